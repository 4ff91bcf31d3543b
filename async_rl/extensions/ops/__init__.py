"""What runs need where they run for days: jobs on a Slurm cluster (``slurm/``)."""
