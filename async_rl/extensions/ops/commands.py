"""The subcommands ``slurm`` and ``bundle``."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated

import typer

from async_rl.cli.options import ConfigPath, Overrides, Quiet
from async_rl.errors import RunError
from async_rl.output import Progress, size_text
from async_rl.terminal import visible

slurm_command = typer.Typer(rich_markup_mode=None)
bundle_command = typer.Typer(rich_markup_mode=None)
_Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        metavar="N",
        min=1,
        help="Learner ranks, and GPUs, on each node; learner.nproc if unset.",
    ),
]
_Sbatch = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch",
        metavar="KEY=VALUE",
        help="An option of sbatch for each job, as in time=04:00:00, at which it is requeued. May be repeated.",
    ),
]
_Setup = Annotated[
    list[str] | None,
    typer.Option(
        "--setup",
        metavar="LINE",
        help="A line of shell that each job runs first, as in 'source .venv/bin/activate'. May be repeated. If "
        "unset, the jobs use this async-rl.",
    ),
]


@slurm_command.command("slurm", short_help="Write the jobs of a run for a Slurm cluster, and submit them.")
def slurm(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="Nodes of the learner's job.")] = 1,
    ranks: _Ranks = None,
    generators: Annotated[
        int | None,
        typer.Option("--generators", metavar="N", min=0, help="Number of generators; generator.count if unset."),
    ] = None,
    no_gpus: Annotated[bool, typer.Option("--no-gpus", help="Ask Slurm for no GPUs.")] = False,
    sbatch: _Sbatch = None,
    setup: _Setup = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the jobs.")] = False,
) -> None:
    """Write two batch scripts for the run of CONFIG to RUN_DIR-slurm, and print them: the learner, and the generators.

    run.dir and the current directory must be on a file system that all nodes share. Edit the scripts for whatever has
    no option here. Scripts that were edited are not replaced.

    \b
    Examples:
      async-rl slurm run.toml --ranks-per-node 8 --generators 16 --sbatch time=24:00:00
      async-rl slurm run.toml --generators 4 --setup 'module load cuda' --submit
    """
    from async_rl.config.loading import load_config
    from async_rl.extensions.ops.slurm import jobs
    from async_rl.run.reuse import check_place

    resolved = load_config(config, overrides or [])
    check_place(resolved, config, overrides or [])
    options = jobs.JobOptions(
        nodes=nodes,
        ranks_per_node=resolved.learner.nproc if ranks is None else ranks,
        num_generators=resolved.generator.count if generators is None else generators,
        sbatch=tuple(sbatch or []),
        setup=tuple(setup or []),
        has_gpus=not no_gpus,
    )
    words = [str(config), *(word for override in overrides or [] for word in ("--set", override))]
    scripts = jobs.write_scripts(resolved, words, options)
    if submit:
        submitted = scripts.submit()
        names = dict(zip(("queue server and learner", "generators"), submitted))
        typer.echo("submitted: " + ", ".join(f"{name} as job {job}" for name, job in names.items()))
        typer.echo(visible(f"logs: {scripts.learner.parent}"))
        typer.echo(f"to save and stop: scancel {' '.join(submitted)}; submit again to go on")
        return
    for path in scripts.paths:
        typer.echo(visible(f"# {path}\n{path.read_text(encoding='utf-8')}"))
    typer.echo(visible(f"# to submit:\n{scripts.commands}"))


@bundle_command.command("bundle", short_help="Pack what debugging a run needs, without data and keys.")
def bundle(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the config of a run that has none.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The archive; NAME-bundle.zip here if unset.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """List, then write an archive of RUN for whoever helps to debug it: config, versions, logs, metrics, status, some
    of the doctor's checks, driver and NCCL environment; and which rank of the learner waits for which.

    It has no rows, rollouts, weights and keys. Values that look like secrets, home directories and names in their paths
    are replaced. Long logs are cut to head and tail. A log may quote a row in an error: read the archive before you
    send it.

    \b
    Example:
      async-rl bundle runs/quickstart
    """
    from async_rl.extensions.ops.bundle import collected
    from async_rl.run.directory import replaced

    target = out or Path(f"{run.resolve().stem}-bundle.zip")
    with Progress(quiet=quiet) as progress:
        files = collected(run, progress.show)
    for name, (text, note) in files.items():
        typer.echo(visible(f"{size_text(len(text.encode())):>10}  {name}{note and f'  ({note})'}"))
    try:
        with replaced(target) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, (text, note) in files.items():
                archive.writestr(name, text or note)
    except OSError as error:
        raise RunError(f"--out: can't write {target}: {error.strerror}; name another file") from None
    typer.echo(visible(f"wrote {target} ({size_text(target.stat().st_size)})"))
