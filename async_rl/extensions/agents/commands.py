"""The subcommands ``relay`` and ``agent``. They import large modules only when they run."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from async_rl.cli.options import ConfigPath, Connect, Insecure, Keys, Overrides, Wait
from async_rl.cli.role import role
from async_rl.net.address import refuse_open_connect

relay_command, agent_command = typer.Typer(rich_markup_mode=None), typer.Typer(rich_markup_mode=None)
_Port = Annotated[
    int,
    typer.Option(
        "--port", metavar="PORT", min=0, max=65535, help="Port on loopback of the sessions. 0 takes any free one."
    ),
]
_Parallel = Annotated[
    int, typer.Option("--parallel", metavar="N", min=1, help="Number of sessions for which COMMAND runs at once.")
]
_Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="COMMAND",
        help="Program that plays one session, with its arguments. If unset, programs on this machine take sessions by "
        "POST /sessions.",
        show_default=False,
    ),
]


@relay_command.command("relay", short_help="Connect generators with agents on other machines.")
def relay(config: ConfigPath, overrides: Overrides = None, insecure: Insecure = False) -> None:
    """Relay between the generators of a run and `async-rl agent` on other machines, at environment.relay of CONFIG.

    `launch` starts the relay itself. Without `launch`, start it on the machine of the queue server. It may be restarted
    at any time: rollouts that agents have begun fail then, and the others wait.

    \b
    Example:
      async-rl relay run.toml --set environment.relay=tcp://10.0.0.1:5560
    """
    with role():
        from async_rl.config.loading import load_config
        from async_rl.extensions.agents.relay.server import run_relay

        run_relay(load_config(config, overrides or []), insecure=insecure)


@agent_command.command("agent", short_help="Play rollouts of a run with agents on this machine.")
def agent(
    connect: Connect,
    command: _Command = None,
    port: _Port = 0,
    parallel: _Parallel = 1,
    wait: Wait = 300.0,
    keys: Keys = None,
    insecure: Insecure = False,
) -> None:
    """Play rollouts of the run at --connect with agents on this machine (environment.relay).

    With COMMAND, run it once for each rollout. It finds the model's endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, and
    its task in the JSON file ASYNC_RL_TASK. Without COMMAND, programs take rollouts themselves, by POST /sessions at
    the address that is logged. If ASYNC_RL_AGENT_KEY is set, they need it as API key.

    \b
    Example:
      async-rl agent --connect tcp://10.0.0.1:5555 --keys agents.key --parallel 8 \\
        -- python my_agent.py
    """
    refuse_open_connect(connect, insecure=insecure, has_keys=keys is not None)
    with role():
        from async_rl.extensions.agents.relay.start import KEY_VARIABLE, run_agent

        run_agent(
            connect, command or [], keys_file=keys, insecure=insecure, port=port, num_parallel=parallel, wait_s=wait,
            sessions_key=os.environ.pop(KEY_VARIABLE, ""),
        )  # fmt: skip
