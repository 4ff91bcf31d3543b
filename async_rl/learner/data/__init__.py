"""From groups to micro-batches, with numpy only: no model and no device.

``batch.py`` turns the groups of a step into sequences, with masks and their causes. ``packing.py`` divides the
sequences of a step into micro-batches for all ranks, with ``balance.py`` (who computes what) and ``beginnings.py``
(what sequences share). Called by the loop and by the engine.
"""
