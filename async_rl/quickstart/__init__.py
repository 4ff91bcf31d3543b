"""The quickstart: a task and a model made on the spot, and a warm start.

The input is a ``Task`` (``tasks``) and a seed. ``prepare`` writes the task's rows, model and config below ``runs/`` of
the working directory and warm-starts the model, by a command that the user could type. ``sums`` is the task; tests,
benchmarks and examples use these, too.
"""
