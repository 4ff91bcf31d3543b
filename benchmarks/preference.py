"""The preference losses against TRL's own code, and DPO's margins against ``DPOTrainer`` on the same pairs.

Part ``losses``: TRL's trainers compute their losses of given log-probabilities, and so do ours; both print value and
gradient. Part ``curves``: from the same random model, on the same batches in the same order, in float32 with plain
AdamW, three seeds; printed are the margins of both and their largest difference in any step.

    nice .venv/bin/python -m benchmarks.preference
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.cpo import CPOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.orpo import ORPOTrainer  # pyright: ignore[reportMissingImports]

from async_rl.config.offline import DpoConfig
from async_rl.data.chat import load_tokenizer, quiet_progress_bars
from async_rl.learner.losses.preference import PAIR_LOSSES, PairValues, kto_kl, kto_loss
from async_rl.learner.offline.batches import batch_of
from async_rl.learner.offline.dpo import run_dpo
from tests.learner.tiny import tiny_config, tiny_model

NUM_PAIRS, NUM_STEPS, BATCH_SIZE, LR, BETA = 64, 48, 8, 1e-3, 0.1
NUM_ANSWERS, LENGTH = 6, 9
"""Of part ``losses``: answers, and the tokens of the longest, prompt included."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("losses", "curves"), help="only one of the parts")
    part = parser.parse_args().part
    quiet_progress_bars()
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    print(f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        tiny_model(Path(name) / "model", hidden_size=32, intermediate_size=64)
        if part != "curves":
            compare_losses(Path(name))
        if part != "losses":
            compare_curves(Path(name))


def compare_losses(root: Path) -> None:
    """Print value and gradient of every loss by both, and the largest differences."""
    ours: dict[str, Callable[[Tensor], Tensor]] = {}
    theirs: dict[str, Callable[[Tensor], Tensor]] = {}
    mask, reference = _answers(), torch.linspace(-9.0, -4.0, NUM_ANSWERS, dtype=torch.float64)
    for loss in ("sigmoid", "ipo", "simpo", "orpo"):
        config = DpoConfig(loss=loss, beta=0.3)
        ours[loss] = lambda values, config=config: _our_pairs(values, mask, reference, config)
        theirs[loss] = {"simpo": _trl_simpo, "orpo": _trl_orpo}.get(
            loss, lambda values, loss=loss: _trl_dpo(values, mask, reference, root, loss)
        )
    ours["kto"] = lambda values: _our_kto(values, mask, reference)
    theirs["kto"] = lambda values: _trl_kto(values, mask, reference, root)
    generator = torch.Generator().manual_seed(0)
    shape = (2 * NUM_ANSWERS, LENGTH - 1)
    print(f"{'loss':8} {'ours':>12} {'TRL':>12} {'difference':>12} {'of gradients':>13}")
    for loss in ours:
        logprobs = -torch.rand(shape, generator=generator, dtype=torch.float64) * 2
        values = [(leaf := logprobs.clone().requires_grad_(), of[loss](leaf)) for of in (ours, theirs)]
        gradients = [torch.autograd.grad(value, leaf)[0] for leaf, value in values]
        (_, own), (_, other) = values
        difference = (gradients[0] - gradients[1]).abs().max().item()
        print(f"{loss:8} {own.item():12.8f} {other.item():12.8f} {abs(own - other).item():12.2e} {difference:13.2e}")
        assert abs(own - other) < 1e-6, loss
        assert difference < 1e-6, loss


def _answers() -> Tensor:
    """Which tokens are the answers', bool [2 answers, T]; mismatched answers follow. Lengths 2 to 7."""
    lengths = torch.arange(2, 2 + NUM_ANSWERS).repeat(2)
    return torch.arange(LENGTH - 1) >= (LENGTH - 1 - lengths)[:, None]


def _sums(logprobs: Tensor, mask: Tensor) -> Tensor:
    return (logprobs * mask).sum(1)


def _our_pairs(logprobs: Tensor, mask: Tensor, reference: Tensor, config: DpoConfig) -> Tensor:
    chosen, rejected = _sums(logprobs, mask)[:NUM_ANSWERS].chunk(2)
    lengths = mask[:NUM_ANSWERS].sum(1).double().chunk(2)
    return PAIR_LOSSES[config.loss](PairValues(chosen, rejected, *reference.chunk(2), *lengths), config).mean()


def _our_kto(logprobs: Tensor, mask: Tensor, reference: Tensor) -> Tensor:
    answers, mismatched = (_sums(logprobs, mask) - reference.repeat(2)).chunk(2)
    config = DpoConfig(loss="kto", beta=0.3, desirable_weight=1.5)
    return kto_loss(answers, torch.arange(NUM_ANSWERS) % 2 == 0, kto_kl(mismatched), config).mean()


def _as_model(logprobs: Tensor, mask: Tensor) -> Any:
    """What TRL calls as a model: its log-probabilities are given."""
    shape = logprobs.shape
    outputs = SimpleNamespace(
        log_probs=logprobs * mask, entropy=torch.zeros(shape), mean_logits=torch.zeros(shape),
        is_top1=torch.zeros(shape, dtype=torch.bool),
    )  # fmt: skip
    return lambda **_: outputs


def _inputs(mask: Tensor) -> dict[str, Tensor]:
    completion = torch.nn.functional.pad(mask, (1, 0)).long()
    return {
        "input_ids": torch.ones_like(completion), "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
    }  # fmt: skip


def _trl_dpo(logprobs: Tensor, mask: Tensor, reference: Tensor, root: Path, loss: str) -> Tensor:
    args = DPOConfig(**_arguments(root), loss_type=[loss], beta=0.3, precompute_ref_log_probs=True)
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    trainer: Any = DPOTrainer(
        str(root / "model"), args=args, train_dataset=datasets.Dataset.from_list([row]),
        processing_class=load_tokenizer(str(root / "model")),
    )  # fmt: skip
    chosen, rejected = reference.chunk(2)
    inputs = _inputs(mask[:NUM_ANSWERS]) | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return trainer._compute_loss(_as_model(logprobs[:NUM_ANSWERS], mask[:NUM_ANSWERS]), inputs, False)


def _trl_kto(logprobs: Tensor, mask: Tensor, reference: Tensor, root: Path) -> Tensor:
    args = KTOConfig(
        **_arguments(root), beta=0.3, desirable_weight=1.5, precompute_ref_log_probs=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    trainer: Any = KTOTrainer(
        str(root / "model"), args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=load_tokenizer(str(root / "model")),
    )  # fmt: skip
    own, other = mask.chunk(2)
    mismatched = {f"KL_{key}": value for key, value in _inputs(other).items()}
    labels = [bool(number % 2 == 0) for number in range(NUM_ANSWERS)]
    scores = {"ref_logps": reference, "ref_KL_logps": reference, "label": torch.tensor(labels)}
    # TRL scores the mismatched answers first, then the others.
    models = iter([_as_model(logprobs.chunk(2)[1], other), _as_model(logprobs.chunk(2)[0], own)])

    class Model:
        training = True

        def __call__(self, **arguments: Any) -> Any:
            return next(models)(**arguments)

    return trainer._compute_loss(Model(), _inputs(own) | mismatched | scores, False)


def _trl_simpo(logprobs: Tensor) -> Tensor:
    cpo: Any = CPOTrainer
    trainer = SimpleNamespace(
        alpha=0.0, beta=0.3, simpo_gamma=0.5, loss_type="simpo", label_smoothing=0.0,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )  # fmt: skip
    return cpo.cpo_loss(trainer, *_means(logprobs))[0].mean()


def _trl_orpo(logprobs: Tensor) -> Tensor:
    """TRL computes the likelihood term in its forward pass, over prompt and answer; here it is ours."""
    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device=torch.device("cpu")))
    orpo: Any = ORPOTrainer
    chosen, rejected = _means(logprobs)
    return (-chosen - orpo.odds_ratio_loss(trainer, chosen, rejected)[0]).mean()


