"""Turn a lease into its scored group: the table of a generator's leases, rollouts of one answer, and graders.

``ActiveLeases`` is the table of the leases that the loop works on. An object of the protocol ``Rollouts`` plays their
rollouts: the loop submits leases to it, passes finished samples to it, and collects scored rollouts from it.
``SingleTurnRollouts`` samples one answer per rollout. ``environment_rollouts`` plays rollouts of several turns.

``ThreadGrader`` scores finished samples in the background. So an answer that takes long to score (milliseconds for a
symbolic comparison, seconds for a hostile answer) does not delay the next decode step.

Under ``data.on_long_prompt = "truncate"`` a prompt above ``sampling.max_prompt_tokens`` loses the end of its last user
message. The chat template's text after that message is kept, because it begins the model's turn.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from async_rl.errors import RewardError
from async_rl.generator.backend import Backend, Sampled
from async_rl.generator.open_sequence import whole_sequence
from async_rl.process.transient import is_transient
from async_rl.process.user_code import describe_error
from async_rl.queue.messages import Failure, FailureCause
from async_rl.records import (
    WITHOUT_REWARD,
    AgentSession,
    FinishReason,
    Group,
    Lease,
    Rollout,
    Span,
    TokenSequence,
    Turn,
    row_fields,
)
from async_rl.rewards.records import CountingReward, GroupReward, RewardInput, RewardOutput, WaitingReward, score_group
from async_rl.run.records.eval_records import Decode

Encode = Callable[[Sequence[Mapping[str, str]]], np.ndarray]

ScoreOne = Callable[[RewardInput], RewardOutput]

_EXAMPLE_CHARACTERS = 120
"""Number of characters of an answer's end that a group takes along for the user."""


@dataclass(slots=True, eq=False)
class ActiveLease:
    """A lease that the generator has not returned yet, with its scored rollouts by index.

    ``is_submitted`` is False while the lease waits for newer weights. ``heartbeats_in_line`` counts the heartbeats at
    which the backend had no token of the submitted lease (none yet, or all answers are finished), while the generator
    did other work, or at which the generator was paused. ``most_sampled`` is the largest number of tokens that the
    backend had. ``failed`` counts the rollouts that failed, by the reason. ``example`` is the end of the text of one
    of its answers. ``kept`` is as in ``Graded``.
    """

    lease: Lease
    prompt_ids: np.ndarray
    received_s: float
    is_submitted: bool = False
    heartbeats_in_line: int = 0
    most_sampled: int = 0
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    failed: Counter[Failure] = field(default_factory=Counter)
    example: str = ""
    kept: bool = True

    def add(self, index: int, rollout: Rollout, failure: Failure | None, text: str = "") -> None:
        """Add a rollout that is scored, or that failed because of ``failure``. ``text`` is its answer's."""
        self.rollouts[index] = rollout
        self.example = text[-_EXAMPLE_CHARACTERS:] or self.example
        if failure is not None:
            self.failed[failure] += 1

    @property
    def is_complete(self) -> bool:
        """Whether every rollout is scored or has failed."""
        return len(self.rollouts) == self.lease.group_size

    @property
    def every_rollout_failed(self) -> bool:
        """Whether no rollout is scored."""
        return self.failed.total() == len(self.rollouts)

    def group(self, generator_id: str, digests: Mapping[int, str], now_s: float) -> Group:
        """Return the complete group to send to the queue.

        ``digests`` maps each version to the digest of its weights.
        """
        rollouts = tuple(self.rollouts[index] for index in range(self.lease.group_size))
        sampled = np.concatenate([s.versions[s.loss_mask] for r in rollouts for s in r.sequences])
        accuracies = {r.accuracy for r in rollouts if r.finish_reason not in WITHOUT_REWARD}
        says_little = len(accuracies) == 1 or all(r.finish_reason == "length" for r in rollouts)
        return Group(
            lease_id=self.lease.lease_id,
            kind=self.lease.kind,
            position=self.lease.prompt.position,
            generator_id=generator_id,
            lineage=self.lease.lineage,
            temperature=self.lease.sampling.temperature,
            rollouts=rollouts,
            weights_digest={version: digests[version] for version in np.unique(sampled).tolist()},
            sampling_time_s=now_s - self.received_s,
            example=self.example if says_little else "",
            kept=self.kept,
        )


