"""Small models that vLLM's CPU kernels take (heads of 32 dimensions), and what the tests do with a backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from async_rl.config.config import Config
from async_rl.generator.vllm.backend import VllmBackend
from tests.config.made import a_config
from tests.generator import backend_checks
from tests.generator.backend_checks import VOCABULARY
from tests.generator.tiny_model import write_tokenizer

EOS = 1
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5 if DEVICE == "cpu" else 2e-3
"""Largest difference in nats between a token's logprob in float32 and in a full forward pass. Kernels of a GPU may
round the factors of a product to fewer bits."""
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels are interpreted (``interpreted``), so that a step takes a quarter of a second."""


TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_model(seed: int, **shape: Any) -> PreTrainedModel:
    """``TINY`` with tied embeddings, but for what ``shape`` says of ``Qwen2Config``."""
    torch.manual_seed(seed)
    given = TINY | {"tie_word_embeddings": True, "initializer_range": 0.15} | shape
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=given["num_attention_heads"],
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=EOS,
        **given,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def weights_of(seed: int, **shape: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in make_model(seed, **shape).named_parameters()}


def write_files(directory: Path, **shape: Any) -> Path:
    """What a generator gets of a model: its config and tokenizer, and no weights."""
    make_model(0, **shape).config.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def make_config(*, runner: str | None = None, **generator: Any) -> Config:
    section = {"backend": "vllm", "batch_size": 64, "num_threads": 1} | generator
    return a_config(
        model={"dtype": "float32"},
        sampling={"max_new_tokens": 400, "max_prompt_tokens": 64, "stop": ["never said"]},
        generator=section,
        experimental={"vllm": {"kv_cache_bytes": 64 << 20, "model_runner": runner}},
    )


@contextmanager
def engine(directory: Path, **settings: Any) -> Iterator[VllmBackend]:
    """A backend over a real engine, without weights yet; for the tests of a module. ``settings``: its config."""
    torch.set_num_threads(1)
    backend = VllmBackend.from_files(directory, make_config(**settings), device=DEVICE)
    try:
        yield backend
    finally:
        backend.close()


def at_version_3(started: VllmBackend) -> Iterator[VllmBackend]:
    """``started`` for one test: with the tiny model's weights of seed 0, and nothing left of the test after it."""
    started.activate(3, weights_of(0))
    yield started
    for lease_id in list(started.progress()):
        started.cancel(lease_id)
    started._recompute = False
    assert started.num_running == 0


assert_scored_by = partial(backend_checks.assert_scored_by, tolerance=TOLERANCE)
