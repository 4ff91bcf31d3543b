"""Checks before a start. ``table`` lists all of them; ``launch``, ``learner``, ``config`` and the doctor make those
that concern them.

A check yields findings (``finding``). ``launch`` ends at the first that failed; ``doctor`` makes all, each with a time
limit, and prints them.
"""
