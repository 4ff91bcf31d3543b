"""The optimizers: AdamW, with compact states if wanted, and Muon; and the learning rate of each step.

Parameters with gradients enter, and change in place. The caller is ``learner.engine``.
"""
