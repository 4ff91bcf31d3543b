"""With which settings the learner fits the memory of its devices. Called by ``device_memory``.

The prediction is that of ``learner.memory_plan``, from the config files of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from async_rl.config.config import Config
from async_rl.config.learner import Recomputation
from async_rl.config.parallel import Layout
from async_rl.data.chat import model_directory
from async_rl.learner.memory_plan import MemoryPlan, ModelShape, UnknownShapeError, plan_memory

RESERVED_BYTES = 2 << 30
"""Memory of a GPU for CUDA's context, libraries and NCCL's buffers."""
MARGIN = 1.1
"""By how much the predicted peak is raised: torch's allocator leaves gaps, and the prediction has an error."""
_SIZES = (2, 4, 8)
"""Proposed sizes of a dimension of the layout, up to the GPUs of a node."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings with which a rank fits.

    Attributes:
        sizes: of the layout.
        changes: config keys that must change, with their new values.
        plan: the memory then.
    """

    sizes: Layout
    changes: dict[str, Any]
    plan: MemoryPlan

    def __str__(self) -> str:
        keys = " ".join(f"--set {key}={value}" for key, value in self.changes.items())
        return f"{self.sizes.num_ranks} ranks {keys}".strip()


def needed_bytes(plan: MemoryPlan, device: str) -> float:
    """Return the memory that a device should have for ``plan``."""
    return plan.total * MARGIN + (RESERVED_BYTES if device == "cuda" else 0)


def propose(shape: ModelShape, config: Config, num_ranks: int, device_bytes: float, device: str) -> Proposal | None:
    """Return what makes the learner fit ``num_ranks`` devices of ``device_bytes``, with the least loss of speed.

    In this order, each with those before: gathered parameters are freed; activations are computed again, in part or in
    full; the optimizer's state is rounded; micro-batches become shorter, down to the longest sequence. Then the layout
    changes: ranks divide experts; or share sequences; or layers; or layers and sequences; or layers and stages. None:
    nothing does. On the CPU ranks share the memory, so more ranks do not help there.

    Raises:
        ConfigError: so many ranks can't be divided as ``[parallel]`` says.
    """
    reference = config.has_reference_model
    for changes in _changes(shape, config, Layout.of(config.parallel, num_ranks)):
        changed = with_changes(config, changes)
        layout = Layout.of(changed.parallel, num_ranks)
        plan = plan_memory(shape, changed, layout, device=device, has_reference=reference)
        if needed_bytes(plan, device) <= device_bytes:
            return Proposal(layout, changes, plan)
    return None


def _changes(shape: ModelShape, config: Config, layout: Layout) -> Iterator[dict[str, Any]]:
    changes: dict[str, Any] = {}
    yield dict(changes)
    steps: list[tuple[str, Any]] = [("learner.reshard", "full")]
    order = get_args(Recomputation)
    stronger = order[order.index(config.model.gradient_checkpointing) + 1 :]
    steps += [("model.gradient_checkpointing", how) for how in stronger]
    if config.optimizer.name == "adamw" and not config.lora.is_set:
        steps += [("optimizer.name", name) for name in ("adamw_bf16", "adamw_8bit")]
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    tokens = config.learner.max_tokens
    while tokens * layout.sequence // 2 >= longest:
        tokens //= 2
        steps.append(("learner.max_tokens", tokens))
    for key, value in steps:
        if key == "learner.reshard" and config.learner.reshard == value:
            continue
        changes[key] = value
        yield dict(changes)
    for sizes in _layouts(shape, layout):
        shared = sizes.get("sequence", layout.sequence) // layout.sequence
        shorter = {"learner.max_tokens": -(-tokens // shared)} if shared > 1 else {}
        yield changes | {f"parallel.{name}": size for name, size in sizes.items()} | shorter


def _layouts(shape: ModelShape, layout: Layout) -> Iterator[dict[str, int]]:
    """Yield sizes that divide the shards of ``layout``, which the model can have, by their names in ``[parallel]``."""
    free = [size for size in _SIZES if layout.shards % size == 0]
    if layout.tensor == layout.experts == 1:
        yield from ({"experts": size} for size in free if shape.num_experts and shape.num_experts % size == 0)
    yield from ({"sequence": layout.sequence * size} for size in free)
    if layout.tensor > 1 or layout.experts > 1:
        return
    counts = (shape.num_heads, shape.num_key_heads, shape.num_experts)
    tensor = [size for size in free if shape.num_heads and not any(count % size for count in counts)]
    yield from ({"tensor": size} for size in tensor)
    if not tensor:
        return
    rest = layout.shards // tensor[-1]
    further = [size for size in _SIZES if rest % size == 0]
    yield from ({"tensor": tensor[-1], "sequence": layout.sequence * size} for size in further)
    if layout.pipeline == 1:
        yield from ({"tensor": tensor[-1], "pipeline": size} for size in further if size <= shape.num_layers)


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return ``config`` with other values of the keys in ``changes``, such as ``learner.nproc``, unchecked."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def shape_of(path: str | Path) -> ModelShape:
    """Return the shape of the model at ``path``, a directory or a hub id.

    Raises:
        ModelError: there is no model at ``path`` (see ``data.chat.model_directory``).
        UnknownShapeError: it can't be read there.
    """
    directory = model_directory(path)
    try:
        return ModelShape.of(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UnknownShapeError(f"can't read {directory / 'config.json'}: {error}") from error
