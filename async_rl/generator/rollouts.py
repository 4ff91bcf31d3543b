"""From a lease to its scored rollouts: what the generator's loop sees of it, and the simple case of one answer each.

The loop submits leases, hands on what the backend finished, and collects rollouts when they are scored. The case of
several turns is in ``environment_rollouts``.

Under ``data.on_long_prompt = "truncate"`` a prompt above ``sampling.max_prompt_tokens`` is cut at the end of its last
user message. The template around that message stays whole: it tells the model that it is its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from async_rl.generator.backend import Backend, Sampled
from async_rl.generator.grading import Graded, Grader
from async_rl.records import Lease

Encode = Callable[[Sequence[Mapping[str, str]]], np.ndarray]


class Rollouts(Protocol):
    """Plays the rollouts of leases with a backend that the loop steps."""

    @property
    def num_open(self) -> int:
        """Rollouts that take up the generator's room."""
        ...

    @property
    def num_pending(self) -> int:
        """Rollouts that somebody other than the backend works on at present."""
        ...

    def encode(self, lease: Lease) -> np.ndarray:
        """The prompt's token ids, int32 [P]; [0] where an environment has yet to make it."""
        ...

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        """Begin the lease's rollouts."""
        ...

    def cancel(self, lease_id: str) -> None:
        """Forget the lease; nothing of it is collected any more. Unknown ones are ignored."""
        ...

    def take(self, sampled: Iterable[Sampled]) -> None:
        """What one step of the backend finished."""
        ...

    def collect(self) -> list[Graded]:
        """Rollouts that are done by now; never waits."""
        ...

    def progress(self) -> dict[str, int]:
        """By lease, a count that grows with every token and turn, for the heartbeat."""
        ...


class SingleTurnRollouts:
    """One answer a rollout, scored by ``grader``. ``truncates``: a prompt that is too long is cut, not refused."""

    def __init__(self, backend: Backend, grader: Grader, *, truncates: bool = False) -> None:
        self._backend = backend
        self._grader = grader
        self._truncates = truncates
        self._leases: dict[str, Lease] = {}
        self._num_missing: dict[str, int] = {}

    @property
    def num_open(self) -> int:
        return self._backend.num_running

    @property
    def num_pending(self) -> int:
        return self._grader.num_pending

    def encode(self, lease: Lease) -> np.ndarray:
        encode, messages = self._backend.encode_prompt, lease.prompt.messages
        prompt_ids = encode(messages)
        if not self._truncates:
            return prompt_ids
        return fitted_prompt(encode, messages, prompt_ids, lease.sampling.max_prompt_tokens)

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        self._leases[lease.lease_id], self._num_missing[lease.lease_id] = lease, lease.group_size
        self._backend.submit(lease, prompt_ids)

    def cancel(self, lease_id: str) -> None:
        self._forget(lease_id)
        self._backend.cancel(lease_id)
        self._grader.forget(lease_id)

    def take(self, sampled: Iterable[Sampled]) -> None:
        for sample in sampled:
            lease = self._leases.get(sample.lease_id)
            if lease is None:
                continue
            self._grader.submit(lease, sample)
            self._num_missing[sample.lease_id] -= 1
            if not self._num_missing[sample.lease_id]:
                self._forget(sample.lease_id)

    def collect(self) -> list[Graded]:
        return self._grader.collect()

    def progress(self) -> dict[str, int]:
        return self._backend.progress()

    def _forget(self, lease_id: str) -> None:
        self._leases.pop(lease_id, None)
        self._num_missing.pop(lease_id, None)


def fitted_prompt(
    encode: Encode, messages: Sequence[Mapping[str, str]], prompt_ids: np.ndarray, max_tokens: int
) -> np.ndarray:
    """Token ids of as much of the prompt as fits, or ``prompt_ids`` where no cut makes it fit.

    Args:
        encode: renders messages to token ids, int32 [P].
        prompt_ids: what ``messages`` render to.
        max_tokens: what may be kept.
    """
    if len(prompt_ids) <= max_tokens:
        return prompt_ids
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    cut = users[-1] if users else len(messages) - 1
    content = messages[cut]["content"]

    def rendered(num_kept: int) -> np.ndarray:
        shortened = {"role": messages[cut]["role"], "content": content[:num_kept]}
        return encode([*messages[:cut], shortened, *messages[cut + 1 :]])

    best, fits, too_many = prompt_ids, 0, len(content)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        shorter = rendered(middle)
        if len(shorter) <= max_tokens:
            best, fits = shorter, middle
        else:
            too_many = middle
    return best
