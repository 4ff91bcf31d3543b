"""``async-rl rm`` against TRL's ``RewardTrainer``: the same pairs of messages, tokenised by both.

Part ``gradients``: from one random model with a random head, loss and gradient of every parameter. TRL computes in
float64, one padded batch of both answers. ``async-rl rm`` computes the scores of all answers, the slopes of the loss,
and the gradient of micro-batches that share prompts and tear pairs apart; its layers once in float64 too, and once in
float32, as it trains on a CPU. Its head and its slopes are float32 always. Exits with 1 if a gradient with layers in
float64 differs from TRL's by more than 1e-6.

Part ``curves``: loss, accuracy and margin of every step, on the same batches in the same order, in float32 with plain
AdamW, three seeds. Rounding makes two runs differ, and the more the larger the learning rate is. So TRL also runs with
longer padding, which changes nothing but the rounding; its difference from TRL is printed too.

    nice .venv/bin/python -m benchmarks.reward_model_peers [--part gradients] [--lr 1e-3]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import datasets  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from trl import RewardConfig, RewardTrainer  # pyright: ignore[reportMissingImports]

from async_rl.config.config import Config
from async_rl.data.chat import load_tokenizer, quiet_progress_bars
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.engine.optimizer import Schedule
from async_rl.learner.offline.batches import batch_of
from async_rl.learner.offline.rm import Pair, RewardModel, run_rm
from async_rl.learner.ranks import init_ranks
from tests.learner.tiny import tiny_config, tiny_model

NUM_PAIRS, NUM_STEPS, BATCH_SIZE = 64, 32, 8
MAX_TOKENS = 64
"""Of a micro-batch: so many that pairs lie in different ones."""
LONGER_PADDING = 64
LIMIT = 1e-6
NO_STEP = 1e-3
"""The learning rate where no step is made."""
FIGURES = ("loss", "accuracy", "margin")
Row = dict[str, Any]
Curve = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("gradients", "curves"), help="only one of the parts")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of part curves")
    options = parser.parse_args()
    quiet_progress_bars()
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    print(f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        differs = options.part != "curves" and not compare_gradients(Path(name))
        if options.part != "gradients":
            compare_curves(Path(name), options.lr)
    raise SystemExit(int(differs))


def pairs(seed: int, *, with_margin: bool) -> list[Row]:
    """Questions with two answers of different lengths. The better one has more of the digit 7, the margin says how
    many.
    """
    generator = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(NUM_PAIRS):
        worse, better = sorted(generator.choice(5, 2, replace=False).tolist())
        texts = ["".join(generator.permutation(["7"] * n + ["1"] * generator.integers(1, 5))) for n in (better, worse)]
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in texts)
        row: Row = {"chosen": chosen, "rejected": rejected}
        row["prompt"] = [{"role": "user", "content": f"{generator.integers(100)}+{generator.integers(100)}="}]
        rows.append(row | ({"margin": 0.5 * (better - worse)} if with_margin else {}))
    return rows


def write_model(directory: Path, seed: int) -> Path:
    """A random Qwen2 of 2 layers, 32 wide, with a random head of one label."""
    tiny_model(directory, hidden_size=32, intermediate_size=64, seed=seed)
    shape = transformers.AutoConfig.from_pretrained(directory, num_labels=1, pad_token_id=0)
    torch.manual_seed(seed)
    transformers.AutoModelForSequenceClassification.from_config(shape).save_pretrained(directory)
    return directory


def rm_config(root: Path, rows: Sequence[Row], seed: int, lr: float) -> Config:
    """A run on the model and the pairs of ``root``."""
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tiny_config(
        root, "model", run={"seed": seed}, learner={"max_tokens": MAX_TOKENS},
        optimizer={"betas": [0.9, 0.999], "weight_decay": 0.0, "max_grad_norm": 1.0},
        rm={
            "data": str(root / "pairs.jsonl"), "out": str(root / "out"), "steps": NUM_STEPS, "batch_size": BATCH_SIZE,
            "lr": lr, "schedule": "constant", "max_length": MAX_TOKENS,
        },
    )  # fmt: skip


def reward_trainer(root: Path, rows: Sequence[Row], seed: int, lr: float, padding: int | None = None) -> Any:
    """TRL's trainer of the model of ``root``, which takes the rows in their order. Batches are padded to a multiple of
    ``padding``.
    """
    args = RewardConfig(
        output_dir=str(root / "trl"), report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no",
        gradient_checkpointing=False, per_device_train_batch_size=BATCH_SIZE, logging_steps=1, learning_rate=lr,
        lr_scheduler_type="constant", adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0, max_steps=NUM_STEPS,
        train_sampling_strategy="sequential", optim="adamw_torch", seed=seed, pad_to_multiple_of=padding,
    )  # fmt: skip
    trainer = RewardTrainer(
        str(root / "model"), args=args, train_dataset=datasets.Dataset.from_list(list(rows)),
        processing_class=load_tokenizer(str(root / "model")),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@dataclass(frozen=True)
class Step:
    """The loss of one step, and its gradient by every parameter, by name."""

    loss: float
    gradients: dict[str, Tensor]

    def differences(self, other: Step) -> tuple[float, float]:
        """Return the difference of the losses, and the largest difference of any two gradients."""
        assert self.gradients.keys() == other.gradients.keys(), self.gradients.keys() ^ other.gradients.keys()
        apart = [(own.double() - other.gradients[name]).abs().max().item() for name, own in self.gradients.items()]
        return abs(self.loss - other.loss), max(apart)


def compare_gradients(root: Path) -> bool:
    """Print how far loss and gradients are apart. Return whether they agree."""
    agrees = True
    for with_margin in (False, True):
        directory = root / f"gradients-{with_margin}"
        write_model(directory / "model", seed=0)
        rows = pairs(0, with_margin=with_margin)
        theirs = _trl_step(directory, rows)
        largest = max(gradient.abs().max().item() for gradient in theirs.gradients.values())
        print(
            f"{'with' if with_margin else 'without'} margin: loss of TRL {theirs.loss:.10f}, {len(theirs.gradients)} "
            f"parameters, largest gradient {largest:.2e}"
        )
        for dtype in (torch.float64, torch.float32):
            of_loss, of_gradients = _our_step(directory, rows, dtype).differences(theirs)
            print(f"  ours, layers in {dtype}: difference of losses {of_loss:.1e}, of gradients {of_gradients:.1e}")
            agrees &= dtype == torch.float32 or max(of_loss, of_gradients) < LIMIT
    return agrees


def _trl_step(root: Path, rows: Sequence[Row]) -> Step:
    trainer = reward_trainer(root, rows, 0, NO_STEP)
    model = trainer.model.double().train()
    inputs = trainer.data_collator(list(trainer.train_dataset))
    if "margin" in inputs:
        inputs["margin"] = inputs["margin"].double()
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return Step(loss.item(), {name: p.grad for name, p in model.named_parameters()})


def _our_step(root: Path, rows: Sequence[Row], dtype: torch.dtype) -> Step:
    task = RewardModel(rm_config(root, rows, 0, NO_STEP))
    given = task.load_rows(task.section.data, "rm.data")
    _check_tokens(root, rows, given)
    schedule = Schedule(kind="constant", lr=NO_STEP, warmup_updates=0, total_updates=1, min_ratio=1.0)
    engine = task.build_engine(init_ranks(task.config), schedule)
    cast(nn.Module, engine.policy.model.causal_lm).to(dtype)
    found = _Gradients(engine)
    _, metrics = task.step(cast(Any, found), given)
    return Step(metrics["loss"], found.gradients)


class _Gradients:
    """An engine in whose ``update`` the gradient is read, and no step made."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine
        self.gradients: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update(self, sequences: Sequence[Any], *, version: int) -> None:
        trained = self._engine.policy
        (micro_batches,) = trained.pack(sequences)
        assert len(micro_batches) > 1, "expected pairs in several micro-batches"
        trained.passes.accumulate(micro_batches, trained.objective, version)
        self.gradients = {name: p.grad for name, p in trained.parameters.items() if p.grad is not None}


