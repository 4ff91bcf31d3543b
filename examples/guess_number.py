"""Trains a small model to guess numbers from hints, in games of several turns: CPU only, a few minutes a seed.

The warm start imitates a pupil who mostly forgets the hints and guesses anything. Run from the checkout:
``python examples/guess_number.py --seeds 0 1 2``. Every step is a command that you could type yourself.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

from async_rl.extensions.quickstart import sums
from async_rl.extensions.quickstart.prepare import run_command

CONFIG = "configs/guess_number.toml"
LARGEST = 9
MAX_TURNS = 4
FORGETFUL = 0.5
"""Share of the pupil's guesses that are made without a thought for the hints."""
PROMPT = ":"
CHARACTERS = "0123456789<>:"
NUM_PUPIL_GAMES = 3000


def pupils_game(number: int, rng: random.Random) -> list[dict[str, str]]:
    """SFT rows, one a guess: the game so far (``<eos>`` ends each guess), and the pupil's next guess."""
    low, high, text = 1, LARGEST, PROMPT
    rows: list[dict[str, str]] = []
    for _ in range(MAX_TURNS):
        guess = rng.randint(1, LARGEST) if rng.random() < FORGETFUL else rng.randint(low, high)
        rows.append({"prompt": text, "response": f"{guess}"})
        if guess == number:
            break
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        text += f"{guess}<eos>{'>' if guess < number else '<'}"
    return rows


def write_task(directory: Path, seed: int) -> None:
    """``sft.jsonl``, ``train.jsonl`` (numbers in a random order) and ``games.jsonl`` (every number once)."""
    directory.mkdir(parents=True)
    rng = random.Random(seed)
    sft = [row for _ in range(NUM_PUPIL_GAMES) for row in pupils_game(rng.randint(1, LARGEST), rng)]
    rng.shuffle(sft)
    games = [
        {"messages": [{"role": "user", "content": PROMPT}], "extra_info": {"number": number}}
        for number in range(1, LARGEST + 1)
    ]
    train = [rng.choice(games) for _ in range(3000)]
    for name, rows in (("sft", sft), ("train", train), ("games", games)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train(seed: int, extra: list[str]) -> tuple[float, float]:
    """Share of games won before and after."""
    base, run_dir = f"runs/guess_number-task/seed-{seed}", f"runs/guess_number-{seed}"
    shutil.rmtree(base, ignore_errors=True)
    write_task(Path(base), seed)
    sums.write_model(Path(base, "base"), seed=seed, characters=CHARACTERS)
    settings = {
        "run.seed": str(seed),
        "data.train": f"{base}/train.jsonl",
        "data.eval.games": f"{base}/games.jsonl",
        "sft.data": f"{base}/sft.jsonl",
        "sft.out": f"{base}/warm_start",
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run_command("sft", CONFIG, *overrides, "--set", f"run.dir={base}/sft_run", "--set", f"model.path={base}/base")
    paths = ("--set", f"run.dir={run_dir}", "--set", f"model.path={base}/warm_start")
    run_command("launch", CONFIG, "--fresh", *overrides, *paths, *(word for item in extra for word in ("--set", item)))
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    scores = [row["eval/games/score"] for row in rows if "eval/games/score" in row]
    return scores[0], scores[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to launch")
    options = parser.parse_args()
    results = {seed: train(seed, options.set) for seed in options.seeds}
    for seed, (before, after) in results.items():
        print(f"seed {seed}: games won within {MAX_TURNS} guesses {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()
