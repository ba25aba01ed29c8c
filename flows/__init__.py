"""What runs, in which order: Prefect flows, deployments, the command line."""
