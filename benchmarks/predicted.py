"""Predicts, without a GPU, what a learner with H100s takes: ``python -m benchmarks.predicted [SHAPE ...]``.

A micro-batch of the real learner runs on fake tensors: shapes only, no values. Every kernel that torch would start
costs the longest of its bytes by ``BANDWIDTH``, its operations by ``PRODUCTS`` or flash attention's rate, and
``LAUNCH_S``. Copies and collectives of FSDP are left out. Memory is the doctor's prediction. A version has the
product's own layout and takes the seconds of ``link_model``. All rates are assumptions about an H100 (SXM); none was
measured by us.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.config.parallel import Layout
from async_rl.learner import memory_plan
from async_rl.learner.data.packing import pack
from async_rl.learner.engine import attention, logprobs
from async_rl.learner.engine.flops import StepFlops, peak_flops_per_s
from async_rl.learner.engine.model import PolicyModel, to_device
from async_rl.learner.engine.recomputation import recompute
from async_rl.learner.losses.objective import policy_objective
from async_rl.learner.memory_plan import ModelShape, plan_memory
from async_rl.learner.sequences import TrainSequence
from async_rl.weights.manifest import Layout as VersionLayout
from async_rl.weights.manifest import LayoutPlan
from benchmarks.link_model import CHUNK_BYTES, PCIE, simulated_s

BANDWIDTH, PRODUCTS, LAUNCH_S = 2.7e12, 620e12, 2.5e-6
"""Of the device's memory in bytes/s, of matrix products in bfloat16 in operations/s; seconds of the smallest kernel."""
FLASH = {"forward": 350e12, "backward": 280e12}
"""Operations/s of flash attention."""
NVLINK, HASH_ALL = 200e9, 40e9
"""Bytes/s of a broadcast between devices, and of the digests by all threads of staging."""


class Shape(NamedTuple):
    """A model of the Qwen2 family and how it is trained: on so many devices, with so much recomputed."""

    width: int
    mlp: int
    layers: int
    heads: int
    key_heads: int
    vocab: int
    is_tied: bool
    num_ranks: int
    checkpointing: str

    def hf_config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.width, "intermediate_size": self.mlp, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.key_heads, "vocab_size": self.vocab,
            "tie_word_embeddings": self.is_tied, "max_position_embeddings": 32768,
        }  # fmt: skip


SHAPES = {
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True, 1, "none"),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True, 1, "selective"),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False, 8, "full"),
    "32B": Shape(5120, 27648, 64, 40, 8, 152064, False, 16, "full"),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one shape: seconds and MFU of a micro-batch, and the head's part of them; a rank's peak memory; size and
    seconds of a version by NCCL, and the learner's pause for it; what the learner keeps on the host. Bytes.
    """

    micro_batch_s: float
    mfu: float
    head_share: float
    peak_bytes: float
    version_bytes: float
    version_s: float
    pause_s: float
    host_bytes: float


class Meter(TorchDispatchMode):
    """Adds up what the kernels of each part would take. ``lengths`` are those of the micro-batch's sequences."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.part, self._lengths = "trunk", lengths
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        ins, outs = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor)] for tree in ((args, kwargs), out)
        )
        shares = {_storage(tensor) for tensor in ins}
        is_view = func.is_view or (bool(outs) and not func._schema.is_mutable and {_storage(t) for t in outs} <= shares)
        if (ins or outs) and not is_view and func.namespace != "prim" and "empty" not in func._schema.name:
            self.seconds[self.part] += self._seconds(func, args, kwargs or {}, out, [*ins, *outs])
        return out

    def _seconds(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: Sequence[Tensor]) -> float:
        name, rate, operations = func._schema.name, PRODUCTS, 0.0
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if "varlen" in name or "flash" in name:
            heads, width = tensors[0].shape[-2:]
            way = "backward" if "backward" in name else "forward"
            rate, per_pair = FLASH[way], {"forward": 4, "backward": 10}[way] * heads * width
            operations = per_pair * sum(length**2 / 2 for length in self._lengths)
        elif func._overloadpacket in flop_registry:
            operations = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        elif any(word in name for word in ("embedding", "index_select", "gather")):
            moved = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(out))  # reads a few rows
        return max(moved / BANDWIDTH, operations / rate, LAUNCH_S)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def predict(shape: Shape, *, max_tokens: int = 16384, length: int = 1024) -> Prediction:
    """Predict for micro-batches of ``max_tokens`` in sequences of ``length``, 128 tokens of each a prompt."""
    raw = {
        "run": {"dir": "runs/predicted"},
        "model": {"path": "model", "dtype": "bfloat16", "gradient_checkpointing": shape.checkpointing},
        "learner": {"max_tokens": max_tokens, "nproc": shape.num_ranks},
    }
    config = parse_config(raw, "the prediction's config")
    seconds, flops = _micro_batch(shape, config, length)
    whole_s = sum(seconds.values())
    peak = peak_flops_per_s("NVIDIA H100 80GB HBM3", torch.bfloat16)
    assert peak is not None
    plan = plan_memory(ModelShape.of(shape.hf_config()), config, Layout(shards=shape.num_ranks))
    version, number = version_layout(shape), ModelShape.of(shape.hf_config()).num_parameters
    gathered_s = version.size_bytes / NVLINK if shape.num_ranks > 1 else 0.0
    return Prediction(
        micro_batch_s=whole_s,
        mfu=flops / whole_s / peak,
        head_share=seconds["head"] / whole_s,
        peak_bytes=plan.total,
        version_bytes=version.size_bytes,
        version_s=simulated_s(version.bucket_sizes, NVLINK),
        pause_s=gathered_s + version.size_bytes / min(PCIE, HASH_ALL),  # digests run beside the copies
        host_bytes=2 * version.size_bytes + 12 * number,  # staged twice; weights and AdamW's moments of a checkpoint
    )


