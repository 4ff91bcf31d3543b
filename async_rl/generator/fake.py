"""A backend without a model: it makes tokens by hashing, at a configured speed. No torch.

All tokens of its vocabulary are equally likely at every temperature. Of equally likely tokens, top-k and top-p keep the
first ones, as the real sampler does.

Answers are a pure function of lease seed and rollout index, so runs can be compared token by token. Fault tests,
benchmarks of the queue and dry runs of a config use it.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.config.generator import BACKENDS, GeneratorConfig
from async_rl.config.reward import REWARD_TYPES
from async_rl.config.run import FakeConfig
from async_rl.generator.backend import Sampled
from async_rl.records import NO_VERSION, FinishReason, Lease, Sampling
from async_rl.rewards.gold import gold_readings
from async_rl.sampling_mask import SamplingMask, join, pack_ids

_CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True)
class _Sequence:
    """One sample of a lease.

    ``started_at`` is the number of decode steps before its first one; -1 while it waits for a slot.
    """

    lease: Lease
    index: int
    prompt_ids: np.ndarray
    num_tokens: int
    finish_reason: FinishReason
    started_at: int = -1


class FakeText:
    """The fake backend's tokenizer, which implements ``backend.Text``. It hashes every four characters to one token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"<{m.get('role', '')}>{m.get('content', '')}" for m in messages) + "<assistant>"

    def encode(self, text: str, before: str = "") -> np.ndarray:
        chunks = [text[i : i + _CHARACTERS_PER_TOKEN] for i in range(0, len(text), _CHARACTERS_PER_TOKEN)]
        return np.array([zlib.crc32(chunk.encode()) % self._vocab_size for chunk in chunks], dtype=np.int32)

    def encode_start(self, text: str) -> np.ndarray:
        return self.encode(text)

    def ending(self, token_id: int) -> str:
        return ""  # no token of the fake ends a turn


