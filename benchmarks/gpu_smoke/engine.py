"""The learner's engine on the device: against float32 on the CPU, with its options, saved and loaded, and timed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.data.packing import pack
from async_rl.learner.engine.flops import device_peak
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.engine.logprobs import token_logprobs
from async_rl.learner.engine.model import PolicyModel, load_model, to_device
from async_rl.learner.losses.objective import policy_objective
from async_rl.learner.ranks import Place, Ranks, init_ranks
from async_rl.learner.sequences import TrainSequence
from async_rl.sampling_mask import pack_ids
from benchmarks.gpu_smoke.case import Machine

VOCAB = 2048
SMALL: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
QWEN_05B: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
# The first moment is then the gradient itself, and nothing is clipped.
PLAIN_OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": [0.0, 0.999], "max_grad_norm": 1e9}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small micro-batches": {"learner": {"max_tokens": 256}},
    "recomputed activations": {"model": {"gradient_checkpointing": "full"}},
    "activations recomputed in part": {"model": {"gradient_checkpointing": "selective"}},
    "LoRA": {"lora": {"rank": 8}},
    "KL in the loss": {"loss": {"kl_coef": 0.1, "kl_placement": "loss"}},
    "sampling masks": {},
    "parameters kept for a step": {"learner": {"max_tokens": 256, "reshard": "none"}},
    "reference offloaded": {"learner": {"offload": "reference"}, "loss": {"kl_coef": 0.1, "kl_placement": "loss"}},
    "everything offloaded": {"learner": {"offload": "all"}, "loss": {"kl_coef": 0.1, "kl_placement": "loss"}},
    "LoRA offloaded": {"learner": {"offload": "all"}, "lora": {"rank": 8}},
    "compiled": {"learner": {"compile": True}},
}
DETERMINISTIC = {"sampling": {"deterministic": True}, "generator": {"backend": "transformers"}}
GRADIENT_TOLERANCE, LOGPROB_TOLERANCE = 0.02, 0.02
"""Of the whole gradient relative to float32, and of a mean log-probability in nats; the parameters are bfloat16."""
HEAD_TOLERANCE = 0.004


def write_model(directory: Path, shape: Mapping[str, Any], vocab_size: int) -> Path:
    """Write a Qwen2 with random weights, heads in groups of two or seven, and a tied embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size, num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, **shape
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
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
    tensors = load_tensors(directory, OPTIMIZER)
    return torch.cat([tensors[n].reshape(-1).float() for n in sorted(tensors) if n.startswith("exp_avg.")])


def check_options(machine: Machine) -> str:
    """Compare a step and scores in bfloat16 on the device with float32 on the CPU, with each of the engine's options.

    A checkpoint must then restore the engine exactly.
    """
    model = write_model(machine.directory / "model", SMALL, VOCAB)
    plain = random_sequences(8, 96, VOCAB)
    ranks, worst = None, 0.0
    for name, sections in OPTIONS.items():
        sequences = [with_sampling_masks(s) for s in plain] if name == "sampling masks" else plain
        # [learner] changes no value, and some of it means nothing on a CPU.
        of_cpu = {section: values for section, values in sections.items() if section != "learner"}
        exact_engine = on_cpu(config_of(machine, model, "float32", of_cpu))
        config = config_of(machine, model, "bfloat16", sections)
        ranks = ranks or init_ranks(config)
        engine = FsdpEngine(config, ranks)
        engine.self_test()
        sequences = scored(exact_engine, sequences, has_reference="loss" in sections)
        _compare_scores(name, exact_engine, engine, sequences)
        exact = gradient(exact_engine, sequences, machine.directory / f"{name} exact")
        rounded = gradient(engine, sequences, machine.directory / name)
        error = float((exact - rounded).norm() / exact.norm())
        print(f"{name}: relative error of the gradient {error:.4f}")
        assert error < GRADIENT_TOLERANCE, f"{name}: expected an error below {GRADIENT_TOLERANCE}, got {error:.4f}"
        worst = max(worst, error)
        again = FsdpEngine(config, ranks)
        again.load(machine.directory / name)
        for (tensor_name, left), (_, right) in zip(list(engine.gather()), list(again.gather()), strict=True):
            assert torch.equal(left, right), f"{name}: {tensor_name} differs after save and load"
    return f"step and scores against float32 on the CPU, {len(OPTIONS)} options: largest error {worst:.4f}"


def _compare_scores(name: str, exact: FsdpEngine, rounded: FsdpEngine, sequences: list[TrainSequence]) -> None:
    wanted, got = (engine.score(sequences, of="policy") for engine in (exact, rounded))
    error = max(float(np.abs(wanted[i] - got[i]).mean()) for i in wanted)
    assert error < LOGPROB_TOLERANCE, f"{name}: expected log-probabilities within {LOGPROB_TOLERANCE}, got {error:.4f}"


def check_deterministic(machine: Machine) -> str:
    """Make the same two steps twice with ``sampling.deterministic``: every weight must have the same bits."""
    model = write_model(machine.directory / "model", SMALL, VOCAB)
    config = config_of(machine, model, "bfloat16", DETERMINISTIC)
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
    """Let torch refuse every wait of the host for the device while micro-batches run forward and backward."""
    model = write_model(machine.directory / "model", SMALL, VOCAB)
    config = config_of(machine, model, "bfloat16", {})
    policy = PolicyModel(load_model(config.model)).to(machine.device, torch.bfloat16)
    objective = policy_objective(config)
    (micro_batches,) = pack(random_sequences(32, 96, VOCAB), max_tokens=1024, num_ranks=1)

    def run() -> None:
        for micro_batch in micro_batches:
            batch = to_device(micro_batch, machine.device)
            objective(batch, policy(batch), version=0).loss_sum.backward()

    run()  # kernels are loaded and memory is reserved, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"no wait for the device in {len(micro_batches)} micro-batches"


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
    assert error < HEAD_TOLERANCE, f"expected an error below {HEAD_TOLERANCE}, got {error:.4f}"
    peak = f", peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if machine.has_cuda else ""
    return f"74 chunks, vocabulary {vocab}: error {error:.4f}{peak}"


def check_throughput(machine: Machine) -> str:
    """Time optimizer steps of the shape of Qwen2.5-0.5B: tokens per second and model FLOPs utilisation.

    ``StepFlops`` counts the operations, attention included.
    """
    shape, vocab, count = (QWEN_05B, 151936, 64) if machine.has_cuda else (SMALL, VOCAB, 1)
    model = write_model(machine.directory / "model", shape, vocab)
    config = config_of(machine, model, "bfloat16", {"learner": {"max_tokens": 16384}})
    engine = FsdpEngine(config, init_ranks(config))
    sequences = random_sequences(count, 1024 if machine.has_cuda else 64, vocab)
    num_tokens = sum(len(s.token_ids) for s in sequences)
    engine.update(sequences, version=0)
    start = time.perf_counter()
    costs = [engine.update(sequences, version=version).cost for version in (1, 2)]
    seconds = time.perf_counter() - start
    rate = 2 * num_tokens / seconds
    flops = sum(cost.flops for cost in costs if cost is not None) / seconds
    peak = device_peak(machine.device, torch.bfloat16)
    used = f"{flops / 1e12:.2f} TFLOP/s" if peak is None else f"{flops / peak:.0%} MFU"
    what = "the shape of Qwen2.5-0.5B, 1,024 tokens a sequence" if machine.has_cuda else "a tiny model"
    return f"{what}: {rate:,.0f} tokens/s, {used}"
