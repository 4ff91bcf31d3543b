"""Steps of a learner, and versions on their way to a generator, on a fake CUDA device: ``python -m`` NUM_RANKS [CASE].

Each case loads, shards, scores, trains, copies and publishes as rank 0 of so many, whose collectives do nothing. Prints
what the failed cases raised, by name, as JSON. Not here: ``parallel.experts``, whose exchange has sizes that depend on
values; offloaded adapters, which are made on the host, and which FSDP here leaves on the fake device; the 8-bit
optimizer and 4-bit layers, whose kernels are a package's; vLLM's workers, which need vLLM.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from async_rl.config.config import Config
from async_rl.config.parallel import Layout
from async_rl.generator.hf.adapter_table import AdapterTable
from async_rl.generator.hf.causal_model import WeightTable, build_model
from async_rl.learner.engine import compilation
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.layouts import sharding
from async_rl.learner.losses import objective
from async_rl.learner.losses.own_trial import load_own_loss
from async_rl.learner.memory_plan import CHUNK_BYTES
from async_rl.learner.model import quantized
from async_rl.learner.ranks import Place, Ranks
from async_rl.learner.sequences import TrainSequence
from async_rl.weights.collective import receiver
from async_rl.weights.collective.nccl import NcclLibrary
from async_rl.weights.control import StartCollective
from async_rl.weights.manifest import digest_bytes
from async_rl.weights.receive_buffers import ReceiveBuffers
from async_rl.weights.staging import Staging
from async_rl.weights.transport import ReceiveOrder
from benchmarks.gpu_smoke.engine import OPTIONS
from benchmarks.gpu_smoke.ranks import LAYOUTS
from tests.learner.fake_cuda import FakeCuda, install
from tests.learner.model.masks import masks_around
from tests.learner.moe import moe_model
from tests.learner.tiny import random_sequences, tiny_config, tiny_model

CUDA, VOCAB, LENGTH, CHUNK_ROWS = torch.device("cuda", 0), 45, 24, 8
OWN_LOSS = f"{Path(__file__).resolve().parents[2] / 'examples' / 'own_loss.py'}:dapo"
SCORER = {"t": {"model": "m", "launch": False, "address": "tcp://127.0.0.1:1"}}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {name: sections for name, sections in OPTIONS.items() if name not in ("small-micro-batches", "lora-offloaded")}
    | {
        "float32": {"model": {"dtype": "float32"}},
        "head-in-float32": {"model": {"head_dtype": "float32"}},
        "padded": {"learner": {"packing": "padded"}},
        "kept-for-a-micro-batch": {"learner": {"reshard": "after_backward"}},
        "adapters": {"lora": {"rank": 4, "publish": "adapters"}},
        "lora-on-8-bits": {"lora": {"rank": 4, "base_bits": 8}, "weights": {"parity": "warn"}},
        "gspo": {"loss": {"preset": "gspo"}},
        "balanced-experts": {"loss": {"load_balancing_coef": 0.01}},
        "own-loss": {"loss": {"function": OWN_LOSS}},
        "anchored-with-entropy": {"loss": {"anchor": "proximal", "entropy_coef": 0.01}},
        "adamw-bf16": {"optimizer": {"name": "adamw_bf16"}},
        "muon": {"optimizer": {"name": "muon"}},
        "critic": {"loss": {"advantage": "gae"}},
        "teacher": {"distill": {"teacher": "t", "form": "loss", "top_k": 4}, "scorer": SCORER},
        "chunks": {},
        "chunks-with-masks": {"loss": {"entropy_coef": 0.01}},
    },
    4: {name: {"parallel": parallel} for name, parallel in LAYOUTS.items() if name != "experts"}
    | {
        "tensor-experts": {"parallel": {"tensor": 2}},
        "tensor-masks": {"parallel": {"tensor": 2}},
        "pipeline-tensor": {"parallel": {"pipeline": 2, "tensor": 2}},
        "pipeline-sequence-lora": {"parallel": {"pipeline": 2, "sequence": 2}, "lora": {"rank": 4}},
    },
}
"""Number of ranks -> sections of a config by the case's name, of which words say more: ``experts``, sampling ``masks``,
``chunks`` of logits.
"""
WAITS = {"chunks": (0, 1), "chunks-with-masks": (0, 1), "tensor-experts": (2, 2)}
"""Waits of the host for the device that are documented, in a micro-batch of scores and one of an update: which slopes
were predicted wrongly (``logprobs._difference``), and in two layers which tokens are an expert's (``_divide_experts``).
"""
RECEIVED = ("plain", "experts", "lora", "adapters")
"""What a generator on the device receives."""


class FirstRank(Ranks):
    """Rank 0 of several, each of which answers what this one does."""

    def scatter(self, frames: Sequence[bytes]) -> bytes:
        return frames[0]

    def gather(self, frame: bytes) -> list[bytes]:
        return [frame] * self.world_size

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


class Wire(NcclLibrary):
    """The class without NCCL: bytes are there at once."""

    def __init__(self, *_: Any) -> None:
        self.device, self._communicator = CUDA, None
        self._stream, self._copies = torch.cuda.Stream(CUDA), torch.cuda.Stream(CUDA)

    def init(self, *_: Any, **__: Any) -> None: ...

    broadcast = init

    def state(self) -> bool:
        return True


def on_device(module: nn.Module, *, real: Any, **settings: Any) -> None:
    """Shard as FSDP does, which can't make a tensor of the host a fake one in place."""
    for part in module.modules():
        tables: Any = (part._parameters, part._buffers)
        for held in tables:
            for name, tensor in held.items():
                if tensor is not None and tensor.device.type == "cpu":
                    moved = tensor.detach().to(CUDA)
                    held[name] = nn.Parameter(moved, tensor.requires_grad) if held is part._parameters else moved
    real(module, **settings)


