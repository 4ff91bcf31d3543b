"""The learner: takes groups of rollouts from the queue, trains on them, and publishes the new weights.

The queue sends batches of groups to the learner. The learner sends acknowledgements and snapshots to the queue, and
weights to the generators. It writes metrics, checkpoints and evaluations to the run directory. The command
``async-rl learner`` calls ``loop.start.run_learner``.

Start with ``loop/trainer.py``, which reads like the algorithm. The rooms, lowest first: ``sequences.py`` and
``interface.py`` say what passes between the loop and an engine; ``data/`` turns groups into sequences and
micro-batches; ``losses/`` has the formulas, advantages among them; ``checkpoints/`` the files of a run's state;
``model/`` computes log-probabilities, ``optimizers/`` step its weights, ``layouts/`` divide it over ranks, and
``engine/`` puts the three together; ``export/`` turns a checkpoint into a Hugging Face directory; ``loop/`` is the
learner's loop.
"""
