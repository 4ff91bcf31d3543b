"""The head's stage of a training step against a plain cross-entropy on the same rows: time, and peak memory.

The stage is ``token_logprobs`` with the default policy loss, forward and backward; the plain side is
``cross_entropy(hidden @ W.T)`` with all logits in memory. Both begin at the hidden states and end at the gradients of
hidden states and weight. Repeats alternate, and the ratio is of the medians::

    python -m benchmarks.head --vocab 32000 152000 --tokens 1024 4096 --repeats 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from async_rl.config.loss import LossConfig
from async_rl.learner.data.packing import pack
from async_rl.learner.losses.objective import PolicyObjective
from async_rl.learner.model.logprobs import token_logprobs
from async_rl.learner.model.policy_model import DeviceBatch, to_device
from async_rl.learner.sequences import TrainSequence

ANSWER_TOKENS = 256
"""Trained tokens of a sequence. They come without a prompt, which the head does not see."""


class HeadTimes(NamedTuple):
    """Seconds of the head's stage, medians: in one pass, with the logits computed again, and a plain cross-entropy."""

    one_pass_s: float
    recomputed_s: float
    plain_s: float


class HeadCase:
    """Hidden states, a head and a micro-batch that is near on-policy, so that the loss's ratios are near 1."""

    def __init__(
        self, vocab: int, width: int, tokens: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
        self.head = nn.Linear(width, vocab, bias=False, device="meta")
        self.head.weight = nn.Parameter((torch.randn(vocab, width, device=device) / width**0.5).to(dtype))
        self.objective = PolicyObjective(LossConfig(), 0, 1)
        self.batch = self._batch(vocab, tokens, device)

    def _batch(self, vocab: int, tokens: int, device: str) -> DeviceBatch:
        random, sequences = np.random.default_rng(0), []
        for index, start in enumerate(range(0, tokens, ANSWER_TOKENS)):
            size = min(ANSWER_TOKENS, tokens - start) + 1
            mask = np.arange(size) > 0
            sequences.append(
                TrainSequence(
                    sequence_id=index,
                    token_ids=random.integers(0, vocab, size).astype(np.int32),
                    loss_mask=mask,
                    behavior_logprobs=np.zeros(size, dtype=np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    advantages=np.full(size, random.normal(), dtype=np.float32),
                    temperature=1.0,
                )
            )
        ((micro_batch,),) = pack(sequences, max_tokens=2 * tokens, num_ranks=1)
        batch = to_device(micro_batch, torch.device(device))
        with torch.no_grad():
            scored = token_logprobs(self.hidden, self.head, batch.targets, batch.temperatures)
        return replace(batch, behavior_logprobs=scored.logprobs + 0.05 * torch.randn_like(scored.logprobs))

    def ours(self, *, one_pass: bool = True) -> None:
        """Compute log-probabilities, loss and gradients as the engine does."""
        predict = self.objective.predict_slopes(self.batch, version=0) if one_pass else None
        scored = token_logprobs(self.hidden, self.head, self.batch.targets, self.batch.temperatures, predict=predict)
        self._backward(self.objective(self.batch, scored, version=0).loss_sum)

    def plain(self) -> None:
        """Compute a cross-entropy with all logits at once, and its gradients."""
        logits = self.hidden @ self.head.weight.T
        self._backward(cross_entropy(logits.float(), self.batch.targets, reduction="sum"))

    def _backward(self, loss: Tensor) -> None:
        loss.backward()
        self.hidden.grad = self.head.weight.grad = None
        if self.hidden.is_cuda:
            torch.cuda.synchronize()


def head_times(case: HeadCase, repeats: int) -> HeadTimes:
    """Time the sides of ``case``, one after the other in every repeat, after one repeat that does not count."""
    sides: list[Callable[[], None]] = [case.ours, lambda: case.ours(one_pass=False), case.plain]
    times: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats + 1):
        for side, found in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            if repeat:
                found.append(time.perf_counter() - start)
    return HeadTimes(*(median(found) for found in times))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 151936], help="sizes of the vocabulary")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="trained tokens of a micro-batch")
    parser.add_argument("--width", type=int, default=896, help="size of the hidden states")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each side")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of head and rows")
    args = parser.parse_args()
    print(f"{args.device}, {args.dtype}, {torch.get_num_threads()} threads, width {args.width}, {args.repeats} repeats")
    print("| vocabulary | tokens | plain, ms a token | one pass / plain | recomputed / plain |\n|---|---|---|---|---|")
    for vocab in args.vocab:
        for tokens in args.tokens:
            case = HeadCase(vocab, args.width, tokens, device=args.device, dtype=getattr(torch, args.dtype))
            times = head_times(case, args.repeats)
            plain = times.plain_s
            print(
                f"| {vocab} | {tokens} | {1e3 * plain / tokens:.3f} | {times.one_pass_s / plain:.2f} | "
                f"{times.recomputed_s / plain:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
