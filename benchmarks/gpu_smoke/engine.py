"""The learner's engine on the device: against float32 on the CPU, with its options, saved and loaded, and timed."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.config.parallel import Layout
from async_rl.errors import ConfigError
from async_rl.launch.checks.machine import check_compiler
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.engine.flops import device_peak
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.interface import UpdateCost
from async_rl.learner.memory_plan import CHUNK_BYTES, ModelShape, plan_memory
from async_rl.learner.model.logprobs import token_logprobs
from async_rl.learner.phases import Phase, PhaseClock
from async_rl.learner.ranks import Place, Ranks, init_ranks
from async_rl.learner.sequences import TrainSequence
from async_rl.sampling_mask import pack_ids
from benchmarks.gpu_smoke.case import Figure, Machine, NotRunError

VOCAB = 2048
SMALL: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
QWEN_05B: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
QWEN_15B: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
# The first moment is then the gradient itself, and nothing is clipped.
PLAIN_OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": [0.0, 0.999], "max_grad_norm": 1e9}
KL: dict[str, Any] = {"kl_coef": 0.1, "kl_placement": "loss"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small-micro-batches": {"learner": {"max_tokens": 256}},
    "recomputed": {"model": {"gradient_checkpointing": "full"}},
    "recomputed-in-part": {"model": {"gradient_checkpointing": "selective"}},
    "attention-kept": {"model": {"gradient_checkpointing": "attention"}},
    "lora": {"lora": {"rank": 8}},
    "kl-in-loss": {"loss": KL},
    "sampling-masks": {},
    "experts": {},
    "kept-for-a-step": {"learner": {"max_tokens": 256, "reshard": "none"}},
    "compiled": {"learner": {"compile": True}},
    "reference-offloaded": {"learner": {"offload": "reference"}, "loss": KL},
    "all-offloaded": {"learner": {"offload": "all"}, "loss": KL},
    "lora-offloaded": {"learner": {"offload": "all"}, "lora": {"rank": 8}},
}
"""What the engine can be told, by the name of the case: sections of a config."""
ON_DEVICE = ("reference-offloaded", "all-offloaded", "lora-offloaded")
"""Options that mean nothing on a CPU."""
DETERMINISTIC = {"sampling": {"deterministic": True}, "generator": {"backend": "transformers"}}
TOLERANCE = {"bfloat16": 0.02, "float32": 1e-4}
"""Of the whole gradient relative to float32 in one process on the CPU, and of a mean log-probability in nats."""
HEAD_TOLERANCE = 0.004
MFU_FLOOR = 0.12
"""Of a step of the shape of Qwen2.5-0.5B. Predicted are 0.15 to 0.24; below this the host is the limit."""
PLAN_TOLERANCE = 0.25
"""By how much the doctor's prediction of a step's memory may be off."""


def write_model(directory: Path, shape: Mapping[str, Any], vocab_size: int, *, has_experts: bool = False) -> Path:
    """Write a Qwen2, or a Qwen3 with experts: random weights, heads in groups of two or seven, a tied embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    settings = {**shape, "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    if has_experts:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocab_size, **settings, **experts)).save_pretrained(directory)
    else:
        Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, **settings)).save_pretrained(directory)
    return directory


