"""A model of a few thousand weights on disk, a config around it, and sequences to train it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.config.config import Config
from async_rl.learner.sequences import TrainSequence
from tests.config.made import a_config

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .+="
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def tiny_model(directory: Path, *, tied: bool = True, seed: int = 0, **shape: Any) -> Path:
    """A Qwen2 with random weights and a tokenizer of one token a character, in Hugging Face format."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *ALPHABET, "\n"))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, **shape,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary), max_position_embeddings=256, tie_word_embeddings=tied, eos_token_id=0, **sizes
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def add_token(directory: Path, token: str) -> None:
    """Add a token to the tokenizer in ``directory`` alone: the model there has no row for it."""
    from async_rl.data.chat import load_tokenizer

    tokenizer = load_tokenizer(directory)
    tokenizer.add_tokens([token])
    tokenizer.save_pretrained(directory)


def tiny_config(root: Path, model: Path | str, /, **sections: Any) -> Config:
    """A config whose run directory is ``root / "run"``; ``sections`` are merged over the defaults."""
    return a_config(root / "run", **{**sections, "model": {"path": str(root / model), **sections.get("model", {})}})


def random_sequences(count: int, length: int, *, seed: int = 0, spread: int = 0) -> list[TrainSequence]:
    """Sequences of ``length`` +- ``spread`` tokens, the last two thirds trained on, near the policy's own logprobs."""
    generator = np.random.default_rng(seed)
    sequences = []
    for index in range(count):
        size = length + int(generator.integers(-spread, spread + 1))
        mask = np.arange(size) >= max(1, size // 3)
        sequences.append(
            TrainSequence(
                sequence_id=index,
                token_ids=generator.integers(4, 40, size).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=(mask * generator.uniform(-4.0, -3.5, size)).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.full(size, generator.normal(), dtype=np.float32),
                temperature=1.0,
            )
        )
    return sequences


def with_behavior(sequence: TrainSequence, logprob: float) -> TrainSequence:
    """``sequence`` as if every trained token had been sampled with this log-probability."""
    return replace(sequence, behavior_logprobs=np.where(sequence.loss_mask, logprob, 0.0).astype(np.float32))


def trained_tokens(sequences: Sequence[TrainSequence]) -> int:
    return sum(int(s.loss_mask.sum()) for s in sequences)
