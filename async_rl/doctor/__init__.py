"""``async-rl doctor``: check on this machine, before a run, whether the run of a config would work.

Each check takes the config and returns findings. A finding says what is wrong and how to correct it. The checks write
nothing to the run, and each has a time limit, so that none can hang the command. Only the command line calls this
folder.
"""