def random_sequences(count: int, length: int, vocab_size: int) -> list[TrainSequence]:
    """Sequences near the policy of a random model, which is nearly uniform; every fourth shares its prompt."""
    random = np.random.default_rng(0)
    sequences = []
    prompt = random.integers(vocab_size, size=length // 4)
    for index in range(count):
        token_ids = random.integers(vocab_size, size=length - index % 7).astype(np.int32)
        if index % 4 == 0:
            token_ids[: len(prompt)] = prompt
        mask = np.arange(len(token_ids)) >= len(prompt)
        sequences.append(
            TrainSequence(
                sequence_id=index,
                token_ids=token_ids,
                loss_mask=mask,
                behavior_logprobs=(mask * -math.log(vocab_size)).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.full(len(mask), random.normal(), dtype=np.float32),
                temperature=0.9,
            )
        )
    return sequences


def with_sampling_masks(sequence: TrainSequence) -> TrainSequence:
    """``sequence`` as if each token had been sampled from the 64 tokens of its residue class."""
    step = VOCAB // 64
    ids = [np.arange(token % step, VOCAB, step) for token in sequence.token_ids[sequence.loss_mask]]
    packed = pack_ids(np.full(len(ids), 64), np.concatenate(ids).astype(np.int32), vocab_size=VOCAB)
    return replace(sequence, sampling_mask=packed)


def scored(engine: FsdpEngine, sequences: list[TrainSequence], *, has_reference: bool) -> list[TrainSequence]:
    """``sequences`` as if ``engine`` had sampled them, so that no rounding error moves a ratio across a clip bound."""
    scores = engine.score(sequences, of="policy")
    reference = engine.score(sequences, of="reference") if has_reference else {}
    found = []
    for sequence in sequences:
        behavior, of_reference = (np.zeros(len(sequence.token_ids), dtype=np.float32) for _ in range(2))
        behavior[sequence.loss_mask] = scores[sequence.sequence_id]
        if has_reference:
            of_reference[sequence.loss_mask] = reference[sequence.sequence_id]
            sequence = replace(sequence, reference_logprobs=of_reference)
        found.append(replace(sequence, behavior_logprobs=behavior))
    return found


def config_of(machine: Machine, path: Path, dtype: str, sections: Mapping[str, Any]) -> Config:
    raw: dict[str, Any] = {
        **sections,
        "run": {"dir": str(machine.directory / "run")},
        "model": {"path": str(path), "dtype": dtype} | sections.get("model", {}),
        "optimizer": PLAIN_OPTIMIZER,
    }
    return parse_config(raw, "the smoke test's config")


def on_cpu(config: Config) -> FsdpEngine:
    """The engine on the CPU, whatever devices there are."""
    return FsdpEngine(config, Ranks(Place.from_environment(), torch.device("cpu"), None))


def gradient(engine: FsdpEngine, sequences: list[TrainSequence], directory: Path) -> Tensor:
    """Make a step, and return its whole gradient, float32 [parameters]."""
    stats = engine.update(sequences, version=0)
    assert stats.stepped, f"expected a step, got none: {stats.reason}"
    directory.mkdir()
    engine.save(directory, {})
    return first_moments(directory)


def first_moments(directory: Path) -> Tensor:
    """Return those of all parameters in a checkpoint: with ``PLAIN_OPTIMIZER`` the last gradient."""
    tensors = load_tensors(directory, OPTIMIZER)
    return torch.cat([tensors[n].reshape(-1).float() for n in sorted(tensors) if n.startswith("exp_avg.")])


def check_option(name: str, machine: Machine) -> str:
    """Compare a step and scores on the device with float32 on the CPU, with one of the engine's options.

    A checkpoint must then restore the engine exactly.

    Raises:
        NotRunError: the option needs a compiler, and there is none.
    """
    sections = OPTIONS[name]
    try:
        list(check_compiler(config_of(machine, machine.directory, machine.dtype, sections)))
    except ConfigError as reason:
        raise NotRunError(str(reason)) from reason
    model = write_model(machine.directory / "model", SMALL, VOCAB, has_experts=name == "experts")
    sequences = random_sequences(8, 96, VOCAB)
    if name == "sampling-masks":
        sequences = [with_sampling_masks(s) for s in sequences]
    # [learner] changes no value, and some of it means nothing on a CPU.
    of_cpu = {section: values for section, values in sections.items() if section != "learner"}
    exact_engine = on_cpu(config_of(machine, model, "float32", of_cpu))
    config = config_of(machine, model, machine.dtype, sections)
    ranks = init_ranks(config)
    engine = FsdpEngine(config, ranks)
    engine.self_test()
    sequences = scored(exact_engine, sequences, has_reference="loss" in sections)
    tolerance = TOLERANCE[machine.dtype]
    wanted, got = (each.score(sequences, of="policy") for each in (exact_engine, engine))
    off = max(float(np.abs(wanted[i] - got[i]).mean()) for i in wanted)
    assert off < tolerance, f"expected log-probabilities within {tolerance}, got {off:.2g}"
    exact = gradient(exact_engine, sequences, machine.directory / "exact")
    found = gradient(engine, sequences, machine.directory / "found")
    error = float((exact - found).norm() / exact.norm())
    machine.figures["error of the gradient"] = Figure(error, "", f"below {tolerance}")
    assert error < tolerance, f"expected an error of the gradient below {tolerance}, got {error:.2g}"
    again = FsdpEngine(config, ranks)
    again.load(machine.directory / "found")
    for (tensor_name, left), (_, right) in zip(list(engine.gather()), list(again.gather()), strict=True):
        assert torch.equal(left, right), f"{tensor_name} differs after save and load"
    return f"against float32 on the CPU: log-probabilities within {off:.1g}, gradient within {error:.1g}"


def check_deterministic(machine: Machine) -> str:
    """Make the same two steps twice with ``sampling.deterministic``: every weight must have the same bits."""
    model = write_model(machine.directory / "model", SMALL, VOCAB)
    config = config_of(machine, model, machine.dtype, DETERMINISTIC)
    ranks = init_ranks(config)
    sequences = random_sequences(8, 96, VOCAB)
    weights: list[dict[str, Tensor]] = []
    for _ in range(2):
        engine = FsdpEngine(config, ranks)
        for version in range(2):
            engine.update(sequences, version=version)
        weights.append({name: tensor.clone() for name, tensor in engine.gather()})
    differing = [name for name, tensor in weights[0].items() if not torch.equal(tensor, weights[1][name])]
    assert not differing, f"expected the same bits after two steps, but {differing[:3]} differ"
    return f"two steps made twice: {len(weights[0])} tensors with the same bits"


def check_no_sync(machine: Machine) -> str:
    """Count where the host waits for the device in the forward and backward passes of a whole step.

    There may be none. Where the logits of a micro-batch don't fit into one chunk there may be one wait, for which
    chunks are computed again (``logprobs._difference``).
    """
    model = write_model(machine.directory / "model", SMALL, VOCAB)
    config = config_of(machine, model, machine.dtype, {"learner": {"max_tokens": 1024}})
    engine = FsdpEngine(config, init_ranks(config))
    sequences = random_sequences(32, 96, VOCAB)
    num_micro_batches = len(engine.policy.pack(sequences)[0])
    engine.update(sequences, version=0)  # kernels are loaded and memory is reserved, which waits
    found = []
    for num_chunks, chunk_bytes in ((1, CHUNK_BYTES[machine.device.type][0]), (8, 4 * VOCAB * 128)):
        with (
            mock.patch.dict(CHUNK_BYTES, {machine.device.type: (chunk_bytes, chunk_bytes)}),
            waits_in_passes() as waits,
        ):
            engine.update(sequences, version=0)
        allowed = 0 if num_chunks == 1 else num_micro_batches
        assert len(waits) <= allowed, f"expected at most {allowed} waits with {num_chunks} chunks, got {Counter(waits)}"
        found.append(len(waits))
    return f"waits for the device in {num_micro_batches} micro-batches: {found[0]}; {found[1]} with chunks of logits"


@contextmanager
def waits_in_passes() -> Iterator[list[str]]:
    """Return the places in the source that wait in forward and backward passes, while the ``with`` block runs. torch
    says where it waits.
    """
    waits: list[str] = []
    timed = PhaseClock.phase

    @contextmanager
    def watched(clock: PhaseClock, name: Phase) -> Iterator[None]:
        with timed(clock, name), _waits(waits) if name in ("forward", "backward") else nullcontext():
            yield

    with mock.patch.object(PhaseClock, "phase", watched):
        yield waits


@contextmanager
def _waits(waits: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits += [f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]


def check_head(machine: Machine) -> str:
    """Compare the gradient of a bfloat16 head over 74 chunks with float32, and report the peak memory."""
    tokens, width, vocab = (32768, 896, 151936) if machine.has_cuda else (74 * 16, 64, 512)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=machine.device).bfloat16()
    head = nn.Linear(width, vocab, bias=False, device=machine.device).bfloat16()
    targets = torch.randint(vocab, (tokens,), device=machine.device)
    temperatures = torch.ones(tokens, device=machine.device)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = head.weight.detach().to(dtype)
        one = nn.Linear(width, vocab, bias=False, device="meta")
        one.weight = nn.Parameter(weight)
        chunk_bytes = -(-tokens // 74) * 4 * vocab
        if machine.has_cuda:
            torch.cuda.reset_peak_memory_stats()
        out = token_logprobs(hidden.to(dtype), one, targets, temperatures, chunk_bytes=chunk_bytes)
        (found,) = torch.autograd.grad(out.logprobs.sum(), one.weight)
        gradients.append(found.float())
        del out, found
    error = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    machine.figures["error"] = Figure(error, "", f"below {HEAD_TOLERANCE}")
    assert error < HEAD_TOLERANCE, f"expected an error below {HEAD_TOLERANCE}, got {error:.4f}"
    peak = f", peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if machine.has_cuda else ""
    return f"74 chunks, vocabulary {vocab}: error {error:.4f}{peak}"


def check_throughput(machine: Machine) -> str:
    """Time optimizer steps of the shape of Qwen2.5-0.5B: tokens per second and model FLOPs utilisation.

    ``StepFlops`` counts the operations, attention included.
    """
    shape, vocab, count = (QWEN_05B, 151936, 64) if machine.has_cuda else (SMALL, VOCAB, 1)
    model = write_model(machine.directory / "model", shape, vocab)
    config = config_of(machine, model, machine.dtype, {"learner": {"max_tokens": 16384}})
    engine = FsdpEngine(config, init_ranks(config))
    sequences = random_sequences(count, 1024 if machine.has_cuda else 64, vocab)
    num_tokens = sum(len(s.token_ids) for s in sequences)
    engine.update(sequences, version=0)
    start = time.perf_counter()
    costs = [engine.update(sequences, version=version).cost for version in (1, 2)]
    seconds = time.perf_counter() - start
    rate = 2 * num_tokens / seconds
    flops = sum(cost.flops for cost in costs if cost is not None) / seconds
    machine.figures["step"] = Figure(seconds / 2, "s")
    peak = device_peak(machine.device, torch.bfloat16)
    used = f"{flops / 1e12:.2f} TFLOP/s" if peak is None else f"{flops / peak:.0%} MFU"
    machine.figures["FLOP/s"] = Figure(flops, "", "" if peak is None else f"above {MFU_FLOOR * peak:.3g}")
    assert peak is None or flops / peak > MFU_FLOOR, f"expected an MFU above {MFU_FLOOR:.0%}, got {flops / peak:.0%}"
    what = "the shape of Qwen2.5-0.5B, 1,024 tokens a sequence" if machine.has_cuda else "a tiny model"
    return f"{what}: {rate:,.0f} tokens/s, {used}{_compared_with_plan(machine, config, costs)}"


def _compared_with_plan(machine: Machine, config: Config, costs: Sequence[UpdateCost | None]) -> str:
    """Compare the device's peak memory with what the doctor predicts for such a step."""
    if not machine.has_cuda:
        return ""
    shape = ModelShape.of(json.loads((machine.directory / "model" / "config.json").read_text()))
    planned = plan_memory(shape, config, Layout(shards=1), device="cuda").total
    peak = max(cost.peak_memory_bytes for cost in costs if cost is not None)
    off = abs(peak / planned - 1)
    machine.figures["peak memory over plan"] = Figure(peak / planned, "", f"1 +- {PLAN_TOLERANCE}")
    assert off < PLAN_TOLERANCE, f"expected a peak near {planned / 1e9:.1f} GB, as planned, got {peak / 1e9:.1f}"
    return f", peak {peak / 1e9:.1f} GB of {planned / 1e9:.1f} planned"
