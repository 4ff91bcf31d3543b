"""The loss of one micro-batch: pure functions, tensors in, tensors out.

The inputs are the log-probabilities of the trained tokens under the learner's and the behavior policy, the advantages,
and the ``[loss]`` section. The outputs are a sum to backpropagate, its denominator, and statistics. The engine calls
``objective.py``, which calls ``policy.py``, which combines parts such as the surrogate and the KL penalty. For each
kind of part, ``parts.py`` has a table from names to functions, and ``config/loss_names.py`` has the same names.
``diagnostics.py`` measures how much the policy differs from the behavior policy.
"""
