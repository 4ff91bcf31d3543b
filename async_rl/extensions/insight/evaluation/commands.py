"""The subcommand ``eval``."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from async_rl.cli.options import AsJson, Insecure, Overrides, Quiet
from async_rl.output import Progress, print_json, prints_to_stderr
from async_rl.terminal import visible

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="Model directories, hub ids, checkpoints, or run directories (their latest checkpoint).",
    ),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset", metavar="[NAME=]FILE", help="A file of rows to answer, as in data.eval. May be repeated."
    ),
]
EvalConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="CONFIG",
        help="Config file with the settings and data sets. If unset, the config of the first MODEL's run.",
    ),
]
Samples = Annotated[
    int | None, typer.Option("--samples", metavar="N", min=1, help="Answers to each row. Several are sampled.")
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", min=0.0, help="Sampling temperature; 0 is greedy decoding."),
]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", metavar="N", min=1, help="Limit of an answer, in tokens.")
]
RewardType = Annotated[
    str | None,
    typer.Option("--reward", metavar="TYPE", help="The reward that scores the answers, in place of reward.type."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Write the answers (DATASET.jsonl) and the metrics (figures.json) to this directory.",
    ),
]
Backend = Annotated[
    str | None, typer.Option("--backend", metavar="NAME", help="What samples, in place of generator.backend.")
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N rows of each set.")]

eval_command = typer.Typer(rich_markup_mode=None)


@eval_command.command(short_help="Evaluate models on data sets.")
def evaluate(
    models: Models,
    datasets: Datasets = None,
    config: EvalConfig = None,
    overrides: Overrides = None,
    samples: Samples = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    reward: RewardType = None,
    backend: Backend = None,
    out: Out = None,
    limit: Limit = None,
    as_json: AsJson = False,
    insecure: Insecure = False,
    quiet: Quiet = False,
) -> None:
    """Let models answer data sets and print accuracy, pass@k, best-of-n and majority@n.

    Settings (system prompt, reward, limits, environment, data.eval) come from --config; if unset, from the run that
    the first MODEL belongs to; else they are the defaults. The options below replace them, and --set any other key. All
    models get the same settings.

    \b
    Examples:
      async-rl eval runs/quickstart
      async-rl eval Qwen/Qwen2.5-0.5B-Instruct runs/gsm8k \\
        --dataset test.jsonl --samples 8 --temperature 0.6
    """
    given = {
        "eval.num_samples": samples, "eval.temperature": temperature, "eval.max_new_tokens": max_new_tokens,
        "eval.max_rows": limit, "reward.type": reward, "generator.backend": backend,
    }  # fmt: skip
    values = {key: value for key, value in given.items() if value is not None}
    with Progress(quiet=quiet) as progress:
        progress.show("loading PyTorch")
        from async_rl.extensions.insight.evaluation.offline import EvalOptions, describe, eval_settings, run_eval

        options = EvalOptions(tuple(datasets or ()), config, tuple(overrides or ()), values)
        settings = eval_settings(models, options)
        for note in settings.notes:
            progress.note(note)
        with prints_to_stderr():
            found = run_eval(models, settings, out=out, insecure=insecure, report=progress.show)
    if as_json:
        print_json({"results": [asdict(one) for one in found]})
    else:
        for line in describe(found, settings.config, width=shutil.get_terminal_size().columns, out=out):
            typer.echo(visible(line))
