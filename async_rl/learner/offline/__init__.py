"""Training on rows that are given, without a queue and without generators: ``async-rl sft``.

The engine is that of reinforcement learning: the same packing, ranks, layouts, adapters and checkpoints. Checkpoints
and ``metrics.jsonl`` are in a folder of the run directory with the command's name.

``run.py`` does what all commands have in common. A command is an ``OfflineTask``, in a module of its own that reads
like its algorithm: ``sft.py``. ``rows.py`` reads and tokenises the data. ``batches.py`` chooses the rows of each step.
The command line calls ``sft.run_sft``.
"""
