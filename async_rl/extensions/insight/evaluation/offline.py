"""Lets models answer the rows of datasets, and scores the answers. This is the body of ``async-rl eval``.

``eval_settings`` builds the ``Config``. It starts from a config file, from the config of the run to which the first
model belongs, or from the defaults, and then applies the options of the command line. ``run_eval`` samples and scores
with the code and the random numbers that generators use in a run. So it gets the same answers as an evaluation in the
run with the same weights.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.engine_arguments import is_operators
from async_rl.config.generator import AUTO, BACKENDS, FALLBACK, SamplingConfig
from async_rl.config.loading import apply_override, load_config, load_run_config, parse_config, resolve
from async_rl.config.reward import REWARD_TYPES
from async_rl.data.answer_text import answer_decoder
from async_rl.data.chat import load_tokenizer, model_directory, quiet_progress_bars
from async_rl.data.dataset import load_rows_of
from async_rl.data.template import check_arguments
from async_rl.data.turn_end import turn_ends
from async_rl.errors import ConfigError, DataError, ModelError
from async_rl.extensions.insight.evaluation.sampling import OfflineSamples, sample_offline
from async_rl.extensions.insight.evaluation.table import eval_table
from async_rl.generator.backend import Backend
from async_rl.generator.rollouts import Rollouts, ThreadGrader
from async_rl.generator.start.backends import build_backend
from async_rl.generator.start.rollouts import RolloutSetup, open_rollouts
from async_rl.generator.start.worker import build_grader, refuse_open_scorers
from async_rl.net.keys import client_keys_of
from async_rl.output import Report, ignore
from async_rl.process.user_code import is_code_name
from async_rl.queue.core.admission import eval_sampling, lease_seed
from async_rl.records import Lease, Prompt
from async_rl.rewards.answers import vote_key_of
from async_rl.run.directory import RunDir, check_writable, step_of, write_atomically
from async_rl.run.following.follower import followed
from async_rl.run.following.sinks import check_sinks
from async_rl.run.lock import acquire
from async_rl.run.records.eval_records import Decode, append_json_lines, eval_figures, row_records
from async_rl.run.records.metric_table import EVAL_FIGURES
from async_rl.run.records.step_log import StepLog

logger = logging.getLogger(__name__)

FIGURES_FILE = "figures.json"
"""Name of the file that ``async-rl eval --out DIR`` writes. It is a JSON list of objects, each with
the figures of one model on one dataset."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of evaluating one model on one dataset.

    Attributes:
        model: the name of the model, as the user gave it.
        dataset: the name of the dataset, a key of ``data.eval``.
        figures: key -> value of the figures, with the keys of ``metric_table.EVAL_FIGURES``.
        causes: cause -> number of rows that have no answer for this cause. Empty if all rows have answers.
        first_failure: the error of the first row without an answer. Empty if all rows have answers.
    """

    model: str
    dataset: str
    figures: Mapping[str, float]
    causes: Mapping[str, int]
    first_failure: str


def run_eval(
    models: Sequence[str], settings: EvalSettings, *, out: Path | None = None, insecure: bool = False,
    report: Report = ignore,
) -> list[Evaluated]:  # fmt: skip
    """Evaluate every model on every dataset of ``data.eval``, model by model. Return one result for each pair.

    Args:
        models: Hugging Face directories, hub ids, or checkpoints of runs.
        settings: the config of the evaluation, from ``eval_settings``.
        out: a directory in which ``DATASET.jsonl`` gets one line per answer, and ``figures.json`` all figures. These
            files must not exist yet. If None, nothing is written.
        insecure: ask a scorer on another machine without keys.
        report: gets the progress: which model is loaded, and how many rows of which dataset are answered.

    Raises:
        UserError: a model, a dataset or a setting can't be used, or no row of a dataset could be answered.
    """
    if len(set(models)) < len(models):
        raise ConfigError(
            f"async-rl eval: expected each model only once, got {', '.join(models)}; leave out the repeated one"
        )
    config = settings.config
    if out is not None:
        _check_out(out, config)
    keys = client_keys_of(config.queue.keys) if config.reward.asks_scorer else None
    refuse_open_scorers(config, insecure=insecure, has_keys=keys is not None, has_teachers=False)
    check_sinks(config)
    report("reading the datasets")
    prompts = {name: _prompts(config, name) for name in config.data.eval}
    found: list[Evaluated] = []
    with ExitStack() as stack:
        report("preparing the reward")
        grader = build_grader(config, None, stack, keys=keys)
        for model in models:
            with ExitStack() as of_model:
                log_row = of_model.enter_context(_logged(config, model, out))
                backend, rollouts, decode = _player(config, model, grader, of_model, report)
                for name in config.data.eval:
                    leases = [_lease(config, name, prompt) for prompt in prompts[name]]

                    def tell(done: int, rows: int, what: str = f"{model} on {name}") -> None:
                        report(what, done, rows)

                    answered = sample_offline(backend, rollouts, leases, progress=tell)
                    found.append(_evaluated(config, model, name, answered))
                    figures = {f"eval/{name}/{key}": value for key, value in found[-1].figures.items()}
                    step = step_of(RunDir(Path(model)).latest_checkpoint or Path(model).name)
                    log_row({"step": max(0, step), **figures})
                    if out is not None:
                        _write(out, found, answered, decode)
    return found


def describe(found: Sequence[Evaluated], config: Config, *, width: int, out: Path | None = None) -> list[str]:
    """Return lines of text that show the results ``found``. ``width`` is the number of columns of the terminal.

    A single result is shown with one line per figure. Several results are shown in one table per dataset. The last line
    names the files of answers in ``out``, if there are any.
    """
    lines: list[str] = []
    for name in dict.fromkeys(one.dataset for one in found):
        of_set = [one for one in found if one.dataset == name]
        lines.append(f"{name}: {int(of_set[0].figures['rows'])} rows, {describe_settings(config, name)}")
        if len(found) == 1:
            lines += _figure_lines(of_set[0].figures, width)
        else:
            lines += eval_table({one.model: one.figures for one in of_set})
        lines += [line for one in of_set for line in _failure_lines(one)]
    if out is not None:
        lines.append(f"answers: {', '.join(str(out / f'{name}.jsonl') for name in config.data.eval)}")
    return lines


def _figure_lines(figures: Mapping[str, float], width: int) -> list[str]:
    """Return one line for each figure, with its key, its value and its meaning."""
    tries = {
        f"pass_at_{2**i}": f"Unbiased estimate of the probability that one of {2**i} answers is right."
        for i in range(1, 11)
    }
    meanings = {**EVAL_FIGURES, **tries, "pass_at_1": "Share of answers that are completely right."}
    lines: list[str] = []
    for key, value in figures.items():
        text = f"{key:<17} {value:<10.4g} {meanings.get(key, '')}"
        lines += textwrap.wrap(text, max(60, width), subsequent_indent=" " * 29)
    return lines


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
            f"{model} could not answer any of the {len(rows)} rows of {dataset}: {counts}; {answered.first_failure}; "
            f"change the setting or the rows that the error names"
        )
    found = eval_figures(rows, vote_key=vote_key_of(config))
    # Versions belong to a run's weights; a model on disk has none.
    figures = {key: value for key, value in found.items() if not key.startswith("version_")}
    return Evaluated(model, dataset, figures, dict(Counter[str](answered.causes)), answered.first_failure)


def _player(
    config: Config, model: str, grader: ThreadGrader, stack: ExitStack, report: Report
) -> tuple[Backend, Rollouts, Decode]:
    """Load a model for the evaluation. ``stack`` closes it.

    Return the backend that samples, the object that plays rollouts, and the function that decodes token ids to text.
    ``grader`` scores single answers, and rollouts of agents.
    """
    report("loading transformers")
    quiet_progress_bars()
    directory = _model_directory(model, stack, report)
    report(f"loading {model}")
    backend = stack.enter_context(closing(build_backend(config, directory, load_pretrained=True)))
    tokenizer = load_tokenizer(directory, needs_template=config.data.prompt_format == "chat")
    check_arguments(tokenizer, config.data.template_arguments)
    decode = answer_decoder(tokenizer, turn_ends(tokenizer, directory, config.data.template_arguments).ids)

    if config.environment.relay is not None:
        raise ConfigError(
            "environment.relay: expected an agent that this machine can run, got a relay, by which only a run offers "
            "its sessions; let the run evaluate (eval.every), or name the agent in environment.name or command"
        )
    rollouts = stack.enter_context(open_rollouts(RolloutSetup(config, backend, grader, directory)))
    return backend, rollouts, decode


@contextmanager
def _logged(config: Config, model: str, out: Path | None) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Yield the function that logs a row of one model, which is a run of its own in the sinks of ``log.to``.

    Its files get a folder below ``out`` or ``run.dir``.
    """
    if not config.log.to:
        yield lambda row: None
        return
    if out is None and config.run.dir == _NO_DIRECTORY:
        raise ConfigError("log.to: expected a directory for the files of the loggers, got none; pass --out DIRECTORY")
    name = Path(model).name or "model"
    place = Path(config.run.dir) / "offline_eval" if out is None else out / "loggers"
    place.mkdir(parents=True, exist_ok=True)
    run_dir = RunDir(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place)))
    with (
        closing(acquire(run_dir, "eval")) as lock,
        followed(config, run_dir, lock, logger.warning, part=f"{name}-eval"),
        closing(StepLog(run_dir.metrics)) as log,
    ):
        yield log.write


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
    """Check that the answers can be written to the directory ``out``, before any answer is sampled.

    Raises:
        UserError: ``out`` has files of an earlier evaluation, or can't be written.
    """
    for name in (FIGURES_FILE, *(f"{dataset}.jsonl" for dataset in config.data.eval)):
        if (out / name).exists():
            raise DataError(
                f"--out {out}: expected no files of an earlier evaluation, but {name} exists; choose another directory"
            )
    check_writable(out, "--out")


