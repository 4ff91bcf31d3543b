"""A real language model on this machine: async-rl beside TRL's GRPOTrainer, accuracy over steps and minutes.

Both train SmolLM2-135M-Instruct on the same rows, with the same reward, samples a step, number of steps and learning
rate: ``configs/smollm2.toml``, and TRL at the fastest settings of ``trl_loop.py`` with all cores. TRL trains on every
group, async-rl replaces those that teach nothing (``queue.filter_range``). Both are evaluated greedily on the held-out
rows every ``eval.every`` steps. TRL's clock stands still meanwhile; async-rl's does not, because its generators answer
beside training.

    python -m benchmarks.real_model [--seeds 0 1 2] [--steps 40] [--picture FILE]

Prints a line of JSON for each run, then the medians. Needs ``pip install -e .[bench,smollm2]``, hours for three seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from async_rl.config.config import Config
from async_rl.config.loading import load_config
from async_rl.data.chat import load_tokenizer
from async_rl.data.dataset import load_rows_of, load_train_rows
from async_rl.extensions.quickstart.instructions import is_followed
from async_rl.extensions.quickstart.prepare import make_task
from async_rl.extensions.quickstart.tasks import SMOLLM2
from async_rl.process.child import module_command
from async_rl.run.records.step_log import read_rows

NAMES = {"async": "async-rl", "trl": "TRL GRPOTrainer"}


@dataclass(frozen=True, slots=True)
class Curve:
    """One run. ``points`` are evaluations: the step, seconds since the first step began, and the accuracy."""

    side: str
    seed: int
    step_s: float
    points: list[tuple[int, float, float]]


def run_async(config: Path, seed: int, settings: Sequence[str], run_dir: Path) -> Curve:
    """Train with ``async-rl launch``, in processes of its own."""
    words = [word for setting in (*settings, f"run.dir={run_dir}") for word in ("--set", setting)]
    subprocess.run(module_command("async_rl", "launch", str(config), "--fresh", "--no-next", *words), check=True)
    rows = read_rows(run_dir / "metrics.jsonl")
    steps = [row for row in rows if "time/step_s" in row]
    begin_s = steps[0]["time_s"] - steps[0]["time/step_s"]
    evaluated = [row for row in rows if "eval/held_out/accuracy" in row]
    points = [(r["step"], max(0.0, r["time_s"] - begin_s), r["eval/held_out/accuracy"]) for r in evaluated]
    return Curve("async", seed, median(row["time/step_s"] for row in steps[1:]), points)


def run_trl(config: Config, seed: int, num_threads: int) -> Curve:
    """Train with TRL, in this process."""
    import datasets  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    from benchmarks.trl_loop import trl_config

    torch.set_num_threads(num_threads)
    tokenizer: Any = load_tokenizer(config.model.path)
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)

    def reward(
        completions: Sequence[str], completion_ids: Sequence[Sequence[int]], kind: Sequence[str], value: Sequence[str],
        **_: Any,
    ) -> list[float | None]:  # fmt: skip
        ended = (tokenizer.eos_token_id in ids for ids in completion_ids)
        return [
            float(end and is_followed(*row)) for end, *row in zip(ended, kind, value, completions, strict=True)
        ]  # fmt: skip

    class Clock(TrainerCallback):
        """Times the steps, and evaluates between them while the clock stands still."""

        def __init__(self) -> None:
            self.steps_s: list[float] = []
            self.points = [(0, 0.0, trl_accuracy(config, model, tokenizer))]

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._begin_s = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps_s.append(time.perf_counter() - self._begin_s)
            if state.global_step % config.eval.every == 0:
                accuracy = trl_accuracy(config, model, tokenizer)
                self.points.append((state.global_step, sum(self.steps_s), accuracy))

    def text_of(messages: Sequence[Any]) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    rows = load_train_rows(config).rows
    prompts = [{"prompt": text_of(row.messages), "kind": row.reward_data["kind"], "value": row.reward_data["value"]}
               for row in rows]  # fmt: skip
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        GRPOTrainer(
            model=model, processing_class=tokenizer, reward_funcs=reward, args=trl_config(config, scratch),
            train_dataset=datasets.Dataset.from_list(prompts), callbacks=[clock],
        ).train()  # fmt: skip
    return Curve("trl", seed, median(clock.steps_s[1:]), clock.points)


@torch.no_grad()
def trl_accuracy(config: Config, model: Any, tokenizer: Any) -> float:
    """Return the accuracy of greedy answers to the held-out rows."""
    (source,) = config.data.eval.values()
    right, rows = 0, load_rows_of(config, source).rows
    was_training, tokenizer.padding_side = model.training, "left"
    model.eval()
    for start in range(0, len(rows), 40):
        batch = rows[start : start + 40]
        inputs = tokenizer.apply_chat_template(
            [list(row.messages) for row in batch], add_generation_prompt=True, padding=True, return_tensors="pt",
            return_dict=True,
        )  # fmt: skip
        sampled = model.generate(**inputs, max_new_tokens=config.sampling.max_new_tokens, do_sample=False)
        for row, ids in zip(batch, sampled[:, inputs["input_ids"].shape[1] :], strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            ends = tokenizer.eos_token_id in ids
            right += bool(ends and is_followed(row.reward_data["kind"], row.reward_data["value"], text))
    model.train(was_training)
    return right / len(rows)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the accuracy over steps and over minutes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for curve in curves:
        color = "#0072b2" if curve.side == "async" else "#d55e00"
        label = NAMES[curve.side] if curve.seed == min(one.seed for one in curves if one.side == curve.side) else None
        steps, seconds, accuracies = zip(*curve.points, strict=True)
        axes[0].plot(steps, accuracies, "o-", color=color, label=label, markersize=4)
        axes[1].plot([s / 60 for s in seconds], accuracies, "o-", color=color, markersize=4)
    axes[0].set(xlabel="optimizer step", ylabel="accuracy on held-out rows", ylim=(0, 1))
    axes[1].set(xlabel="minutes")
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sides", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--threads", type=int, default=2, help="of TRL")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for async-rl")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--curves", type=Path, help="lines of earlier runs, which are drawn and counted, too")
    options = parser.parse_args()
    lines = options.curves.read_text().splitlines() if options.curves else []
    curves = [Curve(**json.loads(line)) for line in lines]
    for seed in options.seeds:
        path = make_task(SMOLLM2, seed)
        settings = [f"learner.steps={options.steps}", *options.set]
        for side in options.sides:
            if side == "async":
                curve = run_async(path, seed, settings, Path(f"runs/real-model-{seed}"))
            else:
                curve = run_trl(load_config(path, settings), seed, options.threads)
            curves.append(curve)
            print(json.dumps(asdict(curve)), flush=True)
    for side in options.sides:
        of_side = [curve for curve in curves if curve.side == side]
        rises = " ".join(f"{curve.points[0][2]:.3f}->{curve.points[-1][2]:.3f}" for curve in of_side)
        print(f"{NAMES[side]}: {median(curve.step_s for curve in of_side):.1f} s a step, accuracy {rises}")
    if options.picture:
        draw(curves, options.picture)


if __name__ == "__main__":
    main()
