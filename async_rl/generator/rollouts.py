"""From a lease to its scored rollouts: what the generator's loop sees of it, and the simple case of one answer each.

The loop submits leases, hands on what the backend finished, and collects rollouts when they are scored. The case of
several turns is in ``environment_rollouts``.

Finished samples go to a ``Grader``, which scores them beside the loop: a slow answer (a symbolic comparison takes
milliseconds, a hostile one seconds) never holds up the next decode step.

Under ``data.on_long_prompt = "truncate"`` a prompt above ``sampling.max_prompt_tokens`` is cut at the end of its last
user message. The template around that message stays whole: it tells the model that it is its turn.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from async_rl.generator.backend import Backend, Sampled
from async_rl.queue.messages import FailureCause
from async_rl.records import NO_VERSION, Lease, Rollout, TokenSequence
from async_rl.rewards.records import GroupReward, RewardInput, RewardOutput, score_group

Encode = Callable[[Sequence[Mapping[str, str]]], np.ndarray]

ScoreOne = Callable[[RewardInput], RewardOutput]


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


def whole_sequence(sample: Sampled) -> TokenSequence:
    """Prompt and answer as one sequence; the answer is under the mask."""
    num_prompt = len(sample.prompt_ids)
    num_tokens = num_prompt + len(sample.token_ids)
    token_ids, versions = np.empty(num_tokens, np.int32), np.empty(num_tokens, np.int32)
    loss_mask, logprobs = np.empty(num_tokens, np.bool_), np.empty(num_tokens, np.float32)
    token_ids[:num_prompt], token_ids[num_prompt:] = sample.prompt_ids, sample.token_ids
    loss_mask[:num_prompt], loss_mask[num_prompt:] = False, True
    logprobs[:num_prompt], logprobs[num_prompt:] = 0.0, sample.logprobs
    versions[:num_prompt], versions[num_prompt:] = NO_VERSION, sample.versions
    return TokenSequence(token_ids, loss_mask, logprobs, versions, sample.sampling_mask)


def graded_rollouts(reward: ScoreOne, lease: Lease, samples: Sequence[Sampled]) -> list[Rollout]:
    """The scored rollouts of finished samples of one lease, in order. Raises whatever ``reward`` raises."""
    items = [
        RewardInput(
            text=sample.text,
            reward_data=lease.prompt.reward_data,
            num_tokens=len(sample.token_ids),
            max_new_tokens=lease.sampling.max_new_tokens,
            finish_reason=sample.finish_reason,
        )
        for sample in samples
    ]
    return [
        Rollout(
            sequences=(whole_sequence(sample),),
            reward_parts=output.parts,
            accuracy=output.accuracy,
            finish_reason=sample.finish_reason,
            extracted=output.extracted,
        )
        for sample, output in zip(samples, score_group(reward, items), strict=True)
    ]


def needs_whole_group(reward: ScoreOne) -> bool:
    """Whether the samples of a lease are to be scored together."""
    return isinstance(reward, GroupReward) and reward.needs_whole_group


@dataclass(frozen=True, slots=True, eq=False)
class Graded:
    """A sample's rollout, or why its lease can't be sampled: ``cause``, and the ``error`` that its reward raised.

    ``detail`` says it in words; also of a rollout that failed.
    """

    lease: Lease
    index: int
    rollout: Rollout | None
    error: Exception | None = None
    cause: FailureCause = "reward_error"
    detail: str = ""


class Grader(Protocol):
    """Scores samples as they are submitted, or all of a lease once the last is, as the reward needs it."""

    @property
    def num_pending(self) -> int:
        """Samples that are being scored, or scored and not collected."""
        ...

    def submit(self, lease: Lease, sample: Sampled) -> None: ...

    def collect(self) -> list[Graded]:
        """What is scored by now; never waits."""
        ...

    def forget(self, lease_id: str) -> None:
        """The lease is gone: its samples that wait for the rest of their group are not scored."""
        ...


def _graded(reward: ScoreOne, lease: Lease, samples: Sequence[Sampled]) -> list[Graded]:
    try:
        rollouts = graded_rollouts(reward, lease, samples)
        return [Graded(lease, sample.index, rollout) for sample, rollout in zip(samples, rollouts, strict=True)]
    except Exception as error:  # the boundary to reward code: the loop fails and counts the lease
        detail = f"{type(error).__name__}: {error}"
        return [Graded(lease, sample.index, None, error, detail=detail) for sample in samples]


class _Gathering:
    """Samples that wait until their lease's group is whole, if the reward needs that."""

    def __init__(self, reward: ScoreOne) -> None:
        self._waits = needs_whole_group(reward)
        self._waiting: dict[str, list[Sampled]] = {}

    def add(self, lease: Lease, sample: Sampled) -> list[Sampled]:
        """What can be scored now that this sample is there, by index; nothing while others are missing."""
        if not self._waits:
            return [sample]
        samples = self._waiting.setdefault(lease.lease_id, [])
        samples.append(sample)
        if len(samples) < lease.group_size:
            return []
        del self._waiting[lease.lease_id]
        return sorted(samples, key=lambda one: one.index)

    def forget(self, lease_id: str) -> None:
        self._waiting.pop(lease_id, None)


class InlineGrader:
    """Scores at once, in the caller's thread: for tests and for runs that must not depend on timing."""

    def __init__(self, reward: ScoreOne) -> None:
        self._reward = reward
        self._gathering = _Gathering(reward)
        self._done: list[Graded] = []

    @property
    def num_pending(self) -> int:
        return len(self._done)

    def submit(self, lease: Lease, sample: Sampled) -> None:
        if samples := self._gathering.add(lease, sample):
            self._done += _graded(self._reward, lease, samples)

    def collect(self) -> list[Graded]:
        done, self._done = self._done, []
        return done

    def forget(self, lease_id: str) -> None:
        self._gathering.forget(lease_id)


class ThreadGrader:
    """Scores in background threads, which wait for a verifier process or a sandbox without holding the interpreter.

    With more than one thread, samples are collected in the order in which their scores are ready.
    """

    def __init__(self, reward: ScoreOne, *, num_threads: int = 1) -> None:
        self._reward = reward
        self._gathering = _Gathering(reward)
        self._todo: queue.SimpleQueue[tuple[Lease, list[Sampled]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Graded] = queue.SimpleQueue()
        self._num_pending = 0
        self._threads = [threading.Thread(target=self._run, name="grading", daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(self, lease: Lease, sample: Sampled) -> None:
        if samples := self._gathering.add(lease, sample):
            self._num_pending += len(samples)
            self._todo.put((lease, samples))

    def collect(self) -> list[Graded]:
        done: list[Graded] = []
        while not self._done.empty():
            done.append(self._done.get())
        self._num_pending -= len(done)
        return done

    def forget(self, lease_id: str) -> None:
        self._gathering.forget(lease_id)

    def close(self) -> None:
        """End the threads once what is submitted is scored."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            for graded in _graded(self._reward, *item):
                self._done.put(graded)
