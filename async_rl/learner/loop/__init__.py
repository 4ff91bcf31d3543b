"""The learner's loop: takes a step's groups from the queue, trains on them, and publishes the new weights.

``start.run_learner`` is called by ``async-rl learner`` and builds the ``trainer.Trainer``, which reads like the
algorithm. ``publishing.py`` sends the new weights, ``evaluations.py`` leases evaluations. ``step_result.py`` and
``staleness.py`` summarise a step, ``recorder.py`` writes it to files. ``parity.py`` compares the generators'
log-probabilities with the learner's, ``critic.py`` trains the critic. ``replay.py`` takes the place of the queue with
the recorded groups of an earlier run.
"""
