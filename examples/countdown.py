"""Countdown: make a target of given numbers with + - * /, each used once. Rows for the two recipes, and a CPU run.

    python examples/countdown.py --data     # writes data/countdown_{train,test}.jsonl for countdown_qwen2.5_3b.toml
    python examples/countdown.py            # trains a small character-level model on two numbers: CPU only

The small model's warm start imitates a careless pupil, who mostly writes any operator between the two numbers.
Reinforcement learning has to find out that the target decides.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from async_rl.extensions.quickstart import sums
from async_rl.extensions.quickstart.prepare import run_command

CONFIG = "configs/countdown.toml"
CHARACTERS = "0123456789+-*=:/<>answer"
NUM_TRAIN, NUM_TEST = 8000, 500
NUM_PUPIL_ROWS = 6000
CARELESS = 0.6
"""Share of the pupil's equations whose operator is drawn without a look at the target."""
QUESTION = (
    "Write an equation with the value {target} that uses each of the numbers {numbers} exactly once, with operations "
    "+ - * / and brackets. Think first. Then write only the equation between <answer> and </answer>, for "
    "example <answer>(1 + 2) / 3</answer>."
)

Row = dict[str, Any]


def solvable(rng: random.Random) -> tuple[list[int], int]:
    """Return three or four numbers of 1 to 99, and a target of 10 to 99 that some equation of them reaches."""
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        values = [Fraction(number) for number in numbers]
        rng.shuffle(values)
        while len(values) > 1:
            a, b = values.pop(), values.pop()
            values.append(rng.choice([a + b, a - b, a * b, *([a / b] if b else [])]))
            rng.shuffle(values)
        (target,) = values
        if target.denominator == 1 and 10 <= target <= 99:
            return numbers, int(target)


def row(content: str, numbers: list[int], target: int) -> Row:
    return {"messages": [{"role": "user", "content": content}], "extra_info": {"numbers": numbers, "target": target}}


def full_rows(count: int, rng: random.Random) -> Iterator[Row]:
    for _ in range(count):
        numbers, target = solvable(rng)
        yield row(QUESTION.format(numbers=numbers, target=target), numbers, target)


def small_row(rng: random.Random) -> Row:
    """Two digits, and what one of three operators makes of them."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    target = rng.choice([a + b, a - b, a * b])
    return row(f"{a}/{b}={target}:", [a, b], target)


def pupils_row(rng: random.Random) -> Row:
    """An SFT row: a task in the small form, and the pupil's equation."""
    task = small_row(rng)
    a, b = task["extra_info"]["numbers"]
    values = {"+": a + b, "-": a - b, "*": a * b}
    right = next(operator for operator, value in values.items() if value == task["extra_info"]["target"])
    operator = rng.choice("+-*") if rng.random() < CARELESS else right
    return {"prompt": task["messages"][0]["content"], "response": f"<answer>{a}{operator}{b}</answer>"}


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows", flush=True)


def train(seed: int, extra: list[str]) -> tuple[float, float]:
    """Make the small task, warm-start a model, and train it. Return the share of solved tasks before and after."""
    base, rng = f"runs/countdown-task/seed-{seed}", random.Random(seed)
    shutil.rmtree(base, ignore_errors=True)
    held_out = [small_row(rng) for _ in range(100)]
    write(Path(base, "sft.jsonl"), [pupils_row(rng) for _ in range(NUM_PUPIL_ROWS)])
    write(Path(base, "train.jsonl"), [small_row(rng) for _ in range(NUM_TRAIN)])
    write(Path(base, "held_out.jsonl"), held_out)
    sums.write_model(Path(base, "base"), seed=seed, characters=CHARACTERS)
    settings = {
        "run.seed": str(seed),
        "data.train": f"{base}/train.jsonl",
        "data.eval.held_out": f"{base}/held_out.jsonl",
        "sft.data": f"{base}/sft.jsonl",
        "sft.out": f"{base}/warm_start",
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run_command("sft", CONFIG, *overrides, "--set", f"run.dir={base}/sft_run", "--set", f"model.path={base}/base")
    run_dir = f"runs/countdown-{seed}"
    paths = ("--set", f"run.dir={run_dir}", "--set", f"model.path={base}/warm_start")
    run_command("launch", CONFIG, "--fresh", *overrides, *paths, *(word for item in extra for word in ("--set", item)))
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    scores = [one["eval/held_out/accuracy"] for one in rows if "eval/held_out/accuracy" in one]
    return scores[0], scores[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="store_true", help="only write the rows of the GPU recipe")
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to launch")
    options = parser.parse_args()
    if options.data:
        rng = random.Random(0)
        write(options.out / "countdown_test.jsonl", list(full_rows(NUM_TEST, rng)))
        write(options.out / "countdown_train.jsonl", list(full_rows(NUM_TRAIN, rng)))
        return
    results = {seed: train(seed, options.set) for seed in options.seeds}
    for seed, (before, after) in results.items():
        print(f"seed {seed}: tasks solved {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()
