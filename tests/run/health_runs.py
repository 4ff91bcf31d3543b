"""Healthy and sick runs, by which the limits of ``run/figures/health.py`` were set, and their rows in the tests.

``python -m tests.run.health_runs DIRECTORY [NAME ...]`` makes the named runs, or all, one after the other, in the
checkout: on two free cores about half a minute each. It writes their figures to ``tests/data/health_runs.json``. The
task of a run and its warm start are made first with ``async-rl quickstart --seed 0`` (to 3),
``examples/guess_number.py`` (seeds 0 to 2) and ``examples/countdown.py`` (0 and 1).

The limits were set on the runs of ``SET_ON``, and judged on the other healthy ones.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from async_rl.run.figures.health import KEYS
from async_rl.run.figures.progress import eval_accuracies, is_step_row
from async_rl.run.records.step_log import Row, read_rows

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests" / "data" / "health_runs.json"
PARTS = "tests/run/sick_parts.py"
MAX_STEPS = 64
"""Steps of a sick run that are kept; of a healthy one all are."""

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SickRun:
    """What makes a run sick.

    Attributes:
        settings: of the run.
        cause: the first cause that is noted. Empty: the learner's metrics show none, and ``named_by`` says who tells.
        step: the step of the first note.
        named_by: what else names it, or names it earlier.
    """

    settings: tuple[str, Settings]
    cause: str
    step: int
    named_by: str = ""


def quickstart(seed: int, settings: Settings | None = None) -> tuple[str, Settings]:
    base = f"runs/quickstart-task/seed-{seed}"
    paths = {
        "run.seed": seed, "data.train": f"{base}/train.jsonl", "data.eval.held_out": f"{base}/held_out.jsonl",
        "model.path": f"{base}/warm_start", "eval.every": 20,
    }  # fmt: skip
    return "configs/quickstart.toml", {**paths, **(settings or {})}


def study(lag: int, seed: int, settings: Settings | None = None) -> tuple[str, Settings]:
    """An exact lag of every token, at four times the quickstart's learning rate."""
    own = {
        "learner.fixed_lag": lag, "queue.max_staleness": lag, "queue.filter_range": "[]", "learner.steps": 128,
        "optimizer.lr": 5e-5, "experimental.max_skipped_steps": 128, "eval.every": 32,
    }  # fmt: skip
    return quickstart(seed, {**own, **(settings or {})})


def game(name: str, seed: int, settings: Settings | None = None) -> tuple[str, Settings]:
    """An example with an environment: ``guess_number`` or ``countdown``."""
    base = f"runs/{name}-task/seed-{seed}"
    held_out = {"guess_number": "games", "countdown": "held_out"}[name]
    paths = {
        "run.seed": seed, "data.train": f"{base}/train.jsonl", f"data.eval.{held_out}": f"{base}/{held_out}.jsonl",
        "model.path": f"{base}/warm_start",
    }  # fmt: skip
    return f"configs/{name}.toml", {**paths, **(settings or {})}


def own(key: str, name: str) -> dict[str, Any]:
    """Settings that use a part of ``sick_parts.py``."""
    return {key: f"{PARTS}:{name}", "generator.allow_code": f'["{PARTS}"]', "weights.parity": "off"}


_SEED_0 = "runs/quickstart-task/seed-0"
HEALTHY: dict[str, tuple[str, Settings]] = {
    "quickstart_0": quickstart(0), "quickstart_1": quickstart(1), "quickstart_2": quickstart(2),
    "quickstart_3": quickstart(3), "lag0_default_0": study(0, 0), "lag4_default_1": study(4, 1),
    "lag16_default_0": study(16, 0), "lag16_default_1": study(16, 1), "lag16_default_2": study(16, 2),
    "lag64_default_0": study(64, 0), "lag64_default_2": study(64, 2),
    "lag16_dppo_tv_1": study(16, 1, {"loss.preset": "dppo_tv"}),
    "lag16_opsm_2": study(16, 2, {"loss.preset": "opsm"}),
    "lag16_vcpo_0": study(16, 0, {"optimizer.ess_reference": 1.0}),
    "lag4_decoupled_1": study(4, 1, {"loss.preset": "decoupled_ppo"}),
    "lag16_decoupled_0": study(16, 0, {"loss.preset": "decoupled_ppo"}),
    "guess_0": game("guess_number", 0), "guess_1": game("guess_number", 1), "guess_2": game("guess_number", 2),
    "countdown_0": game("countdown", 0), "countdown_1": game("countdown", 1),
    "epochs_1": quickstart(1, {"learner.epochs_per_batch": 2}),
    "on_policy_2": quickstart(2, {"queue.max_staleness": 0}),
    "gspo_0": quickstart(0, {"loss.preset": "gspo"}),
    "critic_2": quickstart(2, {"loss.advantage": "gae"}),
    # The accuracy of what is trained falls, or hardly rises, because prompts become harder.
    "harder_0": study(4, 0, {"data.train": f"{_SEED_0}/harder.jsonl", "data.shuffle": "false", "optimizer.lr": 1.2e-5}),
    "curriculum_1": quickstart(1, {"data.curriculum.solved_at": 0.5, "learner.steps": 160}),
}  # fmt: skip
SET_ON = (
    "quickstart_0", "quickstart_1", "quickstart_2", "quickstart_3", "lag0_default_0", "lag4_default_1",
    "lag16_default_0", "lag16_default_1", "lag16_default_2", "lag64_default_0",
)  # fmt: skip

