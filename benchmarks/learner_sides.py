"""The sides of ``learner.py``, each in a process of its own: ``python -m benchmarks.learner_sides SIDE TASK_JSON``.

Each line of standard input asks for one optimizer step on the same batch, and each step prints one JSON line.

- ``async-rl``: the learner's engine, from the sequences to the statistics.
- ``compiled``: the same with ``learner.compile``.
- ``limit``: the same model, rows and attention; the logits of the predicted tokens in one piece, or in pieces of
  ``LOGITS_BYTES`` if they are larger, and a plain cross-entropy.
- ``packed``: transformers' model and attention on rows of whole sequences, told apart by their positions.
- ``padded``: the same on rows padded to the longest of a micro-batch, with an attention mask.
- ``trl``: the padded micro-batches under the loss of TRL's GRPOTrainer (``pip install -c constraints.txt
  -e ".[bench]"``).

All sides hold at most ``max_tokens`` tokens in a micro-batch, keep float32 weights, and use the same fused AdamW with
the gradient's norm clipped. Shape letters: B = rows, L = tokens of a row, T = tokens of a packed row, N = predicted
tokens, V = vocabulary, d = hidden size.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from async_rl.config.config import Config
from async_rl.learner.data.packing import pack
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.model.policy_model import PolicyModel, load_model, to_device
from async_rl.learner.optimizers.optimizer import build_optimizer
from async_rl.learner.phases import highest_memory_bytes
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from async_rl.process.child import reuse_freed_memory
from benchmarks.learner_data import Task, num_trained, sequences_of

LOGITS_BYTES = 4 << 30
"""Logits of a micro-batch that ``limit`` computes at once, in float32."""

Step = Callable[[], float | None]
"""Make one optimizer step. Returns the gradient's norm, if the loss is that of the loops with a policy gradient."""


def product(task: Task) -> Step:
    reuse_freed_memory()  # as the command does
    config = task.config()
    engine = FsdpEngine(config, init_ranks(config))
    sequences = sequences_of(task)

    def step() -> float:
        stats = engine.update(sequences, version=0)
        assert stats.stepped, f"expected a step, got none: {stats.reason}"
        return stats.grad_norm

    return step


def compiled(task: Task) -> Step:
    return product(replace(task, settings=(*task.settings, "learner.compile=true")))


class Weights:
    """The weights of a side. In bfloat16 the optimizer has float32 copies, as FSDP's mixed precision has."""

    def __init__(self, model: nn.Module, task: Task, config: Config) -> None:
        self._computed: list[Tensor] = list(model.parameters())
        self._masters: list[Tensor] = self._computed
        if task.torch_dtype != torch.float32:
            self._masters = [nn.Parameter(p.detach().float()) for p in self._computed]
            for parameter in self._computed:  # not model.to(): buffers keep their dtype
                parameter.data = parameter.data.to(task.torch_dtype)
        named = {str(number): cast(nn.Parameter, master) for number, master in enumerate(self._masters)}
        self._optimizer = build_optimizer(named, config.optimizer)
        self._lr = config.optimizer.lr
        self._max_norm = config.optimizer.max_grad_norm

    def step(self, num_tokens: int) -> float:
        """Update the weights by the gradients of a loss that is a sum over ``num_tokens`` tokens. Return their norm."""
        if self._masters is not self._computed:
            for master, computed in zip(self._masters, self._computed, strict=True):
                master.grad, computed.grad = cast(Tensor, computed.grad).float(), None
        torch._foreach_div_([cast(Tensor, p.grad) for p in self._masters], num_tokens)
        norm = float(nn.utils.clip_grad_norm_(self._masters, self._max_norm))
        self._optimizer.step(self._lr)
        for parameter in self._masters:
            parameter.grad = None
        if self._masters is not self._computed:
            with torch.no_grad():
                torch._foreach_copy_(self._computed, self._masters)
        return norm


def limit(task: Task) -> Step:
    config, device = task.config(), torch.device(task.device)
    policy = PolicyModel(load_model(config.model)).to(device)
    weights = Weights(policy, task, config)
    sequences = sequences_of(task)
    (micro_batches,) = pack(sequences, max_tokens=task.max_tokens, num_ranks=1)
    head = cast(nn.Linear, policy.causal_lm.get_output_embeddings())
    rows = max(1, LOGITS_BYTES // (4 * task.vocab_size))

    def step() -> None:
        for micro_batch in micro_batches:
            batch = to_device(micro_batch, device)
            hidden_Nd = policy.hidden_states(batch).index_select(0, batch.predict_index)
            if len(hidden_Nd) <= rows:
                cross_entropy(head(hidden_Nd).float(), batch.targets, reduction="sum").backward()
                continue
            # Each piece gives the gradient of its hidden states, and the decoder's backward pass runs once.
            leaf_Nd = hidden_Nd.detach().requires_grad_()
            for hidden_Cd, targets_C in zip(leaf_Nd.split(rows), batch.targets.split(rows), strict=True):
                cross_entropy(head(hidden_Cd).float(), targets_C, reduction="sum").backward()
            hidden_Nd.backward(leaf_Nd.grad)
        weights.step(num_trained(sequences))

    return step


def transformers_model(task: Task) -> Any:
    """The model as users load it; with flash attention, if that package is there."""
    attention = "sdpa"
    if task.device == "cuda":
        from transformers.utils import is_flash_attn_2_available

        attention = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    model: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, attn_implementation=attention)
    if task.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model.to(task.device)


