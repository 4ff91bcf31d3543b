"""Asks scorers: the messages between a generator and a scorer, and the client. No torch.

A scorer (``async_rl.scorer``) is a process that holds a frozen model. ``messages`` has the questions and answers,
``scorer_client.ScorerClient`` asks from any thread and waits while the scorer is away. ``rewards.model`` and the
generators' teachers use it.
"""
