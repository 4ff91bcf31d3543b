"""Runs the user's environment code in separate processes, for rollouts of several turns.

The input is the row of a prompt and, in every turn, the text that the model sampled. The output is the next state that
the model continues and, at the end, the reward and score of every turn. The generator calls ``pool``. Authors of
environments need ``protocol`` and may use ``arithmetic``.
"""
