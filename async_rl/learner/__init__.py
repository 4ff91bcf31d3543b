"""The learner: takes groups from the queue, trains on them, and publishes the new weights.

The learner receives batches of groups from the queue. It sends acks and snapshots to the queue and weights to the
generators, and writes metrics, checkpoints and evaluations to the run directory. ``async-rl learner`` calls
``start.run_learner``.

Start with ``trainer.py``: it reads like the algorithm. ``batch.py`` turns groups into sequences, ``advantages.py`` and
``losses/`` hold the formulas, ``packing.py`` and ``engine/`` do the work on the device, ``publishing.py`` sends the new
weights. ``step_result.py`` and ``staleness.py`` summarise a step; ``recorder.py`` and ``checkpoint.py`` write it to
files. ``parity.py`` compares the generators' engines with the learner's. ``export.py`` turns a checkpoint into a
Hugging Face directory. ``sft.py`` is the supervised warm start.
"""
