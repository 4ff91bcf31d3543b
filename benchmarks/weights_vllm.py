"""The table ``vllm`` of ``benchmarks.weights``: how long a version pauses vLLM, beside a memory copy of its bytes.

The pause is what ``VllmBackend.activate`` returns: from the request to stop decoding to the answer that it goes on.
Sequences run meanwhile.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from async_rl.config.loading import parse_config
from async_rl.records import Lease, Prompt, Sampling
from benchmarks.weights_raw import MemoryCopy

NUM_LAYERS = 4
HEAD_SIZE = 64
NUM_SEQUENCES = 8
NUM_TOKENS = 256


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
