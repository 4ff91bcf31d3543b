"""A tiny random Qwen2 with a character tokenizer, written to a directory for the transformers backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from async_rl.generator.backend import Sampled
from async_rl.queue.parity import ProbeSequence

CHARACTERS = "0123456789+=? abcdefghijklmnopqrstuvwxyz<>/"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def write_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{c: i + 3 for i, c in enumerate(CHARACTERS)}}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def make_model(seed: int = 0, *, kv_heads: int = 2, tied: bool = True, **settings: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=settings.get("hidden_size", 32),
        intermediate_size=settings.get("intermediate_size", 64),
        num_hidden_layers=settings.get("num_hidden_layers", 2),
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=1,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def write_model(directory: Path, seed: int = 0, *, kv_heads: int = 2, tied: bool = True) -> PreTrainedModel:
    model = make_model(seed, kv_heads=kv_heads, tied=tied)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def full_logprobs(model: PreTrainedModel, sampled: Sampled, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities, float32 [N, V], where each sampled token was drawn, by one pass over the whole sequence."""
    ids = torch.tensor(np.concatenate([sampled.prompt_ids, sampled.token_ids])[None].astype(np.int64))
    logits = model(input_ids=ids).logits[0, len(sampled.prompt_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).numpy()


def scores(model: PreTrainedModel, sampled: Sampled, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the sampled tokens, float32 [N]."""
    return full_logprobs(model, sampled, temperature)[np.arange(len(sampled.token_ids)), sampled.token_ids]


@torch.no_grad()
def probe_scores(
    model: PreTrainedModel, given: Sequence[ProbeSequence], temperature: float = 1.0
) -> tuple[np.ndarray, ...]:
    """What a plain forward pass gives the scored tokens of ``given``."""
    found = []
    for one in given:
        ids = torch.from_numpy(one.token_ids.astype(np.int64))
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float() / temperature, -1)
        found.append(logprobs.gather(1, ids[1:, None])[-one.num_scored :, 0].numpy())
    return tuple(found)
