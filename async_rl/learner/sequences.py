"""The sequences of one optimizer step, as the loop gives them to an engine: plain numpy arrays. T = tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from async_rl.routes import RouteArray
from async_rl.sampling_mask import SamplingMask


def _no_logprobs() -> np.ndarray:
    return np.zeros(0, dtype=np.float32)


def _no_ids() -> np.ndarray:
    return np.zeros(0, dtype=np.int32)


def _no_verdicts() -> np.ndarray:
    return np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One sequence to train on.

    Attributes:
        sequence_id: number of the sequence, unique in the step.
        token_ids: int32 [T].
        loss_mask: bool [T], True on tokens that are trained on. The first token never is.
        behavior_logprobs: float32 [T], nats.
        versions: int32 [T], the version that sampled each token.
        advantages: float32 [T], reward units.
        temperature: the sampling temperature.
        reference_logprobs: float32 [T], nats, of the frozen reference model. [0] if the loss needs none.
        proximal_logprobs: float32 [T], nats, of the policy that the step began with. [0] if the loss needs none.
        sampling_mask: for each token under the loss mask, the tokens that top-p and top-k left. None if they left all.
        verdicts: uint8 [T], a ``losses.rules.Verdict`` on each token. [0] if nothing judges tokens by the whole step.
        routes: [P, L, K], the experts to compute the first P tokens with (``async_rl.routes``): at least those before
            the last token under the loss mask. None if the model's routers choose.
        teacher_logprobs: float32 [T], nats, of the teacher. [0] without a teacher.
        top_ids: int32 [T, K], the teacher's likeliest tokens, and top_logprobs: float32 [T, K], their log-probabilities
            in nats. [0] if the loss needs none.
    """

    sequence_id: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    temperature: float
    reference_logprobs: np.ndarray = field(default_factory=_no_logprobs)
    proximal_logprobs: np.ndarray = field(default_factory=_no_logprobs)
    sampling_mask: SamplingMask | None = None
    verdicts: np.ndarray = field(default_factory=_no_verdicts)
    routes: RouteArray | None = None
    teacher_logprobs: np.ndarray = field(default_factory=_no_logprobs)
    top_ids: np.ndarray = field(default_factory=_no_ids)
    top_logprobs: np.ndarray = field(default_factory=_no_logprobs)

    @property
    def after_update(self) -> np.ndarray:
        """bool [T], True on tokens that were sampled with newer weights than the first token of their answer.

        Such a token was sampled with cached keys and values of older weights. An answer is an unbroken run of sampled
        tokens.
        Every turn of an environment is an answer with its own prefill.
        """
        return after_update([self.versions])[0]


def after_update(versions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return ``TrainSequence.after_update`` of sequences with these ``versions``."""
    together = np.concatenate(versions)
    bounds = bounds_of([len(each) for each in versions])
    is_sampled = together >= 0
    begins = np.zeros(len(together), dtype=np.bool_)
    begins[1:] = is_sampled[1:] != is_sampled[:-1]
    begins[bounds[:-1]] = True  # also where a sequence begins
    runs = np.flatnonzero(begins)
    first_versions = np.repeat(together[runs], np.diff(runs, append=len(together)))
    after = is_sampled & (together > first_versions)
    return [after[start:end] for start, end in pairwise(bounds.tolist())]


def bounds_of(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return int64 [n + 1]: where each of n things of these sizes begins if they follow each other, and the end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