_60 = {"learner.steps": 60}
_20 = {"learner.steps": 20}
_NEGATED = {"loss.advantage_function": f"{PARTS}:negated"}
_NO_FILTER = {"queue.filter_range": "[]"}
# The learning rate rises to its full height in the first five steps of all runs.
SICK: dict[str, SickRun] = {
    "lr10_lag16": SickRun(study(16, 0, {**_60, "optimizer.lr": 5e-4}), "samples", 8),
    "lr30_lag16": SickRun(study(16, 1, {**_60, "optimizer.lr": 1.5e-3}), "samples", 6),
    "lr10_guess": SickRun(
        game("guess_number", 0, {**_NO_FILTER, "learner.steps": 40, "optimizer.lr": 1e-2}), "samples", 8
    ),
    "lr30_guess": SickRun(
        game("guess_number", 0, {**_NO_FILTER, "learner.steps": 40, "optimizer.lr": 3e-2}), "samples", 4
    ),
    "lr30_on_policy": SickRun(study(0, 2, {**_60, "optimizer.lr": 1.5e-3}), "random", 7),
    "lr100_quickstart": SickRun(quickstart(2, {**_60, **_NO_FILTER, "optimizer.lr": 1.2e-3}), "samples", 5),
    "uncorrected_256": SickRun(
        study(256, 0, {"learner.steps": 300, "loss.surrogate": "plain", "loss.skip_threshold": 0}), "samples", 35
    ),
    "entropy_bonus": SickRun(study(4, 1, {**_60, "loss.entropy_coef": 1.0}), "random", 39),
    "entropy_bonus_2": SickRun(study(4, 2, {**_60, "loss.entropy_coef": 1.0}), "random", 39),
    "negated_0": SickRun(study(4, 0, {**_60, **_NEGATED}), "reversed", 2),
    "negated_1": SickRun(study(4, 1, {**_60, **_NEGATED}), "reversed", 2),
    "negated_filtered_2": SickRun(quickstart(2, {**_60, **_NEGATED, "optimizer.lr": 5e-5}), "reversed", 2),
    "constant_reward": SickRun(study(4, 1, {**_20, **own("reward.type", "constant")}), "no_gradient", 3),
    "zero_reward": SickRun(study(4, 1, {**_20, **own("reward.type", "zero")}), "no_gradient", 3),
    "shifted_logprobs": SickRun(study(4, 0, {**_20, **own("generator.backend", "Shifted")}), "engines", 1),
    "temperature": SickRun(
        study(4, 0, {**_20, **own("generator.backend", "Hot")}), "", 0, "weights.parity, which this run switched off"
    ),
    "noise_reward": SickRun(study(4, 1, {**_60, **own("reward.type", "noise")}), "", 0, "launch, before the run"),
    # A copy of the warm start whose end of sequence is another token: no answer ends.
    "wrong_eos": SickRun(study(4, 0, {**_20, "model.path": f"{_SEED_0}/wrong_eos"}), "", 0, "launch.hints: step 3"),
    # A copy whose chat template turns the prompt around. The filter is off; it would leave no group.
    "wrong_template": SickRun(
        study(4, 0, {**_20, "model.path": f"{_SEED_0}/wrong_template"}),
        "no_gradient",
        13,
        "the queue, after the second batch of groups: 15 of 16 have only wrong answers",
    ),
}


