"""The loss of TRL's ``GRPOTrainer`` on the batches of ``learner_sides.py``, without its sampling and its loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from async_rl.config.config import Config
from async_rl.learner.sequences import TrainSequence
from benchmarks.learner_data import GROUP_SIZE, Task


def trl_loss(
    task: Task, config: Config, model: Any, num_tokens: int
) -> Callable[[Sequence[TrainSequence]], Tensor]:  # fmt: skip
    """Return TRL's loss of a batch: ``dapo``, which is divided by the ``num_tokens`` of the whole step."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>")), pad_token="<pad>",
        eos_token="<pad>",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=task.directory,
            per_device_train_batch_size=GROUP_SIZE,
            num_generations=GROUP_SIZE,
            loss_type="dapo",
            beta=0.0,
            epsilon=config.loss.clip_low,
            epsilon_high=config.loss.clip_high,
            temperature=1.0,
            gradient_checkpointing=task.gradient_checkpointing,
            use_cpu=task.device == "cpu",
            bf16=False,
            report_to="none",
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "<pad>"}]),
    )
    count = torch.tensor(float(num_tokens), device=task.device)

    def loss_of(batch: Sequence[TrainSequence]) -> Tensor:
        starts = [int(np.flatnonzero(s.loss_mask)[0]) for s in batch]
        parts = list(zip(batch, starts, strict=True))

        def moved(tensors: Sequence[Tensor], side: str) -> Tensor:
            return pad_sequence(list(tensors), batch_first=True, padding_side=side).to(task.device)

        inputs = {
            "prompt_ids": moved([torch.from_numpy(s.token_ids[:start]).long() for s, start in parts], "left"),
            "prompt_mask": moved([torch.ones(start, dtype=torch.long) for start in starts], "left"),
            "completion_ids": moved([torch.from_numpy(s.token_ids[start:]).long() for s, start in parts], "right"),
            "completion_mask": moved([torch.from_numpy(s.loss_mask[start:]).long() for s, start in parts], "right"),
            "old_per_token_logps": moved([torch.from_numpy(s.behavior_logprobs[at:]) for s, at in parts], "right"),
            "advantages": torch.tensor([float(s.advantages[0]) for s in batch], device=task.device),
            "num_items_in_batch": count,
        }
        return trainer.compute_loss(model, inputs)

    return loss_of
