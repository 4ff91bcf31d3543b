"""What a run tells: a page about it, its comparison with others, and predictions from what it measured.

The input is run directories, also of running runs; of ``evaluation/`` also models and data sets, which it lets answer
them. Besides, only ``async-rl sweep`` starts anything: the runs that it compares. ``commands`` has the subcommands
``report``, ``compare``, ``sweep`` and ``plan``, and ``evaluation/`` has ``eval``.
"""