class ActiveLeases:
    """The leases that a generator works on, by id.

    The loop adds a lease when the queue grants it. The loop removes the lease when its group is returned, or when the
    lease has failed or is cancelled.
    """

    def __init__(self) -> None:
        self._leases: dict[str, ActiveLease] = {}
        self._work_at_heartbeat = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    @property
    def ids(self) -> list[str]:
        return list(self._leases)

    @property
    def num_unsubmitted(self) -> int:
        """The number of rollouts whose leases wait for newer weights."""
        return sum(active.lease.group_size for active in self._leases.values() if not active.is_submitted)

    def add(self, lease: Lease, prompt_ids: np.ndarray, now_s: float) -> None:
        self._leases[lease.lease_id] = ActiveLease(lease, prompt_ids, now_s)

    def get(self, lease_id: str) -> ActiveLease | None:
        return self._leases.get(lease_id)

    def remove(self, lease_id: str) -> bool:
        """Forget the lease. Return whether it was known."""
        return self._leases.pop(lease_id, None) is not None

    def take_submittable(self, version: int) -> list[ActiveLease]:
        """Return the leases that ``version`` may sample and that have not begun. Mark them as submitted."""
        ready = [a for a in self._leases.values() if not a.is_submitted and version >= a.lease.min_version]
        for active in ready:
            active.is_submitted = True
        return ready

    def progress(self, num_tokens: Mapping[str, int], work: int, *, is_paused: bool = False) -> dict[str, int]:
        """Return for each lease id a count that grows while the lease makes progress. Heartbeats report it.

        The count also grows for a lease that waits for a slot or a grader while the generator does other work, and
        while the generator's device does other work. Otherwise the queue would let the lease expire.

        Args:
            num_tokens: how many tokens the backend sampled for each lease.
            work: a count that grows with everything that the generator does.
            is_paused: whether the generator's device does other work now.
        """
        found: dict[str, int] = {}
        for lease_id, active in self._leases.items():
            sampled = num_tokens.get(lease_id, 0)
            if is_paused or (active.is_submitted and not sampled and work > self._work_at_heartbeat):
                active.heartbeats_in_line += 1
            # The queue notices a number only if it is the highest yet, and finished answers leave the backend.
            active.most_sampled = max(active.most_sampled, sampled)
            found[lease_id] = active.most_sampled + active.heartbeats_in_line + len(active.rollouts)
        self._work_at_heartbeat = work
        return found


class AsksOthers(Protocol):
    """Something that may wait for other processes, such as scorers, which may be away."""

    @property
    def trouble(self) -> str:
        """What it waits for; empty if nothing is known to be wrong."""
        ...

    @property
    def num_waiting(self) -> int:
        """The number of answers or rollouts that wait for another process without a time limit."""
        ...


class Rollouts(Protocol):
    """Plays the rollouts of leases: has the backend sample them and has them scored. The loop steps the backend."""

    @property
    def num_open(self) -> int:
        """The number of rollouts that take up one of the generator's slots or will need one."""
        ...

    @property
    def num_pending(self) -> int:
        """The number of rollouts that wait for a grader or an environment instead of the backend."""
        ...

    def encode(self, lease: Lease) -> np.ndarray:
        """Return the token ids of the lease's prompt, int32 [P]. P is 0 if an environment makes the prompt later."""
        ...

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        """Begin the lease's rollouts."""
        ...

    def cancel(self, lease_id: str) -> None:
        """Stop the lease's rollouts. ``collect`` returns none of them from now on. An unknown lease is ignored."""
        ...

    def take(self, sampled: Iterable[Sampled]) -> None:
        """Accept the samples that one step of the backend finished, to score or to continue them."""
        ...

    def collect(self) -> list[Graded]:
        """Return the rollouts that have been scored since the last call, without waiting."""
        ...

    def progress(self) -> dict[str, int]:
        """Return for each lease id a count that grows with every token and turn. Heartbeats report it."""
        ...


Pending = Literal["grading", "environment"]
"""What rollouts that the backend does not sample wait for."""


