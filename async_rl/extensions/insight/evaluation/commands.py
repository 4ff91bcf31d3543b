"""The subcommand ``eval``."""

from __future__ import annotations

import shutil
from pathlib import Path

import typer

from async_rl.cli.options import (
    AsJson,
    BatchSize,
    Compare,
    Datasets,
    EvalConfig,
    Insecure,
    Limit,
    MaxNewTokens,
    MaxPromptTokens,
    MinP,
    Models,
    Out,
    Overrides,
    Quiet,
    RewardType,
    Samples,
    Seed,
    SystemPrompt,
    Temperature,
    TopK,
    TopP,
)
from async_rl.errors import ConfigError
from async_rl.output import Progress, print_json, prints_to_stderr
from async_rl.terminal import visible

eval_command = typer.Typer(rich_markup_mode=None)


@eval_command.command(short_help="Evaluate models on data sets; compare evaluations.")
def evaluate(
    models: Models,
    datasets: Datasets = None,
    config: EvalConfig = None,
    overrides: Overrides = None,
    samples: Samples = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    max_new_tokens: MaxNewTokens = None,
    max_prompt_tokens: MaxPromptTokens = None,
    reward: RewardType = None,
    system_prompt: SystemPrompt = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    out: Out = None,
    limit: Limit = None,
    compare: Compare = False,
    as_json: AsJson = False,
    insecure: Insecure = False,
    quiet: Quiet = False,
) -> None:
    """Let models answer data sets and print accuracy, pass@k, best-of-n and majority@n; or compare evaluations.

    Settings (system prompt, reward, limits, environment, data.eval) come from --config; if unset, from the run that
    the first MODEL belongs to; else they are the defaults. The options below replace them. All models get the same
    settings.

    \b
    Examples:
      async-rl eval runs/quickstart
      async-rl eval Qwen/Qwen2.5-0.5B-Instruct runs/gsm8k \\
        --dataset test.jsonl --samples 8 --temperature 0.6
      async-rl eval --compare runs/quickstart
    """
    given = {
        "eval.num_samples": samples, "eval.temperature": temperature, "eval.top_p": top_p, "eval.top_k": top_k,
        "eval.min_p": min_p, "eval.max_new_tokens": max_new_tokens, "eval.max_rows": limit,
        "sampling.max_prompt_tokens": max_prompt_tokens,
        "reward.type": reward, "data.system_prompt": system_prompt, "generator.batch_size": batch_size,
        "run.seed": seed,
    }  # fmt: skip
    values = {key: value for key, value in given.items() if value is not None}
    if compare:
        has_options = bool(values or datasets or overrides or config or out or insecure)
        _compare([Path(model) for model in models], has_options=has_options, as_json=as_json)
        return
    with Progress(quiet=quiet) as progress:
        progress.show("loading PyTorch")
        from async_rl.extensions.insight.evaluation.offline import (
            EvalOptions,
            describe,
            eval_settings,
            evaluation_json,
            run_eval,
        )

        options = EvalOptions(tuple(datasets or ()), config, tuple(overrides or ()), values)
        settings = eval_settings(models, options)
        for note in settings.notes:
            progress.note(note)
        with prints_to_stderr():
            found = run_eval(models, settings, out=out, insecure=insecure, report=progress.show)
    if as_json:
        print_json(evaluation_json(found))
    else:
        for line in describe(found, settings.config, width=shutil.get_terminal_size().columns, out=out):
            typer.echo(visible(line))


def _compare(paths: list[Path], *, has_options: bool, as_json: bool) -> None:
    from async_rl.extensions.insight.evaluation.table import compare, compare_json

    if has_options:
        raise ConfigError(
            "async-rl eval --compare: expected only directories, got other options too; leave the "
            "other options out, because --compare only reads results"
        )
    if as_json:
        print_json(compare_json(paths))
        return
    for line in compare(paths):
        typer.echo(visible(line))
