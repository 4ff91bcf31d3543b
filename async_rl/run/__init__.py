"""The run directory: its files and lock, who may use it, and what changed when a run went on.

The modules write these files and read them, and describe a run's progress in words. The learner writes most of the
files, and the queue server writes ``queue.json`` and ``ledger.json``. Launch, evaluation and doctor read them.
"""
