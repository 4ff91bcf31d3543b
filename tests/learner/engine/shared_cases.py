"""Steps of two ranks under settings that ``layouts.py`` does not have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from async_rl.config.config import Config
from async_rl.learner.losses.batch import Slopes, TokenLogprobs
from async_rl.learner.model.logprobs import token_logprobs
from async_rl.learner.model.mask_tensors import MaskTensors
from async_rl.learner.ranks import Ranks, init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner import rank_layouts as layouts
from tests.learner.model.masks import masks_around
from tests.learner.rank_layouts import assert_same, layout_config, layout_model, layout_sequences, run_layout
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_config

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0, "sliding_window": 8}),
    "gemma3": ("Gemma3Text", {"sliding_window": 8, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
    ),
}  # fmt: skip
"""Families that a plan of transformers divides, besides those of ``layouts.py``."""
MOVES = {"preset": "grpo", "reference_every": 2}
PUBLISHED = {"lora": {"publish": "adapters"}, "generator": {"backend": "transformers"}}
VARIANTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "gemma3": ("gemma3", True, {}),
    "recomputed in part": ("qwen3_moe", True, {"model": {"gradient_checkpointing": "selective"}}),
    "a reference of its own, entropy": ("qwen2", False, {"loss": {"preset": "grpo", "entropy_coef": 0.1}}),
    "a reference that moves": ("qwen2", False, {"loss": MOVES | {"reference_decay": 0.4}}),
    "adapters, a reference that moves": ("qwen3", True, {"loss": MOVES}),
    "replayed routes": (
        "qwen3_moe", False, {"model": {"routing_replay": True}, "generator": {"backend": "transformers"}},
    ),
    "sampling masks": ("qwen2", False, {"sampling": {"top_k": 9}}),
    "one sequence for two ranks": ("qwen2_moe", False, {"model": {"gradient_checkpointing": "full"}}),
    "4 bits": ("qwen2", True, {"lora": {"base_bits": 4}, "model": {"gradient_checkpointing": "full"}}),
    "recomputed, kept for a step": (
        "qwen2", False, {"model": {"gradient_checkpointing": "full"}, "learner": {"reshard": "none"}},
    ),
    "padded, kept for a micro-batch": (
        "qwen2", False, {"learner": {"max_tokens": 60, "packing": "padded", "reshard": "after_backward"}},
    ),
    "skipped": ("qwen2", False, {"loss": {"min_ess": 0.999}}),
    "published adapters": ("qwen3", True, PUBLISHED),
    # Not where ranks divide the columns of a matrix: its means are quantized in blocks of their own there.
    "published adapters, 8-bit means": ("qwen3", True, PUBLISHED | {"optimizer": {"name": "adamw_8bit"}}),
    "adapters on 8-bit weights": ("qwen2", True, {"lora": {"base_bits": 8}, "optimizer": {"name": "muon"}}),
    # In the long tests.
    "gemma": ("gemma", False, {}),
    "gemma2": ("gemma2", False, {}),
    "mistral": ("mistral", False, {}),
    "qwen2_moe": ("qwen2_moe", False, {}),
    "recomputed": ("qwen3", False, {"model": {"gradient_checkpointing": "full"}}),
    "kept for a step": ("llama", True, {"learner": {"reshard": "none"}}),
    "compiled": ("qwen3", False, {"learner": {"compile": True, "max_tokens": 80}}),
    "adapters beside a reference": ("qwen3", True, {"loss": {"preset": "grpo", "entropy_coef": 0.1}}),
}  # fmt: skip
"""Name -> model, whether it has adapters, sections of the config."""


def variant_config(directory: Path, name: str, parallel: dict[str, int]) -> Config:
    model, lora, sections = VARIANTS[name]
    # Small steps: where a gradient is nearly 0, Adam divides rounding by itself. The first moment is the gradient.
    sections = sections | {"optimizer": {"lr": 1e-5} | sections.get("optimizer", {})}
    raw = layout_config(directory, model, parallel, lora=lora).model_dump(mode="json", exclude_unset=True)
    merged = {section: raw.get(section, {}) | sections.get(section, {}) for section in raw.keys() | sections.keys()}
    return tiny_config(directory, model, **merged)


def variant_sequences(name: str) -> list[TrainSequence]:
    """Those of ``layouts.py``; with masks each token was one of 9, or of 40; with routes these are random."""
    sequences = layout_sequences()
    if "one sequence" in name:
        return sequences[-1:]
    if "masks" in name:
        return [_masked(s) for s in sequences]
    return [_routed(s) for s in sequences] if "routes" in name else sequences


def _routed(sequence: TrainSequence) -> TrainSequence:
    """``sequence`` with routes through 4 layers, 2 of 8 experts in each."""
    generator = np.random.default_rng(sequence.sequence_id)
    ranked = generator.random((len(sequence.token_ids) - 1, 4, 8)).argsort(axis=-1)
    return replace(sequence, routes=ranked[..., :2].astype(np.uint8))


def _masked(sequence: TrainSequence) -> TrainSequence:
    targets = sequence.token_ids[sequence.loss_mask]
    return replace(sequence, sampling_mask=masks_around(targets, (9, 40), 45))


def compare_with_one_process(directory: Path, names: list[str], parallel: dict[str, int]) -> None:
    """Compare a step of two ranks, laid out as ``parallel`` says, with that of one process, under each variant."""
    for name in {VARIANTS[name][0] for name in names}:
        layout_model(directory / name, name, layouts.MODELS | MODELS)
    alone = init_ranks(variant_config(directory, names[0], {}))
    _run(directory / "alone", directory, names, {}, alone)
    (directory / "variants.json").write_text(json.dumps([names, parallel]), encoding="utf-8")
    run_ranks("variants", directory)
    for name in names:
        assert_same(directory / "two" / name, directory / "alone" / name)


def run_variants(directory: Path) -> None:
    """What each of two ranks does."""
    names, parallel = json.loads((directory / "variants.json").read_text(encoding="utf-8"))
    ranks = init_ranks(variant_config(directory, names[0], parallel))
    _run(directory / "two", directory, names, parallel, ranks)
    if "tensor" in parallel:
        check_vocabulary()
    ranks.close()


def _run(target: Path, directory: Path, names: list[str], parallel: dict[str, int], ranks: Ranks) -> None:
    for name in names:
        config = variant_config(directory, name, parallel)
        run_layout(config, ranks, target / name, sequences=variant_sequences(name))


def check_vocabulary() -> None:
    """Log-probabilities over a divided vocabulary, against the whole."""
    mesh = init_device_mesh("cpu", (2,))

    def divided(whole: nn.Linear) -> nn.Linear:
        head = nn.Linear(whole.in_features, whole.out_features, bias=whole.bias is not None)
        for name, parameter in whole.named_parameters():
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(head, name, nn.Parameter(part))
        return head

    for seed in range(12):
        _compare(divided, seed)


def _compare(divided: Any, seed: int) -> None:
    """45 tokens of 3 chunks: with caps, biases, masks, predictions that are right, wrong or absent, in two dtypes."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    whole = nn.Linear(8, 45, bias=seed % 2 == 0)
    hidden, targets = torch.randn(45, 8, generator=generator), torch.randint(45, (45,), generator=generator)
    temperatures, weights = torch.rand(45, generator=generator) + 0.5, torch.randn(45, generator=generator)
    packed = masks_around(targets.numpy(), (9, 40, 45), 45)
    masks = MaskTensors(packed.sizes, torch.from_numpy(packed.words)) if seed % 3 == 0 else None
    off = [0.0, 0.5, None][seed % 3]  # by how much the prediction is wrong, in some chunks

    def predict(place: slice, scored: TokenLogprobs) -> Slopes:
        return Slopes(weights[place] + (0.0 if place.start else off or 0.0), torch.ones_like(weights[place]))

    def gradients(head: nn.Linear) -> list[Tensor]:
        inputs = hidden.clone().requires_grad_()
        out = token_logprobs(
            inputs, head, targets, temperatures, cap=1.5 if seed % 4 == 0 else None, chunk_bytes=4 * 23 * 16,
            sampling_mask=masks, entropy_grad=True, predict=None if off is None else predict,
        )  # fmt: skip
        (out.logprobs * weights + out.entropies).sum().backward()
        found = [p.grad for p in (inputs, *head.parameters())]
        return [out.logprobs.detach(), out.entropies.detach(), *(cast_whole(g) for g in found)]

    for got, expected in zip(gradients(divided(whole)), gradients(whole), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def cast_whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
