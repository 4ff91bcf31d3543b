"""Offline evaluation, the body of ``async-rl eval``: let models answer the rows of data sets, and score the answers.

``eval_settings`` builds the ``Config``: it begins with a config file, with the config of the run that the first model
belongs to, or with the defaults, and applies the command line's options. ``run_eval`` samples and scores with the
generator's own parts (``rollouts``: single answers, or environments of several turns) and with the random numbers of a
run's evaluations. So an answer here is the one that a generator of the run would have given.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.generator import AUTO, BACKENDS, FALLBACK
from async_rl.config.loading import apply_override, load_config, parse_config
from async_rl.data.chat import load_tokenizer, model_directory, quiet_progress_bars
from async_rl.data.dataset import load_rows_of
from async_rl.errors import ConfigError, DataError, ModelError
from async_rl.evaluation.table import FIGURES_FILE, Entry, eval_table
from async_rl.generator.backend import Backend, build_backend
from async_rl.generator.offline import OfflineSamples, sample_offline
from async_rl.generator.rollouts import Grader, Rollouts, SingleTurnRollouts
from async_rl.generator.worker import build_environment, build_grader
from async_rl.process.user_code import is_code_name
from async_rl.queue.core.admission import eval_sampling, lease_seed
from async_rl.records import Lease, Prompt
from async_rl.rewards.answers import vote_key_of
from async_rl.run.directory import check_writable, write_atomically
from async_rl.run.eval_records import Decode, append_json_lines, eval_figures, row_records
from async_rl.run.metrics import EVAL_FIGURES

Progress = Callable[[str, int, int], None]
"""Called with (model and set, rows answered, rows)."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One model's figures on one set, and why rows have no answer: cause -> rows, and the first error."""

    model: str
    dataset: str
    figures: Mapping[str, float]
    causes: Mapping[str, int]
    first_failure: str


def run_eval(
    models: Sequence[str], settings: EvalSettings, *, out: Path | None = None, progress: Progress | None = None
) -> list[Evaluated]:
    """Evaluate every model on every set of ``data.eval``, model by model.

    Args:
        models: Hugging Face directories, hub ids, or checkpoints of runs.
        out: a directory for ``DATASET.jsonl``, one line per answer, and ``figures.json``. None of these files may exist
            yet.

    Raises:
        UserError: a model, a data set or a setting can't be used, or no row of a set could be answered.
    """
    if len(set(models)) < len(models):
        raise ConfigError(f"expected each model only once, got {', '.join(models)}; leave out the repeated one")
    config = settings.config
    if out is not None:
        _check_out(out, config)
    prompts = {name: _prompts(config, name) for name in config.data.eval}
    found: list[Evaluated] = []
    with ExitStack() as stack:
        grader = None if config.environment.is_set else build_grader(config, None, stack)
        for model in models:
            with ExitStack() as of_model:
                backend, rollouts, decode = _player(config, model, grader, of_model)
                for name in config.data.eval:
                    leases = [_lease(config, name, prompt) for prompt in prompts[name]]

                    def tell(done: int, rows: int, what: str = f"{model} on {name}") -> None:
                        if progress is not None:
                            progress(what, done, rows)

                    answered = sample_offline(backend, rollouts, leases, progress=tell)
                    found.append(_evaluated(config, model, name, answered))
                    if out is not None:
                        _write(out, found, answered, decode)
    return found


def describe(found: Sequence[Evaluated], config: Config) -> list[str]:
    """Write the figures as text: one line per figure if there is only one result, else a table per set."""
    lines: list[str] = []
    for name in dict.fromkeys(one.dataset for one in found):
        of_set = [one for one in found if one.dataset == name]
        lines.append(f"{name}: {int(of_set[0].figures['rows'])} rows, {describe_settings(config, name)}")
        if len(found) == 1:
            lines += _figure_lines(of_set[0].figures)
        else:
            lines += eval_table(["model"], [Entry((one.model,), one.figures) for one in of_set])
        lines += [line for one in of_set for line in _failure_lines(one)]
    return lines


def _figure_lines(figures: Mapping[str, float]) -> list[str]:
    """Return one line per figure: key, value, meaning."""
    tries = {
        f"pass_at_{2**i}": f"Unbiased estimate of the probability that one of {2**i} answers is right."
        for i in range(1, 11)
    }
    meanings = {**EVAL_FIGURES, **tries, "pass_at_1": "Share of answers that are completely right."}
    return [f"{key:<17} {value:<10.4g} {meanings.get(key, '')}".rstrip() for key, value in figures.items()]


def _failure_lines(one: Evaluated) -> list[str]:
    if not one.causes:
        return []
    causes = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in one.causes.items())
    rows = int(one.figures["unanswered"])
    return [
        f"{one.model} has no answer to {rows} rows of {one.dataset}, which count as wrong: {causes}; "
        f"{one.first_failure}"
    ]


