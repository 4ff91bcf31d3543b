"""The loss of one micro-batch: pure functions, tensors in, tensors out.

In: log-probabilities of the trained tokens by the learner and by the behavior policy, advantages, the ``[loss]``
section. Out: a sum to backpropagate, its denominator, and statistics. The engine calls ``objective.py``, which calls
``policy.py``, which puts the parts together: ``surrogate.py``, ``corrections.py``, ``kl.py``, ``aggregation.py``. Each
part is a table of functions by name; ``config/loss.py`` has the same names.
"""
