"""A learner that also samples (``learner.generate``): the generator's loop and engine in the learner's processes.

``generator`` and ``learner`` don't import each other, so what joins them is here, above both: ``LearnerSampler``
implements ``learner.sampling.RankSampler`` with ``generator.loop.Worker``, and ``SharedDevice`` divides a rank's device
between them. The command ``async-rl learner`` passes ``LearnerSampler`` to ``learner.loop.start.run_learner``.
"""
