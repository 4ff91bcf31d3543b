"""Checks of one config on this machine, before a run: ``async-rl doctor``.

A resolved config enters; findings leave, each with a fix if something is wrong. Called by the command line only.
Nothing is written, and every check has a deadline, so none can hang the command.
"""
