"""The subcommands ``report``, ``compare``, ``sweep`` and ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from async_rl.cli.options import AsJson, ConfigPath, On, Overrides, Quiet
from async_rl.errors import ConfigError
from async_rl.output import Progress, print_json
from async_rl.terminal import visible

if TYPE_CHECKING:
    from async_rl.extensions.insight.comparison.sweep import Variant

report_command = typer.Typer(rich_markup_mode=None)
compare_command = typer.Typer(rich_markup_mode=None)
sweep_command = typer.Typer(rich_markup_mode=None)
plan_command = typer.Typer(rich_markup_mode=None)


@report_command.command(short_help="Write a page about runs: curves, waits, ledger, rollouts.")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The directories of runs, finished or running.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The HTML file to write; report.html in the directory of the first RUN if unset.",
        ),
    ] = None,
    max_mb: Annotated[
        float,
        typer.Option("--max-mb", metavar="MB", min=1, help="Size of FILE; rollouts that don't fit are left out."),
    ] = 14.0,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve", help="Write no file: serve the page on this machine, and follow runs that are running."
        ),
    ] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="With --serve: the port; 0 is a free one.")
    ] = 0,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page about RUN that needs nothing else: no network, no server, no other file.

    It has the curves with the evaluations, who waited for whom, staleness and mismatch, the ledger, warnings, settings,
    and a browser of the recorded rollouts. Of several runs it shows the curves in one picture, up to six.

    \b
    Examples:
      async-rl report runs/quickstart
      async-rl report runs/bound-0 runs/bound-4 --out bounds.html
      async-rl report runs/quickstart --serve
    """
    if serve:
        _serve(runs, port)
        return
    from async_rl.extensions.insight.report.report import write_report
    from async_rl.run.directory import RunDir

    path = out or RunDir(runs[0]).report
    with Progress(quiet=quiet) as progress:
        left_out = write_report(runs, path, max_bytes=int(max_mb * 1e6), progress=progress)
    if left_out:
        typer.echo(left_out)
    typer.echo(visible(f"report: {path.absolute()}"))


def _serve(runs: list[Path], port: int) -> None:
    """Serve the report until Ctrl-C or SIGTERM."""
    from async_rl.extensions.insight.report.report import read_all
    from async_rl.extensions.insight.report.serve import start_server
    from async_rl.process.child import exit_on_sigterm

    exit_on_sigterm()
    read_all(runs)  # refused now, not in the browser
    with start_server(runs, port) as server:
        typer.echo(f"report: http://127.0.0.1:{server.server_address[1]}/ until Ctrl-C")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


@compare_command.command(short_help="Compare runs, and recommend a staleness bound.")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The directories of runs, finished or running.")],
    picture: Annotated[
        Path,
        typer.Option(
            "--picture", metavar="FILE", help="Where to write the picture, a PNG file. An existing FILE is replaced."
        ),
    ] = Path("compare.png"),
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show the speed, the age of the data and the learning of runs side by side, and say which bound to set.

    For advice on queue.max_staleness, compare runs that differ in nothing else but run.seed. The picture is written to
    compare.png in the current directory; --picture puts it elsewhere. With --json no picture is drawn.

    \b
    Examples:
      async-rl compare runs/bound-0 runs/bound-4 --picture bounds.png
      async-rl compare runs/quickstart --json
    """
    from async_rl.extensions.insight.comparison.advice import advise
    from async_rl.extensions.insight.comparison.picture import write_picture
    from async_rl.extensions.insight.comparison.summary import summarise
    from async_rl.extensions.insight.comparison.table import comparison_json, comparison_lines

    with Progress(quiet=quiet) as progress:
        summaries = []
        for number, path in enumerate(runs):
            progress.show("reading the runs", number, len(runs))
            summaries.append(summarise(path))
        advice = advise(summaries)
        is_new = not picture.exists()
        if not as_json:
            progress.show(f"drawing {picture}")
            write_picture(summaries, picture, advice.bound)
    if as_json:
        print_json(comparison_json(summaries, advice))
        return
    for line in comparison_lines(summaries, advice):
        typer.echo(visible(line))
    typer.echo(visible(f"picture: {picture.absolute()}{'' if is_new else ' (in place of an older one)'}"))


@sweep_command.command(short_help="Run a config with several values of one key; compare the runs.")
def sweep(
    config: ConfigPath,
    over: Annotated[
        str,
        typer.Option(
            "--over",
            metavar="KEY=V1,V2,...",
            help="The key that differs between the runs, and its values.",
        ),
    ],
    overrides: Overrides = None,
    seeds: Annotated[
        int,
        typer.Option("--seeds", metavar="N", min=1, help="Runs of each value, each with its own run.seed."),
    ] = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Launch CONFIG once for each value of KEY, one run after the other; then compare the runs.

    The runs' directories are below <run.dir>-sweep, and so is the picture. The same command goes on where it was
    stopped: it leaves finished runs alone and resumes the others. What launch prints goes to standard error, with a
    line before each run. With --json no picture is drawn.

    \b
    Example:
      async-rl sweep run.toml --seeds 3 \\
        --over queue.max_staleness=0,1,4,16
    """
    from async_rl.extensions.insight.comparison.sweep import plan_sweep
    from async_rl.process.child import exit_on_sigterm

    exit_on_sigterm()
    variants = plan_sweep(config, overrides or [], over, seeds)
    _launch_all(config, variants, quiet=quiet)
    run_dirs = [variant.run_dir for variant in variants]
    compare(run_dirs, run_dirs[0].parent / "compare.png", as_json=as_json, quiet=quiet)