def sequences(name: str, config: Config, num_data_ranks: int) -> list[TrainSequence]:
    """Two micro-batches of two sequences for each rank, with all columns that a loss may need."""
    floats = ("reference_logprobs", "proximal_logprobs", "value_targets", "old_values")
    columns: dict[str, Any] = {column: np.full(LENGTH, -1, np.float32) for column in floats}
    if config.distill.teacher:
        columns["teacher_logprobs"] = columns["old_values"]
        columns["teacher_top_ids"] = np.tile(np.arange(4, dtype=np.int32), (LENGTH, 1))
        columns["teacher_top_logprobs"] = np.full((LENGTH, 4), -3, np.float32)
    found = []
    for sequence in random_sequences(4 * num_data_ranks, LENGTH):
        mask = masks_around(sequence.token_ids[sequence.loss_mask], (2, 20, VOCAB), VOCAB) if "masks" in name else None
        found.append(replace(sequence, is_recorded=True, sampling_mask=mask, **columns))
    return found


def at_once(_: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Do at once what a thread would do later, so that it finds copies that have only begun."""
    done = Future[Any]()
    done.set_result(function(*arguments))
    return done


def check_waits(expected: int, device: FakeCuda, *calls: Callable[[], Any]) -> None:
    """Check how often the host waits for the device in a micro-batch, by a call with one and another with two."""
    found: list[Counter[str]] = []
    for call in calls:
        device.waits.clear()
        call()
        found.append(Counter(device.waits))
    more = found[1] - found[0]
    assert more.total() == expected, f"expected {expected} waits in a micro-batch, got {dict(more)}"


def train(name: str, config: Config, ranks: Ranks, device: FakeCuda) -> FsdpEngine:
    engine, given = FsdpEngine(config, ranks), sequences(name, config, ranks.layout.num_data_ranks)
    where = {parameter.device.type for parameter in engine.policy.model.parameters()}
    assert where == {"cpu" if config.learner.offload == "all" else "cuda"}
    in_scores, in_update = WAITS.get(name, (0, 0))
    for model in engine.models.values():
        batches = [model.pack(part)[0] for part in (given[::2], given)]
        for by_reference in {False, model is engine.policy and engine.policy.has_reference}:
            check_waits(in_scores, device, *(partial(model.score, part, by_reference=by_reference) for part in batches))
        check_waits(in_update, device, *(partial(model.update, part, 0, records=True) for part in batches))
        for tensor in model.copied_state().tensors.values():
            here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert here.all(), "a checkpoint's copy was not waited for"
    takes_flash = config.model.dtype == "bfloat16" and config.learner.packing != "padded"
    assert bool(device.num_flash) == takes_flash, f"{device.num_flash} calls of flash attention"
    return engine


def publish(engine: FsdpEngine, path: Path, config: Config, device: FakeCuda, *, is_received: bool) -> None:
    """Stage versions, receive them as NCCL brings them, and put them into a generator's model on the device."""
    staging, buffers, collective = (
        Staging(None, 4096),
        ReceiveBuffers(pinned=True),
        receiver.CollectiveReceiver("cuda:0"),
    )
    alone, start = config.lora.publishes_adapters, StartCollective(0, 0, 1, 2, b"i", 9.0, 9.0, 1000, "nccl")
    sampled = build_model(path, device=CUDA, dtype=torch.bfloat16, load_pretrained=alone)
    table = AdapterTable(sampled, config.lora) if alone else WeightTable(sampled)
    for version in (1, 2):
        staged = staging.stage("l", version, engine.gather())
        assert [digest_bytes(b.numpy().data) for b in staged.buckets] == list(staged.manifest.bucket_digests)
        for spec in staged.manifest.tensors:
            assert staged.buckets[spec.bucket][spec.offset : spec.offset + spec.size_bytes].all(), spec
        staged.retire()
        if is_received:
            ones = tuple(digest_bytes(b"\x01" * size) for size in staged.manifest.bucket_sizes)
            buffer = buffers.reserve(manifest := structs.replace(staged.manifest, bucket_digests=ones))
            collective.receive(ReceiveOrder(start, manifest, "", "", time.monotonic() + 60), buffer, buffers)
            received = buffers.commit(buffer, manifest, 0.0)
            table.check(received.tensors)
            table.replace(received.tensors)
            assert not device.copies, "memory may be reused from which the device still copies"


def run(name: str, sections: dict[str, Any], root: Path, num_ranks: int, device: FakeCuda) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": min(2, num_ranks),
    }
    path = (moe_model if "experts" in name else tiny_model)(root / "model", **shape)
    merged = {part: dict(values) for part, values in sections.items()}
    merged["model"] = {"dtype": "bfloat16"} | merged.get("model", {})
    merged["learner"] = merged.get("learner", {}) | {"nproc": num_ranks, "max_tokens": 2 * LENGTH}
    merged["sampling"] = {"max_new_tokens": LENGTH, "max_prompt_tokens": LENGTH}
    config = tiny_config(root, path, **merged)
    ranks = FirstRank(Place(0, 0, num_ranks), CUDA, dist.HashStore(), layout=Layout.of(config.parallel, num_ranks))
    chunk_bytes = (4 * VOCAB * CHUNK_ROWS,) * 2 if "chunks" in name else CHUNK_BYTES["cuda"]
    device.num_flash = 0
    with mock.patch.dict(CHUNK_BYTES, {"cuda": chunk_bytes}), device:
        engine = train(name, config, ranks, device)
        publish(engine, path, config, device, is_received=name in RECEIVED)


def main(num_ranks: int, names: Sequence[str]) -> None:
    device, failed = FakeCuda(), dict[str, str]()
    install(device, num_ranks=num_ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    stand_ins: list[tuple[Any, str, Any]] = [
        (dist, "new_group", lambda *_, real=dist.new_group, **of: real(of.get("ranks"), backend="fake")),
        (sharding, "fully_shard", partial(on_device, real=sharding.fully_shard)),
        (receiver, "make_library", Wire),
        (ThreadPoolExecutor, "submit", at_once),
        # Trials judge by values.
        (objective, "load_own_loss", lambda config, **_: load_own_loss(config)),
        (quantized, "_TRIAL_ERROR", 9.0),
        (compilation, "BACKEND", "eager"),
    ]
    for owner, name, value in stand_ins:
        setattr(owner, name, value)
    for name in names or CASES[num_ranks]:
        with tempfile.TemporaryDirectory() as directory:
            try:
                run(name, CASES[num_ranks][name], Path(directory), num_ranks, device)
            except Exception:
                failed[name] = traceback.format_exc()
    print(json.dumps(failed))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
