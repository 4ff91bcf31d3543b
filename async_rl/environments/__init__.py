"""Rollouts of several turns: runs the user's environment code in separate processes.

Enters a prompt's row and, turn by turn, what the model sampled; leaves the next state to continue, then every turn's
reward and score. The generator calls ``pool``; authors of environments need ``protocol`` and may use ``arithmetic``.
"""
