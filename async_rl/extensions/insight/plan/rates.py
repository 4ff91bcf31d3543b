"""What the parts of a run take: measured in a run directory, known from a config, or given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.loading import load_config, load_run_config
from async_rl.errors import ConfigError, RunError
from async_rl.extensions.insight.plan.lengths import Lengths
from async_rl.launch.checks.learner_memory import shape_of, with_changes
from async_rl.launch.checks.prediction import SIGMA, engine_of, on_machines, step_of, tokens_of, transfer_s
from async_rl.learner.cards import Machines
from async_rl.run.directory import RunDir
from async_rl.run.records.starts import first_steps, warm_steps
from async_rl.run.records.step_log import is_metrics_row, iter_rows, read_rows

_MOST_GROUPS = 20_000
_SHARE_CAUSES = ("grading", "environment", "weights", "leases")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the parts of a run take. Times are in seconds."""

    lengths: Lengths
    decode_step_s: float  # the part of a decode step that does not depend on how many sequences run
    decode_sequence_s: float = 0.0  # the part of a decode step for each running sequence
    train_s: float = 0.0  # the part of a learner's step that does not depend on its tokens
    train_token_s: float = 0.0  # to train one token of a batch with ``num_ranks`` ranks of the learner
    after_s: float = 0.0  # after a step's training: publishing, checkpoints, records
    transfer_s: float = 0.0  # from the publication of a version until a generator activates it
    pause_s: float = 0.0  # for which activating a version stops a generator's decode steps
    version_bytes: float = 0.0  # of a version of the weights; 0 if unknown
    num_ranks: int = 1
    filtered: float = 0.0  # share of the groups that ``queue.filter_range`` filters

    def decode_s(self, num_running: int) -> float:
        """Return the time of a decode step, in which each of ``num_running`` sequences gains a token."""
        return self.decode_step_s + self.decode_sequence_s * num_running

    def step_s(self, num_tokens: float, num_ranks: int) -> float:
        """Return the time in which the learner trains a batch. Only its tokens are divided over more ranks."""
        return self.train_s + self.train_token_s * num_tokens * self.num_ranks / num_ranks


def find_rates(
    path: Path, overrides: Sequence[str], rates: Sequence[str] = (), *, mean_tokens: float | None = None,
    sigma: float | None = None, machines: Machines | None = None,
) -> tuple[Config, Rates, str]:  # fmt: skip
    """Return the config to plan, its rates, and where these come from, in words.

    ``path`` is a run directory, or a config. The rates are those of that run, or of the one in the config's run.dir;
    or those that are predicted for ``machines``, which are not here.
    ``overrides`` are ``--set`` options for the planned run. ``rates``, each NAME=NUMBER, and the other arguments
    replace what was measured.

    Raises:
        ConfigError: the config is wrong, or a rate is neither measured nor given, or not a number; or learner and
            generators have no GPUs of their own on ``machines``, or do not fit them.
        ModelError: the model is not there, so nothing is predicted.
        RunError: the run directory has no run, or one that is too short to measure.
    """
    is_run = path.is_dir()
    config = load_config(RunDir(path).config if is_run else path, overrides)
    run_dir = RunDir(path if is_run else Path(config.run.dir))
    known: dict[str, Any] = {}
    source, lengths = "given", None if mean_tokens is None else Lengths(mean_tokens, 1.0)
    if machines is not None:
        config, known = _predicted(config, machines, mean_tokens)
        source, lengths = f"predicted for {machines.name}, confirmed by no card", known["lengths"]
    elif is_run or run_dir.metrics.is_file():
        measured = measure(run_dir)
        known = {field.name: getattr(measured, field.name) for field in fields(Rates)}
        source, lengths = f"measured in {run_dir.path}", measured.lengths
    elif config.generator.backend == "fake":
        fake = config.experimental.fake
        known = {"decode_step_s": fake.step_time_s} if fake.step_time_s else {}
        source, lengths = "of experimental.fake, or given", Lengths(fake.mean_tokens, fake.sigma)
    known |= dict(map(_read_rate, rates))
    if lengths is None or "decode_step_s" not in known or not {"train_s", "train_token_s"} & known.keys():
        raise ConfigError(
            f"expected a run that was measured, got none in {run_dir.path}; run the config for some steps, or give "
            f"--on GPUS, or --mean-tokens, --rate decode_step_s=SECONDS and --rate train_s=SECONDS"
        )
    if sigma is not None:
        lengths = Lengths(lengths.mean_tokens, sigma)
    known["lengths"] = replace(lengths, limit=config.sampling.max_new_tokens)
    return config, Rates(**known), source