def _launch_all(config: Path, variants: Sequence[Variant], *, quiet: bool) -> None:
    """Launch the ``variants`` that have not finished, one after the other. The first that fails ends the command."""
    from async_rl.extensions.insight.comparison.sweep import launch_variant

    left = [variant for variant in variants if not variant.is_done]
    for number, variant in enumerate(left, start=1):
        if not quiet:
            typer.echo(visible(f"run {number} of {len(left)}: {variant.label} in {variant.run_dir}"), err=True)
        if code := launch_variant(config, variant, quiet=quiet):
            ended = f"launch of {variant.run_dir} ended with exit code {code}"
            typer.echo(f"{ended}; see the messages above, then run the same sweep command to continue there", err=True)
            raise typer.Exit(code if code > 0 else 1)


def _range(option: str, what: str) -> typer.models.OptionInfo:
    return typer.Option(option, metavar="N,N,...", help=f"{what} to predict.")


GivenRates = Annotated[
    list[str] | None,
    typer.Option(
        "--rate",
        metavar="NAME=VALUE",
        help="Give a rate in place of the measured one: decode_step_s, decode_sequence_s, train_s, train_token_s, "
        "after_s, transfer_s, pause_s (seconds), version_bytes, filtered (a share). May be repeated.",
    ),
]


@plan_command.command(short_help="Predict speed and staleness for other settings.")
def plan(
    run: Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG", help="A run directory, or a config file.")],
    max_staleness: Annotated[str | None, _range("--max-staleness", "Values of queue.max_staleness")] = None,
    generators: Annotated[str | None, _range("--generators", "Numbers of generators")] = None,
    ranks: Annotated[str | None, _range("--ranks", "Numbers of learner ranks")] = None,
    mean_tokens: Annotated[str | None, _range("--mean-tokens", "Mean lengths of answers")] = None,
    sigma: Annotated[
        float | None,
        typer.Option("--sigma", min=0, help="Take log-normal lengths with this deviation of their logarithm."),
    ] = None,
    rate: GivenRates = None,
    on: On = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict steps/s, idle time, staleness, lost data and weight traffic, and recommend a setting.

    It simulates the run around the real queue, with the rates that RUN has measured. Of a config, the run in its
    run.dir is taken; without one, give the rates, or --on for those that `async-rl doctor` predicts. Nothing is
    started or written.

    \b
    Examples:
      async-rl plan runs/quickstart --max-staleness 0,1,2,4
      async-rl plan runs/quickstart --generators 1,2,4 --ranks 1,2
      async-rl plan run.toml --on 8xH100
      async-rl plan run.toml --mean-tokens 2000 --sigma 1 \\
        --rate decode_step_s=0.02 --rate train_s=30
    """
    from async_rl.extensions.insight.plan.rates import find_rates
    from async_rl.extensions.insight.plan.simulation import simulate
    from async_rl.extensions.insight.plan.table import plan_json, plan_lines, settings_of
    from async_rl.learner.cards import Machines

    bounds = _numbers("--max-staleness", max_staleness, least=0)
    counts, numbers = _numbers("--generators", generators, least=1), _numbers("--ranks", ranks, least=1)
    means = _numbers("--mean-tokens", mean_tokens, least=1)
    config, rates, source = find_rates(
        run, overrides or [], rate or [], mean_tokens=means[0] if means else None, sigma=sigma,
        machines=None if on is None else Machines.parse("--on", on),
    )  # fmt: skip
    settings = settings_of(config, rates, bounds, counts, numbers, means)
    with Progress(quiet=quiet) as progress:
        found = []
        for number, setting in enumerate(settings):
            progress.show("simulating", number, len(settings))
            found.append(simulate(config, rates, setting))
    if as_json:
        print_json(plan_json(found, rates, source))
        return
    for line in plan_lines(found, rates, source):
        typer.echo(visible(line))


def _numbers(option: str, text: str | None, *, least: int) -> list[int]:
    """Return the numbers of an option ``N,N,...`` in their order. Empty if ``text`` is None."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ConfigError(f"{option}: expected whole numbers of at least {least}, as in {least},4, got {text!r}")
    return sorted({int(part) for part in parts})
