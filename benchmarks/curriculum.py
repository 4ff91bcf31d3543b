"""What a curriculum saves: the quickstart's task with few rows, with and without ``[data.curriculum]``.

Both runs train the same number of steps on the same 256 sums, so every row comes again many times, and most are solved
after a while. The figures are the groups that had to be sampled for each trained group (the rest was filtered), and the
held-out accuracy. Seconds are not compared, because generators and learner share the cores.

    python -m benchmarks.curriculum --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_ROWS = 256
SIDES = {
    "uniform": [],
    "aside": ["data.curriculum.solved_at=1.0", "data.curriculum.rest_epochs=2"],
    "learnability": ["data.curriculum.chance=learnability"],
}


def command(*arguments: str) -> None:
    """Run one program in the checkout. Its output goes to standard error."""
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=sys.stderr)


def make_task(seed: int, directory: Path) -> Path:
    """Make the quickstart's task and warm start of this seed, and return a file with its first rows."""
    directory.mkdir(parents=True, exist_ok=True)
    base = f"runs/quickstart-task/seed-{seed}"
    names = "from async_rl.quickstart import prepare, tasks"
    command("-c", f"{names}; prepare.make_task(tasks.SUMS, {seed})")
    lines = (ROOT / base / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:NUM_ROWS]
    rows = directory / f"rows-{seed}.jsonl"
    rows.write_text("".join(lines), encoding="utf-8")
    return rows


def run(side: str, seed: int, steps: int, rows: Path, directory: Path) -> dict[str, float]:
    """Train one side, and return its figures."""
    base, run_dir = f"runs/quickstart-task/seed-{seed}", directory / f"{side}-{seed}"
    settings = [
        f"run.dir={run_dir}", f"run.seed={seed}", f"data.train={rows}", f"data.eval.held_out={base}/held_out.jsonl",
        f"model.path={base}/warm_start", f"learner.steps={steps}", "checkpoint.every=0", f"eval.every={steps}",
        *SIDES[side],
    ]  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    command("-m", "async_rl", "launch", "configs/quickstart.toml", "--fresh", "--no-next", *words)
    ledger = json.loads((run_dir / "ledger.json").read_text(encoding="utf-8"))["groups"]
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics: list[dict[str, Any]] = [json.loads(line) for line in lines]
    accuracy = [row["eval/held_out/accuracy"] for row in metrics if "eval/held_out/accuracy" in row]
    sampled = ledger["trained"] + ledger["filtered"]
    last = [row for row in metrics if "curriculum/aside" in row]
    return {
        "sampled groups per trained group": sampled / ledger["trained"],
        "accuracy before": accuracy[0],
        "accuracy after": accuracy[-1],
        "share set aside at the end": last[-1]["curriculum/aside"] if last else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "curriculum", help="where runs are written")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for seed in options.seeds:
        rows = make_task(seed, options.dir)
        for side in SIDES:
            found[side].append(run(side, seed, options.steps, rows, options.dir))
    print(f"| side | {' | '.join(found['uniform'][0])} |")
    print("|---" * (1 + len(found["uniform"][0])) + "|")
    for side, results in found.items():
        cells: list[str] = []
        for name in results[0]:
            values = [result[name] for result in results]
            error = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.3f}{error}")
        print(f"| {side} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