class FakeBackend:
    """A backend without a model: its answers depend only on the lease's seed and the rollout's index.

    It implements ``backend.Backend``. ``answer_form`` names the reward type in whose format it writes its answers.
    """

    capabilities = BACKENDS["fake"]

    def __init__(self, config: GeneratorConfig, fake: FakeConfig | None = None, *, answer_form: str = "boxed") -> None:
        self._fake = fake or FakeConfig()
        self.max_running = config.batch_size
        # A user's own reward function declares no format; most read a box.
        self._reward = REWARD_TYPES.get(answer_form, REWARD_TYPES["boxed"])
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._sampled_by_finished: dict[str, int] = {}
        self._num_steps = 0
        self.num_tokens = 0
        self._step_ends_at = 0.0
        self.version = NO_VERSION
        # (first decode step, version), in order; entries that no running sequence needs are dropped.
        self._version_changes: list[tuple[int, int]] = []

    @property
    def text(self) -> FakeText:
        return FakeText(self._fake.vocab_size)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._waiting)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """Return the prompt's token ids, int32 [P].

        Raises:
            ValueError: the prompt contains the text ``experimental.fake.fails_on``.
        """
        coder = self.text
        text = coder.render(messages)
        if self._fake.fails_on and self._fake.fails_on in text:
            raise ValueError(
                f"experimental.fake.fails_on = {self._fake.fails_on!r} is in the prompt, so the fake backend fails on "
                f"purpose; leave the key out to sample this prompt"
            )
        return coder.encode(text)

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        if self.version == NO_VERSION:
            raise RuntimeError("submit() was called before the first activate(); activate a version first")
        self._sampled_by_finished[lease.lease_id] = 0
        for index in range(lease.group_size):
            length = _answer_length(self._fake, lease.seed, index)
            limit = lease.sampling.max_new_tokens
            reason: FinishReason = "stop" if length <= limit else "length"
            self._waiting.append(_Sequence(lease, index, prompt_ids, min(length, limit), reason))
        self._admit_waiting()

    def cancel(self, lease_id: str) -> None:
        self._running = [s for s in self._running if s.lease.lease_id != lease_id]
        self._waiting = deque(s for s in self._waiting if s.lease.lease_id != lease_id)
        self._sampled_by_finished.pop(lease_id, None)
        self._admit_waiting()

    def step(self) -> list[Sampled]:
        if not self._running:
            return []
        self._wait_out_step()
        self._num_steps += 1
        self.num_tokens += len(self._running)
        finished = [s for s in self._running if s.started_at + s.num_tokens == self._num_steps]
        if not finished:
            return []
        self._running = [s for s in self._running if s.started_at + s.num_tokens != self._num_steps]
        sampled = [self._sampled(s) for s in finished]
        self._forget_finished_leases(finished)
        self._admit_waiting()
        return sampled

    def progress(self) -> dict[str, int]:
        tokens = dict(self._sampled_by_finished)
        for sequence in self._running:
            tokens[sequence.lease.lease_id] += self._num_steps - sequence.started_at
        return tokens

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        started_s = time.monotonic()
        self.version = version
        oldest_step = min((s.started_at for s in self._running), default=self._num_steps)
        while len(self._version_changes) > 1 and self._version_changes[1][0] <= oldest_step:
            self._version_changes.pop(0)
        self._version_changes.append((self._num_steps, version))
        return time.monotonic() - started_s

    def close(self) -> None:
        self._running.clear()
        self._waiting.clear()
        self._sampled_by_finished.clear()

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            sequence = self._waiting.popleft()
            sequence.started_at = self._num_steps
            self._running.append(sequence)

    def _wait_out_step(self) -> None:
        """Sleep until the present decode step should end.

        The ends of steps follow a fixed schedule, so time that the caller spends between steps does not slow the fake
        down.
        """
        if self._fake.step_time_s == 0:
            return
        now = time.monotonic()
        # If the schedule is late by more than a step (the backend was idle), start a new one.
        started = self._step_ends_at if now - self._step_ends_at < self._fake.step_time_s else now
        self._step_ends_at = started + self._fake.step_time_s
        time.sleep(max(0.0, self._step_ends_at - now))

    def _sampled(self, sequence: _Sequence) -> Sampled:
        lease, count = sequence.lease, sequence.num_tokens
        steps = np.arange(sequence.started_at, sequence.started_at + count)
        changed_at = np.array([step for step, _ in self._version_changes])
        versions = np.array([version for _, version in self._version_changes], dtype=np.int32)
        random = np.random.default_rng([2, lease.seed, sequence.index])
        num_kept = _num_kept(lease.sampling, self._fake.vocab_size)
        return Sampled(
            lease_id=lease.lease_id,
            index=sequence.index,
            prompt_ids=sequence.prompt_ids,
            token_ids=random.integers(0, num_kept, count, dtype=np.int32),
            logprobs=np.full(count, -math.log(num_kept), dtype=np.float32),
            versions=versions[np.searchsorted(changed_at, steps, side="right") - 1],
            finish_reason=sequence.finish_reason,
            text=self._text(lease, sequence.index),
            sampling_mask=_first_ids(num_kept, count, self._fake.vocab_size) if lease.wants_sampling_mask else None,
        )

    def _text(self, lease: Lease, index: int) -> str:
        correct = np.random.default_rng([1, lease.seed, index]).random() < self._fake.accuracy
        if self._reward.runs_programs:
            return _program(lease.prompt.reward_data, correct=correct)
        golds = gold_readings(lease.prompt.reward_data, is_mathematics=self._reward.compares_mathematics)
        expected = golds[0] if golds else ""
        # The wrong answer is a number: two numbers are compared without the symbolic verifier, which takes little time.
        answer = expected if correct else ("-1" if expected != "-1" else "-2")
        return self._reward.write_answer(answer, thoughts=f"Sample {index}")

    def _forget_finished_leases(self, finished: Sequence[_Sequence]) -> None:
        alive = {s.lease.lease_id for s in (*self._running, *self._waiting)}
        for sequence in finished:
            lease_id = sequence.lease.lease_id
            if lease_id in alive:
                self._sampled_by_finished[lease_id] += sequence.num_tokens
            else:
                self._sampled_by_finished.pop(lease_id, None)


def _program(reward_data: Mapping[str, Any], *, correct: bool) -> str:
    """Return a Python program as an answer to the row's tests.

    If ``correct``, it prints the expected outputs (for tests with standard input only). Otherwise it prints a wrong
    one.
    """
    cases = reward_data.get("test_cases", {})
    known = dict(zip(cases.get("inputs", []), cases.get("outputs", [])))
    source = f"import sys\nprint({known!r}[sys.stdin.read()])" if correct else "print('wrong')"
    return f"```python\n{source}\n```"


def _num_kept(sampling: Sampling, vocab_size: int) -> int:
    """Return how many of the equally likely tokens top-k and top-p keep."""
    if sampling.keeps_all:
        return vocab_size
    return math.ceil(sampling.top_p * min(sampling.top_k or vocab_size, vocab_size))


def _first_ids(num_kept: int, count: int, vocab_size: int) -> SamplingMask:
    """Return a sampling mask for ``count`` tokens. The set of each token holds all ids below ``num_kept``."""
    once = pack_ids(np.array([num_kept]), np.arange(num_kept), vocab_size=vocab_size)
    return join([once] * count)


def _answer_length(fake: FakeConfig, seed: int, index: int) -> int:
    """Return the number of tokens of an answer, at least 1. Lengths are log-normal with mean ``mean_tokens``."""
    normal = np.random.default_rng([0, seed, index]).standard_normal()
    return max(1, round(fake.mean_tokens * math.exp(fake.sigma * normal - fake.sigma**2 / 2)))
