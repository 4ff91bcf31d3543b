"""The tokens of a session: all calls of an agent in one rollout, as the sequences that the learner trains.

A *call* is one request for an answer. Its prompt is token ids. A call whose prompt begins with all tokens of an earlier
sequence (prompt, answer, and so on) *continues* it: the sampled ids stay as they were sampled, and only what follows
them is new. Any other prompt begins a new sequence of the same rollout: it *branches* off if it repeats an earlier
prompt or goes on from an answer that has been continued already, as a tree search or several agents do; else the
history was *rewritten*. What such a sequence repeats is no part of its loss. What sequences have in common at their
beginning is computed once by the learner.

The *main line* of chats is that of the first answer to a call with tools, or else of the first: its system prompt or
its first message of the user. What a sub-agent, a title or a summary begins with is another one.

An *untrained* call is in no sequence, and takes no room of the others. What goes on from it is given tokens.

An answer that never reached the agent is *lost*, and leaves the sequences: the agent did not act on it. It did reach
the agent if a later call continues it, whatever is known about the connection.

Calls may run concurrently. A running call holds room for the longest answer that it may get, so the sequences never
exceed their limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from async_rl.extensions.agents.front.messages import NO_LINE, Line
from async_rl.generator.backend import Sampled
from async_rl.generator.open_sequence import OpenSequence
from async_rl.records import FinishReason, TokenSequence

CallKind = Literal["first", "continued", "branched", "rewritten", "untrained"]
"""How the prompt of a call relates to the calls before."""


@dataclass(slots=True, eq=False)
class _Branch:
    """A sequence of the session. ``held_by`` is the running call that continues or begins it; None if none does.

    ``token_ids`` are those of its answered calls, int32 [N], and ``ends`` where each of its answers ends in them.
    """

    open: OpenSequence = field(default_factory=OpenSequence)
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    ends: list[int] = field(default_factory=list)
    held_by: int | None = None


@dataclass(slots=True, eq=False)
class _Running:
    """A call without an answer. ``given`` are the prompt's tokens that its branch lacks, int32 [G]."""

    branch: _Branch
    given: np.ndarray
    max_tokens: int
    line: Line


@dataclass(slots=True, eq=False)
class Answer:
    """An answer that may not have arrived yet. ``number`` is its place among the answers of its branch.

    ``prompt_opened`` is as in ``Sampled``.
    """

    call: int
    text: str
    finish_reason: FinishReason
    prompt_opened: str
    branch: _Branch
    number: int
    line: Line = NO_LINE


