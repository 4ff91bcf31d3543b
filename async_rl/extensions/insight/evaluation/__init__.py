"""Evaluates models and checkpoints outside a run. ``async-rl eval`` calls it.

The input is names of models and the options of the command line. The output is figures, answers and tables. The
evaluations during a run are not done here: generators answer their rows, and the learner records their figures.
"""
