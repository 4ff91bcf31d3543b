"""``async-rl launch`` and ``async-rl status``: run all processes of a run on one machine, and show how it is doing.

``launch`` takes a config, writes the run's directory and returns an exit code. ``preflight`` checks the config before
anything starts. ``supervisor`` starts the processes and restarts those that die. ``live_view`` shows the progress, and
``status`` shows the queue server's report. The command line calls this folder. The doctor uses ``preflight``, too.
"""
