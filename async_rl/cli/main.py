"""The subcommands of ``async-rl`` that run a part of a run, such as ``launch`` and ``learner``, and the entry point.

A subcommand parses its arguments and calls another folder. Large modules such as torch are imported inside the
subcommands, so that ``async-rl --help`` is fast. Exit codes: 0 done; 1 failed, with a traceback or the first cause of a
stopped run; 2 a mistake of the user, with one message; 130 stopped by SIGINT; 143 stopped by SIGTERM.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from async_rl import __version__
from async_rl.cli.offered import OfferedCommands
from async_rl.cli.options import (
    AsJson,
    ConfigPath,
    Connect,
    Fresh,
    From,
    GeneratorId,
    GeneratorOverrides,
    Insecure,
    Keys,
    Overrides,
    Quiet,
    Replaces,
    Takeover,
    Wait,
)
from async_rl.cli.role import PLAIN, role
from async_rl.cli.tools import tools
from async_rl.errors import ConfigError, UserError
from async_rl.net.address import check_address, refuse_open_connect
from async_rl.output import print_json
from async_rl.process.descriptors import out_of_descriptors
from async_rl.process.pid_one import leave_pid_one
from async_rl.terminal import visible

app = typer.Typer(
    name="async-rl",
    cls=OfferedCommands,
    help="Train language models by asynchronous reinforcement learning with verifiable rewards.\n\n"
    "Start with `async-rl quickstart`, then with `async-rl launch CONFIG`: it runs the queue server, the learner and "
    "the generators of one config on this machine. `async-rl COMMAND --help` explains each command with an example.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"async-rl {__version__}")
        raise typer.Exit()


@app.command(short_help="Run queue server, learner and generators on this machine.")
def launch(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the commands, and check whether the run could start on this machine. Write and start nothing. "
            "Exit code 2 if launch would refuse to start here.",
        ),
    ] = False,
    fresh: Fresh = False,
    source: From = None,
    insecure: Insecure = False,
    takeover: Takeover = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
    quiet: Quiet = False,
    no_next: Annotated[bool, typer.Option("--no-next", help="Name no commands to try next at the end.")] = False,
) -> None:
    """Run everything that CONFIG describes on this machine: queue server, learner, generators. Show a live view.

    Ctrl-C or SIGTERM saves the last step and ends the run; the same command resumes it. When launch ends, all processes
    that it started end, too. A finished run goes on with a higher learner.steps.

    \b
    Examples:
      async-rl launch run.toml --set learner.steps=20
      async-rl launch run.toml --from runs/run@40 \\
        --set run.dir=runs/fork --set queue.max_staleness=16
    """
    from async_rl.config.loading import load_config
    from async_rl.launch import launch as launcher
    from async_rl.run.reuse import check_place

    chosen = overrides or []
    resolved = load_config(config, chosen)
    check_place(resolved, config, chosen)
    if dry_run:
        launcher.dry_run(
            resolved, config, chosen, fresh=fresh, source=source, insecure=insecure, as_json=as_json, quiet=quiet
        )
        return
    if as_json:
        raise ConfigError("--json: expected only with --dry-run; the figures of a run are in its metrics.jsonl")
    ended = launcher.launch(
        resolved, fresh=fresh, source=source, insecure=insecure, takeover=takeover, quiet=quiet, name_next=not no_next
    )
    sys.stderr.write("".join(f"{visible(line)}\n" for line in ended.why))
    raise typer.Exit(ended.exit_code)


@app.command(short_help="Train on the rollouts that generators send.")
def learner(
    config: ConfigPath,
    overrides: Overrides = None,
    fresh: Fresh = False,
    source: From = None,
    insecure: Insecure = False,
    takeover: Takeover = False,
) -> None:
    """Train the model of CONFIG on the rollouts that generators send (one process, or every rank of torchrun).

    It connects to the queue server recorded in the run directory, or starts one. Generators join and leave at any
    time: see `async-rl generator --help`.

    \b
    Examples:
      async-rl learner run.toml
      torchrun --nproc-per-node 4 -m async_rl learner run.toml
    """
    with role() as is_launched:
        from async_rl.config.loading import load_config
        from async_rl.data.chat import quiet_progress_bars
        from async_rl.process.child import set_torch_defaults
        from async_rl.run.reuse import check_place

        set_torch_defaults(is_learner=True)
        resolved = load_config(config, overrides or [])
        check_place(resolved, config, overrides or [])
        if not is_launched and os.environ.get("RANK", "0") == "0":  # rank 0 checks for all
            from async_rl.launch.checks.table import check_learner
            from async_rl.learner.checkpoints.mirror import mirror_of

            log = logging.getLogger(__name__)
            if (mirror := mirror_of(resolved)) is not None:
                for line in mirror.bring_back(resolved, fresh=fresh, is_fork=source is not None, show=log.info):
                    log.info("%s", line)
            check_learner(resolved, fresh=fresh, insecure=insecure)
        logging.getLogger(__name__).info("loading PyTorch")
        quiet_progress_bars()
        from async_rl.learner.loop.start import run_learner

        make_sampler = None
        if resolved.learner.generate:
            from async_rl.colocated.sampler import LearnerSampler

            make_sampler = partial(LearnerSampler, insecure=insecure)
        # A queue server started by a learner of launch would outlive launch.
        run_learner(
            resolved, fresh=fresh, source=source, insecure=insecure, is_launched=is_launched, takeover=takeover,
            make_sampler=make_sampler,
        )  # fmt: skip


@app.command(short_help="Train on the recorded rollouts of a run again.")
def replay(
    run: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="The run; with @STEP, go on from its checkpoint of that step.")
    ],
    overrides: Overrides = None,
    fresh: Fresh = False,
    takeover: Takeover = False,
) -> None:
    """Train a model once more on what RUN sampled, with another loss or learning rate: no generators, no evaluations.

    RUN must have been trained with log.replayable = true. Its config is used with --set, and run.dir is RUN-replay if
    unset. The same command resumes a replay. `async-rl eval` evaluates what it exports.

    \b
    Example:
      async-rl replay runs/a --set loss.preset=gspo --set run.dir=runs/a-gspo
    """
    with role():
        from async_rl.config.loading import load_config
        from async_rl.learner.checkpoints.fork import named_run
        from async_rl.learner.loop.replay import FIXED, RecordedRun
        from async_rl.process.child import set_torch_defaults

        set_torch_defaults(is_learner=True)
        path, step = named_run(run)
        recorded = RecordedRun.find(path)
        place = f"run.dir={path}-replay"
        resolved = load_config(recorded.run_dir.config, [place, *(overrides or []), *FIXED])
        from async_rl.learner.loop.start import run_learner

        source = None if step is None else run
        run_learner(resolved, fresh=fresh, takeover=takeover, source=source, replay=recorded)


@app.command(short_help="Sample rollouts for a run.")
def generator(
    connect: Connect,
    overrides: GeneratorOverrides = None,
    wait: Wait = 300.0,
    insecure: Insecure = False,
    keys: Keys = None,
    generator_id: GeneratorId = None,
    replaces: Replaces = None,
) -> None:
    """Sample rollouts for the run whose queue server is at ADDRESS, until that run is finished.

    It needs no file of the run: the queue server sends model, sampling and rewards, the learner sends weights. Any
    number of generators may join or leave at any time. --set takes keys of this machine only: generator.*, and
    reward.code.allow_unsafe, reward.code.endpoint and reward.code.packages.

    \b
    Example:
      async-rl generator --connect tcp://10.0.0.1:5555 --keys node-b.key \\
        --set generator.batch_size=128
    """
    refuse_open_connect(connect, insecure=insecure, has_keys=keys is not None)
    with role():
        from async_rl.config.loading import check_generator_overrides
        from async_rl.process.child import set_torch_defaults

        set_torch_defaults(is_learner=False)
        check_generator_overrides(overrides or [])
        from async_rl.generator.start.worker import run_generator

        logging.getLogger(__name__).info("joining the run at %s; waiting for it up to %.0f s", connect, wait)
        run_generator(
            connect,
            overrides or [],
            wait_s=wait,
            insecure=insecure,
            generator_id=generator_id,
            keys_file=keys,
            replaces=replaces,
        )
        logging.getLogger(__name__).info("the run at %s is finished", connect)


@app.command(short_help="Serve prompts to generators and groups to the learner.")
def queue(
    config: ConfigPath,
    overrides: Overrides = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id", metavar="ID", help="Only the learner of the run with this id may attach. If unset, a random id."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start with an empty queue. The old journal is moved aside, never deleted.")
    ] = False,
    insecure: Insecure = False,
) -> None:
    """Serve prompts to generators and groups to the learner of CONFIG.

    `launch` and `learner` start one themselves. Start one by hand to train across machines: set queue.address to the
    address that it binds. If that is tcp://0.0.0.0:PORT, set queue.advertise to the address that others connect to.

    \b
    Example:
      async-rl queue run.toml --set queue.address=tcp://10.0.0.1:5555 \\
        --set queue.keys=keys
    """
    with role():
        from async_rl.config.loading import load_config

        resolved = load_config(config, overrides or [])
        from async_rl.launch.checks.table import check_queue
        from async_rl.run.reuse import check_place

        check_place(resolved, config, overrides or [])

        check_queue(resolved)
        from async_rl.queue.server.start import run_queue

        run_queue(resolved, run_id=run_id or "", fresh=fresh, insecure=insecure)


_Alive = Annotated[
    str | None,
    typer.Option(
        "--alive",
        metavar="NAME",
        help="Print only whether this process of the run is alive: queue, learner or a generator's id. For health "
        "checks.",
    ),
]


_Lift = Annotated[
    str | None,
    typer.Option(
        "--lift-quarantine",
        metavar="ID",
        help="First give leases again to this generator, which was quarantined. With keys, the learner's is needed.",
    ),
]


@app.command(short_help="Show how a run is doing.")
def status(
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="RUN_DIR", help="The directory of a run on this machine.", show_default=False),
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            metavar="ADDRESS",
            help="Get the status from the queue server at this address, instead of from RUN_DIR.",
        ),
    ] = None,
    as_json: AsJson = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long to wait for an answer.")
    ] = 5.0,
    keys: Keys = None,
    alive: _Alive = None,
    lift: _Lift = None,
) -> None:
    """Show how a run is doing: generators, versions, ready groups, the ledger, and what waits for what.

    Name the run by its directory or by its queue server's address. A finished run has no queue server: its step and its
    ledger are read from the directory.

    Exit codes: 0; 2 if the queue server does not answer. With --alive: 0 if the process is alive or the run finished, 1
    if the queue server answers and the process is not alive.

    \b
    Examples:
      async-rl status runs/quickstart
      async-rl status --connect tcp://10.0.0.1:5555 --keys node-b.key --json
      async-rl status --connect tcp://10.0.0.1:5555 --keys b.key --alive gpu-7
    """
    if (run_dir is None) == (connect is None):
        raise ConfigError(
            f"expected either RUN_DIR or --connect ADDRESS, got {'neither' if run_dir is None else 'both'}; name the "
            f"run by exactly one of them"
        )
    if connect is not None:
        check_address(connect)
    from async_rl.launch.status import print_alive, print_status, status_at, status_of_run
    from async_rl.net.keys import ClientKeys

    chosen = None if keys is None else ClientKeys.load(keys)
    if run_dir is not None:
        found = status_of_run(run_dir, timeout, chosen, lift=lift)
    else:
        assert connect is not None
        found = status_at(connect, timeout, chosen, lift=lift)
    if alive is not None:
        print_alive(found, alive)
    elif as_json:
        print_json(found)
    else:
        print_status(found)


@app.command(short_help="Log, draw and mirror a run from the files in its directory.")
def follow(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Send the rows of RUN to the sinks of log.to, draw its curve and copy it to its mirror.

    `launch`, `learner`, `sft`, `rm` and `dpo` start this themselves. Start it by hand to log a run that has ended, of
    your own or of somebody else. What a sink has is in RUN/follow and is not sent there again.

    \b
    Example:
      async-rl follow runs/quickstart --set 'log.to=["tensorboard"]'
    """
    with role(PLAIN) as is_attached:
        from async_rl.launch.follow import follow as follow_run
        from async_rl.run.directory import RunDir
        from async_rl.run.notes import tell

        run = RunDir(run_dir.absolute())
        note = say = logging.getLogger(__name__).info
        if is_attached:
            note, say = partial(tell, run), partial(tell, RunDir(run.follow))
        code = follow_run(run, overrides or [], is_attached=is_attached, note=note, say=say)
        sys.stderr.flush()
        os._exit(code)  # sinks would wait for their servers once more