class RolloutSource(Rollouts, AsksOthers, Protocol):
    """What plays all rollouts of a generator, as the loop's caller chooses it."""

    @property
    def pending(self) -> Pending: ...

    def counters(self) -> Mapping[str, int]:
        """Return counts since the start, by the name of their metric."""
        ...


class WrappedRollouts:
    """Plays rollouts as ``rollouts`` does. What extends it changes which of them ``collect`` returns, and when."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    @property
    def num_open(self) -> int:
        return self._rollouts.num_open

    def encode(self, lease: Lease) -> np.ndarray:
        return self._rollouts.encode(lease)

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        self._rollouts.submit(lease, prompt_ids)

    def take(self, sampled: Iterable[Sampled]) -> None:
        self._rollouts.take(sampled)

    def progress(self) -> dict[str, int]:
        return self._rollouts.progress()


class SingleTurnRollouts:
    """Plays rollouts of one answer each, which ``grader`` scores. It implements ``RolloutSource``.

    With ``truncates`` a prompt that is too long is cut. Otherwise its lease fails.
    """

    pending: Pending = "grading"
    trouble, num_waiting = "", 0

    def __init__(self, backend: Backend, grader: ThreadGrader, *, truncates: bool = False) -> None:
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

    def counters(self) -> Mapping[str, int]:
        return {}

    def _forget(self, lease_id: str) -> None:
        self._leases.pop(lease_id, None)
        self._num_missing.pop(lease_id, None)


def fitted_prompt(
    encode: Encode, messages: Sequence[Mapping[str, str]], prompt_ids: np.ndarray, max_tokens: int
) -> np.ndarray:
    """Return the prompt's token ids, with its last user message cut so that they are at most ``max_tokens``.

    The result is ``prompt_ids`` if they fit already, or if no cut makes them fit.

    Args:
        encode: renders messages to token ids, int32 [P].
        prompt_ids: the rendered ``messages``.
        max_tokens: the limit.
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


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """A rollout of several answers that has ended, and whose reward is judged by a reward function.

    Attributes:
        index: the rollout's number in the lease's group.
        text: the last answer.
        token_ids: the sampled tokens of all answers, int32 [N].
        finish_reason: ``length`` if a limit cut it.
        sequences: its token sequences.
        turn_tokens: the number of tokens of each answer, in the order of the sequences.
        transcript: the conversation of its newest answer, as in ``RewardInput``.
        session: what its agent did.
        prompt_opened: that of the last answer, as in ``Sampled``.
    """

    index: int
    text: str
    token_ids: np.ndarray
    finish_reason: FinishReason
    sequences: tuple[TokenSequence, ...]
    turn_tokens: tuple[int, ...]
    transcript: Sequence[Mapping[str, Any]] = ()
    session: AgentSession | None = None
    prompt_opened: str = ""


def _sequences_of(sample: Sampled | Played) -> tuple[TokenSequence, ...]:
    return sample.sequences if isinstance(sample, Played) else (whole_sequence(sample),)


def turns_of(turn_tokens: Sequence[int], reward: float, score: float) -> tuple[Turn, ...]:
    """Return the turns of a rollout that is judged as a whole: the last one has its reward and its score."""
    last = len(turn_tokens) - 1
    zero = (0.0, 0.0)
    return tuple(Turn(num, *((reward, score) if at == last else zero)) for at, num in enumerate(turn_tokens))


def graded_rollouts(
    reward: ScoreOne, lease: Lease, samples: Sequence[Sampled | Played], decode: Decode | None = None
) -> list[Rollout]:
    """Score the finished samples of one lease. Return their rollouts in the same order.

    Errors of ``reward`` pass through. ``decode`` finds the tokens of spans. None: rollouts have no spans, because
    nobody trains on them.

    Raises:
        RewardError: the reward judges parts of a rollout that has several answers.
    """
    items = [
        RewardInput(
            text=sample.text,
            reward_data=row_fields(lease.prompt.reward_data),
            num_tokens=len(sample.token_ids),
            max_new_tokens=lease.sampling.max_new_tokens,
            finish_reason=sample.finish_reason,
            messages=lease.prompt.messages,
            token_ids=sample.token_ids.tolist(),
            transcript=sample.transcript if isinstance(sample, Played) else (),
            prompt_opened=sample.prompt_opened,
        )
        for sample in samples
    ]
    outputs = score_group(reward, items)
    return [_rollout(sample, output, decode) for sample, output in zip(samples, outputs, strict=True)]