def clipped_loss(logprobs: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor, config: Config) -> Tensor:
    """The clipped objective summed over the masked tokens, as GRPO loops have it."""
    ratio = (logprobs - behavior).exp()
    clipped = ratio.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
    return -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum()


def padded_batches(sequences: Sequence[TrainSequence], max_tokens: int) -> list[list[TrainSequence]]:
    """Cut the sequences, group after group, into batches that have at most ``max_tokens`` tokens when padded."""
    batches: list[list[TrainSequence]] = []
    longest = 0
    for sequence in sequences:
        longest = max(longest, len(sequence.token_ids))
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens:
            batches.append([])
            longest = len(sequence.token_ids)
        batches[-1].append(sequence)
    return batches


def padded(task: Task) -> Step:
    config, model = task.config(), transformers_model(task)
    weights = Weights(model, task, config)
    sequences = sequences_of(task)

    def moved(arrays: Sequence[np.ndarray]) -> Tensor:
        return pad_sequence([torch.from_numpy(a) for a in arrays], batch_first=True).to(task.device)

    def step() -> float:
        for batch in padded_batches(sequences, task.max_tokens):
            ids_BL = moved([s.token_ids for s in batch]).long()
            attention_BL = moved([np.ones(len(s.token_ids), np.int64) for s in batch])
            logits_BLV = model(ids_BL, attention_mask=attention_BL, use_cache=False).logits[:, :-1]
            logprobs_BL = -cross_entropy(logits_BLV.float().transpose(1, 2), ids_BL[:, 1:], reduction="none")
            behavior_BL, advantages_BL, mask_BL = (
                moved([getattr(s, name) for s in batch])[:, 1:]
                for name in ("behavior_logprobs", "advantages", "loss_mask")
            )
            clipped_loss(logprobs_BL, behavior_BL, advantages_BL, mask_BL, config).backward()
        return weights.step(num_trained(sequences))

    return step


def packed_rows(sequences: Sequence[TrainSequence], max_tokens: int) -> list[list[TrainSequence]]:
    """Pack whole sequences into rows of at most ``max_tokens`` tokens: each into the first row with room, longest
    first.
    """
    rows: list[list[TrainSequence]] = []
    for sequence in sorted(sequences, key=lambda s: -len(s.token_ids)):
        size = len(sequence.token_ids)
        row = next((r for r in rows if sum(len(s.token_ids) for s in r) + size <= max_tokens), None)
        if row is None:
            rows.append(row := [])
        row.append(sequence)
    return rows


def packed(task: Task) -> Step:
    config, model = task.config(), transformers_model(task)
    weights = Weights(model, task, config)
    sequences = sequences_of(task)

    def moved(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(task.device)

    def step() -> float:
        for row in packed_rows(sequences, task.max_tokens):
            ids_T = moved([s.token_ids for s in row]).long()
            positions_T = moved([np.arange(len(s.token_ids)) for s in row])
            logits_TV = model(ids_T[None], position_ids=positions_T[None], use_cache=False).logits[0, :-1]
            logprobs_T = -cross_entropy(logits_TV.float(), ids_T[1:], reduction="none")
            # The first token of a sequence is never under the mask, so no sequence predicts the next one's.
            behavior_T, advantages_T, mask_T = (
                moved([getattr(s, name) for s in row])[1:] for name in ("behavior_logprobs", "advantages", "loss_mask")
            )
            clipped_loss(logprobs_T, behavior_T, advantages_T, mask_T, config).backward()
        return weights.step(num_trained(sequences))

    return step


def trl(task: Task) -> Step:
    from benchmarks.learner_trl import trl_loss

    config, model = task.config(), transformers_model(task)
    sequences = sequences_of(task)
    loss_of = trl_loss(task, config, model, num_trained(sequences))
    weights = Weights(model, task, config)

    def step() -> float:
        for batch in padded_batches(sequences, task.max_tokens):
            loss_of(batch).backward()
        return weights.step(1)  # TRL divides by the number of tokens itself

    return step


SIDES: dict[str, Callable[[Task], Step]] = {
    "async-rl": product, "compiled": compiled, "limit": limit, "packed": packed, "padded": padded, "trl": trl,
}  # fmt: skip


def main() -> None:
    side, task = sys.argv[1], Task.from_json(sys.argv[2])
    torch.manual_seed(0)
    step: Step | None = None
    for _ in sys.stdin:
        try:
            step = step or SIDES[side](task)
            start = time.perf_counter()
            step()
            if task.device == "cuda":
                torch.cuda.synchronize()
            seconds, peak_bytes = time.perf_counter() - start, highest_memory_bytes(torch.device(task.device))
            found: dict[str, Any] = {"seconds": seconds, "peak_bytes": peak_bytes}
        except torch.OutOfMemoryError:
            found = {"failed": "out of memory"}
        except ImportError as error:
            found = {"failed": f"not run: {error}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
