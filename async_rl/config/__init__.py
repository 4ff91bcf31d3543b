"""The settings of a run: TOML and ``--set`` enter, one checked and frozen ``Config`` leaves.

Every command calls ``loading``; other folders read the sections that they need. A section is in the module of its
name, with these exceptions: ``checkpoint``, ``log`` and ``experimental`` in ``run``; ``model``, ``lora``, ``optimizer``
and ``sft`` in ``learner``; ``weights`` in ``queue``; ``eval`` in ``data``; ``sampling`` and ``environment`` in
``generator``. ``config`` holds the whole and checks keys against each other. ``generator.BACKENDS`` and
``reward.REWARD_TYPES`` say what each named backend and reward can do. ``document`` writes docs/config.md.
"""