def _write(out: Path, found: Sequence[Evaluated], answered: OfflineSamples, decode: Decode) -> None:
    """Add the answers of the newest result to the file of its dataset in ``out``, and write the figures of all results.

    ``found`` has all results so far, and ``answered`` has the answers of the last one.
    """
    newest = found[-1]
    lines = (line for prompt, group in answered.groups for line in row_records(prompt, group, decode))
    append_json_lines(out / f"{newest.dataset}.jsonl", ({"model": newest.model, **line} for line in lines))
    write_atomically(out / FIGURES_FILE, json.dumps([asdict(one) for one in found], indent=1) + "\n")


def _model_directory(model: str, stack: ExitStack, report: Report) -> Path:
    """Return the directory with the files of ``model``. A checkpoint is exported to a temporary directory first.

    ``stack`` removes the temporary directory.
    """
    path = Path(model)
    if not path.is_dir() and (path.is_absolute() or model.startswith(".") or model.count("/") > 1):  # no hub id
        raise ModelError(
            f"async-rl eval: expected a model, a checkpoint or a run directory at {model}, got none; correct the path"
        )
    if path.is_dir() and not (path / "config.json").exists():
        from async_rl.learner.export.model import export_checkpoint

        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-rl-eval-")))
        export_checkpoint(path, scratch / "model", report)
        return scratch / "model"
    report("")  # a download has progress bars of its own
    return model_directory(model, weights=True)


