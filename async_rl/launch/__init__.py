"""``async-rl launch``: starts, supervises and shows the processes of one run on one machine; and ``async-rl status``.

A resolved config enters; an exit code and the run's directory leave. ``preflight`` checks, ``launch`` says what to
start, ``supervisor`` keeps it alive, ``live_view`` shows it. Called by the command line; ``preflight`` also by doctor.
"""
