"""The settings of a run: TOML and ``--set`` enter, one checked and frozen ``Config`` leaves.

Every command calls ``loading``; other folders read the sections that they need. A section lies in the module of its
name, but ``checkpoint`` and ``log`` in ``run``, ``lora`` in ``model`` and ``optimizer`` in ``learner``. ``config``
holds the whole and checks keys against each other. ``backends`` and ``reward_types`` are tables of what each named
backend and reward can do. ``document`` writes the reference, docs/config.md.
"""