MAX_PROMPT_TOKENS = 4096
"""Value of ``sampling.max_prompt_tokens`` if neither a config file nor a run's config is used."""

_NEVER_S = 1e9
_NO_DIRECTORY = "unused"


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The options of the command ``async-rl eval``.

    Attributes:
        datasets: the values of ``--dataset``, in the form ``SOURCE`` or ``NAME=SOURCE``. If empty, the config's
            ``data.eval`` is used.
        config: the config file of ``--config``. If None, the config of the run to which the first model belongs is
            used, or else the defaults.
        overrides: the values of ``--set``, in the form ``section.key=value``.
        values: config key -> the value of the option for this key, such as ``--samples`` for ``eval.num_samples``. They
            replace values from ``overrides`` and values for single datasets.
    """

    datasets: tuple[str, ...] = ()
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """The config of an evaluation. ``notes`` are lines for the user about where its settings come from."""

    config: Config
    notes: tuple[str, ...]


def eval_settings(models: Sequence[str], options: EvalOptions) -> EvalSettings:
    """Build and return the config for evaluating ``models`` with the options of the command line.

    Raises:
        ConfigError: the config, an override or an option is wrong, or no dataset is named.
    """
    raw, notes = _base(models, options)
    for override in options.overrides:
        apply_override(raw, override)
    _apply(raw, options)
    raw.setdefault("run", {}).setdefault("dir", _NO_DIRECTORY)
    raw.setdefault("model", {})["path"] = models[0]
    # Offline there are no leases that could expire, and nothing chooses prompts by their accuracy.
    raw.setdefault("queue", {}).update(lease_timeout_s=_NEVER_S, filter_range=[])
    raw.setdefault("data", {}).pop("curriculum", None)
    raw.get("lora", {}).pop("publish", None)  # a model on disk is whole
    config = parse_config(raw, "the config with this command line")
    if options.config is None:
        _refuse_foreign_decisions(config, options.overrides)
    if not config.data.eval:
        raise ConfigError(
            "async-rl eval: expected --dataset FILE, or a config with data.eval, got neither; pass --dataset"
        )
    return EvalSettings(config, tuple(notes))


def _refuse_foreign_decisions(config: Config, overrides: Sequence[str]) -> None:
    """Refuse what only the config beside the weights says, which may come from the weights' author: a judge that gets
    what is in the environment or in files, a file that is written, programs that run without the sandbox, an argument
    of vLLM's engine that touches this machine.

    Raises:
        ConfigError: the config sets such a key, and none of ``overrides`` does.
    """
    named = {override.partition("=")[0].strip() for override in overrides}
    judge, reasons = config.reward.judge, dict[str, str]()
    if config.reward.asks_judge:
        if judge.api_key_env is not None:
            reasons["reward.judge.api_key_env"] = f"what {judge.api_key_env} has is sent to {judge.endpoint}"
        if judge.cache is not None:
            reasons["reward.judge.cache"] = f"the judge's answers are written to {judge.cache}"
    if config.generator.backend in (AUTO, "vllm"):
        names = filter(is_operators, config.generator.engine)
        reasons |= {f"generator.engine.{name}": "it may run code, or read and write files" for name in names}
    if config.reward.runs_programs and config.reward.code.allow_unsafe:
        reasons["reward.code.allow_unsafe"] = "the model's programs run without the sandbox"
    for key, reason in reasons.items():
        if key not in named:
            raise ConfigError(
                f"{key}: expected a config that you name, because {reason}, got it from the config beside the model; "
                f"if you trust it, pass it with --config"
            )


def run_config_of(model: str) -> Path | None:
    """Return the path of the ``config.toml`` of the run to which ``model`` belongs. None if it belongs to no run.

    ``model`` may be a run's directory, or a checkpoint or an export in it.
    """
    path = Path(model)
    if not path.exists():
        return None  # a hub id
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.toml").is_file() and (folder / "run_id").is_file():
            return folder / "config.toml"
    return None


def _base(models: Sequence[str], options: EvalOptions) -> tuple[dict[str, Any], list[str]]:
    """Return the config before the options of the command line are applied, and notes for the user.

    The config is a dict of sections, as in the TOML file.
    """
    source = options.config or run_config_of(models[0])
    if source is None:
        return {"sampling": {"max_prompt_tokens": MAX_PROMPT_TOKENS}}, []
    _ = load_config(source) if options.config else load_run_config(source)  # raises with the name of the file
    raw = tomllib.loads(source.read_text(encoding="utf-8"))
    generator = raw.setdefault("generator", {})
    for key in ("count", "devices", "tensor_parallel_size"):
        generator.pop(key, None)
    backend = generator.get("backend", AUTO)
    notes = [f"settings: {source}" + ("" if options.config else " (--config FILE takes them from another file)")]
    if backend in BACKENDS and (package := BACKENDS[backend].package) and find_spec(package) is None:
        notes.append(f"generator.backend is {backend} in the config, which is not installed here: {FALLBACK} samples")
        generator["backend"] = FALLBACK
    if options.config is None:
        # The user did not name this file. It may come from the weights' author, so it must not allow code to run.
        generator.pop("allow_code", None)
    return raw, notes


def _apply(raw: dict[str, Any], options: EvalOptions) -> None:
    """Put the options of the command line into ``raw``, the config as a dict of sections.

    An option for a key of ``eval`` also removes that key from the settings of single datasets, so that the option holds
    for all datasets.

    Several greedy answers would be one and the same, so ``--samples`` above 1 samples, at
    ``sampling.temperature`` unless the config or the command line has a temperature of evaluations.

    Raises:
        ConfigError: two datasets have the same name, or ``raw`` names what this machine lacks.
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
    is_chosen = any(re.match(r"eval\.(.+\.)?temperature\b", key) for key in (*options.values, *options.overrides))
    if options.values.get("eval.num_samples", 1) > 1 and not is_chosen:
        sampled = raw.get("sampling", {}).get("temperature", SamplingConfig.model_fields["temperature"].default)
        for own in (evaluation, *(own for own in sets.values() if "temperature" in own)):
            own["temperature"] = own.get("temperature") or sampled
    evaluation["sets"] = sets
    resolve(raw)
    if "reward.type" not in options.values:
        return
    reward = raw["reward"]["type"]
    used = (reward, *raw["reward"].get("extra", ()))
    if "model" not in used:
        # No reward asks the run's reward model any more.
        raw.get("scorer", {}).pop(raw["reward"].pop("model", None), None)
    if "judge" not in used:
        raw["reward"].pop("judge", None)
    if not any(name in REWARD_TYPES and REWARD_TYPES[name].has_format for name in used):
        # No reward reads any more how the run compares answers.
        for key in ("equality", "require_format", "format"):
            raw["reward"].pop(key, None)
    if is_code_name(reward):
        # Naming code on the command line allows it.
        generator = raw.setdefault("generator", {})
        generator["allow_code"] = [*generator.get("allow_code", ()), reward.rpartition(":")[0]]


