"""The mirror of a run in an object store (``checkpoint.mirror``): copies of its checkpoints and files, behind the run.

``process.py`` is the process that copies, and what ``launch`` and the learner see of it. ``copier.py`` makes one pass,
``manifest.py`` has the object that makes copies count, ``store.py`` the operations on a URL. ``fetch.py`` brings a run
back to an empty directory.
"""
