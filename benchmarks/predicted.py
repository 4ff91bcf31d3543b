"""Predicts, without a GPU, what a learner with H100s takes: ``python -m benchmarks.predicted [SHAPE ...]``.

A micro-batch of the real learner runs on fake tensors: shapes only, no values. Every kernel that torch would start
costs the longest of its bytes, its operations, and ``LAUNCH_S``, by the rates of ``async_rl.learner.cards``. The
doctor's prediction has the same rates; a test compares them. Copies and collectives of FSDP are left out. Memory is the
doctor's prediction. A version has the product's own layout and takes the seconds of ``link_model``. ``--parts`` prints
where a micro-batch's time goes instead, ``--versions`` what versions cost a step.
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
from async_rl.launch.checks.prediction import version_seconds
from async_rl.learner import memory_plan
from async_rl.learner.cards import CARDS, COMPUTED, COPIED, NVLINK
from async_rl.learner.data.packing import pack
from async_rl.learner.engine.flops import StepFlops
from async_rl.learner.losses.objective import policy_objective
from async_rl.learner.memory_plan import ModelShape, plan_memory
from async_rl.learner.model import attention, logprobs
from async_rl.learner.model.policy_model import PolicyModel, to_device
from async_rl.learner.model.recomputation import recompute
from async_rl.learner.sequences import TrainSequence
from async_rl.weights.manifest import Layout as VersionLayout
from async_rl.weights.manifest import LayoutPlan
from benchmarks.link_model import CHUNK_BYTES, simulated_s
from benchmarks.memory_table import MODELS

CARD = next(card for card in CARDS if card.words == ("H100",))
LAUNCH_S = 2.5e-6
"""Seconds of the smallest kernel."""
FLASH = dict(zip(("forward", "backward"), CARD.attended_per_s(), strict=True))
"""Operations/s of flash attention."""

_RANKS_PER_HOST, _STEP_MICRO_BATCHES = 8, 64


class Shape(NamedTuple):
    """A model, by its config.json, and how it is trained: on so many devices, with so much recomputed."""

    config: Mapping[str, Any]
    num_ranks: int
    checkpointing: str

    @property
    def model(self) -> ModelShape:
        return ModelShape.of(self.config)


SHAPES = {
    "0.5B": Shape(MODELS["Qwen2.5 0.5B"], 1, "none"),
    "1.5B": Shape(MODELS["Qwen2.5 1.5B"], 1, "selective"),
    "4B": Shape(MODELS["Qwen3 4B"], 8, "full"),
    "7B": Shape(MODELS["Qwen2.5 7B"], 8, "full"),
    "32B": Shape(MODELS["Qwen2.5 32B"], 16, "full"),
    "70B": Shape(MODELS["Llama 3 70B"], 64, "full"),
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


class PartTimes(NamedTuple):
    """Seconds of a micro-batch: matrix products, attention and all other kernels of the trunk and of the head.

    ``trunk_fused`` is the least that the others of the trunk would take as compiled kernels: see ``fused_s``.
    """

    trunk_products: float
    attention: float
    trunk_others: float
    trunk_fused: float
    head_products: float
    head_others: float
    whole: float


class Meter(TorchDispatchMode):
    """Adds up what the kernels of each part would take, in all and those of matrix products and of attention.

    ``lengths`` are those of the micro-batch's sequences.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.part, self._lengths = "trunk", lengths
        self.seconds: dict[str, float] = defaultdict(float)
        self.of_products: dict[str, float] = defaultdict(float)
        self.of_attention = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        ins, outs = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor)] for tree in ((args, kwargs), out)
        )
        shares = {_storage(tensor) for tensor in ins}
        is_view = func.is_view or (bool(outs) and not func._schema.is_mutable and {_storage(t) for t in outs} <= shares)
        if (ins or outs) and not is_view and func.namespace != "prim" and "empty" not in func._schema.name:
            written = _written_only(func, args, kwargs or {})
            read = [tensor for tensor in ins if not any(tensor is other for other in written)]
            seconds = self._seconds(func, args, kwargs or {}, out, [*read, *outs])
            self.seconds[self.part] += seconds
            if _is_attention(func._schema.name):
                self.of_attention += seconds
            elif func._overloadpacket in flop_registry:
                self.of_products[self.part] += seconds
        return out

    def _seconds(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: Sequence[Tensor]) -> float:
        name, rate, operations = func._schema.name, COMPUTED * CARD.peak, 0.0
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if _is_attention(name):
            heads, width = tensors[0].shape[-2:]
            way = "backward" if "backward" in name else "forward"
            rate, per_pair = FLASH[way], {"forward": 4, "backward": 10}[way] * heads * width
            operations = per_pair * sum(length**2 / 2 for length in self._lengths)
        elif func._overloadpacket in flop_registry:
            operations = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        elif any(word in name for word in ("embedding", "index_select", "gather")):
            moved = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(out))  # reads a few rows
        elif "scatter" in name:
            moved = sum(t.numel() * t.element_size() for t in tensors if t is not args[0] and t is not out)
            moved += args[2].numel() * args[0].element_size()  # writes as many elements as there are indices
        return max(moved / (COPIED * CARD.bandwidth), operations / rate, LAUNCH_S)