def _rollout(sample: Sampled | Played, output: RewardOutput, decode: Decode | None) -> Rollout:
    if isinstance(sample, Played) and output.spans:
        raise RewardError(
            "expected a reward without spans for a rollout of several answers, got spans: they count characters of one "
            "answer; return RewardOutput without spans"
        )
    is_played = isinstance(sample, Played)
    return Rollout(
        sequences=_sequences_of(sample),
        reward_parts=output.parts,
        accuracy=output.accuracy,
        finish_reason=sample.finish_reason if output.is_judged else "unjudged",
        extracted=output.extracted,
        turns=turns_of(sample.turn_tokens, sum(output.parts.values()), output.accuracy) if is_played else (),
        spans=() if decode is None else token_spans(output.spans, sample.token_ids, decode),
        session=sample.session if isinstance(sample, Played) else None,
    )


def token_spans(spans: Sequence[tuple[int, float]], token_ids: np.ndarray, decode: Decode) -> tuple[Span, ...]:
    """Return ``RewardOutput.spans``, whose ends are characters, as spans of tokens.

    A span ends with the first token that completes its text. The rewards of spans that end in the same token are
    added. Each end takes about log2(N) calls of ``decode`` for an answer of N tokens.
    """
    rewards: dict[int, float] = {}
    for end, reward in spans:
        num_tokens = 1 + bisect_left(range(1, len(token_ids)), end, key=lambda num: len(decode(token_ids[:num])))
        rewards[num_tokens] = rewards.get(num_tokens, 0.0) + reward
    return tuple(Span(num_tokens, reward) for num_tokens, reward in sorted(rewards.items()))


@dataclass(frozen=True, slots=True, eq=False)
class Graded:
    """The result for one sample: a rollout that is scored or has failed, or the reason why its whole lease failed.

    ``rollout`` is None if the lease failed, and its finish reason is ``error`` if the rollout failed. In both cases
    ``failure`` says why, and ``error`` is the exception, or None if there is none in this process. ``text`` is the
    answer's text, with an environment that of its last turn. ``kept`` is what the user's own filter said of the group.
    """

    lease: Lease
    index: int
    rollout: Rollout | None
    failure: Failure | None = None
    error: BaseException | None = None
    text: str = ""
    kept: bool = True


def failure_of(error: BaseException, cause: FailureCause) -> Failure:
    """Return why a lease or rollout failed, from the exception that the user's code or the engine raised."""
    detail, place = describe_error(error)
    return Failure(cause, detail, place, is_transient(error))


def _graded(
    reward: ScoreOne, lease: Lease, samples: Sequence[Sampled | Played], decode: Decode | None, max_abs: float
) -> list[Graded]:
    try:
        rollouts = graded_rollouts(reward, lease, samples, decode)
    except (Exception, SystemExit) as error:  # the boundary to reward code: the loop counts the failed rollouts
        return [_failed(lease, sample, failure_of(error, "reward_error"), error) for sample in samples]
    return [
        _failed(lease, sample, _too_large(max_abs))
        if largest_reward(rollout) > max_abs
        else Graded(lease, sample.index, rollout, text=sample.text)
        for sample, rollout in zip(samples, rollouts, strict=True)
    ]


def _failed(lease: Lease, sample: Sampled | Played, failure: Failure, error: BaseException | None = None) -> Graded:
    rollout = Rollout(_sequences_of(sample), {}, 0.0, "error")
    return Graded(lease, sample.index, rollout, failure, error)


def _too_large(max_abs: float) -> Failure:
    detail = f"expected rewards of at most reward.max_abs = {max_abs:g}, got a larger one; scale it, or raise that"
    return Failure("reward_error", detail)


def largest_reward(rollout: Rollout) -> float:
    """Return the largest absolute value of the rollout's rewards: parts, turns, spans, and the accuracy."""
    amounts = [*rollout.reward_parts.values(), rollout.accuracy]
    amounts += [turn.reward for turn in rollout.turns] + [span.reward for span in rollout.spans]
    return max(map(abs, amounts))


