"""Starts a generator: the table of inference engines, what plays rollouts, and the process that runs one.

``worker`` is the ``async-rl generator`` command. ``backends`` builds the inference engine that the config names, for
``worker``, offline evaluation, the doctor and a learner that also samples. ``rollouts`` opens what plays rollouts with
it.
"""
