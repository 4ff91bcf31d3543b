"""The training of ``sync_loop.py`` by TRL's ``GRPOTrainer`` (``pip install -c constraints.txt -e ".[bench]"``), on CPU.

Same model, prompts, rewards, loss and samples a step: one generation batch is one optimizer step, in one micro-batch.
TRL is at the fastest settings that were found for it: prompts as text (rendered by the chat template once, not every
step), no gradient checkpointing, no padding to multiples, fused AdamW, nothing logged or saved. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from async_rl.config.config import Config
from async_rl.config.loading import load_config
from benchmarks.sync_loop import SyncLoop, report


class StepClock(TrainerCallback):
    """Times the steps after the first."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends.append(time.perf_counter())

    @property
    def steps_per_s(self) -> float:
        return (len(self._ends) - 1) / (self._ends[-1] - self._ends[0])


def trl_config(config: Config, scratch: str) -> GRPOConfig:
    """The run's settings under TRL's names, and what makes TRL fast on a CPU."""
    samples = config.learner.groups_per_step * config.sampling.group_size
    return GRPOConfig(
        output_dir=scratch,
        seed=config.run.seed,
        max_steps=config.learner.steps,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=config.sampling.group_size,
        max_completion_length=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        loss_type="dapo",
        beta=0.0,
        epsilon=config.loss.clip_low,
        epsilon_high=config.loss.clip_high,
        mask_truncated_completions=config.loss.mask_truncated,
        optim="adamw_torch_fused",
        learning_rate=config.optimizer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=config.optimizer.warmup_steps,
        weight_decay=config.optimizer.weight_decay,
        adam_beta1=config.optimizer.betas[0],
        adam_beta2=config.optimizer.betas[1],
        max_grad_norm=config.optimizer.max_grad_norm,
        pad_to_multiple_of=None,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
    )


def text_rewards(loop: SyncLoop) -> Callable[..., list[float | None]]:
    """The run's reward in the form TRL calls; ``row`` is the dataset's column of row numbers."""

    def reward(completion_ids: Sequence[Sequence[int]], row: Sequence[int], **_: Any) -> list[float | None]:
        outputs = loop.score(completion_ids, [loop.rows[index] for index in row])
        return [sum(output.parts.values()) for output in outputs]

    return reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    # Rows, rewards and evaluation are the other loop's; so is the model, which TRL trains in place.
    loop = SyncLoop(load_config(options.config, options.set), options.threads)
    before = loop.evaluate()
    clock = StepClock()
    prompts = [{"prompt": loop.render(row), "row": index} for index, row in enumerate(loop.rows)]
    with tempfile.TemporaryDirectory() as scratch:
        GRPOTrainer(
            model=loop.model,
            processing_class=loop.tokenizer,
            reward_funcs=text_rewards(loop),
            args=trl_config(loop.config, scratch),
            train_dataset=datasets.Dataset.from_list(prompts),
            callbacks=[clock],
        ).train()
    report(loop, steps_per_s=clock.steps_per_s, accuracy_before=before, num_threads=options.threads)


if __name__ == "__main__":
    main()
