"""The quickstart: make the task, warm-start the model (both cached), then train it with asynchronous RL.

Run by ``make quickstart``; every step is a command that you could type yourself, and is printed before it runs.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from async_rl.quickstart import sums

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/quickstart.toml"


def run(*arguments: str) -> None:
    """Run one async-rl command in the checkout, or end with its exit code."""
    command = [sys.executable, "-m", "async_rl", *arguments]
    print(f"$ async-rl {shlex.join(arguments)}", flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


def task_paths(seed: int) -> dict[str, str]:
    """Where the task of this seed lies, as config keys."""
    base = f"runs/quickstart-task/seed-{seed}"
    return {
        "run.seed": str(seed),
        "data.train": f"{base}/train.jsonl",
        "data.eval.held_out": f"{base}/held_out.jsonl",
        "sft.data": f"{base}/sft.jsonl",
        "sft.out": f"{base}/warm_start",
    }


def task_options(seed: int) -> list[str]:
    """``--set`` options that name the task of this seed. The config itself names that of seed 0."""
    return (
        [] if seed == 0 else [word for key, value in task_paths(seed).items() for word in ("--set", f"{key}={value}")]
    )


def recipe_digest() -> str:
    """Changes when the task or the config does, so that a stale warm start is never used."""
    parts = [(ROOT / name).read_bytes() for name in (CONFIG, "async_rl/quickstart/sums.py", "examples/quickstart.py")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def warm_start(seed: int) -> None:
    """Task, base model and SFT, unless they are there already for this very recipe."""
    base = ROOT / f"runs/quickstart-task/seed-{seed}"
    marker = base / "recipe"
    if marker.exists() and marker.read_text() == recipe_digest():
        print(f"warm start: cached in {base.relative_to(ROOT)}")
        return
    shutil.rmtree(base, ignore_errors=True)
    sums.write_task(base, seed=seed)
    sums.write_model(base / "base", seed=seed)
    print(f"task: {base.relative_to(ROOT)}: sft.jsonl, train.jsonl, held_out.jsonl; a random model in base/")
    relative = base.relative_to(ROOT)
    settings = ("--set", f"run.dir={relative}/sft_run", "--set", f"model.path={relative}/base")
    run("sft", CONFIG, *task_options(seed), *settings)
    marker.write_text(recipe_digest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", default="runs/quickstart", help="moved aside if it exists")
    parser.add_argument("--compare", action="store_true", help="train once more on-policy, and compare the two runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to launch")
    options = parser.parse_args()
    warm_start(options.seed)
    launch = task_options(options.seed)
    if options.seed:
        launch += ["--set", f"model.path={task_paths(options.seed)['sft.out']}"]
    if options.run_dir != "runs/quickstart":
        launch += ["--set", f"run.dir={options.run_dir}"]
    launch += [word for item in options.set for word in ("--set", item)]
    run("launch", CONFIG, "--fresh", *launch, *(["--no-next"] if options.compare else []))
    if options.compare:
        other = f"{options.run_dir}-on-policy"
        on_policy = ("--set", f"run.dir={other}", "--set", "queue.max_staleness=0")
        run("launch", CONFIG, "--fresh", *launch, *on_policy, "--no-next")
        run("compare", options.run_dir, other)
    print("a run of your own (first: . .venv/bin/activate): async-rl init my.toml")


if __name__ == "__main__":
    main()