_NO_ANSWER = Answer(-1, "", "stop", "", _Branch(), 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one rollout, in tokens.

    Attributes:
        first_prompt: those of the first call's prompt (``sampling.max_prompt_tokens``), unless an answer before it
            was lost: the agent may have it, and go on from it.
        sampled: the sampled ones of all calls (``sampling.max_new_tokens``).
        sequence: those of one sequence: the sum of both.
        rollout: those of all sequences together (``environment.max_rollout_tokens``).
        answer: those of one answer (``environment.max_turn_tokens``); None for no limit of its own.
    """

    first_prompt: int
    sampled: int
    sequence: int
    rollout: int
    answer: int | None = None


class NoRoomError(Exception):
    """A call does not fit in the rollout's limits. ``key`` is the setting that limits it."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class MustWaitError(Exception):
    """A call fits only if running calls of the session need less room than they hold: try again when one has ended."""


class SessionTokens:
    """The sequences of one session.

    Attributes:
        kinds: the number of calls that were answered, by their kind.
        num_lost: the number of answers that never reached the agent, those included whose sampling was stopped.
        named: the call whose answer counts as the last one; None for the main line's newest.
    """

    def __init__(self, limits: Limits) -> None:
        self.kinds: dict[CallKind, int] = dict.fromkeys(get_args(CallKind), 0)
        self.num_lost = 0
        self.named: int | None = None
        self._limits = limits
        self._branches: list[_Branch] = []
        self._running: dict[int, tuple[_Running, CallKind]] = {}
        self._untrained: set[int] = set()
        self._doubtful: dict[int, Answer] = {}
        self._answers: list[Answer] = []
        self._lines: set[Line] = set()

    @property
    def doubtful(self) -> list[int]:
        """The ids of the calls whose answers are on their way to the agent."""
        return list(self._doubtful)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(len(branch.token_ids) for branch in self._branches)

    @property
    def num_sampled(self) -> int:
        return sum(branch.open.num_sampled for branch in self._branches)

    @property
    def num_calls(self) -> int:
        """The number of calls that were answered."""
        return sum(self.kinds.values())

    @property
    def last(self) -> Answer:
        """The answer that the rollout is judged by: the named one or the newest of the main line; an empty one, of call
        -1, without any.
        """
        named = next((answer for answer in self._answers if answer.call == self.named), None)
        lines = [answer.line for answer in self._answers]
        main = next((line for line in lines if line.has_tools), next(iter(lines), NO_LINE))
        of_main = (answer for answer in reversed(self._answers) if answer.line.is_of(main))
        return named or next(of_main, _NO_ANSWER)

    @property
    def turn_tokens(self) -> list[int]:
        """The number of tokens of each answer, in the order of ``sequences``."""
        return [count for branch in self._branches for count in branch.open.answer_tokens]

    def begin(self, call: int, prompt_ids: np.ndarray, max_tokens: int | None, line: Line = NO_LINE) -> int:
        """Begin the call number ``call``. Return how many tokens its answer may have.

        Args:
            prompt_ids: its whole prompt, int32 [P], at least one token.
            max_tokens: the limit that the agent asks for; None for none.
            line: its conversation. One of token ids has none.

        Raises:
            NoRoomError: a limit of the rollout leaves no room.
            MustWaitError: as its docstring says.
        """
        limits = self._limits
        if not self._branches and not self.num_lost and len(prompt_ids) > limits.first_prompt:
            text = f"the first prompt has {len(prompt_ids)} tokens, sampling.max_prompt_tokens = {limits.first_prompt}"
            raise NoRoomError(text, "sampling.max_prompt_tokens")
        branch, kind = self._place(prompt_ids, line)
        given = prompt_ids if branch is None else prompt_ids[len(branch.token_ids) :]
        room = self._room(len(prompt_ids), len(given), max_tokens)
        if branch is None:
            branch = _Branch()
            self._branches.append(branch)
        elif (answer := self._answer_at_end(branch)) is not None:
            del self._doubtful[answer]  # the agent has it, or it could not go on from it
        branch.held_by = call
        self._running[call] = _Running(branch, given, room, line), kind
        self._lines.add(line)
        return room

    def begin_untrained(self, call: int, num_prompt: int, max_tokens: int | None) -> int:
        """The same for a call that is not trained, with a prompt of ``num_prompt`` tokens.

        Raises:
            NoRoomError: the prompt is too long.
        """
        key = "sampling.max_prompt_tokens + sampling.max_new_tokens"
        if (room := self._limits.sequence - num_prompt) < 1:
            raise NoRoomError(f"no room for an answer to a prompt of {num_prompt} tokens: {key} is used up", key)
        self._untrained.add(call)
        return min([room, *(limit for limit in (self._limits.answer, max_tokens) if limit is not None)])

    def answer(self, call: int, sampled: Sampled) -> None:
        """Add the answer to a running call. It is in doubt until ``deliver``, ``lose`` or a call that continues it."""
        if call in self._untrained:
            self._untrained.remove(call)
            self.kinds["untrained"] += 1
            return
        running, kind = self._running.pop(call)
        branch = running.branch
        branch.open.add_given(running.given)
        branch.open.add_sampled(sampled)
        branch.token_ids = np.concatenate([branch.token_ids, running.given, sampled.token_ids]).astype(np.int32)
        branch.ends.append(len(branch.token_ids))
        branch.held_by = None
        self._doubtful[call] = Answer(
            call, sampled.text, sampled.finish_reason, sampled.prompt_opened, branch, len(branch.ends), running.line
        )
        self._answers.append(self._doubtful[call])
        self.kinds[kind] += 1

    def deliver(self, call: int) -> None:
        """Note that the agent has the answer to a call."""
        self._doubtful.pop(call, None)

    def lose(self, call: int) -> None:
        """End a call whose answer the agent will never have, or that was stopped. An ended call is ignored."""
        self._untrained.discard(call)
        if (found := self._running.pop(call, None)) is not None:
            branch = found[0].branch
            branch.held_by = None
        elif (answer := self._doubtful.pop(call, None)) is not None:
            branch = answer.branch
            branch.open.drop_answer()
            branch.ends.pop()
            branch.token_ids = branch.token_ids[: branch.ends[-1] if branch.ends else 0]
            self._answers.remove(answer)
        else:
            return
        self.num_lost += 1
        if not branch.ends:
            self._branches.remove(branch)

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the sequences that have answers. What a running call adds is not in them."""
        return tuple(branch.open.sequence() for branch in self._branches if branch.ends)

    def counts(self) -> Mapping[str, int]:
        """Return the counts of calls by kind, and of lost ones, for metrics."""
        return {**self.kinds, "lost": self.num_lost}

    def _place(self, prompt_ids: np.ndarray, line: Line) -> tuple[_Branch | None, CallKind]:
        """Return the branch that a prompt continues, or None, and the kind of its call."""
        begun = [branch for branch in self._branches if branch.ends and _is_prefix(branch.token_ids, prompt_ids)]
        free = [branch for branch in begun if branch.held_by is None]
        if free:
            return max(free, key=lambda branch: len(branch.token_ids)), "continued"
        if not self._branches or not any(map(line.is_of, self._lines)):
            return None, "first"
        is_known = bool(begun) or any(self._shares(branch, prompt_ids) for branch in self._branches)
        return None, "branched" if is_known else "rewritten"

    def _shares(self, branch: _Branch, prompt_ids: np.ndarray) -> bool:
        """Return whether a prompt goes on from an answer inside the branch, or is the beginning of the branch."""
        running = None if branch.held_by is None else self._running[branch.held_by][0]
        known = branch.token_ids if running is None else np.concatenate([branch.token_ids, running.given])
        num = min(len(known), len(prompt_ids))
        differing = np.flatnonzero(known[:num] != prompt_ids[:num])
        num_equal = int(differing[0]) if len(differing) else num
        return num_equal == len(prompt_ids) or any(end <= num_equal for end in branch.ends)

    def _answer_at_end(self, branch: _Branch) -> int | None:
        """Return the call whose doubtful answer is the end of the branch, or None."""
        for call, answer in self._doubtful.items():
            if answer.branch is branch and answer.number == len(branch.ends):
                return call
        return None

    def _room(self, num_prompt: int, num_given: int, max_tokens: int | None) -> int:
        """Return how many tokens an answer may have. ``num_given`` are the prompt's tokens that are new."""
        limits = self._limits
        held = [running for running, _ in self._running.values()]
        left = {
            "sampling.max_new_tokens": limits.sampled - self.num_sampled,
            "sampling.max_prompt_tokens + sampling.max_new_tokens": limits.sequence - num_prompt,
            "environment.max_rollout_tokens": limits.rollout - self.num_tokens - num_given,
        }
        if (full := next((key for key, room in left.items() if room < 1), None)) is not None:
            raise NoRoomError(f"no room for an answer to a prompt of {num_prompt} tokens: {full} is used up", full)
        left["sampling.max_new_tokens"] -= sum(one.max_tokens for one in held)
        left["environment.max_rollout_tokens"] -= sum(len(one.given) + one.max_tokens for one in held)
        room = min(left.values())
        if room < 1:
            raise MustWaitError
        return min([room, *(limit for limit in (limits.answer, max_tokens) if limit is not None)])


def _is_prefix(ids: np.ndarray, of: np.ndarray) -> bool:
    return len(ids) <= len(of) and np.array_equal(ids, of[: len(ids)])
