"""The settings of a run. TOML files and ``--set`` options come in, one checked and frozen ``Config`` comes out.

Every command reads its config with ``loading``. Other folders get the sections that they need. Each section is a class
in the module of its name, with these exceptions: ``checkpoint``, ``log`` and ``experimental`` are in ``run``;
``model``, ``lora`` and ``optimizer`` in ``learner``; ``sft``, ``rm`` and ``dpo`` in ``offline``; ``weights`` in
``queue``; ``eval`` in ``data``; ``sampling`` and ``environment`` in ``generator``. ``config`` has the whole ``Config``,
and checks keys against keys of other sections. ``generator.BACKENDS`` and ``reward.REWARD_TYPES`` say what each built-
in backend and reward can do. ``document`` writes docs/config.md.
"""
