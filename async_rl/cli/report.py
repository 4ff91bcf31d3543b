"""The subcommand ``report``. It imports large modules only when it runs, so that ``async-rl --help`` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from async_rl.cli.options import Quiet
from async_rl.output import Progress
from async_rl.terminal import visible

report_command = typer.Typer(rich_markup_mode=None)


@report_command.command("report", short_help="Write a page about runs: curves, waits, ledger, rollouts.")
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
    quiet: Quiet = False,
) -> None:
    """Write one HTML page about RUN that needs nothing else: no network, no server, no other file.

    It has the curves with the evaluations, who waited for whom, staleness and mismatch, the ledger, warnings, settings,
    and a browser of the recorded rollouts. Of several runs it shows the curves in one picture, up to six.

    \b
    Examples:
      async-rl report runs/quickstart
      async-rl report runs/bound-0 runs/bound-4 --out bounds.html
    """
    from async_rl.report.report import write_report

    path = out or runs[0] / "report.html"
    with Progress(quiet=quiet) as progress:
        left_out = write_report(runs, path, max_bytes=int(max_mb * 1e6), progress=progress)
    if left_out:
        typer.echo(left_out)
    typer.echo(visible(f"report: {path.absolute()}"))
