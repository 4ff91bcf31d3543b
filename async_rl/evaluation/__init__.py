"""Offline evaluation of models and checkpoints, and tables that compare evaluations: ``async-rl eval``.

Names of models and the command line's options enter; figures, answers and tables leave. Called by the command line.
A run's own evaluations are done elsewhere: generators answer them, and the learner records them.
"""
