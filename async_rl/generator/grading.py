"""From a finished sample to a scored rollout. Called by the generator's loop and by offline evaluation.

The loop hands samples to a ``Grader`` and collects them when they are scored, so that a slow answer (a symbolic
comparison takes milliseconds, a hostile one seconds) never stalls the next decode step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from async_rl.generator.backend import Sampled
from async_rl.queue.messages import FailureCause
from async_rl.records import NO_VERSION, Lease, Rollout, TokenSequence
from async_rl.rewards.records import RewardInput, RewardOutput


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
    return TokenSequence(token_ids, loss_mask, logprobs, versions, sample.kept)


def graded_rollout(reward: Callable[[RewardInput], RewardOutput], lease: Lease, sample: Sampled) -> Rollout:
    """The scored rollout of one finished sample. Raises whatever ``reward`` raises."""
    output = reward(
        RewardInput(
            text=sample.text,
            reward_data=lease.prompt.reward_data,
            num_tokens=len(sample.token_ids),
            max_new_tokens=lease.sampling.max_new_tokens,
            finish_reason=sample.finish_reason,
        )
    )
    return Rollout(
        sequences=(whole_sequence(sample),),
        reward_parts=output.parts,
        accuracy=output.accuracy,
        finish_reason=sample.finish_reason,
        extracted=output.extracted,
    )


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
    """Scores samples, in the order in which they were submitted."""

    @property
    def num_pending(self) -> int:
        """Samples that are submitted and not collected."""
        ...

    def submit(self, lease: Lease, sample: Sampled) -> None: ...

    def collect(self) -> list[Graded]:
        """What is scored by now; never waits."""
        ...


def _graded(reward: Callable[[RewardInput], RewardOutput], lease: Lease, sample: Sampled) -> Graded:
    try:
        return Graded(lease, sample.index, graded_rollout(reward, lease, sample))
    except Exception as error:  # the boundary to reward code: the loop fails and counts the lease
        return Graded(lease, sample.index, None, error, detail=f"{type(error).__name__}: {error}")


class InlineGrader:
    """Scores at once, in the caller's thread: for tests and for runs that must not depend on timing."""

    def __init__(self, reward: Callable[[RewardInput], RewardOutput]) -> None:
        self._reward = reward
        self._done: list[Graded] = []

    @property
    def num_pending(self) -> int:
        return len(self._done)

    def submit(self, lease: Lease, sample: Sampled) -> None:
        self._done.append(_graded(self._reward, lease, sample))

    def collect(self) -> list[Graded]:
        done, self._done = self._done, []
        return done


class ThreadGrader:
    """Scores in one background thread, which waits for its verifier process without holding the interpreter."""

    def __init__(self, reward: Callable[[RewardInput], RewardOutput]) -> None:
        self._reward = reward
        self._todo: queue.SimpleQueue[tuple[Lease, Sampled] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Graded] = queue.SimpleQueue()
        self._num_pending = 0
        self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(self, lease: Lease, sample: Sampled) -> None:
        self._num_pending += 1
        self._todo.put((lease, sample))

    def collect(self) -> list[Graded]:
        done: list[Graded] = []
        while not self._done.empty():
            done.append(self._done.get())
        self._num_pending -= len(done)
        return done

    def close(self) -> None:
        """End the thread once what is submitted is scored."""
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            self._done.put(_graded(self._reward, *item))
