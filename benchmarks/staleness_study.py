"""What does staleness cost, and what do the corrections save? The quickstart's task with the lag held.

Every run is the whole product (``launch``: queue, learner, generator) with ``learner.fixed_lag`` = 0, 4, 16 or 64 and
one of these losses, at four times the quickstart's learning rate:

    old        the default preset as it was: without a bound on the ratio at negative advantages
    default    the default preset
    dppo_tv    its preset: no clip, but tokens stop whose probability has moved by 0.15
    opsm       its preset: the default, without wrong answers that became unlikely
    vcpo       the default, with the learning rate scaled by the effective sample size
    decoupled  its preset: REINFORCE with capped importance weights, as a batch is one update

    python -m benchmarks.staleness_study [--seeds 5] [--lags 0 4 16 64] [--jobs 2]

The result of a run is kept in ``runs/staleness-study/results`` under its settings, and never made twice: stop it when
you like, start it again with more seeds. At its end, or with ``--kept`` at once, it prints the table of what is there
and draws ``docs/staleness_study.png``.
A seed is a task, a warm start and a run of its own; all lags and losses of a seed begin with the same model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from async_rl.quickstart.prepare import make_task, recipe_digest
from async_rl.quickstart.tasks import SUMS
from async_rl.run.directory import write_atomically
from async_rl.run.step_log import Row, read_rows

ROOT = Path(__file__).resolve().parent.parent
STUDY = ROOT / "runs" / "staleness-study"
PICTURE = ROOT / "docs" / "staleness_study.png"
LAGS = (0, 4, 16, 64)
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "old": {"loss.dual_clip": 0},
    "default": {},
    "dppo_tv": {"loss.preset": "dppo_tv"},
    "opsm": {"loss.preset": "opsm"},
    "vcpo": {"optimizer.ess_reference": 1.0},
    "decoupled": {"loss.preset": "decoupled_ppo"},
    "off": {"loss.surrogate": "plain", "loss.skip_threshold": 0},
    "clip": {"loss.skip_threshold": 0, "loss.dual_clip": 0},
    "cispo": {"loss.preset": "cispo"},
}
"""The first six are the study; the others (``off`` has no correction at all) are there to ask for."""
STUDIED = ("old", "default", "dppo_tv", "opsm", "vcpo", "decoupled")
_COLORS = {
    "old": "#999999", "default": "#009e73", "dppo_tv": "#d55e00", "opsm": "#56b4e9", "vcpo": "#e69f00",
    "decoupled": "#0072b2", "off": "#000000", "clip": "#f0e442", "cispo": "#cc79a7",
}  # fmt: skip
LEARNING_RATE = 5e-5
"""Four times the quickstart's, so that staleness is felt."""
STEPS = 256
"""Four times the longest lag, and the same for every lag."""
EVAL_EVERY = 32
ACCURACY = 0.9
"""Steps are counted until held-out accuracy reaches this, on the line between two evaluations."""
_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Setting:
    """One run's, beside the quickstart's config."""

    lag: int
    loss: str
    seed: int
    learning_rate: float
    steps: int

    @property
    def overrides(self) -> dict[str, Any]:
        """As ``--set`` keys. Nothing is filtered, for a run that falls apart would sample for ever."""
        base = SUMS.directory(self.seed)
        return {
            "run.seed": str(self.seed),
            "data.train": f"{base}/train.jsonl",
            "data.eval.held_out": f"{base}/held_out.jsonl",
            "model.path": f"{base}/warm_start",
            "learner.fixed_lag": self.lag,
            "queue.max_staleness": self.lag,
            "queue.filter_range": "[]",
            "learner.steps": self.steps,
            "optimizer.lr": self.learning_rate,
            "experimental.max_skipped_steps": self.steps,
            "eval.every": EVAL_EVERY,
            "checkpoint.every": 0,
            "log.rollouts_every": 0,
            **LOSSES[self.loss],
        }

    @property
    def name(self) -> str:
        """Readable, and another one for every setting and recipe."""
        plain = json.dumps([asdict(self), self.overrides, recipe_digest(SUMS, self.seed)], sort_keys=True)
        digest = hashlib.sha256(plain.encode()).hexdigest()[:10]
        return f"lag-{self.lag}_{self.loss}_seed-{self.seed}_{digest}"


