"""What runs need that go for days: jobs on a Slurm cluster (``slurm/``), tools that show metrics (``sinks/``), and a
copy in an object store (``mirror/``).

``commands.py`` has the subcommand ``slurm``. A run's process ``async-rl follow`` opens what ``log.to`` names, and lets
``checkpoint.mirror`` be copied to.
"""
