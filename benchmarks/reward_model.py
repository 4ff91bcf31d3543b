"""A reward model from pairs, and a policy that learns from it: both must follow a preference that only the pairs show.

Whoever labels the pairs prefers answers with more of the digit 7. For each seed: a random character-level model; a
reward model trained on pairs of random texts by ``async-rl rm``, measured on held-out pairs; and a run of ``async-rl
launch`` whose only reward is that model (``reward.type = "model"``, a scorer beside the generator). The number of 7s in
the policy's answers is recorded by a function whose weight is far too small to be felt. CPU only, no download; about
two minutes a seed on an idle core.

    python -m benchmarks.reward_model [--seeds 3] [--rm-steps 150] [--steps 40] [--directory runs/reward_model]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from async_rl.quickstart import sums

ROOT = Path(__file__).resolve().parents[1]
LIKED = "7"
UNFELT = 1e-6
"""Weight of the function that counts: the reward of an answer of eight 7s is 8e-6, that of the model some units."""
COUNT = f'''"""Counts what the labels of benchmarks/reward_model.py prefer."""

from async_rl.rewards.records import RewardInput


def liked(item: RewardInput) -> float:
    return float(item.text.count("{LIKED}"))
'''
AVERAGED = 5
"""Steps at the beginning and at the end over which a figure is averaged."""


def pairs(count: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    """Pairs of random texts of 8 characters, which differ in the number of 7s: 0 to 6 of them."""
    others = [c for c in sums.CHARACTERS if c.isprintable() and c != LIKED]
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        worse, better = sorted(generator.choice(7, 2, replace=False))
        texts = []
        for number in (better, worse):
            letters = [LIKED] * number + list(generator.choice(others, 8 - number))
            texts.append("".join(generator.permutation(letters)))
        question = f"{generator.integers(10, 100)}+{generator.integers(10, 100)}:"
        prompt = [{"role": "user", "content": question}]
        rows.append({"prompt": prompt, "chosen": texts[0], "rejected": texts[1]})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config(directory: Path, seed: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The files of one seed, and a config for both commands."""
    sums.write_model(directory / "model", seed=seed)
    generator = np.random.default_rng(seed)
    (directory / "count.py").write_text(COUNT, encoding="utf-8")
    prompts = [{"messages": row["prompt"]} for row in pairs(64, generator)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    counted = str(directory / "count.py")
    return {
        "run": {"dir": str(directory / "run"), "seed": seed},
        "model": {"path": str(directory / "model")},
        "data": {"train": write_rows(directory / "prompts.jsonl", prompts), "system_prompt": ""},
        "rm": {
            "data": write_rows(directory / "pairs.jsonl", pairs(1024, generator)),
            "eval": {"held_out": write_rows(directory / "held_out.jsonl", pairs(512, generator))},
            "out": str(directory / "reward_model"),
            "steps": options.rm_steps,
            "batch_size": 64,
            "lr": 2e-3,
            "warmup_steps": 10,
            "schedule": "linear",
        },
        "scorer": {"liked": {"model": str(directory / "reward_model"), "address": address}},
        "reward": {
            "type": "model",
            "model": "liked",
            "soft_overlong": False,
            "extra": {f"{counted}:liked": UNFELT},
        },
        "sampling": {"group_size": 8, "max_new_tokens": 8, "max_prompt_tokens": 16},
        "queue": {"max_staleness": 2, "filter_range": []},
        "loss": {"mask_truncated": False},
        "learner": {"steps": options.steps, "groups_per_step": 8, "max_tokens": 4096, "num_threads": 1},
        "optimizer": {"lr": 1e-3},
        "generator": {"batch_size": 64, "num_threads": 1, "allow_code": [counted]},
        "eval": {"every": 0},
    }


def write_toml(path: Path, sections: dict[str, dict[str, Any]]) -> Path:
    from async_rl.config.loading import config_to_toml, parse_config

    path.write_text(config_to_toml(parse_config(sections, "this benchmark")), encoding="utf-8")
    return path


def command(*arguments: str) -> None:
    """Run a command of async-rl in a process of its own.

    Raises:
        SystemExit: it fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "async_rl", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"async-rl {' '.join(arguments)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def rows_of(path: Path, key: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if key in row]


def run_seed(directory: Path, seed: int, options: argparse.Namespace) -> dict[str, float]:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    path = str(write_toml(directory / "config.toml", config(directory, seed, options)))
    command("rm", path)
    accuracy = rows_of(directory / "run" / "rm" / "metrics.jsonl", "eval/held_out/accuracy")[-1][
        "eval/held_out/accuracy"
    ]
    command("launch", path, "--quiet")
    rows = rows_of(directory / "run" / "metrics.jsonl", "reward/model")
    found = {"held-out pair accuracy": accuracy}
    for name, key, unit in (("7s in an answer", "reward/liked", UNFELT), ("score", "reward/model", 1.0)):
        values = [row[key] / unit for row in rows]
        found[f"{name}, first {AVERAGED} steps"] = mean(values[:AVERAGED])
        found[f"{name}, last {AVERAGED} steps"] = mean(values[-AVERAGED:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rm-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--directory", type=Path, default=Path("runs/reward_model"))
    options = parser.parse_args()
    import torch
    import transformers

    print(
        f"{platform.machine()}, {os.cpu_count()} cores; CPython {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    seeds: list[dict[str, float]] = []
    for seed in range(options.seeds):
        seeds.append(run_seed((options.directory / f"seed-{seed}").resolve(), seed, options))
        print(f"seed {seed}: " + "; ".join(f"{name} {value:.4g}" for name, value in seeds[-1].items()), flush=True)
    print(f"\n{'mean over the seeds, and its standard error':44s}")
    for name in seeds[0]:
        values = [found[name] for found in seeds]
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        print(f"{name:44s} {mean(values):8.4f} +- {error:.4f}")


if __name__ == "__main__":
    main()
