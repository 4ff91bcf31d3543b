"""The subcommands that start no process of a run: ``config``, ``export``, ``doctor`` and ``keys``.

Each subcommand imports large modules only when it runs, so that ``async-rl --help`` is fast.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from async_rl.cli.options import (
    AsJson,
    CheckTimeout,
    ConfigPath,
    DoctorConnect,
    Insecure,
    Keys,
    MeanTokens,
    On,
    Overrides,
    Parity,
    Quiet,
)
from async_rl.errors import ConfigError
from async_rl.output import Progress, print_json, prints_to_stderr
from async_rl.terminal import visible

if TYPE_CHECKING:
    from async_rl.launch.checks.finding import Finding

tools = typer.Typer(rich_markup_mode=None)


@tools.command("config", short_help="Check a config, print or explain every key.")
def show_config(
    config: ConfigPath,
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="With --explain: a section or a key, as in queue.max_staleness."),
    ] = None,
    overrides: Overrides = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print what each key means, its values, and where its own is from. See KEY."),
    ] = False,
    as_json: AsJson = False,
    show_all: Annotated[bool, typer.Option("--all", help="Print also the sections that have only defaults.")] = False,
) -> None:
    """Check CONFIG and print the sections in use as TOML with every key, defaults included; or explain its keys.
    Without CONFIG, --explain KEY shows the defaults.

    \b
    Examples:
      async-rl config run.toml --set queue.max_staleness=0
      async-rl config run.toml --explain queue.max_staleness
      async-rl config run.toml --explain queue
      async-rl config --explain queue
    """
    from async_rl.config.loading import config_to_toml, default_config, load_config

    if explain and key is None and config.suffix != ".toml" and not config.exists():
        key, resolved = str(config), default_config(overrides or [])
    else:
        resolved = load_config(config, overrides or [])
    if not explain and key is not None:
        raise ConfigError(
            f"expected only CONFIG, or --explain and a key, got the key {key!r} without --explain; add --explain"
        )
    if not explain:
        from async_rl.launch.checks.table import problems_of_config

        for problem in problems_of_config(resolved):
            typer.echo(visible(f"warning: launch refuses this: {problem}"), err=True)
        if as_json:
            print_json(resolved.model_dump(mode="json"))
        else:
            typer.echo(config_to_toml(resolved, is_short=not show_all), nl=False)
        return
    from async_rl.config.document import explain as explain_keys
    from async_rl.config.document import explain_json

    if as_json:
        print_json(explain_json(resolved, key, overrides or []))
        return
    width = min(100, shutil.get_terminal_size().columns)
    for line in explain_keys(resolved, key, width=width, overrides=overrides or []):
        typer.echo(line)


@tools.command(short_help="Write a checkpoint as a Hugging Face model directory.")
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run directory (its latest checkpoint).")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write: new or empty.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapter of a run with lora.rank, in peft's format.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory (config, tokenizer, safetensors).

    A LoRA adapter is merged into the model that the run began with. That model must still be at model.path.

    \b
    Example:
      async-rl export runs/quickstart exported
      async-rl export runs/lora adapter --adapter
    """
    with Progress(quiet=quiet) as progress:
        progress.show("loading PyTorch")
        from async_rl.learner.export.model import export_adapter, export_checkpoint

        (export_adapter if adapter else export_checkpoint)(checkpoint, out, progress.show)
    if as_json:
        print_json({"checkpoint": str(checkpoint), "out": str(out)})
    else:
        typer.echo(f"wrote {out}")


@tools.command(short_help="Check a config, or a generator's machine; say how to fix it.")
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A TOML config, on the learner's machine.")
    ] = None,
    overrides: Overrides = None,
    connect: DoctorConnect = None,
    on: On = None,
    mean_tokens: MeanTokens = None,
    keys: Keys = None,
    insecure: Insecure = False,
    parity: Parity = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    timeout: CheckTimeout = 300.0,
) -> None:
    """Check what would go wrong on this machine, and say how to fix it. Nothing is written.

    With CONFIG it checks versions, devices, disk, ports, a real broadcast between two ranks, data, tokenizer, the
    rendered first prompt, the reward on sample rows, and whether engine and learner give the same tokens the same
    log-probabilities. With --connect it joins the run as a generator would: queue server, clock, versions, disk, a
    real transfer of the weights, engine and memory. With --on it says for other machines whether CONFIG fits them, and
    predicts a step. The exit code is 1 if a check failed.

    \b
    Examples:
      async-rl doctor run.toml
      async-rl doctor --connect tcp://10.0.0.1:5555 --keys node-b.key
      async-rl doctor run.toml --on 8xH100
    """
    _check_options(config, connect, on, mean_tokens, keys)
    from async_rl.launch.checks.finding import exit_code, findings_json, print_table

    command = "generator"
    with Progress(quiet=quiet) as progress, prints_to_stderr():
        if config is not None:
            command, found = _check_config(
                config, overrides or [], on, mean_tokens, insecure, timeout, parity, progress
            )
        else:
            found = _check_node(str(connect), overrides or [], keys, insecure, timeout, progress)
    if as_json:
        print_json(findings_json(found))
    else:
        print_table(found)
        if not exit_code(found) and on is None:
            typer.echo(
                visible(f"next: {_after_doctor(command, config, connect, overrides or [], keys, insecure=insecure)}")
            )
    raise typer.Exit(exit_code(found))


