"""Commands that start no role of a run: ``config``, ``eval``, ``export``, ``keys``. Heavy imports are in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from async_rl.cli_options import ConfigPath, Overrides

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
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with lora.rank: the adapter alone, in peft's format.")
    ] = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory (config, tokenizer, safetensors).

    A LoRA adapter is merged into the model that the run began with, which must still be there.

    \b
    Example:
      async-rl export runs/quickstart exported
      async-rl export runs/lora adapter --adapter
    """
    from async_rl.learner.export import export_adapter, export_checkpoint

    (export_adapter if adapter else export_checkpoint)(checkpoint, out)
    typer.echo(f"wrote {out}")


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