def _check_tokens(root: Path, rows: Sequence[Row], given: Sequence[Pair]) -> None:
    """Check that both sides train on the same tokens. Ours has one more, which is not computed."""
    for row, own in zip(reward_trainer(root, rows, 0, NO_STEP).train_dataset, given, strict=True):
        for side, sequence in (("chosen_ids", own.chosen), ("rejected_ids", own.rejected)):
            assert row[side] == sequence.token_ids[:-1].tolist(), (row, sequence)


def compare_curves(root: Path, lr: float) -> None:
    """Print what both reach, seed by seed, and how far they are apart in any step."""
    print(f"{NUM_STEPS} steps of {BATCH_SIZE} of {NUM_PAIRS} pairs, learning rate {lr}")
    last: list[list[tuple[float, float]]] = []
    for seed in range(3):
        directory = root / f"seed-{seed}"
        write_model(directory / "model", seed)
        rows = pairs(seed, with_margin=False)
        own, other = _our_curve(directory, rows, seed, lr), _trl_curve(directory, rows, seed, lr)
        padded = _trl_curve(directory, rows, seed, lr, LONGER_PADDING)
        print(f"seed {seed}, after 1, {NUM_STEPS // 2} and {NUM_STEPS} steps, and largest difference in a step:")
        for figure in FIGURES:
            of_sides = [
                ", ".join(f"{values[step]:.4f}" for step in (0, NUM_STEPS // 2 - 1, NUM_STEPS - 1))
                for values in (own[figure], other[figure])
            ]
            apart = [np.abs(side[figure] - other[figure]).max() for side in (own, padded)]
            print(
                f"  {figure:8} ours {of_sides[0]}; TRL {of_sides[1]}; ours and TRL {apart[0]:.1e}, TRL and TRL with "
                f"longer padding {apart[1]:.1e}",
                flush=True,
            )
        last.append([(own[figure][-1], other[figure][-1]) for figure in FIGURES])
    errors = np.std(last, axis=0, ddof=1) / math.sqrt(len(last))
    for figure, means, error in zip(FIGURES, np.mean(last, axis=0), errors, strict=True):
        sides = [f"{name} {m:.4f} +- {e:.4f}" for name, m, e in zip(("ours", "TRL"), means, error, strict=True)]
        print(f"last {figure}, mean and standard error of {len(last)} seeds: {', '.join(sides)}")


def _our_curve(directory: Path, rows: Sequence[Row], seed: int, lr: float) -> Curve:
    run_rm(rm_config(directory, rows, seed, lr))
    lines = (directory / "run" / "rm" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return _curve([json.loads(line) for line in lines])


def _trl_curve(directory: Path, rows: Sequence[Row], seed: int, lr: float, padding: int | None = None) -> Curve:
    ordered = [row for step in range(NUM_STEPS) for row in batch_of(rows, step, batch_size=BATCH_SIZE, seed=seed)]
    trainer = reward_trainer(directory, ordered, seed, lr, padding)
    trainer.train()
    return _curve([step for step in trainer.state.log_history if "margin" in step])


def _curve(steps: Sequence[Row]) -> Curve:
    assert len(steps) == NUM_STEPS, f"expected {NUM_STEPS} steps, got {len(steps)}"
    return {figure: np.array([step[figure] for step in steps]) for figure in FIGURES}


if __name__ == "__main__":
    main()
