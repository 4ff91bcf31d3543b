"""Compares runs, and recommends a staleness bound. ``async-rl compare`` and ``async-rl sweep`` call it.

The input is run directories. ``summary`` reads a run's ``metrics.jsonl``, ledger and config into a ``RunSummary``;
``speed`` computes steps/s and seconds of training for it. ``table`` and ``picture`` show summaries side by side.
``points`` takes means over the runs of one bound, ``comparable`` finds runs that can't be compared, and ``advice`` says
what the figures mean for ``queue.max_staleness``. These read files only, also those of a running run. ``sweep``
launches one config with several values of a key, so that there are runs to compare.
"""
