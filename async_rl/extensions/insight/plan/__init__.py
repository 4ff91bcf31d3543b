"""Predicts the speed of a run with other settings, before it runs. ``async-rl plan`` and ``async-rl sweep`` call it.

``rates`` finds what a token, a learner's step and a transfer of weights take, in a run directory or as given;
``lengths`` has the lengths of answers. ``simulation`` drives the real queue core (``queue.core``) in simulated time,
with a learner and the generators of ``simulated_generator``. ``table`` names the settings, and shows what came of them.
"""