def _predicted(config: Config, machines: Machines, mean_tokens: float | None) -> tuple[Config, dict[str, Any]]:
    """Return ``config`` as it runs on ``machines``, with as many sequences at once as the cache holds, and the fields
    of its ``Rates``.
    """
    config = on_machines(config, machines)
    shape, tokens = shape_of(config.model.path), tokens_of(config, mean_tokens)
    engine, step = engine_of(shape, config, machines.card, tokens), step_of(shape, config, machines, tokens)
    if not step.seconds == max(step.learner_s, step.generators_s) < math.inf:
        raise ConfigError(
            f"--on: expected a learner and generators that fit GPUs of their own, got others for {machines.name}; "
            f"see `async-rl doctor CONFIG --on {machines.name}`"
        )
    size, pause_s = 2 * shape.num_parameters, step.learner["pause for a version"]
    fixed_s = step.learner["FSDP"] + step.learner["optimizer"]
    return with_changes(config, {"generator.batch_size": engine.at_once}), {
        "lengths": Lengths(tokens.mean, SIGMA), "decode_step_s": engine.step_s, "decode_sequence_s": engine.sequence_s,
        "train_s": fixed_s, "train_token_s": (step.learner_s - fixed_s - pause_s) / tokens.sampled, "after_s": pause_s,
        "transfer_s": transfer_s(size, machines), "version_bytes": size, "num_ranks": config.learner.nproc,
    }  # fmt: skip


def _read_rate(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    names = [field.name for field in fields(Rates) if field.name not in ("lengths", "num_ranks")]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if name not in names or not 0 <= number < math.inf or (name == "decode_step_s" and not number):
        raise ConfigError(f"--rate: expected NAME=NUMBER with a name of {', '.join(names)}, got {text!r}; correct it")
    return name, number


def measure(run_dir: RunDir) -> Rates:
    """Return the rates of the run in a directory: means over its steps, without the first ones.

    The time of a step's training counts as that of its tokens.

    Raises:
        RunError: there is no run, or it has not measured its generators yet.
    """
    config, starts = load_run_config(run_dir.config), set(first_steps(run_dir))
    steps = [row for row in read_rows(run_dir.metrics, is_whole=is_metrics_row) if "version" in row]
    warm = warm_steps(steps, starts)
    sampled = [row for row in warm if row.get("time/generate_s") and row.get("throughput/generated_tokens_per_s")]
    if not sampled:
        raise RunError(
            f"{run_dir.path}: expected a run with steps after its first ones in which generators sampled, got "
            f"{len(steps)} steps and none such; let it run for longer"
        )

    def total(key: str) -> float:
        return sum(row.get(key) or 0.0 for row in warm)

    def mean(key: str) -> float:
        return float(np.mean([row[key] for row in warm if row.get(key) is not None] or [0.0]))

    sequence_s = sum(row["time/generate_s"] * config.generator.batch_size * row["generators"] for row in sampled)
    num_sampled = sum(row["throughput/generated_tokens_per_s"] * row["time/step_s"] for row in sampled)
    # What happens between two decode steps lengthens each token, but is no part of the busy time.
    running = sum(1 - sum(row.get(f"idle/{cause}") or 0.0 for cause in _SHARE_CAUSES) for row in sampled)
    decoding = sum(1 - row["idle/generators"] for row in sampled)
    token_s = sequence_s / num_sampled * max(1.0, running / decoding)
    busy_s = sum((1 - row["idle/generators"]) * row["time/step_s"] * row["generators"] for row in sampled)
    step_share = _step_share(warm, sequence_s / busy_s)
    groups = run_dir.read_ledger()["groups"]
    return Rates(
        lengths=_lengths(run_dir, mean("length/mean")),
        decode_step_s=token_s * step_share,
        decode_sequence_s=token_s * (1 - step_share) * busy_s / sequence_s,
        train_token_s=total("time/train_s") / max(1.0, total("tokens/trained") + total("tokens/masked")),
        after_s=max(0.0, mean("time/step_s") - mean("time/wait_s") - mean("time/train_s")),
        transfer_s=mean("time/transfer_s"),
        pause_s=mean("time/pause_s"),
        version_bytes=mean("weights/bytes"),
        num_ranks=config.learner.nproc,
        filtered=groups["filtered"] / max(1, groups["filtered"] + groups["trained"]),
    )


def _step_share(rows: Sequence[Mapping[str, Any]], num_running: float) -> float:
    """Return the share of a decode step of ``num_running`` sequences that does not depend on their number.

    It is that of the last row which has it, because each fits all decode steps since the generators' start. 1 if none
    has it: rows of an older version, or generators that came and went all the time.
    """
    for row in reversed(rows):
        if "time/decode_step_s" in row:
            step_s, sequence_s = row["time/decode_step_s"], row["time/decode_sequence_s"]
            return step_s / (step_s + sequence_s * num_running)
    return 1.0


def _lengths(run_dir: RunDir, mean_tokens: float) -> Lengths:
    """Return the lengths of the run's last groups; constant ones if the run records no rollouts."""
    groups: list[tuple[int, ...]] = []
    for row in iter_rows(run_dir.rollout_summaries):
        tokens = iter(row["tokens"])
        groups += [tuple(next(tokens) for _ in range(size)) for size in row["sizes"]]
    kept = tuple(group for group in groups[-_MOST_GROUPS:] if min(group, default=0) > 0)
    return Lengths.of_groups(kept) if kept else Lengths(mean_tokens)
