"""The command ``async-rl scorer``: a process that holds a frozen model and scores what generators sampled.

``start`` loads the model, a ``RewardModel`` or a ``Teacher``, and ``server`` answers the questions of
``scorer.client``, many in a batch. ``questions`` has the budgets and the turns of clients, ``sockets`` the thread
that receives and sends. The process has no state: it may die at any time, and generators ask its successor again.
"""
