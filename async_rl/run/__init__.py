"""The run directory: its files and lock, who may use it, and what changed when a run went on.

``records/`` are its files of rows, ``figures/`` says what they tell a person, and ``following/`` feeds loggers from
them. The learner writes most of the files, and the queue server writes ``queue.json`` and ``ledger.json``.
"""