def _evaluated(config: Config, model: str, dataset: str, answered: OfflineSamples) -> Evaluated:
    rows = [group.rollouts for _, group in answered.groups]
    if not any(rows):
        counts = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in answered.causes.items())
        raise DataError(
            f"{model} could not answer any of the {len(rows)} rows of {dataset}: {counts}; {answered.first_failure}"
        )
    found = eval_figures(rows, vote_key=vote_key_of(config))
    # Versions belong to a run's weights; a model on disk has none.
    figures = {key: value for key, value in found.items() if not key.startswith("version_")}
    return Evaluated(model, dataset, figures, dict(Counter[str](answered.causes)), answered.first_failure)


def _player(config: Config, model: str, grader: Grader | None, stack: ExitStack) -> tuple[Backend, Rollouts, Decode]:
    """Return the model's backend, rollouts and token decoder; ``stack`` closes them."""
    quiet_progress_bars()
    directory = _model_directory(model, stack)
    backend = stack.enter_context(closing(build_backend(config, directory, load_pretrained=True)))
    tokenizer = load_tokenizer(directory, needs_template=config.data.prompt_format == "chat")

    def decode(token_ids: np.ndarray) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    if grader is not None:
        truncates = config.data.on_long_prompt == "truncate"
        return backend, SingleTurnRollouts(backend, grader, truncates=truncates), decode
    environment = build_environment(config, directory, backend, None, stack)
    assert environment is not None
    return backend, environment, decode


def _prompts(config: Config, name: str) -> list[Prompt]:
    rows = load_rows_of(config, config.data.eval[name]).rows[: config.eval.of(name).max_rows]
    return [Prompt(row, row, 0, found.messages, found.reward_data) for row, found in enumerate(rows)]


def _lease(config: Config, dataset: str, prompt: Prompt) -> Lease:
    seed = lease_seed(config.run.seed, "eval", dataset, prompt.position)
    return Lease(
        lease_id=f"{dataset}-{prompt.position}",
        kind="eval",
        prompt=prompt,
        group_size=config.eval.of(dataset).num_samples,
        sampling=eval_sampling(config, dataset),
        lineage="",
        min_version=0,
        max_staleness=0,
        attempt=1,
        seed=seed,
    )


def _check_out(out: Path, config: Config) -> None:
    """Check before sampling that the answers can be written.

    Raises:
        UserError: answers exist already, or the directory can't be written.
    """
    for name in (FIGURES_FILE, *(f"{dataset}.jsonl" for dataset in config.data.eval)):
        if (out / name).exists():
            raise DataError(f"expected no earlier answers at {out}, but {name} exists; choose another --out")
    check_writable(out, "--out")


def _write(out: Path, found: Sequence[Evaluated], answered: OfflineSamples, decode: Decode) -> None:
    """Add the answers of the newest evaluation to its file in ``out``, and write the figures of all evaluations."""
    newest = found[-1]
    lines = (line for prompt, group in answered.groups for line in row_records(prompt, group, decode))
    append_json_lines(out / f"{newest.dataset}.jsonl", ({"model": newest.model, **line} for line in lines))
    write_atomically(out / FIGURES_FILE, json.dumps([asdict(one) for one in found], indent=1) + "\n")


def _model_directory(model: str, stack: ExitStack) -> Path:
    """Return the directory of the model's files: for a checkpoint a temporary export, which ``stack`` removes."""
    path = Path(model)
    if not path.is_dir() and (path.is_absolute() or model.startswith(".") or model.count("/") > 1):  # no hub id
        raise ModelError(f"expected a model, a checkpoint or a run directory at {model}, got none; correct the path")
    if path.is_dir() and not (path / "config.json").exists():
        from async_rl.learner.checkpoint import resolve_checkpoint
        from async_rl.learner.export import export_checkpoint

        checkpoint = resolve_checkpoint(path)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-rl-eval-")))
        export_checkpoint(checkpoint, scratch / "model")
        return scratch / "model"
    return model_directory(model, weights=True)


MAX_PROMPT_TOKENS = 4096
"""``sampling.max_prompt_tokens`` of an evaluation without a config."""

_NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The options of the command line.

    Attributes:
        datasets: ``SOURCE`` or ``NAME=SOURCE``, as for ``data.eval``. If empty, the config's ``data.eval`` is used.
        config: a config file. If unset, the config of the run that the first model belongs to, or else the defaults.
        overrides: ``section.key=value``, in the form of ``--set``.
        values: config key -> the value of the key's own option (``--samples`` for ``eval.num_samples``). They replace
            those of ``overrides`` and of single sets.
    """

    datasets: tuple[str, ...] = ()
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """The config of an evaluation, and ``notes``, lines to show to the user."""

    config: Config
    notes: tuple[str, ...]


def eval_settings(models: Sequence[str], options: EvalOptions) -> EvalSettings:
    """Return the config to evaluate ``models`` with.

    Raises:
        ConfigError: the config, an override or an option is wrong, or no data set is named.
    """
    raw, notes = _base(models, options)
    if not _is_usable_offline(raw):
        notes.append(
            f"generator.backend is {raw['generator']['backend']} in the config; an offline evaluation uses {FALLBACK}"
        )
        raw["generator"]["backend"] = FALLBACK
    for override in options.overrides:
        apply_override(raw, override)
    if not _is_usable_offline(raw):
        usable = " or ".join(name for name, one in BACKENDS.items() if one.offline)
        raise ConfigError(
            f"generator.backend: expected {usable} for an offline evaluation, got {raw['generator']['backend']!r}, "
            f"which serves only the evaluations of a run (data.eval, eval.every); leave the key out"
        )
    _apply(raw, options)
    raw.setdefault("run", {}).setdefault("dir", "unused")
    raw.setdefault("model", {})["path"] = models[0]
    # Offline there are no leases that could expire.
    raw.setdefault("queue", {})["lease_timeout_s"] = _NEVER_S
    config = parse_config(raw, "the config with this command line")
    if not config.data.eval:
        raise ConfigError("expected --dataset FILE, or a config with data.eval, got neither; name a data set to answer")
    return EvalSettings(config, tuple(notes))


def _is_usable_offline(raw: Mapping[str, Any]) -> bool:
    """Return False for a known backend that needs a learner. A user's own backend is checked where it is imported."""
    capabilities = BACKENDS.get(raw.get("generator", {}).get("backend", AUTO))
    return capabilities is None or capabilities.offline


def run_config_of(model: str) -> Path | None:
    """Find the ``config.toml`` of the run whose directory, checkpoint or export ``model`` is; None if there is none."""
    path = Path(model)
    if not path.exists():
        return None  # a hub id
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.toml").is_file() and (folder / "run_id").is_file():
            return folder / "config.toml"
    return None


def _base(models: Sequence[str], options: EvalOptions) -> tuple[dict[str, Any], list[str]]:
    """Return the config before options are applied, as plain data, and notes for the user."""
    source = options.config or run_config_of(models[0])
    if source is None:
        return {"sampling": {"max_prompt_tokens": MAX_PROMPT_TOKENS}}, []
    load_config(source)  # raises with the name of the file
    raw = tomllib.loads(source.read_text(encoding="utf-8"))
    generator = raw.setdefault("generator", {})
    for key in ("count", "devices", "tensor_parallel_size"):
        generator.pop(key, None)
    if options.config is None:
        # The user did not name this file. It may come from the weights' author, so it must not allow code to run.
        generator.pop("allow_code", None)
    return raw, [f"settings: {source}" + ("" if options.config else " (--config FILE takes them from another file)")]


def _apply(raw: dict[str, Any], options: EvalOptions) -> None:
    """Put the options of the command line into the configuration ``raw``.

    An option for a key of ``eval`` also removes that key from every evaluation set, so that it holds for all sets.
    """
    if options.datasets:
        named = [_named(dataset) for dataset in options.datasets]
        raw.setdefault("data", {})["eval"] = dict(named)
        if len(raw["data"]["eval"]) < len(named):
            raise ConfigError(
                f"--dataset: expected names that differ, got {', '.join(name for name, _ in named)}; "
                f"use --dataset NAME=FILE"
            )
    evaluation = raw.setdefault("eval", {})
    names = raw.get("data", {}).get("eval", {})
    sets = {name: dict(own) for name, own in evaluation.get("sets", {}).items() if name in names}
    for key, value in options.values.items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = value
        if section == "eval":
            for own in sets.values():
                own.pop(name, None)
    evaluation["sets"] = sets
    reward = options.values.get("reward.type")
    if reward is not None and is_code_name(reward):
        # Naming code on the command line allows it.
        generator = raw.setdefault("generator", {})
        generator["allow_code"] = [*generator.get("allow_code", ()), reward.rpartition(":")[0]]


def _named(dataset: str) -> tuple[str, str]:
    """Return name and source of a ``--dataset``. Without ``NAME=`` the name is the last part of the source."""
    name, separator, source = dataset.partition("=")
    if separator and "/" not in name:
        return name, source
    last = dataset.rstrip("/").rpartition("/")[2].partition(":")[0]
    return last.rpartition("@")[2].partition(".")[0] or "dataset", dataset


def describe_settings(config: Config, name: str) -> str:
    """Describe in words how the rows of the set ``name`` are answered."""
    chosen = config.eval.of(name)
    answers = "1 answer" if chosen.num_samples == 1 else f"{chosen.num_samples} answers"
    how: Mapping[str, Any] = {
        "temperature": f"{chosen.temperature:g}" if chosen.temperature else "0 (greedy)",
        **({"top-p": f"{chosen.top_p:g}"} if chosen.top_p < 1 else {}),
        **({"top-k": chosen.top_k} if chosen.top_k else {}),
        "at most": f"{chosen.max_new_tokens or config.sampling.max_new_tokens} tokens",
    }
    return f"{answers} a row, " + ", ".join(f"{key} {value}" for key, value in how.items())
