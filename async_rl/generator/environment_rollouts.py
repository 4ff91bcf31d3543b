"""Rollouts of several turns: the backend samples answers, and the environments' processes reply to them.

Each turn is a separate request to the backend, with all the tokens so far as its prompt. So updates of the weights,
cancelled leases and the sharing of slots work as for single answers. ``sampling.max_new_tokens`` limits the tokens that
a rollout samples in all its turns. No sequence is longer than ``sampling.max_prompt_tokens`` plus
``sampling.max_new_tokens``.

A ``Trajectory`` holds the tokens of one rollout. It keeps sampled tokens as they are and never tokenises them again.
It tokenises separately what the environment adds, and leaves these tokens out of the loss mask. If the environment's
new state begins with the old state and the model's answer, it continues the token sequence. Any other state begins a
new sequence, for example if the chat template removes old thoughts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec.structs import replace

from async_rl.config.generator import EnvironmentConfig
from async_rl.data.chat import ids_after, text_ids
from async_rl.data.spellings import rest_after, unguarded
from async_rl.data.template import apply_template, check_rendered
from async_rl.data.vocabulary import check_embedded, special_ids
from async_rl.environments.pool import EnvironmentPool, Event
from async_rl.generator.backend import Backend, Sampled, Text, rollout_keys
from async_rl.generator.open_sequence import OpenSequence
from async_rl.generator.rollouts import Graded, Pending
from async_rl.queue.messages import Failure
from async_rl.records import (
    DROPPED_KEY,
    TEXT_ROLE,
    FinishReason,
    Lease,
    Rollout,
    Sampling,
    TokenSequence,
    Turn,
)  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Open:
    """A rollout that has not ended.

    ``chat`` is the row's rendered prompt; empty if the row has none, or plain text.
    ``request_id`` is the id of the rollout's request that the backend is sampling; None if there is none. ``text`` is
    the model's newest answer.
    """

    key: str
    lease: Lease
    index: int
    trajectory: Trajectory
    chat: str = ""
    request_id: str | None = None
    finish_reason: FinishReason = "stop"
    is_over: bool = False
    text: str = ""


@dataclass(slots=True, eq=False)
class _OpenLease:
    """A lease's unfinished rollouts by key, and a count that grows while they make progress.

    ``progress`` counts sampled tokens, messages of environments, and heartbeats at which a turn waited for a slot.
    """

    progress: int = 0
    rollouts: dict[str, _Open] = field(default_factory=dict)


class EnvironmentRollouts:
    """Plays rollouts of several turns between the backend and the processes of an ``EnvironmentPool``.

    It implements ``RolloutSource``. ``collect`` also returns a rollout that failed, with finish reason ``error``.
    """

    pending: Pending = "environment"
    num_waiting = 0

    def __init__(
        self, backend: Backend, pool: EnvironmentPool, text: Text, config: EnvironmentConfig, *,
        max_abs: float = math.inf,
    ) -> None:  # fmt: skip
        """A rollout with a turn's reward above ``max_abs`` in absolute value fails."""
        self._backend = backend
        self._pool = pool
        self._text = text
        self._config, self._max_abs = config, max_abs
        self._leases: dict[str, _OpenLease] = {}
        self._requests: dict[str, _Open] = {}
        self._done: list[Graded] = []
        self._num_steps = self._steps_at_progress = 0

    @property
    def num_open(self) -> int:
        return sum(len(open_lease.rollouts) for open_lease in self._leases.values())

    @property
    def num_pending(self) -> int:
        return self.num_open - len(self._requests)

    @property
    def trouble(self) -> str:
        """Why environments don't start; empty if nothing is known to be wrong."""
        return self._pool.trouble

    def counters(self) -> Mapping[str, int]:
        return {}

    def encode(self, lease: Lease) -> np.ndarray:
        messages = lease.prompt.messages
        if not messages:
            return np.zeros(0, np.int32)
        encode = self._text.encode_start if _is_text(messages) else self._text.encode
        return encode(prompt_text(messages, self._text.render) or "")

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        """Begin the lease's rollouts. ``prompt_ids`` is ignored, because an environment may begin with another prompt.

        Raises:
            ConfigError: the environment's code can no longer be run.
        """
        open_lease = self._leases[lease.lease_id] = _OpenLease()
        messages = lease.prompt.messages
        prompt = prompt_text(messages, self._text.render)
        chat = "" if prompt is None or _is_text(messages) else prompt
        for index in range(lease.group_size):
            key = f"{lease.lease_id}/{index}"
            open_lease.rollouts[key] = _Open(key, lease, index, Trajectory(self._text), chat)
            self._pool.start(key, start_message(self._config, lease, index, prompt))

    def cancel(self, lease_id: str) -> None:
        open_lease = self._leases.pop(lease_id, None)
        for rollout in open_lease.rollouts.values() if open_lease is not None else ():
            self._pool.cancel(rollout.key)
            self._stop_sampling(rollout)

    def take(self, sampled: Iterable[Sampled]) -> None:
        self._num_steps += 1
        for sample in sampled:
            rollout = self._requests.pop(sample.lease_id, None)
            if rollout is None:
                continue
            rollout.request_id = None
            rollout.finish_reason, rollout.text = sample.finish_reason, sample.text
            rollout.trajectory.add_answer(sample)
            self._leases[rollout.lease.lease_id].progress += len(sample.token_ids)
            self._pool.answer(
                rollout.key,
                {
                    "type": "sampled",
                    "text": sample.text,
                    "finish_reason": sample.finish_reason,
                    "num_tokens": len(sample.token_ids),
                },
            )

    def collect(self) -> list[Graded]:
        for event in self._pool.poll():
            open_lease = self._leases.get(event.key.rpartition("/")[0])
            rollout = None if open_lease is None else open_lease.rollouts.get(event.key)
            if open_lease is None or rollout is None:
                continue  # an earlier event of this poll ended the rollout
            open_lease.progress += 1
            if event.type == "sample":
                self._next_turn(rollout, event.message)
            elif event.type == "ended":
                self._end(rollout, event)
            else:
                said = event.message
                texts = {key: str(said.get(key, "")) for key in ("error", "detail", "place")}
                self._fail(rollout, **texts, is_transient=bool(said.get("is_transient")))
        done, self._done = self._done, []
        return done

    def progress(self) -> dict[str, int]:
        """Return for each lease id a count that grows while the lease makes progress.

        The count also grows while a turn waits for a slot and the backend samples other sequences, and while a process
        works, which has a time limit of its own.
        """
        sampled = self._backend.progress()
        moved = self._num_steps > self._steps_at_progress
        self._steps_at_progress = self._num_steps
        progress: dict[str, int] = {}
        for lease_id, open_lease in self._leases.items():
            tokens = [sampled.get(r.request_id, 0) for r in open_lease.rollouts.values() if r.request_id is not None]
            open_lease.progress += int(moved and 0 in tokens) + int(
                any(map(self._pool.is_working, open_lease.rollouts))
            )
            progress[lease_id] = open_lease.progress + sum(tokens)
        return progress

    def _next_turn(self, rollout: _Open, wanted: Mapping[str, Any]) -> None:
        """Request the model's next answer in a rollout from the backend.

        ``wanted`` is the environment's request, with the state to answer.
        """
        lease, trajectory = rollout.lease, rollout.trajectory
        sampling, is_first = lease.sampling, not rollout.trajectory.turn_tokens
        if len(trajectory.turn_tokens) >= self._config.max_turns or rollout.is_over:
            self._abandon(rollout, "it requested a turn after the last one")
            return
        try:
            ids = self._add_state(rollout, wanted["state"])
            limits = [self._config.max_turn_tokens, wanted["max_tokens"]]
            stop = (*sampling.stop, *map(str, wanted["stop"]))
            room = min(
                sampling.max_new_tokens - trajectory.num_sampled,
                sampling.max_prompt_tokens + sampling.max_new_tokens - len(ids),
                *(int(limit) for limit in limits if limit is not None),
            )
        except Exception as error:  # boundary to templates, tokenizers and the environment's request
            self._abandon(rollout, f"its state can't be continued: {type(error).__name__}: {error}")
            return
        if is_first and (len(ids) > sampling.max_prompt_tokens or not len(ids)):
            detail = f"{len(ids)} tokens, sampling.max_prompt_tokens = {sampling.max_prompt_tokens}"
            self._done.append(Graded(lease, rollout.index, None, Failure("prompt_too_long", detail)))
            return
        if not len(ids):
            self._abandon(rollout, "its state has no token that the model could continue")
            return
        if room < 1:
            # As for a cut answer: notify the environment of the end; it reports the rewards so far.
            rollout.finish_reason, rollout.is_over = "length", True
            self._pool.answer(rollout.key, {"type": "over"})
            return
        request = self._request(rollout, replace(sampling, max_new_tokens=room, stop=stop))
        rollout.request_id = request.lease_id
        self._requests[request.lease_id] = rollout
        self._backend.submit(request, ids)

    def _add_state(self, rollout: _Open, state: Any) -> np.ndarray:
        """Add the state of an environment, text or messages, to the rollout's tokens. Return all of them, int32 [N]."""
        if not isinstance(state, str):
            return rollout.trajectory.add_state(self._text.render(state))
        # Text that begins with the row's rendered messages is a chat, and what they spell stays guarded.
        shown = unguarded(rollout.chat)
        if shown and state.startswith(shown):
            return rollout.trajectory.add_state(rollout.chat + state[len(shown) :])
        return rollout.trajectory.add_state(state, is_text=True)

    def _request(self, rollout: _Open, sampling: Sampling) -> Lease:
        """Return one turn as a lease for one sample.

        Its seed depends only on the lease's seed, the rollout's index and the turn.
        """
        turn = len(rollout.trajectory.turn_tokens)
        key = int(rollout_keys(rollout.lease.seed, np.array([rollout.index]))[0])
        return replace(
            rollout.lease,
            lease_id=f"{rollout.key}/{turn}",
            group_size=1,
            sampling=sampling,
            seed=int(rollout_keys(key, np.array([turn]))[0]) >> 1,
        )

    def _end(self, rollout: _Open, event: Event) -> None:
        counts = rollout.trajectory.turn_tokens
        try:
            earned = [(float(reward), float(score)) for reward, score in event.message["turns"]]
        except (KeyError, TypeError, ValueError) as error:
            self._fail(rollout, f"expected a list of turns from its process: {error}")
            return
        if not counts or len(earned) != len(counts) or not np.isfinite(earned).all():
            self._fail(rollout, f"expected finite rewards for {len(counts)} answers (at least one), got {earned}")
            return
        if max(abs(amount) for pair in earned for amount in pair) > self._max_abs:
            self._fail(rollout, f"expected rewards of at most reward.max_abs = {self._max_abs:g}, got {earned}")
            return
        turns = tuple(Turn(count, reward, score) for count, (reward, score) in zip(counts, earned, strict=True))
        self._finish(
            rollout,
            Rollout(
                sequences=rollout.trajectory.sequences(),
                reward_parts={"environment": sum(turn.reward for turn in turns)},
                accuracy=min(1.0, max(0.0, sum(turn.score for turn in turns))),
                finish_reason=rollout.finish_reason,
                turns=turns,
            ),
        )

    def _abandon(self, rollout: _Open, error: str) -> None:
        """Fail a rollout, and cancel its environment, which still waits for an answer."""
        self._pool.cancel(rollout.key)
        self._fail(rollout, error)

    def _fail(
        self, rollout: _Open, error: str, detail: str = "", place: str = "", *, is_transient: bool = False
    ) -> None:
        """End a rollout that failed. Log ``error``; report ``detail`` (by default ``error``) and the rest."""
        logger.warning("environment failed on position %d, %s: %s", rollout.lease.prompt.position, rollout.key, error)
        self._stop_sampling(rollout)
        failed = Rollout(rollout.trajectory.sequences(), {"environment": 0.0}, 0.0, "error")
        self._finish(rollout, failed, Failure("environment_error", detail or error, place, is_transient))

    def _stop_sampling(self, rollout: _Open) -> None:
        if rollout.request_id is not None:
            del self._requests[rollout.request_id]
            self._backend.cancel(rollout.request_id)
            rollout.request_id = None

    def _finish(self, rollout: _Open, scored: Rollout, failure: Failure | None = None) -> None:
        open_lease = self._leases[rollout.lease.lease_id]
        del open_lease.rollouts[rollout.key]
        if not open_lease.rollouts:
            del self._leases[rollout.lease.lease_id]
        self._done.append(Graded(rollout.lease, rollout.index, scored, failure, text=rollout.text))