def _check_options(
    config: Path | None, connect: str | None, on: str | None, mean_tokens: int | None, keys: Path | None
) -> None:
    if (config is None) == (connect is None):
        raise ConfigError(
            f"expected either CONFIG or --connect ADDRESS, got {'neither' if config is None else 'both'}; name the "
            f"config on the learner's machine, or the queue server's address on a generator's machine"
        )
    if on is not None and config is None:
        raise ConfigError("--on: expected CONFIG, too, got --connect; name the config to predict")
    if mean_tokens is not None and on is None:
        raise ConfigError("--mean-tokens: expected --on, too, got none; name the GPUs to predict")
    if keys is not None and config is not None:
        raise ConfigError("--keys is only for --connect; leave it out, because CONFIG names the run's keys")


def _check_config(
    path: Path, overrides: list[str], on: str | None, mean_tokens: int | None, insecure: bool, timeout: float,
    parity: bool, progress: Progress,
) -> tuple[str, list[Finding]]:  # fmt: skip
    """Check a config, here or for the machines ``on``. Return the command that runs it, and what was found."""
    from async_rl.config.loading import load_config
    from async_rl.launch.checks.doctor import run_checks
    from async_rl.learner.cards import Machines

    config = load_config(path, overrides)
    found = run_checks(
        config, insecure=insecure, deadline_s=timeout, with_parity=parity, report=progress.show,
        machines=None if on is None else Machines.parse("--on", on), mean_tokens=mean_tokens,
    )  # fmt: skip
    return config.offline_commands[0] if config.is_offline_only else "launch", found


def _after_doctor(
    command: str, config: Path | None, connect: str | None, overrides: list[str], keys: Path | None, *, insecure: bool
) -> str:
    """Return the command that runs what the doctor has checked, with the same options. ``command`` takes a config."""
    words = [command, str(config)] if config is not None else ["generator", "--connect", str(connect)]
    words += [] if keys is None else ["--keys", str(keys)]
    words += [word for override in overrides for word in ("--set", override)]
    return shlex.join(["async-rl", *words, *(["--insecure"] if insecure else [])])


def _check_node(
    address: str, overrides: list[str], keys: Path | None, insecure: bool, timeout: float, progress: Progress
) -> list[Finding]:
    from async_rl.config.loading import check_generator_overrides
    from async_rl.net.address import check_address

    check_address(address)
    check_generator_overrides(overrides)
    progress.show("loading PyTorch")
    from async_rl.launch.checks.node import run_node_checks

    return run_node_checks(
        address, overrides, keys_file=keys, insecure=insecure, deadline_s=timeout, report=progress.show
    )


keys_app = typer.Typer(
    help="Keys that encrypt the run's sockets and decide who may join.", no_args_is_help=True, rich_markup_mode=None
)
tools.add_typer(keys_app, name="keys")


@keys_app.command("new", short_help="Make keys, or add clients.")
def keys_new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the keys.")],
    clients: Annotated[
        list[str] | None,
        typer.Option(
            "--client", metavar="NAME", help="A further client, one for each machine of generators. May be repeated."
        ),
    ] = None,
) -> None:
    """Make DIR with the queue server's key, a key for each client, and allowed.txt, the list of allowed clients.

    Set queue.keys to DIR for the queue server and the learner. Only the learner uses DIR/client.key. Copy one client
    file to each machine of generators, over a channel that you trust. Run it again to add clients, also while a run
    goes on: it replaces nothing. To shut a client out, delete its line in allowed.txt. Within 5 s the running servers
    close its connections.

    \b
    Example:
      async-rl keys new keys --client node7
      async-rl generator --connect tcp://10.0.0.1:5555 --keys node7.key
    """
    from async_rl.net.keys import make_keys

    for line in make_keys(directory, clients or []):
        typer.echo(line)
