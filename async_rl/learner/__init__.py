"""The learner: takes groups from the queue, trains on them, and publishes the new weights.

In: batches of groups from the queue. Out: acks and snapshots to the queue, versions of the weights to the generators,
and in the run directory metrics, checkpoints and evaluations. ``async-rl learner`` calls ``start.run_learner``.

Start with ``trainer.py``: it reads like the algorithm. ``batch.py`` makes sequences of groups, ``advantages/`` and
``losses/`` hold the formulas, ``packing.py`` and ``engine/`` do the work on the device, ``publishing.py`` sends the
result. ``recorder.py`` and ``checkpoint.py`` write things down. ``export.py`` makes Hugging Face
directories of checkpoints. ``sft.py`` is the supervised warm start.
"""
