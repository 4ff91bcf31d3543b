"""The learner: takes groups of rollouts from the queue, trains on them, and publishes the new weights.

The queue sends batches of groups to the learner. The learner sends acknowledgements and snapshots to the queue, and
weights to the generators. It writes metrics, checkpoints and evaluations to the run directory. The command
``async-rl learner`` calls ``start.run_learner``.

Start with ``trainer.py``, which reads like the algorithm. ``batch.py`` turns groups into sequences. ``advantages.py``
and ``losses/`` hold the formulas; ``step_masks.py`` judges the tokens of a whole step. ``packing.py``
divides a step into micro-batches for all ranks, with ``balance.py`` and ``beginnings.py``; ``engine/`` does the work on
the device. ``publishing.py`` sends the new weights. ``step_result.py`` and ``staleness.py`` summarise a
step. ``recorder.py`` and ``checkpoint.py`` write it to files. ``parity.py`` compares the generators' log-probabilities
with the learner's. ``export.py`` turns a checkpoint into a Hugging Face directory. ``offline/`` trains on given rows,
without a queue.
"""
