"""The subcommand ``verifier``. It imports large modules only when it runs, so that ``async-rl --help`` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from async_rl.cli.options import Insecure, Overrides
from async_rl.cli.role import role

verifier_command = typer.Typer(rich_markup_mode=None)


@verifier_command.command(short_help="Run and judge programs for generators that can't isolate them.")
def verifier(
    bind: Annotated[
        str, typer.Option("--bind", metavar="HOST:PORT", help="Where to listen; port 0 takes any free port.")
    ] = "127.0.0.1:8000",
    overrides: Overrides = None,
    insecure: Insecure = False,
) -> None:
    """Judge programs over HTTP for generators whose machines can't isolate them (reward.code.endpoint).

    It runs programs in this machine's sandbox, under the reward.code.* limits that --set gives here. It does not
    authenticate clients, so an address beyond loopback needs --insecure and a trusted network.

    \b
    Example:
      async-rl verifier --bind 10.0.0.1:8000 --insecure \\
        --set reward.code.workers=16
    """
    with role():
        from async_rl.extensions.code_rewards.verifier import serve

        serve(bind, overrides or [], insecure=insecure)
