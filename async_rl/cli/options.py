"""The command-line options that several subcommands share, as annotated types."""

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
On = Annotated[
    str | None,
    typer.Option("--on", metavar="GPUS", help="Predict CONFIG elsewhere: 8xH100; 2x8xH100 (two nodes); 8xH100,1500GB."),
]
MeanTokens = Annotated[
    int | None,
    typer.Option("--mean-tokens", metavar="N", min=1, help="With --on: mean length of answers, in tokens."),
]
Parity = Annotated[
    bool,
    typer.Option(help="With CONFIG, load the model in both engine and learner, and compare their log-probabilities."),
]
CheckTimeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=1, help="Time limit of each check that loads data or a model."),
]
