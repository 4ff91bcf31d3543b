"""The table ``vllm`` of ``benchmarks.weights``: how long a version pauses vLLM, beside a memory copy of its bytes.

The pause is what ``VllmBackend.activate`` gives: from the request that stops the engine between two decode steps to its
answer that it goes on, with sequences running. The bytes are in shared memory by then.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from async_rl.config_file import parse_config
from async_rl.records import Lease, Prompt, Sampling
from benchmarks.weights_raw import MemoryCopy, goal

NUM_LAYERS = 4
HEAD_SIZE = 64
NUM_SEQUENCES = 8
NUM_TOKENS = 256


def vllm_table(sizes_mb: Sequence[int], num_rounds: int) -> None:
    print("\npause of vLLM by a version, beside a memory copy of the same bytes")
    if find_spec("vllm") is None:
        print(
            "  left out: vLLM is not installed here. `make test-vllm` makes an environment with its CPU build; then\n"
            "  .venv-vllm/bin/python -m benchmarks.weights --tables vllm (docs/vllm.md)"
        )
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print(f"{'MB':>8s}{'pause s':>10s}{'best':>9s}{'memory copy s':>15s}{'best':>9s}{'ratio':>8s}", flush=True)
    for size_mb in sizes_mb:
        _print_row(*_pauses(size_mb, num_rounds))


def _print_row(size_bytes: int, pauses: Sequence[float], copies: Sequence[float]) -> None:
    ratio = median(pause / copy for pause, copy in zip(pauses, copies, strict=True))
    print(
        f"{size_bytes / 1e6:8.1f}{median(pauses):10.4f}{min(pauses):9.4f}{median(copies):15.4f}{min(copies):9.4f}"
        f"{ratio:8.2f}",
        flush=True,
    )
    goal(f"pause over a memory copy, {size_bytes / 1e6:.0f} MB", ratio, 2.0, at_most=True)


def _pauses(size_mb: int, num_rounds: int) -> tuple[int, list[float], list[float]]:
    """Bytes of a version, and seconds of each round: of the pause, of the copy."""
    from async_rl.generator.vllm_backend import VllmBackend

    with tempfile.TemporaryDirectory() as directory:
        model = _write_model(Path(directory), size_mb)
        weights = [{name: torch.randn_like(p) * 0.02 for name, p in model.named_parameters()} for _ in range(2)]
        size_bytes = sum(tensor.nbytes for tensor in weights[0].values())
        backend = VllmBackend.from_files(Path(directory), _config(directory), device="cpu")
        pauses: list[float] = []
        copies: list[float] = []
        with closing(backend), closing(MemoryCopy(size_bytes)) as copy:
            for version in range(num_rounds + 2):
                if version > 0:
                    _decode(backend, version)
                pause_s = backend.activate(version, weights[version % 2])
                if version >= 2:  # before, memory is touched for the first time
                    pauses.append(pause_s)
                    copies.append(copy.once())
        return size_bytes, pauses, copies


def _decode(backend: Any, number: int) -> None:
    """Until every sequence has begun its answer; they go on."""
    if backend.num_running < NUM_SEQUENCES:
        prompt = Prompt(number, number, 0, (), {})
        sampling = Sampling(1.0, 1.0, 0, NUM_TOKENS, 16, ())
        lease = Lease(f"{number}", "train", prompt, NUM_SEQUENCES, sampling, "", 0, 0, 0, number)
        backend.submit(lease, np.arange(3, 11, dtype=np.int32))
    enough = backend.num_tokens + NUM_SEQUENCES
    while backend.num_tokens < enough and backend.num_running:
        backend.step()


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


def _config(directory: str) -> Any:
    raw = {
        "run": {"dir": f"{directory}/run"},
        "model": {"path": directory, "dtype": "float32"},
        "sampling": {"max_new_tokens": NUM_TOKENS, "max_prompt_tokens": 16},
        "generator": {"backend": "vllm", "batch_size": NUM_SEQUENCES, "num_threads": 1},
    }
    return parse_config(raw, "the benchmark's config")