@dataclass(frozen=True, slots=True)
class Result:
    """``evals`` are (step, held-out accuracy). The rest is over the steps whose lag is the one held: means, and the
    largest lag and ratio of any token. ``clipped`` and ``masked`` are shares of tokens.
    """

    evals: list[tuple[int, float]]
    lag_mean: float
    lag_max: int
    ess: float
    kl: float
    ratio_max: float
    clipped: float
    masked: float
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.evals[-1][1]

    @property
    def steps_to_accuracy(self) -> float | None:
        """None if it was never reached."""
        for (step, low), (next_step, high) in zip([(0, 0.0), *self.evals], self.evals, strict=False):
            if high >= ACCURACY:
                return step + (next_step - step) * (ACCURACY - low) / (high - low)
        return None


def kept(setting: Setting) -> Result | None:
    """The result of an earlier run, if there is one."""
    path = _result_file(setting)
    return Result(**json.loads(path.read_text(encoding="utf-8"))["result"]) if path.exists() else None


def run(setting: Setting) -> Result:
    """The kept result, or that of a run of its own.

    Raises:
        RuntimeError: the run did not succeed; its log is named.
    """
    if (found := kept(setting)) is not None:
        return found
    run_dir, log = STUDY / "runs" / setting.name, STUDY / "logs" / f"{setting.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = {**setting.overrides, "run.dir": run_dir}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "async_rl", "launch", "configs/quickstart.toml", "--fresh", *words]
    with log.open("wb") as output:
        done = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the run {setting.name} exited {done.returncode}; see {log}")
    result, path = measure(run_dir, setting.lag), _result_file(setting)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"setting": asdict(setting), "result": asdict(result)}, indent=1))
    return result


def _result_file(setting: Setting) -> Path:
    return STUDY / "results" / f"{setting.name}.json"


def measure(run_dir: Path, lag: int) -> Result:
    """What the run's metrics say. Its first ``lag`` steps have no version as old as that to sample with."""
    rows = read_rows(run_dir / "metrics.jsonl")
    # A model that has fallen apart writes no answer that ends: its steps have nothing to train on, and no lag.
    held = [row for row in rows if row.get("tokens/trained") and row["step"] > lag]
    evals = sorted((row["step"], row[key]) for row in rows if (key := "eval/held_out/accuracy") in row)
    last = evals[-1][0]
    return Result(
        # Versions of the last steps are sent with the last one, so evaluations asked of them are the last, too.
        evals=[(step, accuracy) for step, accuracy in evals if step == last or step + lag <= last],
        lag_mean=_mean(held, "staleness/mean"),
        lag_max=max((row["staleness/max"] for row in held), default=0),
        ess=_mean(held, "ratio/ess"),
        kl=_mean(held, "ratio/kl"),
        ratio_max=max((row["ratio/max"] for row in held if row.get("ratio/max") is not None), default=math.nan),
        clipped=_mean(held, "ratio/clip_fraction"),
        masked=_mean(held, "skip/token_fraction"),
        seconds=max(row["time_s"] for row in rows),
    )


