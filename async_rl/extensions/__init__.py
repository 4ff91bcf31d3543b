"""What stands beside the core. Each folder is an extension: the core imports none of them, nor do they each other,
except that the quickstart compares its runs by insight.

``quickstart`` makes a first task, model and config; ``insight`` compares, evaluates, predicts and reports; ``ops`` has
scripts for Slurm, loggers, and copies in an object store; ``agents`` plays rollouts by programs that call a chat
endpoint; ``code_rewards`` judges programs; ``offline`` trains on given rows; ``own_prompts`` are the user's own.

An extension gives the core things of a few kinds, each under a name, as an installed package does by entry points:

* ``async_rl.commands``: a ``typer.Typer`` with one subcommand of ``async-rl``, which has the entry's name;
* ``async_rl.python``: what ``async_rl.train``, ``compare`` and ``Run`` call (``api/``), only ours;
* ``async_rl.sinks``: what opens a sink of ``log.to``; ``async_rl.sink_checks``: whether it can be opened;
* ``async_rl.pictures``: what draws a run while it goes (``launch/follow.py``), only ours;
* ``async_rl.mirrors``: a class that copies runs to ``checkpoint.mirror``, and brings them back from there;
* ``async_rl.rank_watches``: what each of several ranks of a learner starts to say what it waits for, only ours;
* ``async_rl.checks``: a check of a config before a start, which a row of ``launch/checks/table.py`` names, only ours;
* ``async_rl.rollouts``: what plays a generator's rollouts, as ``OpenRollouts`` of ``generator/start/rollouts.py``;
* ``async_rl.datasets``: NAME of the sources NAME:REST of data, as ``OpenRows`` of ``data/dataset.py``;
* ``async_rl.streams``: a ``PromptStream`` (``queue/core/prompts.py``) of a config, in place of that of rows, only ours;
* ``async_rl.rewards`` and ``async_rl.environments``: a name for ``reward.type`` or ``environment.name``. A package's is
  own code, of which the config gets MODULE:FUNCTION (``offered_code`` in ``process/user_code.py``); ours is a
  ``Builder`` (``rewards/registry.py``);
* ``async_rl.config``: the pydantic model of a package's table ``[extension.NAME]`` (``config/extension.py``);
* ``async_rl.row_fields``: what reads the field of that name in rows whose reward needs it (``data/dataset.py``), only
  ours.

``OFFERS`` is to this package what ``[project.entry-points]`` is to another; a checkout that is not installed has none.
"""

from collections.abc import Mapping

OFFERS: Mapping[str, Mapping[str, str]] = {
    "async_rl.commands": {
        "quickstart": "async_rl.extensions.quickstart.commands:quickstart_command",
        "init": "async_rl.extensions.quickstart.commands:init_command",
        "sft": "async_rl.extensions.offline.commands:sft_command",
        "dpo": "async_rl.extensions.offline.commands:dpo_command",
        "rm": "async_rl.extensions.offline.commands:rm_command",
        "relay": "async_rl.extensions.agents.commands:relay_command",
        "agent": "async_rl.extensions.agents.commands:agent_command",
        "slurm": "async_rl.extensions.ops.commands:slurm_command",
        "bundle": "async_rl.extensions.ops.commands:bundle_command",
        "report": "async_rl.extensions.insight.commands:report_command",
        "compare": "async_rl.extensions.insight.commands:compare_command",
        "sweep": "async_rl.extensions.insight.commands:sweep_command",
        "plan": "async_rl.extensions.insight.commands:plan_command",
        "eval": "async_rl.extensions.insight.evaluation.commands:eval_command",
        "verifier": "async_rl.extensions.code_rewards.commands:verifier_command",
    },
    "async_rl.python": {
        "report": "async_rl.extensions.insight.report.report:write_report",
        "compare": "async_rl.extensions.insight.comparison.table:compared",
        "picture": "async_rl.extensions.insight.pictures.curve:write_curve",
        "sizes": "async_rl.extensions.quickstart.init:guessed_sizes",
    },
    "async_rl.sinks": {
        "wandb": "async_rl.extensions.ops.sinks.wandb_sink:Wandb",
        "tensorboard": "async_rl.extensions.ops.sinks.tensorboard_sink:TensorBoard",
        "trackio": "async_rl.extensions.ops.sinks.trackio_sink:Trackio",
        "mlflow": "async_rl.extensions.ops.sinks.mlflow_sink:Mlflow",
    },
    "async_rl.pictures": {"curve": "async_rl.extensions.insight.pictures.curve:CurveUpdater"},
    "async_rl.mirrors": {"fsspec": "async_rl.extensions.ops.mirror.passes:StoreMirror"},
    "async_rl.rank_watches": {"files": "async_rl.extensions.ops.rank_watch:watch_rank"},
    "async_rl.sink_checks": dict.fromkeys(
        ("wandb", "tensorboard", "trackio", "mlflow"), "async_rl.extensions.ops.sinks.check:check"
    ),
    "async_rl.rollouts": {"agents": "async_rl.extensions.agents.start:open_agents"},
    "async_rl.datasets": {"verifiers": "async_rl.extensions.agents.programs.verifiers_rows:taskset_rows"},
    "async_rl.streams": {"own": "async_rl.extensions.own_prompts.stream:OwnStream"},
    "async_rl.checks": {
        "offline": "async_rl.extensions.offline.checks:check_offline_rows",
        "sandbox": "async_rl.extensions.code_rewards.checks:check_sandbox",
        "agents": "async_rl.extensions.agents.checks:check_agents",
        "relay": "async_rl.extensions.agents.checks:check_relay",
    },
    "async_rl.rewards": {"code": "async_rl.extensions.code_rewards.builder:code_reward"},
    "async_rl.environments": {},  # a kind that packages fill alone
    "async_rl.row_fields": {"test_cases": "async_rl.extensions.code_rewards.rows:read_tests"},
}
"""Kind -> name -> MODULE:ATTRIBUTE."""
