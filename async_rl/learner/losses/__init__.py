"""The loss of one micro-batch: pure functions, tensors in, tensors out.

The inputs are the log-probabilities of the trained tokens under the learner's and the behavior policy, the advantages,
and the ``[loss]`` section. The outputs are a sum to backpropagate, its denominator, and statistics. The engine calls
``objective.py``, which calls ``policy.py``, which combines the parts in ``parts.py``. Each kind of part is a table of
functions by name, and ``config/loss.py`` has the same names. ``diagnostics.py`` measures how much the policy differs
from the behavior policy.
"""
