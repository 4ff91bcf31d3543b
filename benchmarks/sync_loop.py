"""A plain synchronous GRPO/DAPO loop on Hugging Face parts: generate, score, train, repeat, in one process.

The baseline of ``overlap.py``, at its best: every prompt is prefilled once for its whole group, the KV cache grows with
the answers, ended answers leave the batch, training is one causal forward and backward pass without a mask. Loss,
optimizer, rewards and samples a step are those of the asynchronous run. Prints one JSON line.

Shape letters: B = answers, T = tokens of the longest prompt and answer, V = vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, DynamicCache

from async_rl.config.config import Config
from async_rl.config.loading import load_config
from async_rl.data.chat import load_tokenizer, render_prompt
from async_rl.data.dataset import Row, load_rows_of, load_train_rows
from async_rl.learner.losses.advantages import group_normalised
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import build_reward


class SyncLoop:
    """Model, optimizer and data of one synchronous run."""

    def __init__(self, config: Config, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.manual_seed(config.run.seed)
        self.config = config
        self.tokenizer: Any = load_tokenizer(config.model.path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation="sdpa")
        settings = config.optimizer
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=settings.betas,
            weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / max(1, settings.warmup_steps))
        )
        self._reward = build_reward(config)
        # Its verifier process takes a second to start, at the first formula: now, and not inside what is timed.
        self._reward(RewardInput("<answer>\\boxed{x+1}</answer>", {"gt_answer": "x+2"}, 1, 2, "stop"))
        self.rows = load_train_rows(config).rows
        self._prompts = [self.encode(row) for row in self.rows]
        self._random = random.Random(config.run.seed)

    def close(self) -> None:
        self._reward.close()

    def encode(self, row: Row) -> list[int]:
        """The row's prompt in tokens, as generators render it."""
        return render_prompt(self.tokenizer, row.messages).tolist()

    def render(self, row: Row) -> str:
        """The same prompt as text."""
        return self.tokenizer.apply_chat_template(list(row.messages), tokenize=False, add_generation_prompt=True)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], *, num_samples: int, greedy: bool = False) -> list[list[int]]:
        """``num_samples`` answers to each prompt, side by side; an end-of-sequence token belongs to its answer."""
        cache = DynamicCache(config=self.model.config)
        logits_BV, mask_BT, next_B = self._prefill(prompts, cache, num_samples)
        answers: list[list[int]] = [[] for _ in range(len(prompts) * num_samples)]
        running = list(range(len(answers)))
        for _ in range(self.config.sampling.max_new_tokens):
            if greedy:
                tokens_B = logits_BV.argmax(-1)
            else:
                tokens_B = (logits_BV / self.config.sampling.temperature).softmax(-1).multinomial(1).squeeze(-1)
            tokens = tokens_B.tolist()
            for index, token in zip(running, tokens, strict=True):
                answers[index].append(token)
            kept = [row for row, token in enumerate(tokens) if token != self.tokenizer.eos_token_id]
            if not kept:
                break
            if len(kept) < len(running):
                running = [running[row] for row in kept]
                rows_B = torch.tensor(kept)
                cache.batch_select_indices(rows_B)
                tokens_B, next_B = tokens_B[rows_B], next_B[rows_B]
                mask_BT = None if mask_BT is None else mask_BT[rows_B]
            if mask_BT is not None:
                mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(running), 1)], 1)
            logits_BV = self.model(
                tokens_B[:, None], attention_mask=mask_BT, position_ids=next_B[:, None], past_key_values=cache
            ).logits[:, -1]
            next_B = next_B + 1
        return answers

    def _prefill(
        self, prompts: Sequence[list[int]], cache: DynamicCache, num_samples: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits after the prompts [B, V], their mask [B, T] (none: no padding), and the next positions [B]."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = pad_sequence(
            [torch.tensor(prompt) for prompt in prompts], True, self.tokenizer.pad_token_id, padding_side="left"
        )
        mask = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded = None if mask.all() else mask.long()
        logits = self.model(
            ids, attention_mask=padded, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        cache.batch_repeat_interleave(num_samples)
        repeated = None if padded is None else padded.repeat_interleave(num_samples, 0)
        return logits.repeat_interleave(num_samples, 0), repeated, lengths.repeat_interleave(num_samples)

    def score(self, answers: Sequence[Sequence[int]], rows: Sequence[Row]) -> list[RewardOutput]:
        """What the run's reward says about each answer to each row."""
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [
            self._reward(
                RewardInput(
                    text=text,
                    reward_data=row.reward_data,
                    num_tokens=len(answer),
                    max_new_tokens=self.config.sampling.max_new_tokens,
                    finish_reason="stop" if self._ended(answer) else "length",
                )
            )
            for text, answer, row in zip(texts, answers, rows, strict=True)
        ]

    def _ended(self, answer: Sequence[int]) -> bool:
        return answer[-1] == self.tokenizer.eos_token_id

    def step(self) -> None:
        """One on-policy step."""
        groups, size = self.config.learner.groups_per_step, self.config.sampling.group_size
        chosen = self._random.sample(range(len(self.rows)), groups)
        answers = self.generate([self._prompts[index] for index in chosen], num_samples=size)
        repeated = [index for index in chosen for _ in range(size)]
        outputs = self.score(answers, [self.rows[index] for index in repeated])
        rewards_B = np.array([sum(output.parts.values()) for output in outputs])
        is_kept_B = np.array([self._ended(answer) or not self.config.loss.mask_truncated for answer in answers])
        advantages_B = np.zeros(len(answers))
        for group in np.split(np.arange(len(answers)), groups):
            members = group[is_kept_B[group]]
            advantages_B[members] = group_normalised(rewards_B[members])
        if is_kept_B.any():
            kept = np.flatnonzero(is_kept_B).tolist()
            prompts = [self._prompts[index] for index in repeated]
            self.train(prompts, answers, torch.from_numpy(advantages_B).float(), kept)

    def train(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]], advantages_B: Tensor, kept: Sequence[int]
    ) -> None:
        """One step of the DAPO loss on the answers ``kept``. On policy the ratio is 1, and clipping never acts."""
        sequences = [torch.tensor(prompts[i] + answers[i]) for i in kept]
        # Padding is on the right, where a causal model can't see it.
        ids_BT = pad_sequence(sequences, True, self.tokenizer.pad_token_id)
        starts = torch.tensor([len(prompts[i]) for i in kept])
        ends = torch.tensor([len(sequence) for sequence in sequences])
        targets = torch.arange(1, ids_BT.shape[1])
        mask_BT = (targets >= starts[:, None]) & (targets < ends[:, None])
        logits_BTV = self.model(ids_BT, use_cache=False).logits[:, :-1]
        logprobs_BTV = (logits_BTV / self.config.sampling.temperature).log_softmax(-1)
        chosen_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        ratio_BT = (chosen_BT - chosen_BT.detach()).exp()
        loss = -(ratio_BT * advantages_B[kept, None] * mask_BT).sum() / mask_BT.sum()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        self._optimizer.step()
        self._schedule.step()

    def evaluate(self) -> float:
        """Greedy accuracy on the held-out rows."""
        rows = load_rows_of(self.config, next(iter(self.config.data.eval.values()))).rows
        outputs = self.score(self.generate([self.encode(row) for row in rows], num_samples=1, greedy=True), rows)
        return sum(output.accuracy for output in outputs) / len(outputs)


def report(loop: SyncLoop, *, steps_per_s: float, accuracy_before: float, num_threads: int) -> None:
    """Print the one JSON line that ``overlap.py`` reads, with the trained model's accuracy, and close the loop."""
    result = {
        "steps_per_s": steps_per_s,
        "accuracy_before": accuracy_before,
        "accuracy_after": loop.evaluate(),
        "threads": num_threads,
    }
    print(json.dumps(result))
    loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    loop = SyncLoop(load_config(options.config, options.set), options.threads)
    before = loop.evaluate()
    loop.step()
    start = time.perf_counter()
    num_steps = loop.config.learner.steps - 1
    for _ in range(num_steps):
        loop.step()
    seconds = time.perf_counter() - start
    report(loop, steps_per_s=num_steps / seconds, accuracy_before=before, num_threads=options.threads)


if __name__ == "__main__":
    main()
