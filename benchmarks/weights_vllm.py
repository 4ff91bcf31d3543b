"""The table ``vllm`` of ``benchmarks.weights``: how long a version pauses vLLM, and how fast gloo brings it there.

The pause is what ``VllmBackend.activate`` returns: from the request to stop decoding to the answer that it goes on.
Sequences run meanwhile. It is compared with a memory copy of the version's bytes.

A broadcast into idle workers lasts from ``Publisher.publish`` until all workers of the generator have the version and
have compared its digests. It is compared with a bare broadcast to as many processes.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from async_rl.config.loading import parse_config
from async_rl.queue.messages import Announcement
from async_rl.records import Lease, Prompt, Sampling
from async_rl.weights.channel.engine_ranks import HeldByEngine
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.staging import Staging
from benchmarks.weights_raw import BUCKET_BYTES, DEADLINE_S, BareGloo, MemoryCopy, goal

NUM_LAYERS = 4
HEAD_SIZE = 64
NUM_SEQUENCES = 8
NUM_TOKENS = 256
SMALLEST_GOAL_MB = 100
GOAL = 0.75


@dataclass(frozen=True, slots=True)
class _Round:
    """Seconds of one version's pause, of the whole call of ``activate``, and of a memory copy."""

    pause: float
    activate: float
    copy: float


def vllm_table(sizes_mb: Sequence[int], num_rounds: int) -> None:
    print("\npause of vLLM by a version, beside a memory copy of the same bytes")
    if find_spec("vllm") is None:
        print(
            "  left out: vLLM is not installed here. `make test-vllm` makes an environment with its CPU build; then\n"
            "  .venv-vllm/bin/python -m benchmarks.weights --tables vllm (docs/vllm.md)"
        )
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print(
        f"{'MB':>8s} {'after update':13s}{'pause s':>9s}{'worst':>9s}{'copy s':>9s}{'ratio':>8s}{'activate s':>12s}",
        flush=True,
    )
    for size_mb in sizes_mb:
        for after_update in ("keep", "recompute"):
            _print_row(after_update, *_rounds(size_mb, num_rounds, after_update))
    print(f"\ngloo into idle workers of vLLM\n{'MB':>8s}{'workers':>9s}{'gloo s':>9s}{'bare s':>9s}{'ratio':>8s}")
    for size_mb in (size for size in sizes_mb if size >= SMALLEST_GOAL_MB):
        for num_workers in (1, 2):
            _broadcast_row(size_mb, num_workers, num_rounds)


def _print_row(after_update: str, size_bytes: int, rounds: Sequence[_Round]) -> None:
    pause, copy = median(one.pause for one in rounds), median(one.copy for one in rounds)
    print(
        f"{size_bytes / 1e6:8.1f} {after_update:13s}{pause:9.4f}{max(one.pause for one in rounds):9.4f}{copy:9.4f}"
        f"{median(one.pause / one.copy for one in rounds):8.1f}{median(one.activate for one in rounds):12.4f}",
        flush=True,
    )


def _rounds(size_mb: int, num_rounds: int, after_update: str) -> tuple[int, list[_Round]]:
    """Bytes of a version, and the rounds."""
    from async_rl.generator.vllm.backend import VllmBackend

    with tempfile.TemporaryDirectory() as directory:
        model = _write_model(Path(directory), size_mb)
        weights = [{name: torch.randn_like(p) * 0.02 for name, p in model.named_parameters()} for _ in range(2)]
        size_bytes = sum(tensor.nbytes for tensor in weights[0].values())
        backend = VllmBackend.from_files(Path(directory), _config(directory, after_update), device="cpu")
        rounds: list[_Round] = []
        with closing(backend), closing(MemoryCopy(size_bytes)) as copy:
            copy.once()  # its memory is touched for the first time
            backend.activate(0, weights[0])
            for version in range(1, num_rounds + 2):
                one = _round(backend, version, weights[version % 2], copy)
                if version >= 2:  # the first touches memory, too
                    rounds.append(one)
        return size_bytes, rounds