def _mean(rows: Sequence[Row], key: str) -> float:
    """Over the rows where it is a number; NaN without one."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return mean(values) if values else math.nan


def run_all(settings: Sequence[Setting], jobs: int) -> None:
    """Make what is not there yet, ``jobs`` runs at a time; every result is said as it comes.

    Seed by seed, so that whoever stops it has whole comparisons.
    """
    told = threading.Lock()
    left = len(settings)

    def make(setting: Setting) -> None:
        nonlocal left
        result = run(setting)
        with told:
            left -= 1
            curve = " ".join(f"{accuracy:.2f}" for _, accuracy in result.evals)
            print(f"{setting.name}: {curve} ({result.seconds:.0f} s; {left} left)", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for seed in sorted({setting.seed for setting in settings}):
            make_task(SUMS, seed)
            list(pool.map(make, [setting for setting in settings if setting.seed == seed]))


Results = Mapping[tuple[int, str], Sequence[Result]]


def table(results: Results) -> str:
    """One Markdown row a lag and loss."""
    lines = [
        f"| lag | corrections | runs | measured lag (max) | final accuracy | lowest | steps to {ACCURACY:g} "
        f"| ESS | KL | largest ratio | clipped | masked |\n{'|---' * 12}|"
    ]
    for (lag, loss), found in results.items():
        lags = f"{mean(r.lag_mean for r in found):.2f} ({max(r.lag_max for r in found)})"
        steps = [s for r in found if (s := r.steps_to_accuracy) is not None]
        reached = f"{mean(steps):.0f}" if steps else "never"
        if 0 < len(steps) < len(found):
            reached += f" ({len(steps)} of {len(found)})"
        accuracies = [r.accuracy for r in found]
        lines.append(
            f"| {lag} | {loss} | {len(found)} | {lags} | {with_error(accuracies)} | {min(accuracies):.3f} | {reached} "
            f"| {mean(r.ess for r in found):.3f} | {mean(r.kl for r in found):.3g} "
            f"| {max(r.ratio_max for r in found):.3g} | {mean(r.clipped for r in found):.2%} "
            f"| {mean(r.masked for r in found):.2%} |"
        )
    return "\n".join(lines)


def goal(results: Results) -> str:
    """The default at the longest lag less itself at lag 0, seed by seed."""
    lags = [lag for lag, loss in results if loss == "default"]
    if 0 not in lags or max(lags) == 0:
        return ""
    pairs = zip(results[max(lags), "default"], results[0, "default"], strict=False)
    differences = [late.accuracy - fresh.accuracy for late, fresh in pairs]
    return f"default at lag {max(lags)} less lag 0: {with_error(differences)} (goal: within two standard errors of 0)"


def with_error(values: Sequence[float]) -> str:
    """Mean and standard error."""
    return f"{mean(values):.3f}" + (f" ± {stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else "")


def draw(results: Results, path: Path) -> None:
    """One field a lag: held-out accuracy over steps, the mean over seeds and the range that they span."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lags = sorted({lag for lag, _ in results})
    figure = Figure(figsize=(3.2 * len(lags), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for number, lag in enumerate(lags):
        axes = figure.add_subplot(1, len(lags), number + 1)
        for loss, found in ((name, found) for (at, name), found in results.items() if at == lag):
            steps = [step for step, _ in found[0].evals]
            curves = np.array([[accuracy for _, accuracy in result.evals] for result in found])
            # Thinner and thinner, for at lag 0 they lie on one another.
            width = 3.6 - 0.8 * min(2, list(LOSSES).index(loss))
            axes.plot(steps, curves.mean(0), "o-", color=_COLORS[loss], markersize=3, linewidth=width, label=loss)
            axes.fill_between(steps, curves.min(0), curves.max(0), color=_COLORS[loss], alpha=0.15, linewidth=0)
        axes.set_title(f"lag {lag}", fontsize=11)
        axes.set_ylim(-0.02, 1.03)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if number == 0:
            axes.set_ylabel("held-out accuracy")
            axes.legend(loc="best", fontsize=9, edgecolor="none", framealpha=0.85)
    figure.savefig(path, dpi=120, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ... of so many runs each")
    parser.add_argument("--lags", type=int, nargs="+", default=list(LAGS))
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(STUDIED))
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each keeps about one core busy")
    parser.add_argument("--kept", action="store_true", help="no runs: table and picture of what there is")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    settings = {
        (lag, loss): [Setting(lag, loss, seed, options.lr, options.steps) for seed in range(options.seeds)]
        for lag in options.lags
        for loss in options.losses
    }
    if not options.kept:
        run_all([setting for group in settings.values() for setting in group], options.jobs)
    found = {key: [r for setting in group if (r := kept(setting)) is not None] for key, group in settings.items()}
    results = {key: group for key, group in found.items() if group}
    print(f"\n{table(results)}\n\n{goal(results)}")
    draw(results, options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
