"""Predicts the speed of a run with other settings, before it runs. ``async-rl plan`` and ``async-rl sweep`` call it.

The inputs are rates: what a token, a learner's step and a transfer of weights take, and how long answers are.
``rates`` reads them from a run directory or a config, ``lengths`` draws the lengths of answers. ``simulation`` drives
the real queue core (``queue.core``) with simulated time, a learner, and the generators of ``simulated_generator``.
``grid`` names the settings to predict, ``recommend`` says which of them to take, ``table`` shows them. No torch.
"""
