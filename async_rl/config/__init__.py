"""The settings of a run: TOML and ``--set`` enter, one checked and frozen ``Config`` leaves.

``loading`` reads, ``config`` holds the whole and checks keys against each other, and every section lies in the module
of its name (``checkpoint`` and ``log`` in ``run``, ``lora`` in ``model``, ``optimizer`` in ``learner``). Every command
calls ``loading``; every other folder reads the sections that it needs.
"""
