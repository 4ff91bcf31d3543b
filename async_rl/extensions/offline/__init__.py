"""Training on rows that are given, without a queue and without generators: ``async-rl sft``, ``rm`` and ``dpo``.

The engine is that of reinforcement learning: the same packing, ranks, layouts, adapters and checkpoints. Checkpoints
and ``metrics.jsonl`` are in a folder of the run directory with the command's name.

``run.py`` does what all commands have in common. A command is an ``OfflineTask``, in a module of its own that reads
like its algorithm: ``sft.py``, ``rm.py``, ``dpo.py``; ``tasks.py`` lists them. ``preference.py`` has the losses of
``dpo``, ``slopes.py`` trains with losses over whole sequences. ``rows.py`` and ``pairs.py`` read and tokenise the data.
``batches.py`` chooses the rows of each step. ``reference.py`` scores rows with the model that a run begins with. The
core calls ``commands.py`` and ``checks.py``.
"""
