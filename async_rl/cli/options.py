"""The command-line options that several subcommands share, and all options of ``async-rl eval``, as annotated types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's config file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set one config key, as in learner.steps=20. VALUE is TOML or a bare string. May be repeated.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Allow addresses that other machines can reach, without keys. Use it on trusted networks only, because "
        "anybody there can send messages to the run.",
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start over. An existing run directory is moved aside, never deleted.")
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN[@STEP]",
        help="Start a new run from a checkpoint of another run: its latest, or the one at STEP. The new run takes "
        "model, optimizer and place in the data from it, and is written to the run.dir of CONFIG.",
    ),
]
Takeover = Annotated[
    bool,
    typer.Option(
        "--takeover",
        help="Take the run over from a `learner` or `launch` that uses its directory and does not answer. The old "
        "process can then write nothing to the run any more.",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="STEPS",
        help="Write a trace of these steps of the learner, such as 3 or 3-5, into profile/ in the run directory "
        "(log.profile).",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show neither progress nor messages, only the result and errors.")
]
Keys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="This client's key file, made by `async-rl keys new`."),
]
Connect = Annotated[
    str, typer.Option("--connect", metavar="ADDRESS", help="The queue server's address, as in tcp://127.0.0.1:5555.")
]

# Options of `async-rl eval` alone.
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="Model directories, hub ids, checkpoints, or run directories (their latest checkpoint). With "
        "--compare: run directories, or directories that --out wrote.",
    ),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset", metavar="[NAME=]FILE", help="A file of rows to answer, as in data.eval. May be repeated."
    ),
]
EvalConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="CONFIG",
        help="Config file with the settings and data sets. If unset, the config of the first MODEL's run.",
    ),
]
Samples = Annotated[
    int | None, typer.Option("--samples", metavar="N", min=1, help="Number of answers to sample for each row.")
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", min=0.0, help="Sampling temperature; 0 is greedy decoding."),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Nucleus sampling, in place of eval.top_p; 1 switches it off."),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", metavar="P", help="Leave out tokens below P of the likeliest one, in place of eval.min_p; 0: none."
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        metavar="K",
        min=0,
        help="Sample from the K likeliest tokens, in place of eval.top_k; 0 switches it off.",
    ),
]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", metavar="N", min=1, help="Limit of an answer, in tokens.")
]
MaxPromptTokens = Annotated[
    int | None,
    typer.Option(
        "--max-prompt-tokens", metavar="N", min=1, help="Limit of a prompt, in tokens; longer ones get no answer."
    ),
]
RewardType = Annotated[
    str | None,
    typer.Option("--reward", metavar="TYPE", help="The reward that scores the answers, in place of reward.type."),
]
SystemPrompt = Annotated[
    str | None,
    typer.Option(
        "--system-prompt",
        metavar="TEXT",
        help="System message, in place of data.system_prompt; an empty text means none.",
    ),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", metavar="N", min=1, help="Sequences sampled at the same time.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help="Random seed, for temperatures above 0.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Write the answers (DATASET.jsonl) and the metrics (figures.json) to this directory.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N rows of each set.")]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", help="Sample nothing; print tables of the evaluations in run directories and --out directories."
    ),
]

# Of ``generator``.
GeneratorOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one generator.* key, as in generator.batch_size=128. May be repeated."
    ),
]
Wait = Annotated[
    float,
    typer.Option(
        "--wait", metavar="SECONDS", min=0, help="How long to wait for a queue server that does not answer yet."
    ),
]
GeneratorId = Annotated[
    str | None,
    typer.Option("--id", metavar="NAME", help="Name of this generator in logs and metrics. If unset, a random name."),
]
Replaces = Annotated[
    str | None,
    typer.Option(
        "--replaces", metavar="NAME", help="Name of a dead generator whose leases are given to others at once."
    ),
]

# Of ``doctor``.
DoctorConnect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        metavar="ADDRESS",
        help="Check this machine for generators of the run whose queue server has this address. Needs no CONFIG.",
    ),
]
Parity = Annotated[
    bool,
    typer.Option(help="With CONFIG, load the model in both engine and learner, and compare their log-probabilities."),
]
CheckTimeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=1, help="Time limit of each check that loads data or a model."),
]


def with_profile(overrides: list[str] | None, steps: str | None) -> list[str]:
    """Return ``overrides``, and the override for ``--profile`` if that is given."""
    return [*(overrides or []), *([] if steps is None else [f'log.profile="{steps}"'])]
