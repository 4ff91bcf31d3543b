"""The subcommand ``plan``. It imports large modules only when it runs, so that ``async-rl --help`` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from async_rl.cli.options import AsJson, Overrides, Quiet
from async_rl.output import Progress, print_json
from async_rl.terminal import visible

plan_command = typer.Typer(rich_markup_mode=None)


def _range(option: str, what: str) -> typer.models.OptionInfo:
    return typer.Option(option, metavar="N,N,...", help=f"{what} to predict.")


@plan_command.command("plan", short_help="Predict speed and staleness for other settings.")
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
    lengths: Annotated[
        Path | None,
        typer.Option(
            "--lengths", metavar="FILE", help="Take lengths from FILE: on each line a length, or also a count."
        ),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            "--rate",
            metavar="NAME=VALUE",
            help="Give a rate in place of the measured one: decode_step_s, decode_sequence_s, train_s, "
            "train_token_s, after_s, transfer_s, pause_s (seconds), version_bytes, filtered (a share). "
            "May be repeated.",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict steps/s, idle time, staleness, lost data and weight traffic, and recommend a setting.

    It simulates the run around the real queue, with the rates that RUN has measured. Of a config, the run in its
    run.dir is taken; without one, give the rates. Nothing is started or written.

    \b
    Examples:
      async-rl plan runs/quickstart --max-staleness 0,1,2,4
      async-rl plan runs/quickstart --generators 1,2,4 --ranks 1,2
      async-rl plan run.toml --mean-tokens 2000 --sigma 1 \\
        --rate decode_step_s=0.02 --rate train_s=30
    """
    from async_rl.plan.rates import find_rates
    from async_rl.plan.simulation import simulate
    from async_rl.plan.table import plan_json, plan_lines, settings_of

    bounds = _numbers("--max-staleness", max_staleness, least=0)
    counts, numbers, means = (
        _numbers(option, text, least=1)
        for option, text in (("--generators", generators), ("--ranks", ranks), ("--mean-tokens", mean_tokens))
    )
    mean = means[0] if means else None
    config, rates, source = find_rates(
        run, overrides or [], rate or [], lengths_file=lengths, mean_tokens=mean, sigma=sigma
    )
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
        from async_rl.errors import ConfigError

        raise ConfigError(f"{option}: expected whole numbers of at least {least}, as in {least},4, got {text!r}")
    return sorted({int(part) for part in parts})
