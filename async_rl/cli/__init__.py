"""The ``async-rl`` command: arguments enter, messages and an exit code leave. Called by the shell and ``cli.py``."""