def _means(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    mask = _answers()[:NUM_ANSWERS]
    chosen, rejected = (_sums(logprobs[:NUM_ANSWERS], mask) / mask.sum(1)).chunk(2)
    return chosen, rejected


def _arguments(root: Path) -> dict[str, Any]:
    return {
        "output_dir": str(root / "trl"), "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "gradient_checkpointing": False, "per_device_train_batch_size": BATCH_SIZE, "logging_steps": 1,
        "save_strategy": "no",
    }  # fmt: skip


def compare_curves(root: Path) -> None:
    """Print the margins that both reach, per seed, and how far they are apart."""
    print(f"{NUM_STEPS} steps of {BATCH_SIZE} of {NUM_PAIRS} pairs, lr {LR}, beta {BETA}")
    apart: list[float] = []
    last: list[tuple[float, float]] = []
    for seed in range(3):
        directory = root / f"seed-{seed}"
        tiny_model(directory / "model", hidden_size=32, intermediate_size=64, seed=seed)
        pairs = _pairs(seed)
        own, other = _our_curve(directory, pairs, seed), _trl_curve(directory, pairs, seed)
        of_margins = np.abs(own["margin"] - other["margin"]).max()
        of_losses = np.abs(own["loss"] - other["loss"]).max()
        apart.append(of_margins / np.abs(other["margin"]).max())
        last.append((own["margin"][-1], other["margin"][-1]))
        print(
            f"seed {seed}: margin after {NUM_STEPS // 2} and {NUM_STEPS} steps: ours "
            f"{own['margin'][NUM_STEPS // 2 - 1]:.4f}, {own['margin'][-1]:.4f}; TRL "
            f"{other['margin'][NUM_STEPS // 2 - 1]:.4f}, {other['margin'][-1]:.4f}; largest difference in a step: "
            f"{of_margins:.1e} (loss {of_losses:.1e})"
        )
    errors = np.std(last, axis=0, ddof=1) / math.sqrt(len(last))
    means = np.mean(last, axis=0)
    print(
        f"last margin, mean and standard error of 3 seeds: ours {means[0]:.4f} +- {errors[0]:.4f}, TRL {means[1]:.4f} "
        f"+- {errors[1]:.4f}; largest difference as a share of the largest margin: {max(apart):.1e}"
    )


def _pairs(seed: int) -> list[dict[str, str]]:
    """Sums of two numbers: the right result is chosen, a wrong one of another length is rejected."""
    generator = np.random.default_rng(seed)
    rows: list[dict[str, str]] = []
    for a, b in generator.integers(1, 100, (NUM_PAIRS, 2)).tolist():
        rows.append({"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * 7 + b)})
    return rows


def _our_curve(directory: Path, pairs: list[dict[str, str]], seed: int) -> Mapping[str, np.ndarray]:
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    config = tiny_config(
        directory,
        "model",
        run={"seed": seed},
        optimizer={"betas": [0.9, 0.999], "weight_decay": 0.0, "max_grad_norm": 1.0},
        dpo={
            "data": str(directory / "pairs.jsonl"), "out": str(directory / "out"), "steps": NUM_STEPS,
            "batch_size": BATCH_SIZE, "lr": LR, "beta": BETA, "schedule": "constant",
        },
    )  # fmt: skip
    run_dpo(config)
    lines = (directory / "run" / "dpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        "loss": np.array([row["loss"] for row in rows]),
        "margin": np.array([row["rewards/margin"] for row in rows]),
    }


def _trl_curve(directory: Path, pairs: list[dict[str, str]], seed: int) -> Mapping[str, np.ndarray]:
    ordered = [row for step in range(NUM_STEPS) for row in batch_of(pairs, step, batch_size=BATCH_SIZE, seed=seed)]
    args = DPOConfig(
        **_arguments(directory), beta=BETA, learning_rate=LR, lr_scheduler_type="constant", adam_beta2=0.999,
        weight_decay=0.0, max_grad_norm=1.0, max_steps=NUM_STEPS, train_sampling_strategy="sequential",
        optim="adamw_torch", seed=seed,
    )  # fmt: skip
    trainer: Any = DPOTrainer(
        str(directory / "model"), args=args, train_dataset=datasets.Dataset.from_list(ordered),
        processing_class=load_tokenizer(str(directory / "model")),
    )  # fmt: skip
    trainer.train()
    history = [row for row in trainer.state.log_history if "rewards/margins" in row]
    return {
        "loss": np.array([row["loss"] for row in history]),
        "margin": np.array([row["rewards/margins"] for row in history]),
    }


if __name__ == "__main__":
    main()
