"""The table of docs/scaling.md: ``python -m benchmarks.memory_table`` prints it. A test compares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.config.loading import parse_config
from async_rl.config.parallel import Layout
from async_rl.launch.checks.learner_memory import needed_bytes
from async_rl.learner.memory_plan import ModelShape, plan_memory

DEVICE_BYTES = 80e9
"""Memory of the GPUs of the table."""


def decoder(
    width: int, mlp: int, layers: int, heads: int, key_heads: int, vocab: int, *, tied: bool = False, **more: Any
) -> dict[str, Any]:
    """Return what a model's config.json says of its shape, of a Qwen2 if ``more`` does not say another."""
    return {
        "model_type": "qwen2", "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": 131072, **more,
    }  # fmt: skip


_QWEN3 = {"model_type": "qwen3", "head_dim": 128}
_EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5 0.5B": decoder(896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen2.5 1.5B": decoder(1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen2.5 3B": decoder(2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen3 4B": decoder(2560, 9728, 36, 32, 8, 151936, tied=True, **_QWEN3),
    "Qwen2.5 7B": decoder(3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5 32B": decoder(5120, 27648, 64, 40, 8, 152064),
    "Llama 3 70B": decoder(8192, 28672, 80, 64, 8, 128256),
    "Qwen3 30B-A3B": decoder(2048, 6144, 48, 32, 4, 151936, **_QWEN3 | _EXPERTS),
}

ROWS: tuple[tuple[str, Layout, int, str, str, int | None], ...] = (
    ("Qwen2.5 0.5B", Layout(), 32768, "selective", "adamw", None),
    ("Qwen2.5 1.5B", Layout(), 16384, "selective", "adamw", None),
    ("Qwen2.5 7B", Layout(), 16384, "full", "adamw", 32),
    ("Qwen2.5 7B", Layout(shards=2), 8192, "full", "adamw_8bit", None),
    ("Qwen2.5 7B", Layout(shards=4), 32768, "full", "adamw", None),
    ("Qwen2.5 7B", Layout(replicas=2, shards=8), 8192, "selective", "adamw", None),
    ("Qwen2.5 7B", Layout(shards=2, sequence=4), 32768, "full", "adamw", None),
    ("Qwen2.5 32B", Layout(shards=8), 8192, "full", "adamw_8bit", None),
    ("Qwen2.5 32B", Layout(shards=16), 16384, "full", "adamw", None),
    ("Qwen3 30B-A3B", Layout(shards=8), 32768, "full", "adamw_8bit", None),
    ("Qwen3 30B-A3B", Layout(shards=16), 32768, "full", "adamw", None),
    ("Llama 3 70B", Layout(shards=8), 16384, "full", "adamw", 32),
    ("Llama 3 70B", Layout(shards=8, sequence=4), 8192, "full", "adamw", None),
    ("Llama 3 70B", Layout(shards=16, sequence=4), 8192, "full", "adamw", None),
    ("Llama 3 70B", Layout(shards=8, tensor=8), 16384, "full", "adamw", None),
    ("Llama 3 70B", Layout(shards=4, tensor=8, pipeline=2), 16384, "full", "adamw", None),
)
"""Model, layout, ``learner.max_tokens``, ``model.gradient_checkpointing``, ``optimizer.name`` and ``lora.rank``."""


def memory(model: str, sizes: Layout, tokens: int, recompute: str, optimizer: str, rank: int | None) -> list[float]:
    """Return the bytes of weights, gradients, optimizer, gathered parameters, and activations with logits; and what a
    GPU should have.
    """
    raw: dict[str, Any] = {
        "run": {"dir": "run"},
        "model": {"path": model, "gradient_checkpointing": recompute},
        "learner": {"max_tokens": tokens},
        "optimizer": {"name": optimizer},
        "lora": {} if rank is None else {"rank": rank},
        # They must fit learner.max_tokens.
        "sampling": {"max_prompt_tokens": 1024, "max_new_tokens": 4096},
    }
    plan = plan_memory(ModelShape.of(MODELS[model]), parse_config(raw, "the table"), sizes)
    parts = [plan.weights, plan.gradients, plan.optimizer, plan.gathered, plan.activations + plan.head]
    return [*parts, needed_bytes(plan, "cuda")]


def markdown() -> str:
    """Return the table."""
    lines = [
        "| model | GPUs | layout | max_tokens | longest sequence | recomputed | optimizer | weights, gradients, state "
        "| gathered | activations, logits | GB a GPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, sizes, tokens, recompute, optimizer, rank in ROWS:
        weights, gradients, state, gathered, activations, needed = memory(
            model, sizes, tokens, recompute, optimizer, rank
        )
        name = optimizer if rank is None else f"{optimizer}, LoRA of rank {rank}"
        numbers = (weights + gradients + state, gathered, activations, needed)
        cells = (
            model, sizes.num_ranks, _layout(sizes), tokens, tokens * sizes.sequence, recompute, name,
            *(f"{number / 1e9:.1f}" for number in numbers),
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _layout(sizes: Layout) -> str:
    names = ("replicas", "shards", "sequence", "tensor", "pipeline", "experts")
    dimensions = [f"{name} {size}" for name in names if (size := getattr(sizes, name)) > 1]
    return " x ".join(dimensions) or "one rank"


if __name__ == "__main__":
    print(markdown(), end="")
