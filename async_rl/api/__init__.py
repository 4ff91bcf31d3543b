"""Python's way to runs: ``async_rl.train`` starts one and waits for it, ``async_rl.Run`` reads one.

Input: a config as dicts, functions and rows, or the directory of a run. Output: a finished run, its figures as
iterators and tables of pandas. The user's programs and notebooks call it, by the names in ``async_rl``.
"""
