"""The tools of ``log.to`` that async-rl itself knows: a module for each, which imports the tool.

``run/following/feeds.py`` opens them by their names in ``log.to``, which are also those of the modules that must be
installed. ``check.py`` says before a start whether they are, and imports none. All tools get the same keys. A row
carries its step: an evaluation's is often below that of the row before, and a run that went back to a checkpoint
repeats steps.
"""
