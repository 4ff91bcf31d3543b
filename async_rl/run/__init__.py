"""A run's files: its directory, metrics, step logs, curve and evaluation records.

This folder turns rows, groups and plain data into files of the run directory. The learner writes most of them, the
queue server writes two. Launch, evaluation, doctor and the command line read them.
"""
