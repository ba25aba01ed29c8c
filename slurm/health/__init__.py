"""Node checks: measured on the node, judged elsewhere."""
