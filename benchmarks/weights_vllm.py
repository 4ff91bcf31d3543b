"""The table ``vllm`` of ``benchmarks.weights``: how long a version pauses vLLM, beside a memory copy of its bytes.

The pause is what ``VllmBackend.activate`` gives: for how long vLLM's engine core was kept from running a decode step by
the two calls that a version needs, measured in that process, with sequences running. Beside it are the wall time of
``activate`` as the generator sees it, in which the engine ends the step under way; how long the version was prepared
before; and what that did to decoding: tokens a second, and the longest time without a token, of those without it.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from async_rl.config.loading import parse_config
from async_rl.records import Lease, Prompt, Sampling
from benchmarks.weights_raw import MemoryCopy, goal

NUM_LAYERS = 4
HEAD_SIZE = 64
NUM_SEQUENCES = 8
NUM_TOKENS = 256
PLAIN_S = 1.0
"""For how long decoding is timed without a preparation."""


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Over some time: tokens a second, and the longest time in which none came."""

    tokens_per_s: float
    longest_gap_s: float


@dataclass(frozen=True, slots=True)
class _Round:
    """Seconds but for the last two, which are shares of what they are without a preparation."""

    pause: float
    copy: float
    activate: float
    prepare: float
    speed: float
    gap: float


def vllm_table(sizes_mb: Sequence[int], num_rounds: int) -> None:
    print("\npause of vLLM by a version, beside a memory copy of the same bytes; decoding while a version is prepared")
    if find_spec("vllm") is None:
        print(
            "  left out: vLLM is not installed here. `make test-vllm` makes an environment with its CPU build; then\n"
            "  .venv-vllm/bin/python -m benchmarks.weights --tables vllm (docs/vllm.md)"
        )
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print(
        f"{'MB':>8s} {'after swap':10s}{'pause s':>9s}{'worst':>9s}{'copy s':>9s}{'best':>9s}{'ratio':>8s}"
        f"{'activate s':>12s}{'prepare s':>11s}{'speed':>8s}{'gap':>8s}",
        flush=True,
    )
    for size_mb in sizes_mb:
        for after_update in ("keep", "recompute"):
            _print_row(after_update, *_scheduler(size_mb, num_rounds, after_update))


def _print_row(after_update: str, size_bytes: int, scheduler: Sequence[_Round]) -> None:
    def middle(name: str) -> float:
        return median(getattr(one, name) for one in scheduler)

    ratio = median(one.pause / one.copy for one in scheduler)
    print(
        f"{size_bytes / 1e6:8.1f} {after_update:10s}{middle('pause'):9.4f}{max(one.pause for one in scheduler):9.4f}"
        f"{middle('copy'):9.4f}{min(one.copy for one in scheduler):9.4f}{ratio:8.2f}{middle('activate'):12.4f}"
        f"{middle('prepare'):11.3f}{middle('speed'):8.2f}{middle('gap'):8.2f}",
        flush=True,
    )
    goal(f"pause over a memory copy, {size_bytes / 1e6:.0f} MB, {after_update}", ratio, 2.0, at_most=True)


def _scheduler(size_mb: int, num_rounds: int, after_update: str) -> tuple[int, list[_Round]]:
    """Bytes of a version, and the scheduler."""
    from async_rl.generator.vllm.backend import VllmBackend

    with tempfile.TemporaryDirectory() as directory:
        model = _write_model(Path(directory), size_mb)
        weights = [{name: torch.randn_like(p) * 0.02 for name, p in model.named_parameters()} for _ in range(2)]
        size_bytes = sum(tensor.nbytes for tensor in weights[0].values())
        backend = VllmBackend.from_files(Path(directory), _config(directory, after_update), device="cpu")
        scheduler: list[_Round] = []
        with closing(backend), closing(MemoryCopy(size_bytes)) as copy:
            copy.once()  # its memory is touched for the first time
            backend.activate(0, weights[0])
            for version in range(1, num_rounds + 2):
                one = _round(backend, version, weights[version % 2], copy)
                if version >= 2:  # the first touches memory, too
                    scheduler.append(one)
        return size_bytes, scheduler


def _round(backend: Any, version: int, weights: dict[str, Any], copy: MemoryCopy) -> _Round:
    plain_until_s = time.perf_counter() + PLAIN_S
    plain = _decode(backend, version, lambda: time.perf_counter() >= plain_until_s)
    started_s = ready_s = time.perf_counter()

    def is_ready() -> bool:
        nonlocal ready_s
        if not backend.prepare(version, weights):
            ready_s = time.perf_counter()
            return False
        return True

    preparing = _decode(backend, version, is_ready)
    activate_at_s = time.perf_counter()
    pause_s = backend.activate(version, weights)
    activate_s = time.perf_counter() - activate_at_s
    speed = preparing.tokens_per_s / plain.tokens_per_s
    gap = preparing.longest_gap_s / plain.longest_gap_s
    return _Round(pause_s, copy.once(), activate_s, ready_s - started_s, speed, gap)


def _decode(backend: Any, number: int, is_over: Callable[[], bool]) -> _Decoding:
    """With all slots taken, from one token's arrival on until it is over and one more has come."""
    arrivals: list[float] = []
    at_begin = backend.num_tokens
    while not is_over() or len(arrivals) < 2:
        while backend.num_running < NUM_SEQUENCES:
            prompt = Prompt(number, number, 0, (), {})
            sampling = Sampling(1.0, 1.0, 0, NUM_TOKENS, 16, ())
            lease = Lease(f"{time.monotonic_ns()}", "train", prompt, NUM_SEQUENCES, sampling, "", 0, 0, 0, number)
            backend.submit(lease, np.arange(3, 11, dtype=np.int32))
        before = backend.num_tokens
        backend.step()
        if backend.num_tokens > before:
            arrivals.append(time.perf_counter())
            at_begin = backend.num_tokens if len(arrivals) == 1 else at_begin
    gaps = [after - before for before, after in pairwise(arrivals)]
    return _Decoding((backend.num_tokens - at_begin) / (arrivals[-1] - arrivals[0]), max(gaps))


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


def _config(directory: str, after_update: str) -> Any:
    raw = {
        "run": {"dir": f"{directory}/run"},
        "model": {"path": directory, "dtype": "float32"},
        "sampling": {"max_new_tokens": NUM_TOKENS, "max_prompt_tokens": 16},
        "generator": {
            "backend": "vllm",
            "batch_size": NUM_SEQUENCES,
            "num_threads": 1,
            "kv_after_update": after_update,
        },
    }
    return parse_config(raw, "the benchmark's config")
