"""What a run writes and reads back: its directory, metrics, step logs, curve and evaluation records.

Rows, groups and plain data enter; files of the run directory leave. The learner writes most of them, the queue server
its own two. Launch, evaluation, doctor and the command line read them.
"""
