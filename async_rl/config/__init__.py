"""The settings of a run: TOML and ``--set`` enter, one checked and frozen ``Config`` leaves.

Every command calls ``loading``; other folders read the sections that they need. A section lies in the module of its
name, or beside its neighbours: ``checkpoint`` and ``log`` in ``run``, ``lora`` and ``weights`` in ``model``, ``eval``
in ``data``, ``sampling`` and ``environment`` in ``generator``, ``optimizer`` and ``sft`` in ``learner``. ``config``
holds the whole and checks keys against each other. ``backends`` and ``reward.REWARD_TYPES`` are tables of what each
named backend and reward can do. ``document`` writes the reference, docs/config.md.
"""
