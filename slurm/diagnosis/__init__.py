"""The rules of `slurm.diagnose`, each module one witness: the job itself, Slurm, the logs."""
