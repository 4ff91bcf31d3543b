"""The run directory and its files: config, lock, metrics, step logs, curve, evaluation records, the queue's records.

The modules write these files and read them, and describe a run's progress in words. The learner writes most of the
files, and the queue server writes ``queue.json`` and ``ledger.json``. Launch, evaluation and doctor read them.
"""
