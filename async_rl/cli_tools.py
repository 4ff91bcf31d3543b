"""Commands that start no role: ``config``, ``eval``, ``export``, ``doctor``, ``keys``. Heavy imports are in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from async_rl.cli_options import ConfigPath, Insecure, Keys, Overrides

tools = typer.Typer(rich_markup_mode=None)


@tools.command("config", short_help="Check a config and print it resolved.")
def show_config(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check CONFIG and print it resolved: every key, defaults written out, as TOML.

    \b
    Example:
      async-rl config configs/quickstart.toml --set queue.max_staleness=0
    """
    from async_rl.config_file import config_to_toml, load_config

    typer.echo(config_to_toml(load_config(config, overrides or [])), nl=False)


@tools.command("eval", short_help="Answer a dataset with a model and print its accuracy.")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model directory, a hub id, a checkpoint, or a run directory (its latest)."
        ),
    ],
    dataset: Annotated[Path, typer.Option("--dataset", metavar="FILE", help="Rows to answer (JSONL).")],
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Answers a row.")] = 1,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="0 is greedy decoding.")
    ] = 0.0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer, tokens.")
    ] = 3584,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", metavar="N", min=1, help="Longer prompts are counted, not asked.")
    ] = 4096,
    reward: Annotated[str, typer.Option("--reward", metavar="TYPE", help="As reward.type.")] = "boxed",
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", metavar="TEXT", help="Default: by reward type; empty: none.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Sequences sampled at a time.")
    ] = 64,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="For sampling above temperature 0.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write every answer to DIR/answers.jsonl.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N rows; default: all.")
    ] = None,
) -> None:
    """Answer the rows of a dataset with a model and print its accuracy.

    Give the --system-prompt and the limits that the run was trained with: the defaults are those of a new config.

    \b
    Example:
      async-rl eval runs/quickstart --dataset runs/quickstart-task/seed-0/held_out.jsonl --system-prompt ""
    """
    from async_rl.evaluation import describe_figures, run_eval

    figures = run_eval(
        model,
        dataset=dataset,
        num_samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        reward_type=reward,
        system_prompt=system_prompt,
        batch_size=batch_size,
        seed=seed,
        out=out,
        limit=limit,
        progress=_show_progress if sys.stderr.isatty() else None,
    )
    for line in describe_figures(figures):
        typer.echo(line)
    if out is not None:
        typer.echo(f"answers: {out / 'answers.jsonl'}")


@tools.command(short_help="Write a checkpoint as a Hugging Face model directory.")
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run directory (its latest).")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; new, or empty.")],
) -> None:
    """Write a checkpoint as a Hugging Face model directory (config, tokenizer, safetensors).

    \b
    Example:
      async-rl export runs/quickstart exported
    """
    from async_rl.learner.export import export_checkpoint

    export_checkpoint(checkpoint, out)
    typer.echo(f"wrote {out}")


@tools.command(short_help="Look for what would go wrong, with a fix for each.")
def doctor(
    config: ConfigPath,
    overrides: Overrides = None,
    connect: Annotated[
        str | None,
        typer.Option("--connect", metavar="ADDRESS", help="Ask this queue server, as a generator here would."),
    ] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    parity: Annotated[
        bool, typer.Option(help="Load the model twice, as engine and learner, and compare their log-probabilities.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="For each check that loads a model.")
    ] = 300.0,
) -> None:
    """Look for what would go wrong with CONFIG on this machine, and say how to mend it. Nothing is written.

    Versions, devices, disk, ports, a real collective of two, data, tokenizer, the first prompt as it is rendered, the
    reward on sample rows, and whether engine and learner give the same tokens the same log-probabilities. The exit
    code is 1 if a row is red.

    \b
    Examples:
      async-rl doctor configs/quickstart.toml
      async-rl doctor run.toml --connect tcp://10.0.0.1:5555 --keys node-b.key
    """
    from async_rl.address import check_address
    from async_rl.config_file import load_config

    resolved = load_config(config, overrides or [])
    if connect is not None:
        check_address(connect)
    from async_rl.doctor.rows import exit_code, print_json, print_table
    from async_rl.doctor.visit import visit

    def told(name: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{name} ...")

    rows = visit(
        resolved, connect=connect, keys_file=keys, insecure=insecure, deadline_s=timeout, with_parity=parity, told=told
    )
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    (print_json if as_json else print_table)(rows)
    raise typer.Exit(exit_code(rows))


keys_app = typer.Typer(
    help="Keys that encrypt the run's sockets and say who may join.", no_args_is_help=True, rich_markup_mode=None
)
tools.add_typer(keys_app, name="keys")


@keys_app.command("new", short_help="Make keys, or add clients to them.")
def keys_new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the keys are, or are to be.")],
    clients: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="NAME", help="A further client, for a machine of generators; repeatable."),
    ] = None,
) -> None:
    """Make DIR with the queue server's key, a key for every client and allowed.txt, the list of who is let in.

    Set queue.keys to DIR for the queue server and the learner, who alone is to use DIR/client.key, and copy a client's
    file to each machine of generators by a safe way. Repeated, it adds clients, to a running run as well, and replaces
    nothing. To shut a client out, delete its line of allowed.txt and restart the queue server.

    \b
    Example:
      async-rl keys new keys --client node7
      async-rl generator --connect tcp://10.0.0.1:5555 --keys node7.key
    """
    from async_rl.keys import make_keys

    for line in make_keys(directory, clients or []):
        typer.echo(line)


def _show_progress(num_done: int, num_rows: int) -> None:
    sys.stderr.write(f"\r{num_done}/{num_rows} rows answered" + ("\n" if num_done == num_rows else ""))
    sys.stderr.flush()
