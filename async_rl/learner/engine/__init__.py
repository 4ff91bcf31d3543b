"""Everything that touches the learner's device: model, log-probabilities, gradients, optimizer, ranks.

In: the sequences of one optimizer step, from the trainer or from ``sft``. Out: ``UpdateStats``, log-probabilities on
request, whole parameters for publishing, checkpoints. ``protocol.Engine`` is all that callers see;
``fsdp_engine.FsdpEngine`` is the real one. Rank 0 is called, and the other ranks follow its commands (``ranks.py``).
"""
