"""A plain synchronous GRPO/DAPO loop on Hugging Face parts: generate, score, train, repeat, in one process.

The baseline of ``overlap.py``: KV cache, generation stops when every row has ended, one padded forward and backward
pass a micro-batch, the same loss, optimizer, rewards and samples a step as the asynchronous run. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.config import Config
from async_rl.config_file import load_config
from async_rl.data import Row, load_rows
from async_rl.rewards.records import RewardInput
from async_rl.rewards.registry import build_reward


class SyncLoop:
    """Model, optimizer and data of one synchronous run."""

    def __init__(self, config: Config, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.manual_seed(config.run.seed)
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.optimizer.lr, weight_decay=config.optimizer.weight_decay, fused=True
        )
        self.reward = build_reward(config)
        self.rows = list(load_rows(config.data.train).rows)
        self.random = random.Random(config.run.seed)

    def generate(self, rows: list[Row], *, num_samples: int, sample: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids [B, T], response mask [B, T] and padding mask [B, T] of ``num_samples`` answers a row."""
        texts = [
            self.tokenizer.apply_chat_template(list(row.messages), tokenize=False, add_generation_prompt=True)
            for row in rows
        ]
        prompts = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            ids = self.model.generate(
                **prompts, max_new_tokens=self.config.sampling.max_new_tokens, do_sample=sample, top_k=0, top_p=1.0,
                temperature=self.config.sampling.temperature if sample else None, num_return_sequences=num_samples,
                pad_token_id=self.tokenizer.pad_token_id,
            )  # fmt: skip
        ids = ids.clone()
        width = prompts["input_ids"].shape[1]
        ended = (ids[:, width:] == self.tokenizer.eos_token_id).cumsum(1)
        # The first end-of-sequence token belongs to the answer, what follows is padding.
        answer = (ended == 0) | ((ended == 1) & (ids[:, width:] == self.tokenizer.eos_token_id))
        prompt_mask = prompts["attention_mask"].repeat_interleave(num_samples, 0).bool()
        response = torch.cat([torch.zeros_like(prompt_mask), answer], 1)
        return ids, response, torch.cat([prompt_mask, answer], 1)

    def score(self, rows: list[Row], ids: Tensor, response: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
        """Rewards and accuracies, [B] each."""
        rewards, accuracies = [], []
        for index in range(len(ids)):
            tokens = ids[index][response[index]]
            ended = bool((tokens == self.tokenizer.eos_token_id).any())
            output = self.reward(
                RewardInput(
                    text=self.tokenizer.decode(tokens, skip_special_tokens=True),
                    reward_data=rows[index // num_samples].reward_data,
                    num_tokens=len(tokens),
                    max_new_tokens=self.config.sampling.max_new_tokens,
                    finish_reason="stop" if ended else "length",
                )
            )
            rewards.append(sum(output.parts.values()))
            accuracies.append(output.accuracy)
        return torch.tensor(rewards), torch.tensor(accuracies)

    def step(self) -> float:
        """One on-policy step; the mean accuracy of its samples."""
        groups, size = self.config.learner.groups_per_step, self.config.sampling.group_size
        rows = self.random.sample(self.rows, groups)
        ids, response, attention = self.generate(rows, num_samples=size, sample=True)
        rewards, accuracies = self.score(rows, ids, response, size)
        grouped = rewards.view(groups, size)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1)
        position_ids = (attention.long().cumsum(1) - 1).clamp(min=0)
        logits = self.model(ids, attention_mask=attention.long(), position_ids=position_ids).logits[:, :-1]
        logprobs = (logits / self.config.sampling.temperature).log_softmax(-1)
        chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (chosen - chosen.detach()).exp()
        mask = response[:, 1:]
        loss = -(ratio * advantages[:, None] * mask).sum() / mask.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        return float(accuracies.mean())

    def evaluate(self) -> float:
        """Greedy accuracy on the held-out rows."""
        rows = list(load_rows(next(iter(self.config.data.eval.values()))).rows)
        ids, response, _ = self.generate(rows, num_samples=1, sample=False)
        return float(self.score(rows, ids, response, 1)[1].mean())


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
    result: dict[str, Any] = {
        "steps_per_s": num_steps / seconds,
        "accuracy_before": before,
        "accuracy_after": loop.evaluate(),
        "threads": options.threads,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
