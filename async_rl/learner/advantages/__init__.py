"""Rewards to advantages. Numpy only, on rank 0.

In: a step's ``PreparedBatch`` with rewards, the reference's log-probabilities if ``loss.kl_coef`` needs them. Out: the
same batch with an advantage for every trained token. The trainer calls ``step_advantages.with_advantages``; the
formulas are in ``estimators.py``, whose tables name them.
"""
