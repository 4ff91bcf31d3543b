"""The mirror of a run in an object store (``checkpoint.mirror``): copies of its checkpoints and files, behind the run.

``passes.py`` has what the core loads, and copies, a pass of ``copier.py`` after the other. ``rules.py`` decides what
becomes of each checkpoint, ``manifest.py`` has the object that makes copies count, ``store.py`` the operations on a
URL. ``fetch.py`` brings a run back to an empty directory. How far the mirror is goes into ``mirror.json``, which
``learner/checkpoints/mirror.py`` reads.
"""
