"""The model that is trained, on one rank: loading, attention over packed rows, log-probabilities, adapters, self-test.

A causal LM of transformers and the micro-batches of ``learner.data`` enter; log-probabilities with gradients leave.
Callers: ``learner.layouts``, which divides it over ranks, ``learner.engine``, and scorers.
"""
