"""Checkpoints as files: what is in one, how it is written, and how a run goes on from one.

``files.py`` has the names and the trainer's state, ``writer.py`` writes whole checkpoints in the background, makes
``latest`` name them (``commit_latest``, which ``resume.py`` and ``fork.py`` call, too) and removes old ones,
``digests.py`` finds damage. ``stored_tensors.py`` writes and reads the tensors, on any number of ranks, with readers
that run no code. ``resume.py`` and ``fork.py`` find where a run goes on. ``mirror.py`` has the interface of what copies
a run elsewhere, and how far it is. The engine writes its part, the loop and the commands do the rest.
"""
