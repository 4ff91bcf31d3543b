"""One HTML page about runs, for people: ``async-rl report RUN...``. It needs no network and no build step.

The input is run directories, also of running runs. ``figures`` reads a run's metrics, ledger, settings and notes, and
``rollouts`` what its ``rollouts/`` has. ``page`` fills the templates with them. Text that a model or a user wrote is in
the page only as escaped text or as compressed data, so that none of it can become markup.
"""
