"""The part of the learner that uses the device: it puts model, layout and optimizer together, and makes the steps.

``fsdp_engine.FsdpEngine`` implements ``interface.Engine``, which the loop and ``extensions.offline`` use. It gets the
sequences of one optimizer step, and returns ``UpdateStats``. On request it returns log-probabilities and unsharded
parameters, and writes checkpoints. Callers run on rank 0, and the other ranks follow the commands of rank 0
(``learner/ranks.py``).
"""