def _broadcast_row(size_mb: int, num_workers: int, num_rounds: int) -> None:
    """Broadcast versions into the workers of an engine that does nothing else, and print the row."""
    from async_rl.generator.vllm.backend import VllmBackend

    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = _write_model(Path(directory), size_mb)
        weights = [{name: torch.randn_like(p) * 0.02 for name, p in model.named_parameters()} for _ in range(2)]
        size_bytes = sum(tensor.nbytes for tensor in weights[0].values())
        config = _config(directory, "keep", num_workers)
        backend = stack.enter_context(closing(VllmBackend.from_files(Path(directory), config, device="cpu")))
        publisher = stack.enter_context(closing(Publisher("127.0.0.1", deadline_s=DEADLINE_S, insecure=False)))
        assert publisher.wait_for_collective(DEADLINE_S), "the process that broadcasts weights did not start"
        receiver = stack.enter_context(closing(Receiver("vllm", insecure=False, engine=backend.ranks)))
        bare = stack.enter_context(closing(BareGloo(size_bytes, num_workers)))
        staging = Staging(None, BUCKET_BYTES, deadline_s=DEADLINE_S)
        ours: list[float] = []
        limit: list[float] = []
        for version in range(num_rounds + 3):
            staged = staging.stage("benchmark", version, iter(weights[version % 2].items()))
            start = time.perf_counter()
            publisher.publish(staged)
            if version == 0:
                receiver.follow(Announcement("benchmark", 0, staged.manifest.digest, publisher.address))
            while (received := receiver.poll()) is None or received.version != version:
                assert not receiver.error, receiver.error
                receiver.wait(1.0)
            took = time.perf_counter() - start
            backend.activate(version, received.tensors)
            receiver.activated(received)
            assert publisher.wait(version, DEADLINE_S, num_members=1)
            if version >= 3:  # the first is pulled; then buffers are touched for the first time
                assert isinstance(received.tensors, HeldByEngine), "expected a broadcast into the workers, got a pull"
                ours.append(took)
                limit.append(bare.once())
    ratio = median(limit) / median(ours)
    print(f"{size_bytes / 1e6:8.1f}{num_workers:9d}{median(ours):9.4f}{median(limit):9.4f}{ratio:8.2f}", flush=True)
    goal(f"gloo into {num_workers} idle workers of vLLM over a bare broadcast", ratio, GOAL)


def _round(backend: Any, version: int, weights: dict[str, Any], copy: MemoryCopy) -> _Round:
    """Activate a version while sequences run in all slots."""
    enough = backend.num_tokens + NUM_SEQUENCES * 4
    while backend.num_tokens < enough:
        while backend.num_running < NUM_SEQUENCES:
            prompt = Prompt(version, version, 0, (), {})
            sampling = Sampling(1.0, 1.0, 0, NUM_TOKENS, 16, ())
            lease = Lease(f"{time.monotonic_ns()}", "train", prompt, NUM_SEQUENCES, sampling, "", 0, 0, 0, version)
            backend.submit(lease, np.arange(3, 11, dtype=np.int32))
        backend.step()
    start = time.perf_counter()
    pause_s = backend.activate(version, weights)
    return _Round(pause_s, time.perf_counter() - start, copy.once())


def _write_model(directory: Path, size_mb: int) -> Any:
    """A float32 Qwen2 of about this size, without weights on disk, and a tokenizer that nothing is encoded with."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    # A layer has 4 h^2 weights in its attention and 3 h (4 h) in its MLP, of 4 bytes.
    width = max(1, round(math.sqrt(size_mb * 1e6 / (NUM_LAYERS * 64)) / HEAD_SIZE)) * HEAD_SIZE
    config = Qwen2Config(
        vocab_size=64, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=width // HEAD_SIZE, num_key_value_heads=width // HEAD_SIZE, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.save_pretrained(directory)
    vocabulary = {chr(40 + number): number for number in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=chr(40))), eos_token=chr(41)
    )
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(directory)
    return model


def _config(directory: str, after_update: str, num_workers: int = 1) -> Any:
    raw = {
        "run": {"dir": f"{directory}/run"},
        "model": {"path": directory, "dtype": "float32"},
        "sampling": {"max_new_tokens": NUM_TOKENS, "max_prompt_tokens": 16},
        "generator": {
            "backend": "vllm",
            "batch_size": NUM_SEQUENCES,
            "num_threads": 1,
            "kv_after_update": after_update,
            "tensor_parallel_size": num_workers,
        },
    }
    return parse_config(raw, "the benchmark's config")
