"""The files of a run: its directory and lock, metrics, step logs, curve and evaluation records.

The functions here write rows, groups and other data into files of the run directory, and read them. The learner writes
most of these files, the queue server writes two. Launch, evaluation, doctor and the command line read them.
"""