def _named(dataset: str) -> tuple[str, str]:
    """Return the name and the source of ``dataset``, a value of ``--dataset``.

    Without ``NAME=``, the name is the last part of the source, without its ending.
    """
    name, separator, source = dataset.partition("=")
    if separator and "/" not in name:
        return name, source
    last = dataset.rstrip("/").rpartition("/")[2].partition(":")[0]
    return last.rpartition("@")[2].partition(".")[0] or "dataset", dataset


def describe_settings(config: Config, name: str) -> str:
    """Return a text that says how the rows of the dataset ``name`` are answered, for example with which temperature."""
    chosen = config.eval.of(name)
    answers = "1 answer" if chosen.num_samples == 1 else f"{chosen.num_samples} answers"
    how: Mapping[str, Any] = {
        "temperature": f"{chosen.temperature:g}" if chosen.temperature else "0 (greedy)",
        **({"top-p": f"{chosen.top_p:g}"} if chosen.top_p < 1 else {}),
        **({"top-k": chosen.top_k} if chosen.top_k else {}),
        **({"min-p": f"{chosen.min_p:g}"} if chosen.min_p else {}),
        "at most": f"{chosen.max_new_tokens or config.sampling.max_new_tokens} tokens",
    }
    return f"{answers} a row, " + ", ".join(f"{key} {value}" for key, value in how.items())
