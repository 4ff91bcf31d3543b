"""A tiny random Qwen2 with a character tokenizer, written to a directory for the transformers backend."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

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
