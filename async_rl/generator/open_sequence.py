"""A token sequence of a rollout that still grows: what the policy is given, and what it answers."""

from __future__ import annotations

import numpy as np

from async_rl.generator.backend import Sampled
from async_rl.records import NO_VERSION, TokenSequence
from async_rl.routes import RouteArray
from async_rl.sampling_mask import SamplingMask, join


class OpenSequence:
    """A token sequence that still grows: tokens that the policy is given, an answer, given ones, an answer, and so on.

    It keeps one array for each of them, in the order in which they came. ``_ends`` has for each answer the number of
    arrays up to its end.
    """

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._sampling_masks: list[SamplingMask] = []
        self._routes: list[RouteArray] = []
        self._ends: list[int] = []

    @property
    def has_samples(self) -> bool:
        return bool(self._ends)

    @property
    def answer_tokens(self) -> list[int]:
        """The number of tokens of each answer."""
        return [len(self._ids[end - 1]) for end in self._ends]

    @property
    def num_sampled(self) -> int:
        return sum(self.answer_tokens)

    def add_given(self, ids: np.ndarray) -> None:
        self._add(ids, False, np.zeros(len(ids), np.float32), np.full(len(ids), NO_VERSION, np.int32))

    def add_sampled(self, sampled: Sampled) -> None:
        self._add(sampled.token_ids, True, sampled.logprobs, sampled.versions)
        self._ends.append(len(self._ids))
        if sampled.sampling_mask is not None:
            self._sampling_masks.append(sampled.sampling_mask)
        if sampled.routes is not None:
            # A later turn computes the earlier ones again. Their tokens were sampled with the first routes.
            self._routes.append(sampled.routes[sum(map(len, self._routes)) :])

    def drop_answer(self) -> None:
        """Remove the last answer, and all that follows the one before it."""
        self._ends.pop()
        begin = self._ends[-1] if self._ends else 0
        for arrays in (self._ids, self._masks, self._logprobs, self._versions):
            del arrays[begin:]
        for parts in (self._sampling_masks, self._routes):
            del parts[len(self._ends) :]

    def _add(self, ids: np.ndarray, mask: bool, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self._ids.append(ids)
        self._masks.append(np.full(len(ids), mask, np.bool_))
        self._logprobs.append(logprobs)
        self._versions.append(versions)

    def token_ids(self) -> np.ndarray:
        """Return all tokens, int32 [N]."""
        return np.concatenate(self._ids).astype(np.int32)

    def sequence(self) -> TokenSequence:
        """Return the sequence up to its last sampled token. A state that nobody answered may not fit in the context."""
        end = self._ends[-1]
        return TokenSequence(
            token_ids=np.concatenate(self._ids[:end]).astype(np.int32),
            loss_mask=np.concatenate(self._masks[:end]),
            behavior_logprobs=np.concatenate(self._logprobs[:end]).astype(np.float32),
            versions=np.concatenate(self._versions[:end]).astype(np.int32),
            sampling_mask=join(self._sampling_masks) if self._sampling_masks else None,
            routes=np.concatenate(self._routes) if self._routes else None,
        )
