"""``async-rl launch`` and ``async-rl status``: run all processes of a run on one machine, and show how it is doing.

``launch`` takes a config, writes the run's directory and returns an exit code. ``checks/`` checks the config before
anything starts; the doctor makes the same checks. ``supervisor`` starts the processes and restarts those that die.
``live_view`` and ``hints`` show the progress, ``summary`` how the run ended, and ``status`` the queue server's report.
``follow`` is the body of ``async-rl follow``. The command line calls this folder.
"""
