"""Compares finished and running runs, and recommends a staleness bound. ``async-rl compare`` calls it.

The input is run directories. ``summary`` reads a run's ``metrics.jsonl``, ledger and config into a ``RunSummary``.
``table`` and ``picture`` show summaries side by side. ``advice`` says what the figures mean for
``queue.max_staleness``. No process of a run is asked, and nothing in a run directory changes.
"""
