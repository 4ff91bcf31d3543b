"""``async-rl quickstart``: a task and a model made on the spot, a warm start, a run, and what asynchrony gained.

The input is a ``Task`` (``tasks``) and a seed. ``prepare`` writes the task's rows, model and config below ``runs/`` of
the working directory and warm-starts the model; ``start`` trains it by ``async-rl launch``, and reports. All steps are
commands that the user could type, in processes of their own. The core calls ``commands.py``, the examples call
``prepare``. The tasks are ``sums``, which tests use, too, and ``instructions``, for a real language model that
``smollm2`` fetches. ``init`` writes the first config of a user's own run.
"""
