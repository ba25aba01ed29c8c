"""Signs of life of a training job: metrics, where a step's time goes, the watchdog."""
