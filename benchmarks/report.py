"""How long ``async-rl report`` takes for a large run, how large its page is, and how fast Chromium opens it.

    python -m benchmarks.report [--steps 300] [--rollouts 38400] [--tokens 60] [--keep DIR]

The run is made up: every rollout is recorded with text and token columns, the most that a page may meet, and an
evaluation of 1,319 rows every 20 steps. Budgets for
300 steps and 38,400 rollouts: made in 20 s, 15 MB, opened in 3 s, a filter in 0.2 s; with Chromium, where it is
installed. The exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.run.token_columns import PLACES, TokenTable, columns_path, write_token_columns
from benchmarks.chromium import Chromium, find_chromium

GROUP_SIZE = 8
NUM_EVAL_ROWS = 1319
LIMITS = {"make_s": 20.0, "size_mb": 15.0, "open_s": 3.0, "filter_s": 0.2, "rollout_s": 0.5}


def make_run(path: Path, *, steps: int, rollouts: int, tokens: int) -> None:
    """Write a run directory with rollouts of random tokens."""
    rng = np.random.default_rng(0)
    (path / "rollouts").mkdir(parents=True)
    config = Config.model_validate({"run": {"dir": str(path)}, "model": {"path": "m"}, "learner": {"steps": steps}})
    (path / "config.toml").write_text(config_to_toml(config))
    words = [
        f" {w}" for w in ("the", "sum", "of", "both", "is", "=", "so", "we", "add", "carry", *map(str, range(500)))
    ]
    each = max(1, rollouts // steps // GROUP_SIZE)
    rows, summaries = [_eval_row(0)], []
    for step in range(1, steps + 1):
        rows.append(_step_row(step, rng))
        if step % 20 == 0:
            rows.append(_eval_row(step))
            _write_answers(path, step, words, rng)
        positions = [step * each + group for group in range(each)]
        count = each * GROUP_SIZE
        rewards = rng.integers(0, 2, count).astype(float)
        ids = rng.integers(0, len(words), (count, tokens))
        lag = rng.integers(0, 5, count)
        _write_step(path, step, positions, ids, words, rewards, lag, rng)
        summaries.append({
            "step": step, "version": step - 1, "positions": positions, "rows": [p % 2000 for p in positions],
            "sizes": [GROUP_SIZE] * each, "reward": rewards.tolist(), "accuracy": rewards.tolist(),
            "tokens": [tokens] * count, "staleness": lag.tolist(), "finish": ["stop"] * count, "cause": [""] * count,
        })  # fmt: skip
    for name, lines in (("metrics.jsonl", rows), ("rollouts/summaries.jsonl", summaries)):
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _step_row(step: int, rng: np.random.Generator) -> dict[str, Any]:
    noise = rng.random(100)
    row = {
        "step": step, "version": step, "time_s": 2.0 * step, "time/step_s": 2.0, "tokens/trained": 7680,
        "time/train_s": 1.2, "time/wait_s": 0.5, "idle/generators": 0.2, "idle/leases": 0.1,
        "reward/mean": 0.3 + step / 1000 + 0.1 * noise[0], "staleness/mean": 2 + noise[1], "staleness/max": 4,
        "entropy": 0.5 + noise[2], "grad_norm": noise[3], "ratio/ess": 1 - 0.1 * noise[4], "ratio/kl": 1e-4 * noise[5],
    }  # fmt: skip
    return row | {f"other/{number}": value for number, value in enumerate(noise.tolist())}


def _eval_row(step: int) -> dict[str, Any]:
    return {"step": step, "time_s": 2.0 * step, "eval/math/accuracy": 0.3 + step / 1000, "eval/math/accuracy_se": 0.02}


def _write_answers(path: Path, step: int, words: list[str], rng: np.random.Generator) -> None:
    """Write the answers of an evaluation to as many rows as the test set of GSM8K has."""
    (path / "eval").mkdir(exist_ok=True)
    with (path / "eval" / f"math-step-{step:06d}.jsonl").open("w") as out:
        for row, right in enumerate(rng.integers(0, 2, NUM_EVAL_ROWS).tolist()):
            out.write(json.dumps({
                "row": row, "index": 0, "messages": [{"role": "user", "content": f"What is {row} + 1?"}],
                "response": "".join(words[i] for i in rng.integers(0, len(words), 60)), "extracted": "7",
                "expected": "7", "accuracy": float(right), "reward": float(right), "reward_parts": {"correct": right},
                "finish_reason": "stop", "num_tokens": 60, "versions": [step, step],
            }) + "\n")  # fmt: skip


def _write_step(
    path: Path, step: int, positions: list[int], ids: np.ndarray, words: list[str], rewards: np.ndarray,
    lag: np.ndarray, rng: np.random.Generator,
) -> None:  # fmt: skip
    count, tokens = ids.shape
    texts = [[words[i] for i in row] for row in ids.tolist()]
    file = path / "rollouts" / f"step-{step:06d}.jsonl"
    with file.open("w") as out:
        for number in range(count):
            version = step - 1 - int(lag[number])
            out.write(json.dumps({
                "position": positions[number // GROUP_SIZE], "lease_id": "l", "generator": "generator-0",
                "trained_at": step - 1, "masked": False, "index": number % GROUP_SIZE,
                "row": positions[number // GROUP_SIZE] % 2000,
                "messages": [{"role": "user", "content": f"What is {positions[number // GROUP_SIZE]} + {step}?"}],
                "response": "".join(texts[number]), "extracted": texts[number][-1], "expected": "7",
                "accuracy": rewards[number], "reward": rewards[number], "reward_parts": {"correct": rewards[number]},
                "finish_reason": "stop", "num_tokens": tokens, "versions": [version, version],
            }) + "\n")  # fmt: skip
    size = count * tokens
    behavior = -rng.exponential(0.5, size)
    write_token_columns(columns_path(file), TokenTable(
        places=dict(zip(PLACES, (np.repeat(positions, GROUP_SIZE), np.tile(np.arange(GROUP_SIZE), len(positions)),
                                 np.zeros(count, int), np.full(count, step - 1)), strict=True)),
        sizes=np.full(count, tokens),
        numbers={
            "token_ids": ids.ravel(), "versions": np.repeat(step - 1 - lag, tokens), "behavior_logprobs": behavior,
            "logprobs": behavior + rng.normal(0, 0.02, size), "entropies": rng.exponential(0.5, size),
            "advantages": np.repeat(rewards - 0.5, tokens),
        },
        texts=[text for row in texts for text in row],
        outcomes=["trained"] * size,
    ))  # fmt: skip


def measure(run: Path, page: Path) -> dict[str, float]:
    """Return the figures of ``LIMITS`` that can be measured here."""
    started = time.monotonic()
    command = [sys.executable, "-m", "async_rl", "report", str(run), "--out", str(page), "--quiet"]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    found = {"make_s": time.monotonic() - started, "size_mb": page.stat().st_size / 1e6}
    program = find_chromium()
    if program is None:
        print("Chromium is not installed: opening and filtering are not measured")
        return found
    with Chromium(program) as browser:
        found["open_s"] = browser.open(page.as_uri()) / 1000
        timed = "(() => { const begin = performance.now(); filter(); document.body.offsetHeight; return (performance.now() - begin) / 1000; })()"  # noqa: E501
        browser.run("document.querySelector('[name=reward-min]').value = '0.5'")
        browser.run("document.querySelector('[name=stale-max]').value = '2'")
        browser.run("browser.sort = 'tokens'")
        found["filter_s"] = max(browser.run(timed) for _ in range(3))
        opened = "(async () => { const begin = performance.now(); await openRollout(browser.found.find(canOpen)); return (performance.now() - begin) / 1000; })()"  # noqa: E501
        found["rollout_s"] = browser.run(opened)
        browser.run("browser.form.elements.set.value = 'math'; browser.form.elements['accuracy-min'].value = '1'")
        found["filter_s"] = max(found["filter_s"], *(browser.run(timed) for _ in range(3)))
        found["rollout_s"] = max(found["rollout_s"], browser.run(opened))
        if browser.errors:
            raise RuntimeError(f"the page has errors: {browser.errors}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rollouts", type=int, default=38_400)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--keep", type=Path, help="where to leave the run and the page; used again if it exists")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or Path(temporary)
        if not (place / "run" / "metrics.jsonl").exists():
            make_run(place / "run", steps=options.steps, rollouts=options.rollouts, tokens=options.tokens)
        found = measure(place / "run", place / "report.html")
    for name, value in found.items():
        print(f"{name}: {value:.3g} (at most {LIMITS[name]:g})")
    return int(any(value > LIMITS[name] for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
