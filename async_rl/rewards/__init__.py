"""Scores finished rollouts. The input is the model's text and the row. The output is reward parts and an accuracy.

Generators and offline evaluation call ``registry.build_reward`` and then the reward, from several threads. To add a
reward, add an entry to ``config.reward.REWARD_TYPES``, a class to this folder, and a line to ``registry.REWARDS`` that
builds the class. ``conformance`` checks the new reward. ``answers`` scores known answers with ``extraction`` and the
folder ``math``, which decides whether two answers are the same mathematics. ``functions`` calls the user's functions,
also in the forms of TRL and verl (``forms``).
"""
