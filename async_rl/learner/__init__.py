"""The learner: takes groups from the queue, trains on them, and publishes the new weights.

In: batches of groups from the queue. Out: acks and snapshots to the queue, versions of the weights to the generators,
and in the run directory metrics, checkpoints and evaluations. ``async-rl learner`` calls ``start.run_learner``.

Start with ``trainer.py``: it reads like the algorithm. ``batch.py`` turns groups into sequences, ``advantages.py`` and
``losses/`` hold the formulas, ``packing.py`` and ``engine/`` do the work on the device, ``publishing.py`` sends the new
weights. ``step_result.py`` and ``staleness.py`` say what a step did, ``recorder.py`` and ``checkpoint.py`` write it
down. ``parity.py`` compares the generators' engines with the learner's. ``export.py`` makes a Hugging Face directory of
a checkpoint. ``sft.py`` is the supervised warm start.
"""
