"""The options that several commands share."""

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
        help="Allow addresses beyond loopback without keys. On trusted networks only: nothing is authenticated.",
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start over. An existing run directory is moved aside, never deleted.")
]
Keys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="This client's key file, made by `async-rl keys new`."),
]
Connect = Annotated[
    str, typer.Option("--connect", metavar="ADDRESS", help="The queue server's address, as in tcp://127.0.0.1:5555.")
]
