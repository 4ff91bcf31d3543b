"""Checkpoints: written whole or not at all, read back on any number of ranks, exported as Hugging Face directories.

In: the engine's tensors, the trainer's plain data, the queue's snapshot. Out: ``checkpoints/step-NNNNNN/`` and
``latest`` in the run directory, and exports. The trainer and ``sft`` write; the start of a run, ``async-rl export`` and
``async-rl eval`` read.
"""