class ThreadGrader:
    """Scores finished samples in background threads: each at once, or those of a lease together if the reward compares.

    A thread releases the interpreter's lock while a verifier process or a sandbox works. With more than one thread,
    ``collect`` returns samples in the order in which their scores are ready.
    """

    def __init__(
        self, reward: ScoreOne, *, num_threads: int = 1, decode: Decode | None = None, max_abs: float = math.inf
    ) -> None:
        """Start no thread yet. ``submit`` starts up to ``num_threads``, each when there is work for it.

        ``decode`` is that of ``graded_rollouts``, and is called in these threads. A rollout with a reward above
        ``max_abs`` in absolute value has failed.
        """
        self._reward, self._decode, self._max_abs = reward, decode, max_abs
        self._needs_whole_group = isinstance(reward, GroupReward) and reward.needs_whole_group
        self._incomplete: dict[str, list[Sampled | Played]] = {}
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Graded] = queue.SimpleQueue()
        self.num_pending = 0
        """The number of samples that are being scored, or are scored but not collected."""
        self._began_s: dict[int, float] = {}
        """When the running calls began, by the id of their thread."""
        self._num_threads, self._num_calls, self._calls_lock = num_threads, 0, threading.Lock()
        """``_num_calls`` counts the calls that have not ended, also those that have not begun."""
        self._threads: list[threading.Thread] = []

    @property
    def calls_s(self) -> tuple[float, ...]:
        """For how many seconds each running call of the reward, or of what else was given to ``call``, runs."""
        began_s, now_s = list(self._began_s.values()), time.monotonic()
        return tuple(max(0.0, now_s - began) for began in began_s)

    def submit(self, lease: Lease, sample: Sampled | Played) -> None:
        samples = [sample]
        if self._needs_whole_group:
            samples = self._incomplete.setdefault(lease.lease_id, [])
            samples.append(sample)
            if len(samples) < lease.group_size:
                return
            del self._incomplete[lease.lease_id]
        self.num_pending += len(samples)
        self.call(partial(self._grade, lease, sorted(samples, key=lambda one: one.index)))

    def call(self, job: Callable[[], None]) -> None:
        """Run ``job``, which raises nothing, in one of the threads."""
        with self._calls_lock:
            self._num_calls += 1
            num_calls = self._num_calls
        self._todo.put(job)
        # Rewards that compare mathematics may use 64 threads, but few are enough while each comparison is quick.
        if len(self._threads) < min(self._num_threads, num_calls):
            self._threads.append(threading.Thread(target=self._run, name="grading", daemon=True))
            self._threads[-1].start()

    def collect(self) -> list[Graded]:
        """Return the samples that have been scored since the last call, without waiting."""
        done: list[Graded] = []
        while not self._done.empty():
            done.append(self._done.get())
        self.num_pending -= len(done)
        return done

    def forget(self, lease_id: str) -> None:
        """Drop the lease's samples that wait until the group is complete."""
        self._incomplete.pop(lease_id, None)

    @property
    def trouble(self) -> str:
        """Why scores are not coming from another process; empty if nothing is known to be wrong."""
        return self._reward.trouble if isinstance(self._reward, WaitingReward) else ""

    @property
    def num_waiting(self) -> int:
        """The number of samples that wait for another process."""
        return self._reward.num_waiting if isinstance(self._reward, WaitingReward) else 0

    def counters(self) -> dict[str, int]:
        """Return the counts of the reward, if it counts anything."""
        return self._reward.counters() if isinstance(self._reward, CountingReward) else {}

    def close(self) -> None:
        """End the threads. Samples whose scoring has not begun are dropped, and those that wait for a scorer fail."""
        if isinstance(self._reward, WaitingReward):
            self._reward.interrupt()
        with suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def _grade(self, lease: Lease, samples: Sequence[Sampled | Played]) -> None:
        for graded in _graded(self._reward, lease, samples, self._decode, self._max_abs):
            self._done.put(graded)

    def _run(self) -> None:
        while (job := self._todo.get()) is not None:
            self._began_s[threading.get_ident()] = time.monotonic()
            job()
            del self._began_s[threading.get_ident()]
            with self._calls_lock:
                self._num_calls -= 1
