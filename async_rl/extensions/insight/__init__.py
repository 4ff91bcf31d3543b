"""What a run tells: a page about it, its comparison with others, and predictions from what it measured.

The input is run directories, also of running runs. Only ``async-rl sweep`` starts anything: the runs that it compares.
``commands`` has the subcommands ``report``, ``compare``, ``sweep`` and ``plan``; ``async_rl.Run.report`` writes the
page, too.
"""
