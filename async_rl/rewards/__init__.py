"""Scores finished rollouts: takes the model's text and its row, and returns the reward's parts and an accuracy.

Generators and offline evaluation call ``registry.build_reward`` and then the reward, from several threads. To add a
reward, add a row to ``config/reward.py``, a class here, and the line that builds it to ``registry.REWARDS``;
``conformance`` checks it. ``answers`` needs ``extraction`` and ``equality``, which asks the child process of
``verifier``; ``code`` needs ``code_tests`` and the sandbox, or ``code_remote``.
"""
