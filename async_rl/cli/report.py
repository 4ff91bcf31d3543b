"""The subcommand ``report``. It imports large modules only when it runs, so that ``async-rl --help`` is fast."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from async_rl.cli.options import Quiet
from async_rl.errors import RunError
from async_rl.output import Progress
from async_rl.terminal import visible

MAX_RUNS = 6
"""The page has as many colours."""

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
    if len(runs) > MAX_RUNS:
        raise RunError(f"expected at most {MAX_RUNS} runs in one report, got {len(runs)}; compare shows more")
    if serve:
        _serve(runs, port)
        return
    from async_rl.report.report import write_report
    from async_rl.run.directory import RunDir

    path = out or RunDir(runs[0]).report
    with Progress(quiet=quiet) as progress:
        left_out = write_report(runs, path, max_bytes=int(max_mb * 1e6), progress=progress)
    if left_out:
        typer.echo(left_out)
    typer.echo(visible(f"report: {path.absolute()}"))


def _serve(runs: list[Path], port: int) -> None:
    """Serve the report until Ctrl-C or SIGTERM."""
    from async_rl.process.child import exit_on_sigterm
    from async_rl.report.report import read_all
    from async_rl.report.serve import start_server

    exit_on_sigterm()
    read_all(runs)  # refused now, not in the browser
    with start_server(runs, port) as server:
        typer.echo(f"report: http://127.0.0.1:{server.server_address[1]}/ until Ctrl-C")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