def _micro_batch(shape: Shape, config: Config, length: int) -> tuple[Mapping[str, float], float]:
    """Return the seconds of the trunk and of the head, and the operations that a micro-batch must compute."""
    count = config.learner.max_tokens // length
    (micro_batches,) = pack(_sequences(count, length, shape.vocab), max_tokens=config.learner.max_tokens, num_ranks=1)
    objective, meter = policy_objective(config), Meter([length] * count)
    with FakeTensorMode(allow_non_fake_inputs=True), _kernels_of_a_gpu():
        model = _fake_model(shape)
        recompute(model, config.model.gradient_checkpointing)
        flops, policy = StepFlops.of_model(model).of(micro_batches[0]), PolicyModel(model)
        with meter:
            batch = to_device(micro_batches[0], torch.device("cpu"))
            hidden = policy.hidden_states(batch).index_select(0, batch.predict_index)
            meter.part = "head"
            scored = logprobs.token_logprobs(
                hidden, policy.head, batch.targets, batch.temperatures,
                predict=objective.predict_slopes(batch, version=0),
            )  # fmt: skip
            hidden.register_hook(lambda gradient: setattr(meter, "part", "trunk"))
            objective(batch, scored, version=0).loss_sum.backward()
    return meter.seconds, flops


@contextmanager
def _kernels_of_a_gpu() -> Iterator[None]:
    """Let the engine take flash attention and a GPU's chunks of logits, and no value leave a fake tensor."""

    def agree(slopes: Any, predicted: Any, chunks: Any, part: Any) -> tuple[Any, list[Any]]:
        return slopes, []  # where nothing is clipped, the slopes are as predicted

    with (
        mock.patch.object(attention, "why_padded", return_value=""),
        mock.patch.object(attention.PackedLayout, "_moved", lambda self, array: _fake(array)),
        mock.patch.dict(memory_plan.CHUNK_BYTES, {"cpu": memory_plan.CHUNK_BYTES["cuda"]}),
        mock.patch.object(logprobs, "_difference", agree),
        mock.patch("torch.from_numpy", _fake),
    ):
        yield


def _fake(array: np.ndarray) -> Tensor:
    return torch.empty(array.shape, dtype=torch.tensor(array.reshape(-1)[:0]).dtype)


def _fake_model(shape: Shape) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM._from_config(Qwen2Config(**shape.hf_config()), dtype=torch.bfloat16)


def _sequences(count: int, length: int, vocab: int) -> list[TrainSequence]:
    random, mask = np.random.default_rng(0), np.arange(length) >= 128
    return [
        TrainSequence(
            sequence_id=index,
            token_ids=random.integers(vocab, size=length).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=(mask * -1.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.full(length, 0.5, np.float32),
            temperature=1.0,
        )
        for index in range(count)
    ]


def version_layout(shape: Shape) -> VersionLayout:
    """Return the layout of a version in bfloat16, as staging makes it."""
    plan, keys = LayoutPlan(CHUNK_BYTES), shape.key_heads * shape.width // shape.heads
    plan.place("embedding", "bfloat16", (shape.vocab, shape.width))
    square, up = (shape.width, shape.width), (shape.mlp, shape.width)
    for layer in range(shape.layers):
        for index, size in enumerate((square, square, (keys, shape.width), (keys, shape.width), up, up, up[::-1])):
            plan.place(f"{layer}.{index}", "bfloat16", size)
    if not shape.is_tied:
        plan.place("head", "bfloat16", (shape.vocab, shape.width))
    return plan.layout


def table(names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    columns = ("model", "devices", "recomputed", "s/micro-batch", "MFU", "head", "peak GB", "version GB", "s/version")
    yield f"| {' | '.join((*columns, 'pause s', 'host GB'))} |"
    yield "|---" * (len(columns) + 2) + "|"
    for name in names:
        shape, found = SHAPES[name], predict(SHAPES[name])
        yield (
            f"| {name} | {shape.num_ranks} | {shape.checkpointing} | {found.micro_batch_s:.2f} | {found.mfu:.0%} | "
            f"{found.head_share:.0%} | {found.peak_bytes / 1e9:.0f} | {found.version_bytes / 1e9:.1f} | "
            f"{found.version_s:.2f} | {found.pause_s:.2f} | {found.host_bytes / 1e9:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all if left out")
    names = parser.parse_args().shapes or list(SHAPES)
    if unknown := set(names) - SHAPES.keys():
        parser.error(f"expected shapes of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    for line in table(names):
        print(line, flush=True)


if __name__ == "__main__":
    main()
