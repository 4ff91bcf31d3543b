"""A tiny model that vLLM's CPU kernels take (heads of 32 dimensions), and what the tests do with a backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from async_rl.config import Config
from async_rl.config_file import parse_config
from async_rl.generator.backend import Backend, Sampled
from tests.generator.leases import make_lease
from tests.generator.tiny_model import CHARACTERS, write_tokenizer

VOCABULARY = len(CHARACTERS) + 3
EOS = 1


def make_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        initializer_range=0.15,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in make_model(seed).named_parameters()}


def write_files(directory: Path) -> Path:
    """What a generator gets of a model: its config and tokenizer, and no weights."""
    make_model(0).config.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def make_config(**generator: Any) -> Config:
    section = {"backend": "vllm", "batch_size": 64, "num_threads": 1, "vllm": {"kv_cache_bytes": 64 << 20}} | generator
    raw = {
        "run": {"dir": "run"},
        "model": {"path": "model"},
        "sampling": {"max_new_tokens": 400, "max_prompt_tokens": 64, "stop": ["never said"]},
        "generator": section,
    }
    return parse_config(raw, "test")


def submit(backend: Backend, lease_id: str, prompt: str = "1+1", **settings: Any) -> None:
    lease = make_lease(lease_id, **settings)
    backend.submit(lease, backend.encode_prompt([{"role": "user", "content": prompt}]))


def run_all(backend: Backend) -> dict[tuple[str, int], Sampled]:
    finished: dict[tuple[str, int], Sampled] = {}
    while backend.num_running:
        for sampled in backend.step():
            assert (sampled.lease_id, sampled.index) not in finished
            finished[sampled.lease_id, sampled.index] = sampled
    assert backend.progress() == {}
    return finished


@torch.no_grad()
def full_logprobs(model: PreTrainedModel, sampled: Sampled, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities, float32 [N, V], where each sampled token was drawn, by one pass over the whole sequence."""
    ids = torch.tensor(np.concatenate([sampled.prompt_ids, sampled.token_ids])[None].astype(np.int64))
    logits = model(input_ids=ids).logits[0, len(sampled.prompt_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).numpy()


def scores(model: PreTrainedModel, sampled: Sampled, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the sampled tokens, float32 [N]."""
    return full_logprobs(model, sampled, temperature)[np.arange(len(sampled.token_ids)), sampled.token_ids]