def prompt_text(
    messages: Sequence[Mapping[str, str]], render: Callable[[Sequence[Mapping[str, str]]], str]
) -> str | None:
    """Return a row's messages as text, by ``render``, and a plain-text prompt as it is. None: it has neither."""
    if not messages:
        return None
    return messages[0]["content"] if _is_text(messages) else render(messages)


def start_message(config: EnvironmentConfig, lease: Lease, index: int, prompt: str | None) -> dict[str, Any]:
    """Return the message ``start`` for one rollout. ``prompt``: the prompt's messages as text, which may be guarded;
    None if it has none.
    """
    messages = lease.prompt.messages
    if prompt is not None and not _is_text(messages):
        prompt = unguarded(prompt)
    return {
        "prompt": prompt,
        "state": prompt if _is_text(messages) else [dict(message) for message in messages] or None,
        "extra_info": extra_info(config.extra, lease, index, prompt),
        "seed": lease.seed,
        "max_turns": config.max_turns,
    }


def _is_text(messages: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the prompt is a plain text (``data.prompt_format = "text"``)."""
    return len(messages) == 1 and messages[0]["role"] == TEXT_ROLE


def extra_info(settings: Mapping[str, Any], lease: Lease, index: int, prompt: str | None) -> dict[str, Any]:
    """Return the ``extra`` dict that an environment gets for one rollout.

    It has ``idx`` (the row's number), ``seed`` (one per prompt, equal for all rollouts of the group), ``index`` (the
    rollout's number in its group), ``messages``, ``prompt_text`` (``prompt``, the messages as text), the keys of
    ``environment.extra``, the row's other keys and the keys of the row's ``extra_info``. Where a name occurs several
    times, the last one in this order wins.
    """
    row = dict(lease.prompt.reward_data)
    own = row.pop("extra_info", None)
    # The keys of extra_info become keys of the whole.
    dropped = [
        (names[1:] if len(names) > 1 and names[0] == "extra_info" else names, reason)
        for names, reason in row.pop(DROPPED_KEY, ())
    ]
    built_in = {
        "idx": lease.prompt.row,
        "seed": lease.seed,
        "index": index,
        "messages": [dict(message) for message in lease.prompt.messages],
        "prompt_text": prompt,
    }
    found = {**built_in, **settings, **row, **(own if isinstance(own, dict) else {})}
    return found | ({DROPPED_KEY: dropped} if dropped else {})


class TokenizerText:
    """Renders and encodes text with a Hugging Face tokenizer, as the protocol ``backend.Text`` requires.

    A text with a token that the model has no row for raises a ModelError.
    """

    def __init__(
        self, tokenizer: Any, arguments: Mapping[str, Any] = MappingProxyType({}), num_rows: int | None = None
    ) -> None:
        """``arguments`` are the variables of the chat template in addition to the messages. ``num_rows`` is the number
        of rows of the model's embedding, None if unknown.
        """
        self._tokenizer, self._num_rows = tokenizer, num_rows
        self._arguments = arguments
        self._special = special_ids(tokenizer)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        check_rendered(self._tokenizer, messages, self._arguments)
        return str(apply_template(self._tokenizer, messages, self._arguments))

    def encode(self, text: str, before: str = "") -> np.ndarray:
        return self._embedded(np.asarray(ids_after(self._tokenizer, before, text), dtype=np.int32))

    def encode_start(self, text: str) -> np.ndarray:
        return self._embedded(text_ids(self._tokenizer, text))

    def _embedded(self, ids: np.ndarray) -> np.ndarray:
        check_embedded(ids, self._num_rows, self._tokenizer, "a state")
        return ids

    def ending(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False) if token_id in self._special else ""


class Trajectory:
    """Collects the tokens of one rollout.

    Call ``add_state`` at the start of each turn and ``add_answer`` at its end.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._closed: list[TokenSequence] = []
        self._open = OpenSequence()
        self._state = ""
        self._action: str | None = None
        self._endings: tuple[str, ...] = ()
        self.turn_tokens: list[int] = []

    @property
    def num_sampled(self) -> int:
        return sum(self.turn_tokens)

    def add_state(self, state: str, *, is_text: bool = False) -> np.ndarray:
        """Add the environment's newest state. Return all token ids, int32 [N], that the model shall continue.

        ``is_text`` says that ``state`` is plain text and no rendered chat, so a sequence that begins with it begins as
        a prompt of plain text does.
        """
        rest = self._continuation(state)
        if rest is None:
            self._close()
            given = self._text.encode_start(state) if is_text else self._text.encode(state)
        else:
            given = self._text.encode(rest, state[: len(state) - len(rest)])
        self._open.add_given(given)
        self._state, self._action = state, None
        return self._open.token_ids()

    def add_answer(self, sampled: Sampled) -> None:
        """Add the answer that the model sampled for the newest state."""
        self._open.add_sampled(sampled)
        self._action = sampled.text
        self._endings = self._endings_of(sampled.token_ids)
        self.turn_tokens.append(len(sampled.token_ids))

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the rollout's sequences that contain sampled tokens. The rollout ends with this call."""
        self._close()
        return tuple(self._closed)

    def _continuation(self, state: str) -> str | None:
        """Return the part of ``state`` after the text so far.

        Return None if ``state`` does not begin with that text.
        """
        if self._action is None:
            return None
        known, shown = unguarded(self._state + self._action), unguarded(state)
        # The tokens that end the turn were sampled, so the sequence has them already. A rendered conversation spells
        # them out; text that an environment composes from state and action does not.
        for ending in self._endings:
            if shown.startswith(known + ending):
                return rest_after(state, len(known) + len(ending))
        return rest_after(state, len(known)) if shown.startswith(known) else None

    def _endings_of(self, token_ids: np.ndarray) -> tuple[str, ...]:
        """Return the texts with which a rendered conversation may end an answer, the longest first: those of its last
        special tokens. A turn may end with several (Command R7B).
        """
        endings: list[str] = []
        for token in reversed(token_ids):
            if not (text := self._text.ending(int(token))):
                break
            endings.append(text + (endings[-1] if endings else ""))
        return tuple(reversed(endings))

    def _close(self) -> None:
        if self._open.has_samples:
            self._closed.append(self._open.sequence())
        self._open = OpenSequence()
