"""The quickstart: make the task, warm-start the model (both cached), then train it with asynchronous RL.

Run by ``make quickstart``; every step is a command that you could type yourself, and is printed before it runs.
"""

from __future__ import annotations

import argparse

from async_rl.quickstart.prepare import run_command, warm_start
from async_rl.quickstart.tasks import SUMS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", default="runs/quickstart", help="moved aside if it exists")
    parser.add_argument("--compare", action="store_true", help="train once more on-policy, and compare the two runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to launch")
    options = parser.parse_args()
    config = str(warm_start(SUMS, options.seed))
    launch = [word for item in (f"run.dir={options.run_dir}", *options.set) for word in ("--set", item)]
    run_command("launch", config, "--fresh", *launch, *(["--no-next"] if options.compare else []))
    if options.compare:
        other = f"{options.run_dir}-on-policy"
        on_policy = ("--set", f"run.dir={other}", "--set", "queue.max_staleness=0")
        run_command("launch", config, "--fresh", *launch, *on_policy, "--no-next")
        run_command("compare", options.run_dir, other)
    print("a run of your own (first: . .venv/bin/activate): async-rl init my.toml")


if __name__ == "__main__":
    main()
