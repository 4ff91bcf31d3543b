"""Writes a checkpoint's weights as safetensors, shard by shard, and never holds more than a shard and a batch of reads.

transformers says which names and shapes the weights have on disk: its ``revert_weight_conversion`` is applied to each
tensor by itself. ``plan_export`` tries that on tensors without memory. If the result is not what transformers makes of
all tensors at once (a file's tensor is made from several of the model's), there is no plan, and ``model.py`` writes
the whole model with ``save_pretrained``.

Called by ``model.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from async_rl.learner.checkpoints.stored_tensors import read_batches
from async_rl.output import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_SHARD_BYTES = 5_000_000_000
"""Size of a safetensors file, unless one tensor is larger."""

BATCH_BYTES = 1 << 30
"""Bytes of stored tensors that are read at a time, unless one tensor is larger."""

_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """How stored tensors become tensors on disk.

    Attributes:
        model: the model, without memory.
        sources: for each tensor of the checkpoint, in the order in which they are read, its name in the model.
        dtypes: its dtype on disk, by its name in the checkpoint.
        sizes: bytes of each tensor on disk, by its name there, in the order in which they are written.
    """

    model: PreTrainedModel
    sources: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]
    sizes: Mapping[str, int]


def plan_export(model: PreTrainedModel, stored: Sequence[str], dtype: torch.dtype) -> ExportPlan | None:
    """Plan the export of a checkpoint that holds the tensors ``stored``. None if it can't be done tensor by tensor.

    Args:
        model: the model on the meta device, its weights tied.
        stored: names of the checkpoint's tensors: all parameters and persistent buffers, tied ones once.
        dtype: the dtype of parameters on disk. Buffers keep theirs.
    """
    names = _names_on_disk(model, stored)
    if names is None:
        return None
    buffers = {name for name, _ in model.named_buffers()}
    state = model.state_dict()
    meta = {new: state[old] if old in buffers else state[old].to(dtype) for old, new in names.items()}
    expected = _reverted(model, meta)
    sizes: dict[str, int] = {}
    for name, tensor in meta.items():
        try:
            made = _reverted(model, {name: tensor})
        except Exception:  # transformers has no error of its own for a part that is missing
            return None
        for key, value in made.items():
            if key in sizes or key not in expected or expected[key].shape != value.shape:
                return None
            sizes[key] = value.nbytes
    if sizes.keys() != expected.keys():
        return None
    return ExportPlan(model, names, {old: meta[new].dtype for old, new in names.items()}, sizes)


def write_shards(
    plan: ExportPlan, checkpoint_dir: Path, target: Path, report: Report, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write config and weights of the checkpoint into the directory ``target``, with an index if there are several
    files.

    Raises:
        RunError: the checkpoint is damaged.
    """
    shards = _shards(plan.sizes, max_shard_bytes)
    _write_config(plan.model, target)
    suffixes = [f"-{number:05d}-of-{len(shards):05d}" for number in range(1, len(shards) + 1)]
    files = [_FILE.replace(".", f"{suffix}.") for suffix in suffixes] if len(shards) > 1 else [_FILE]
    ready: dict[str, Tensor] = {}
    num_written, num_parameters = 0, 0
    for name, tensor in _converted(plan, checkpoint_dir, max_batch_bytes=min(max_shard_bytes, BATCH_BYTES)):
        ready[name] = tensor.contiguous()
        num_parameters += tensor.numel()
        if len(ready) == len(shards[num_written]):  # both have the order of the plan
            report("writing the model", num_written, len(shards))
            save_file(ready, target / files[num_written], metadata={"format": "pt"})
            ready, num_written = {}, num_written + 1
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        metadata = {"total_parameters": num_parameters, "total_size": sum(plan.sizes.values())}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
        (target / f"{_FILE}.index.json").write_text(index + "\n", encoding="utf-8")


def _names_on_disk(model: PreTrainedModel, stored: Sequence[str]) -> dict[str, str] | None:
    """Return, for each stored tensor, its name in ``model`` under which transformers saves it.

    They differ where a checkpoint and transformers keep different ones of two tied names. None if it can't be told.
    """
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    dropped: set[str] = set(getattr(model, "all_tied_weights_keys", None) or {})
    groups = {name: group for group in tied.values() for name in group}
    left = set(model.state_dict())
    names: dict[str, str] = {}
    for name in stored:
        group = groups.get(name, [name])
        kept = [member for member in group if member not in dropped] if len(group) > 1 else group
        if len(kept) != 1 or not left.issuperset(group):
            return None
        left.difference_update(group)
        names[name] = kept[0]
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return None if left or ignored else names


def _reverted(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names, and in the shapes, that they have on disk."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(state))


def _converted(plan: ExportPlan, checkpoint_dir: Path, *, max_batch_bytes: int) -> Iterator[tuple[str, Tensor]]:
    for batch in read_batches(checkpoint_dir, list(plan.sources), max_bytes=max_batch_bytes):
        for name in list(batch):
            tensor = batch.pop(name).to(plan.dtypes[name])
            yield from _reverted(plan.model, {plan.sources[name]: tensor}).items()


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_config(model: Any, target: Path) -> None:
    """Write the files that ``save_pretrained`` writes in addition to the weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    if model.can_generate():
        model.generation_config.save_pretrained(target)
