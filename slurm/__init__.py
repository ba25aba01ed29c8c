"""Jobs and nodes: submit, watch, diagnose, decide, check nodes, and a dev cluster to try it on."""
