"""What runs need that go for days: jobs on a Slurm cluster (``slurm/``), and the tools that show metrics (``sinks/``).

``commands.py`` has the subcommand ``slurm``. A run's process ``async-rl follow`` opens what ``log.to`` names.
"""