def _written_only(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that the kernel writes and does not read: those for results, and the target of a copy."""
    if "copy_" in func._schema.name:
        return [args[0]]
    return [kwargs[argument.name] for argument in func._schema.arguments if argument.is_out]


def _is_attention(name: str) -> bool:
    return "varlen" in name or "flash" in name


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def predict(shape: Shape, *, max_tokens: int = 16384, length: int = 1024) -> Prediction:
    """Predict for micro-batches of ``max_tokens`` in sequences of ``length``, 128 tokens of each a prompt."""
    config = _config(shape, max_tokens)
    meter, flops = _micro_batch(shape, config, length)
    whole_s = sum(meter.seconds.values())
    plan = plan_memory(shape.model, config, Layout(shards=shape.num_ranks))
    version, number = version_layout(shape), shape.model.num_parameters
    return Prediction(
        micro_batch_s=whole_s,
        mfu=flops / whole_s / CARD.peak,
        head_share=meter.seconds["head"] / whole_s,
        peak_bytes=plan.total,
        version_bytes=version.size_bytes,
        version_s=simulated_s(version.bucket_sizes, NVLINK),
        pause_s=sum(pause_parts(shape)),
        host_bytes=2 * version.size_bytes + 12 * number,  # staged twice; weights and AdamW's moments of a checkpoint
    )


def pause_parts(shape: Shape, num_hosts: int = 1) -> tuple[float, float]:
    """Return the seconds of a version's gather, and of copies to the host and digests, which run beside each other.

    ``num_hosts``: so many hosts share the latter. Today it is one.
    """
    gather, copy = version_seconds(version_layout(shape).size_bytes, shape.num_ranks)
    return gather, copy / num_hosts


def predict_parts(shape: Shape, *, max_tokens: int = 16384, length: int = 1024) -> PartTimes:
    """Predict where the time of such a micro-batch goes."""
    meter, _ = _micro_batch(shape, _config(shape, max_tokens), length)
    products = meter.of_products
    return PartTimes(
        trunk_products=products["trunk"],
        attention=meter.of_attention,
        trunk_others=meter.seconds["trunk"] - products["trunk"] - meter.of_attention,
        trunk_fused=fused_s(shape, max_tokens),
        head_products=products["head"],
        head_others=meter.seconds["head"] - products["head"],
        whole=sum(meter.seconds.values()),
    )


def fused_s(shape: Shape, num_tokens: int) -> float:
    """Return the seconds of the trunk's other kernels if those between two products or attention are a single one, and
    nothing is recomputed: then each tensor that they need from elsewhere is read once, and each result written once.

    Of each token and layer, forward: two norms with the addition before them (2 reads, 2 writes of the width each), the
    rotation of queries and keys, and the MLP's activation (2 reads, 1 write). Backward: the norms (1 write; they read
    their input, the residual's gradient, and 3 or 2 gradients of the products behind them), the rotation, the
    activation (3 reads, 2 writes), and the sums of the gradients for three biases.
    """
    model = shape.model
    forward = 8 * model.width + 2 * (model.queries + model.keys) + 3 * model.mlp
    backward = 11 * model.width + 2 * (model.queries + model.keys) + 5 * model.mlp + model.queries + 2 * model.keys
    return 2 * (forward + backward) * model.num_layers * num_tokens / (COPIED * CARD.bandwidth)


def _config(shape: Shape, max_tokens: int) -> Config:
    raw = {
        "run": {"dir": "runs/predicted"},
        "model": {"path": "model", "dtype": "bfloat16", "gradient_checkpointing": shape.checkpointing},
        "learner": {"max_tokens": max_tokens, "nproc": shape.num_ranks},
    }
    return parse_config(raw, "the prediction's config")


def _micro_batch(shape: Shape, config: Config, length: int) -> tuple[Meter, float]:
    """Return the times of the trunk and of the head, and the operations that a micro-batch must compute."""
    count = config.learner.max_tokens // length
    (micro_batches,) = pack(
        _sequences(count, length, shape.model.vocab), max_tokens=config.learner.max_tokens, num_ranks=1
    )
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
    return meter, flops


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
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape.config), dtype=torch.bfloat16)


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
    plan, model = LayoutPlan(CHUNK_BYTES), shape.model
    plan.place("embedding", "bfloat16", (model.vocab, model.width))
    square, narrow, up = (model.queries, model.width), (model.keys, model.width), (model.mlp, model.width)
    for layer in range(model.num_layers):
        for index, size in enumerate((square, square[::-1], narrow, narrow, up, up, up[::-1])):
            plan.place(f"{layer}.{index}", "bfloat16", size)
    if not model.is_tied:
        plan.place("head", "bfloat16", (model.vocab, model.width))
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


def parts_table(names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the table of ``--parts``, in Markdown, in milliseconds."""
    columns = ("trunk products", "attention", "others", "others if fused", "head products", "others", "all")
    yield f"| model | recomputed | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 2) + "|"
    for name in names:
        for how in ("none", "selective", "full"):
            found = predict_parts(SHAPES[name]._replace(checkpointing=how))
            yield f"| {name} | {how} | {' | '.join(f'{1e3 * seconds:.0f}' for seconds in found)} |"


def versions_table(names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the table of ``--versions``, in Markdown, in seconds."""
    links = (10, 25, 50)
    columns = ("hosts", "step", "gather", "copy, digests", "pause", "of the step", "if hosts share it")
    yield f"| model | {' | '.join((*columns, *(f'over {link} GB/s' for link in links)))} |"
    yield "|---" * (len(columns) + len(links) + 1) + "|"
    for name in names:
        shape = SHAPES[name]
        hosts = -(-shape.num_ranks // _RANKS_PER_HOST)
        step_s = predict(shape).micro_batch_s * _STEP_MICRO_BATCHES / shape.num_ranks
        pause, shared = pause_parts(shape), sum(pause_parts(shape, hosts))
        sizes = version_layout(shape).bucket_sizes
        over = " | ".join(f"{simulated_s(sizes, link * 1e9):.2f}" for link in links)
        yield (
            f"| {name} | {hosts} | {step_s:.1f} | {pause[0]:.2f} | {pause[1]:.2f} | {sum(pause):.2f} | "
            f"{sum(pause) / step_s:.0%} | {shared:.2f} | {over} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all if left out")
    parser.add_argument("--parts", action="store_true", help="milliseconds of products, attention and all the rest")
    parser.add_argument(
        "--versions", action="store_true", help="seconds of versions, beside a step of a million tokens"
    )
    options = parser.parse_args()
    names = options.shapes or list(SHAPES)
    if unknown := set(names) - SHAPES.keys():
        parser.error(f"expected shapes of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    rows = parts_table if options.parts else versions_table if options.versions else table
    for line in rows(names):
        print(line, flush=True)


if __name__ == "__main__":
    main()
