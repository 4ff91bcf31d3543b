"""Preferences on a CPU: the quickstart's careless pupil learns from pairs which of two workings is better.

A pair is the working of a sum with the carry, and without it. ``async-rl dpo`` trains the quickstart's warm start on
pairs, and ``async-rl rm`` makes it a reward model. Run from the checkout: ``python examples/careful_sums.py --seeds 0 1
2``. Every step is a command that you could type yourself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from async_rl.extensions.quickstart import sums
from async_rl.extensions.quickstart.prepare import make_task, run_command
from async_rl.extensions.quickstart.tasks import SUMS

CONFIG = "configs/careful_sums.toml"
NUM_TRAIN, NUM_TEST = 1024, 256


def write_pairs(directory: Path, seed: int) -> None:
    """``train.jsonl`` and ``test.jsonl``: pairs for sums with a carry that no warm start has seen."""
    directory.mkdir(parents=True)
    rows = [
        {
            "prompt": f"{a}+{b}:",
            "chosen": sums.working(a, b, carry=True),
            "rejected": sums.working(a, b, carry=False),
        }
        for a, b in sums.split_pairs(seed)["rl"]
        if a % 10 + b % 10 >= 10
    ]
    for name, part in (("train", rows[:NUM_TRAIN]), ("test", rows[NUM_TRAIN : NUM_TRAIN + NUM_TEST])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def accuracy(config: Path, model: str) -> float:
    """Return the share of held-out sums that the model solves by greedy decoding."""
    command = ["eval", model, "--config", str(config), "--json", "--quiet"]
    found = subprocess.run([sys.executable, "-m", "async_rl", *command], check=True, stdout=subprocess.PIPE)
    return json.loads(found.stdout)["results"][0]["figures"]["accuracy"]


def train(seed: int) -> tuple[float, float, float]:
    """Train on the pairs.

    Returns:
        The accuracy on held-out sums before and after ``dpo``, and the share of held-out pairs that the reward model
        puts into the right order.
    """
    start, base = f"{SUMS.directory(seed)}/warm_start", f"runs/careful_sums-{seed}"
    config = make_task(SUMS, seed)
    shutil.rmtree(base, ignore_errors=True)
    write_pairs(Path(base, "pairs"), seed)
    settings = [
        f"run.seed={seed}", f"run.dir={base}", f"model.path={start}", f"dpo.data={base}/pairs/train.jsonl",
        f"dpo.out={base}/model", f"rm.data={base}/pairs/train.jsonl", f"rm.eval.test={base}/pairs/test.jsonl",
        f"rm.out={base}/reward_model",
    ]  # fmt: skip
    for command in ("dpo", "rm"):
        run_command(command, CONFIG, *(word for setting in settings for word in ("--set", setting)))
    lines = Path(base, "rm", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return accuracy(config, start), accuracy(config, f"{base}/model"), json.loads(lines[-1])["eval/test/accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    results = {seed: train(seed) for seed in options.seeds}
    for seed, (before, after, pairs) in results.items():
        print(f"seed {seed}: held-out sums {before:.3f} -> {after:.3f}; pairs in the right order: {pairs:.3f}")


if __name__ == "__main__":
    main()