@app.command(short_help="Serve a reward model or a teacher to generators.")
def scorer(
    config: ConfigPath,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The scorer, a table scorer.NAME of CONFIG. If unset, the only one."),
    ] = None,
    overrides: Overrides = None,
    insecure: Insecure = False,
) -> None:
    """Score what generators sampled with the frozen model of the table scorer.NAME of CONFIG.

    `launch` starts the scorers of its config itself. Start one by hand to run it on another machine, with
    scorer.NAME.launch = false. It may be restarted at any time: generators wait for it and ask again.

    \b
    Example:
      async-rl scorer run.toml judge --set scorer.judge.address=tcp://10.0.0.3:5570
    """
    with role():
        from async_rl.config.loading import load_config
        from async_rl.process.child import set_torch_defaults

        set_torch_defaults(is_learner=False)
        resolved = load_config(config, overrides or [])
        from async_rl.data.chat import quiet_progress_bars

        logging.getLogger(__name__).info("loading PyTorch")
        quiet_progress_bars()
        from async_rl.scorer.start import run_scorer

        run_scorer(resolved, name, insecure=insecure)


app.add_typer(tools)


def _is_bad_path(error: Exception, arguments: Sequence[str]) -> bool:
    """Return whether one of ``arguments`` is a path that can't exist, such as a link to itself or one below a file."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR):
        return False
    return any(one and str(error.filename).startswith(one) for one in arguments)


def main(arguments: list[str] | None = None) -> Any:
    """Run the subcommand that ``arguments`` name, and exit with its exit code. This is the program's entry point.

    ``arguments`` are those of the command line if None. A ``UserError``, the lack of a temporary directory and a path
    that can't exist are each printed as one message, with exit code 2. So is a lack of file descriptors, with exit code
    1.
    """
    leave_pid_one()
    try:
        app(arguments)
    except UserError as error:
        sys.stderr.write(visible(f"async-rl: {error}\n"))
        raise SystemExit(2) from None
    except FileNotFoundError as error:  # tempfile has no class of its own for it, and torch's imports call tempfile
        if not (error.strerror or "").startswith("No usable temporary directory"):
            raise
        sys.stderr.write(
            f"async-rl: expected a directory for temporary files that can be written, got none: {error.strerror}; set "
            f"TMPDIR to one, or mount one at /tmp (docker run --tmpfs /tmp)\n"
        )
        raise SystemExit(2) from None
    except Exception as error:  # also zmq's own kind of OSError
        if _is_bad_path(error, sys.argv[1:] if arguments is None else arguments):
            sys.stderr.write(visible(f"async-rl: can't use this path: {error!s:.300}; correct it\n"))
            raise SystemExit(2) from None
        if getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE):
            raise
        sys.stderr.write(visible(f"async-rl: {out_of_descriptors(error)}\n"))
        raise SystemExit(1) from None
