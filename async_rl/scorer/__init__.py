"""The command ``async-rl scorer``: a process that holds a frozen model and scores what generators sampled.

``start`` loads the model, a ``RewardModel`` or a ``Teacher``, and ``server`` answers the questions of
``async_rl.scoring``, many in a batch. The process has no state: it may die at any time, and generators ask its
successor again.
"""
