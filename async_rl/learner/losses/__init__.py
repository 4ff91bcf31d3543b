"""The loss of one micro-batch: pure functions, tensors in, tensors out.

In: log-probabilities of the trained tokens by the learner and by the behavior policy, advantages, the ``[loss]``
section. Out: a sum to backpropagate, its denominator, and statistics. The engine calls ``objective.py``, which calls
``policy.py``, which combines the parts in ``parts.py``. Each kind of part is a table of functions by name;
``config/loss.py`` has the same names. ``diagnostics.py`` measures how far the policy is from the one that sampled.
"""
