"""What runs inside a training job, one process a rank."""