def write_harder_rows() -> None:
    """Make the training rows of ``harder_0``: 64 batches of which half carry, which is harder, then only such rows."""
    lines = (ROOT / _SEED_0 / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows: dict[bool, list[str]] = {True: [], False: []}
    for line in lines:
        first, second = json.loads(line)["messages"][0]["content"].rstrip(":").split("+")
        rows[int(first) % 10 + int(second) % 10 >= 10].append(line)
    mixed = [line for pair in zip(rows[True][:256], rows[False][:256], strict=True) for line in pair]
    text = "\n".join([*mixed, *rows[True][256:]])
    (ROOT / _SEED_0 / "harder.jsonl").write_text(f"{text}\n", encoding="utf-8")


def write_wrong_models() -> None:
    """Make the copies of the warm start that two of the sick runs use."""
    eos = {"config.json": 0, "generation_config.json": 0, "tokenizer_config.json": "<pad>"}
    for name in ("wrong_eos", "wrong_template"):
        copy = ROOT / _SEED_0 / name
        shutil.copytree(ROOT / _SEED_0 / "warm_start", copy, dirs_exist_ok=True)
        if name == "wrong_template":
            reversed_prompt = "{% for message in messages %}+{{ message['content'][::-1] }}9{% endfor %}"
            (copy / "chat_template.jinja").write_text(reversed_prompt, encoding="utf-8")
            continue
        for file, value in eos.items():
            content = json.loads((copy / file).read_text(encoding="utf-8"))
            content["eos_token_id" if isinstance(value, int) else "eos_token"] = value
            (copy / file).write_text(json.dumps(content), encoding="utf-8")


def make(name: str, directory: Path) -> None:
    """Make a run in ``directory``."""
    config, settings = HEALTHY[name] if name in HEALTHY else SICK[name].settings
    plain = {**settings, "run.dir": directory / name, "checkpoint.every": 0, "log.rollouts_every": 0}
    options = [word for key, value in plain.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([sys.executable, "-m", "async_rl", "launch", config, "--fresh", *options], cwd=ROOT, check=True)


def figures(rows: Sequence[Row]) -> list[list[float | None]]:
    """Return step, version and the figures of ``health.KEYS`` of each step, rounded to four digits."""
    steps = [row for row in rows if is_step_row(row)]
    names = ("step", "version", *KEYS)
    return [[_rounded(row.get(name)) for name in names] for row in steps]


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def evaluations(rows: Sequence[Row]) -> list[list[Any]]:
    """Return the evaluations: how many steps are recorded before, the step, the set, the accuracy and its error."""
    found: list[list[Any]] = []
    num_steps = 0
    for row in rows:
        num_steps += is_step_row(row)
        for name, accuracy in eval_accuracies(row).items():
            error = row[f"eval/{name}/accuracy_se"]
            found.append([num_steps, row["step"], name, _rounded(accuracy), _rounded(error)])
    return found


def load() -> dict[str, list[Row]]:
    """Return the rows of every run in ``tests/data/health_runs.json``, by its name.

    Some runs were made before ``accuracy/received`` was measured. Without a filter it is the ``accuracy/mean`` of the
    step before, but for groups that were dropped.
    """
    stored = json.loads(DATA.read_text(encoding="utf-8"))
    names, evals = stored.pop("columns"), stored.pop("evaluations")
    runs: dict[str, list[Row]] = {}
    for run, steps in stored.items():
        rows = [dict(zip(names, row, strict=False)) for row in steps]
        _, settings = HEALTHY[run] if run in HEALTHY else SICK[run].settings
        if settings.get("queue.filter_range") == "[]" and "accuracy/received" not in rows[-1]:
            for before, row in pairwise(rows):
                row["accuracy/received"] = before["accuracy/mean"]
        of_evals = [
            (count, {"step": step, f"eval/{name}/accuracy": accuracy, f"eval/{name}/accuracy_se": error})
            for count, step, name, accuracy, error in evals.get(run, ())
        ]
        parts = [(count, row) for count, row in enumerate(rows, 1)] + of_evals
        runs[run] = [row for _, row in sorted(parts, key=lambda part: part[0])]
    return runs


def store(runs: Mapping[str, Path]) -> None:
    """Write the figures of ``runs``, whose directories are given, in addition to those that are there."""
    stored: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    stored["columns"] = ["step", "version", *KEYS]
    evals = stored.setdefault("evaluations", {})
    for name, path in runs.items():
        rows = read_rows(path / "metrics.jsonl")
        steps = figures(rows)
        stored[name] = steps if name in HEALTHY else steps[:MAX_STEPS]
        evals[name] = [entry for entry in evaluations(rows) if entry[0] <= len(stored[name])]
    lines = [f"{json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}" for name, rows in stored.items()]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    directory, *names = sys.argv[1:]
    chosen = names or [*HEALTHY, *SICK]
    write_wrong_models()
    write_harder_rows()
    for name in chosen:
        shutil.rmtree(Path(directory) / name, ignore_errors=True)
        make(name, Path(directory))
    store({name: Path(directory) / name for name in chosen})


if __name__ == "__main__":
    main()
