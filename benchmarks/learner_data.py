"""What every side of ``learner.py`` trains: the model's shape, its random weights, and one batch of sequences."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_rl.config.config import Config
from async_rl.config.loading import apply_override, parse_config
from async_rl.learner.sequences import TrainSequence

GROUP_SIZE = 8
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Qwen2 models by name. The vocabulary is an option of its own."""


@dataclass(frozen=True, slots=True)
class Task:
    """One comparison, as it travels to the processes of its sides.

    Attributes:
        directory: an empty directory; ``model`` in it has the weights.
        shape: a name in ``SHAPES``.
        vocab_size: rows of the head.
        num_groups: groups of ``GROUP_SIZE`` answers that share a prompt, in a step.
        length: tokens of the longest sequence that may occur.
        sigma: spread of the log-normal lengths. 0: every sequence has ``length`` tokens.
        max_tokens: tokens of a micro-batch, of every side, with the padding of padded rows.
        device: ``cpu`` or ``cuda``.
        dtype: that in which the models compute. Master weights are float32.
        gradient_checkpointing: whether every side computes activations again in the backward pass.
        settings: more settings of async-rl's side, as ``--set`` takes them.
    """

    directory: str
    shape: str
    vocab_size: int
    num_groups: int
    length: int
    sigma: float
    max_tokens: int
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    gradient_checkpointing: bool
    settings: tuple[str, ...]

    @classmethod
    def from_json(cls, text: str) -> Task:
        fields: dict[str, Any] = json.loads(text)
        fields["settings"] = tuple(fields["settings"])
        return cls(**fields)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def model(self) -> Path:
        return Path(self.directory) / "model"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def model_config(self) -> Qwen2Config:
        return Qwen2Config(vocab_size=self.vocab_size, max_position_embeddings=65536, **SHAPES[self.shape])

    def config(self) -> Config:
        """The settings of async-rl; the other sides take the optimizer and the clipping from them."""
        raw: dict[str, Any] = {
            "run": {"dir": str(Path(self.directory) / "run")},
            "model": {
                "path": str(self.model),
                "dtype": self.dtype,
                "gradient_checkpointing": "full" if self.gradient_checkpointing else "none",
            },
            "sampling": {"max_prompt_tokens": self.length // 2, "max_new_tokens": self.length - self.length // 2},
            "learner": {"max_tokens": self.max_tokens},
        }
        for setting in self.settings:
            apply_override(raw, setting)
        return parse_config(raw, "the benchmark's config")


def write_model(task: Task) -> None:
    """Write the model with random weights, in bfloat16: it halves the disk that 7B take."""
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(task.model_config())
    model.to(torch.bfloat16).save_pretrained(task.model)


def sequences_of(task: Task) -> list[TrainSequence]:
    """The step's groups: prompts of a tenth of ``length`` and answers of a quarter on average, log-normal and cut.

    The behavior policy is near that of a random model, which is nearly uniform. Advantages of a group have mean 0.
    """
    random = np.random.default_rng(0)
    found: list[TrainSequence] = []
    for _ in range(task.num_groups):
        prompt_length = _length(random, task.length / 10, task.sigma, task.length // 4)
        prompt = random.integers(task.vocab_size, size=prompt_length)
        advantages = random.permutation(np.linspace(-1.5, 1.5, GROUP_SIZE))
        for advantage in advantages:
            most = task.length - prompt_length
            answer_length = _length(random, task.length / 4, task.sigma, most) if task.sigma else most
            tokens = np.concatenate([prompt, random.integers(task.vocab_size, size=answer_length)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= prompt_length
            behavior = -math.log(task.vocab_size) + random.normal(0.0, 0.05, len(tokens))
            found.append(
                TrainSequence(
                    sequence_id=len(found),
                    token_ids=tokens,
                    loss_mask=mask,
                    behavior_logprobs=np.where(mask, behavior, 0.0).astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    advantages=np.full(len(tokens), advantage, dtype=np.float32),
                    temperature=1.0,
                )
            )
    return found


def _length(random: np.random.Generator, mean: float, sigma: float, most: int) -> int:
    """Draw from the log-normal distribution with this mean, from 1 to ``most`` tokens."""
    return int(np.clip(random.lognormal(math.log(mean) - sigma**2 / 2, sigma), 1, most))


def num_trained(sequences: list[TrainSequence]) -> int:
    return sum(int(s.loss_mask.sum()) for s in sequences)
