"""What a run writes and reads back: its directory, metrics, step logs, curve and evaluation records.

Rows, groups and plain data enter; files of the run directory leave. The learner writes them; launch, evaluation, doctor
and the queue server read them.
"""
