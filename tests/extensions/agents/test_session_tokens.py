"""The tokens of a session: what continues what, what is lost, and what the limits leave room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_rl.extensions.agents.front.messages import NO_LINE, Line
from async_rl.extensions.agents.session_tokens import Limits, MustWaitError, NoRoomError, SessionTokens
from async_rl.generator.backend import Sampled
from async_rl.records import NO_VERSION

WIDE = Limits(first_prompt=1000, sampled=1000, sequence=2000, rollout=10_000, answer=8)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def sampled(*tokens: int, version: int = 1, text: str = "", opened: str = "") -> Sampled:
    found = ids(*tokens)
    logprobs = np.array([-token / 100 for token in tokens], np.float32)
    versions = np.full(len(tokens), version, np.int32)
    return Sampled("request", 0, ids(1), found, logprobs, versions, "stop", text, prompt_opened=opened)


def ask(session: SessionTokens, call: int, prompt: tuple[int, ...], answer: tuple[int, ...], **more: object) -> int:
    room = session.begin(call, ids(*prompt), None)
    session.answer(call, sampled(*answer, **more))  # type: ignore[arg-type]
    return room


def test_a_call_that_goes_on_from_an_answer_keeps_the_sampled_tokens_in_one_sequence():
    session = SessionTokens(WIDE)
    ask(session, 0, (1, 2), (7, 8), version=3)
    ask(session, 1, (1, 2, 7, 8, 5), (9,), version=4)
    (sequence,) = session.sequences()
    assert sequence.token_ids.tolist() == [1, 2, 7, 8, 5, 9]
    assert sequence.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sequence.versions.tolist() == [NO_VERSION, NO_VERSION, 3, 3, NO_VERSION, 4]
    assert sequence.behavior_logprobs.tolist() == pytest.approx([0, 0, -0.07, -0.08, 0, -0.09])
    assert session.counts() == {"first": 1, "continued": 1, "branched": 0, "rewritten": 0, "untrained": 0, "lost": 0}
    assert session.turn_tokens == [2, 1]


@pytest.mark.parametrize(
    ("calls", "kind", "sequences", "num_trained"),
    [
        # A rewritten history begins a sequence that trains only its own answer.
        ([((1, 2), (7, 8)), ((1, 2, 7, 6), (9,))], "rewritten", [[1, 2, 7, 8], [1, 2, 7, 6, 9]], 3),
        # The answer that two calls share is trained once.
        ([((1,), (7,)), ((1, 7, 3), (8,)), ((1, 7, 4), (9,))], "branched", [[1, 7, 3, 8], [1, 7, 4, 9]], 3),
        ([((1, 2), (7,)), ((1, 2), (8,))], "branched", [[1, 2, 7], [1, 2, 8]], 2),
        # A call goes on from the longest sequence that it repeats.
        ([((1,), (7,)), ((1,), (7, 8)), ((1, 7, 8, 2), (9,))], "continued", [[1, 7], [1, 7, 8, 2, 9]], 4),
    ],
)
def test_what_a_call_repeats(calls: list[Any], kind: str, sequences: list[list[int]], num_trained: int):
    session = SessionTokens(WIDE)
    for number, (prompt, answer) in enumerate(calls):
        ask(session, number, prompt, answer)
    assert [one.token_ids.tolist() for one in session.sequences()] == sequences
    assert sum(int(one.loss_mask.sum()) for one in session.sequences()) == num_trained
    assert session.counts()[kind] > 0


MAIN, COMPACTED, HANDED = Line(b"main", b"task", True), Line(b"main", b"so far", True), Line(b"expert", b"task", True)
HELPER, TITLE, WRITER = Line(b"helper", b"part", True), Line(b"title", b"about"), Line(b"writer", b"task")


@pytest.mark.parametrize(
    ("lines", "judged", "num_first"),
    [
        ([MAIN, HELPER, MAIN, HELPER], 2, 2),
        ([TITLE, MAIN, HELPER], 1, 3),  # a title has no tools
        ([MAIN, COMPACTED, TITLE], 1, 2),
        ([MAIN, HANDED, HELPER], 1, 2),  # another agent goes on with the task
        ([WRITER, TITLE], 0, 2),
        ([NO_LINE, NO_LINE], 1, 1),  # token ids
    ],
)
def test_the_last_answer_of_the_main_line_counts_and_other_lines_have_no_rewritten_history(
    lines: list[Line], judged: int, num_first: int
):
    session = SessionTokens(WIDE)
    for call, line in enumerate(lines):
        session.begin(call, ids(10 + call), None, line)
        session.answer(call, sampled(7))
    assert session.last.call == judged
    counts = session.counts()
    assert (counts["first"], counts["rewritten"]) == (num_first, len(lines) - num_first)
    session.named = 0
    assert session.last.call == 0


def test_an_answer_that_never_arrived_leaves_the_loss():
    session = SessionTokens(WIDE)
    ask(session, 0, (1,), (7,), text="kept", opened="<think>")
    session.deliver(0)
    ask(session, 1, (1, 7, 2), (8, 9), text="lost")
    session.lose(1)
    (sequence,) = session.sequences()
    assert sequence.token_ids.tolist() == [1, 7]
    assert (session.num_lost, session.last.text, session.num_sampled) == (1, "kept", 1)
    assert session.last.prompt_opened == "<think>"
    ask(session, 2, (1, 7, 2), (6,))
    assert [one.token_ids.tolist() for one in session.sequences()] == [[1, 7, 2, 6]]


def test_after_an_answer_that_seems_lost_a_call_may_be_longer_than_the_first_prompt():
    # The front can die after the agent got an answer and before it said so: then the agent goes on from it.
    session = SessionTokens(Limits(first_prompt=2, sampled=10, sequence=12, rollout=24))
    ask(session, 0, (1, 2), (7,))
    session.lose(0)
    ask(session, 1, (1, 2, 7, 3), (8,))
    (sequence,) = session.sequences()
    assert sequence.token_ids.tolist() == [1, 2, 7, 3, 8]
    assert sequence.loss_mask.tolist() == [False, False, False, False, True]


def test_the_limits_leave_room_for_an_answer_or_say_which_one_does_not():
    session = SessionTokens(Limits(first_prompt=4, sampled=6, sequence=10, rollout=14, answer=3))

    def refused(call: int, length: int) -> str:
        with pytest.raises(NoRoomError) as error:
            session.begin(call, ids(*range(20, 20 + length)), None)
        return error.value.key

    assert refused(0, 5) == "sampling.max_prompt_tokens"
    assert session.begin(0, ids(1, 2), None) == 3
    session.answer(0, sampled(7, 8, 9))
    assert session.begin(1, ids(1, 2, 7, 8, 9, 3), 2) == 2
    session.answer(1, sampled(6, 6))
    assert refused(2, 10) == "sampling.max_prompt_tokens + sampling.max_new_tokens"
    assert refused(2, 6) == "environment.max_rollout_tokens"
    assert session.begin(2, ids(20), None) == 1
    session.answer(2, sampled(5))
    assert refused(3, 1) == "sampling.max_new_tokens"


@dataclass
class Known:
    """An answer as the agent knows it: all tokens up to it, and whether it certainly has it."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]


class CallsInAnyOrder(RuleBasedStateMachine):
    """Agents that go on, branch, rewrite, lose answers and stop calls, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = Limits(first_prompt=6, sampled=24, sequence=30, rollout=60, answer=4)
        self.session, self.num_calls = SessionTokens(self.limits), 0
        self.running: dict[int, tuple[tuple[int, ...], int]] = {}  # call -> its prompt, and room for an answer
        self.doubtful: dict[int, Known] = {}
        self.kept: list[Known] = []

    @rule(data=st.data(), added=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def begin(self, data: st.DataObject, added: list[int]):
        known = [one.tokens for one in (*self.kept, *self.doubtful.values())]
        before = data.draw(st.sampled_from([(), *known]))
        prompt = (*before, *added)
        call, self.num_calls = self.num_calls, self.num_calls + 1
        try:
            room = self.session.begin(call, ids(*prompt), None)
        except (NoRoomError, MustWaitError):
            return
        self.running[call] = prompt, room

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data: st.DataObject):
        call = data.draw(st.sampled_from(sorted(self.running)))
        prompt, room = self.running.pop(call)
        # Each answer has tokens of its own, so that it is clear whose they are.
        tokens = tuple(1000 * (call + 1) + at for at in range(data.draw(st.integers(1, room))))
        self.session.answer(call, sampled(*tokens))
        self.doubtful[call] = Known((*prompt, *tokens), tokens)

    @precondition(lambda self: self.doubtful)
    @rule(data=st.data(), arrives=st.booleans())
    def deliver_or_lose(self, data: st.DataObject, arrives: bool):
        call = data.draw(st.sampled_from(sorted(self.doubtful)))
        if arrives:
            self.session.deliver(call)
            self.kept.append(self.doubtful.pop(call))
            return
        if call in self.session.doubtful:  # else a later call went on from it, so it did arrive
            del self.doubtful[call]
        self.session.lose(call)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def stop(self, data: st.DataObject):
        call = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[call]
        self.session.lose(call)

    @invariant()
    def every_answer_is_trained_once_after_its_own_prompt(self):
        known = [*self.kept, *self.doubtful.values()]
        wanted = sorted(token for one in known for token in one.answer)
        sequences = self.session.sequences()
        assert sorted(token for one in sequences for token in one.token_ids[one.loss_mask].tolist()) == wanted
        begins = {
            tuple(one.token_ids[: end + 1].tolist()) for one in sequences for end in np.flatnonzero(one.loss_mask)
        }
        assert all(one.tokens in begins for one in known)

    @invariant()
    def no_limit_is_exceeded(self):
        sequences = self.session.sequences()
        assert sum(len(one.token_ids) for one in sequences) <= self.limits.rollout
        assert sum(int(one.loss_mask.sum()) for one in sequences) <= self.limits.sampled
        assert max((len(one.token_ids) for one in sequences), default=0) <= self.limits.sequence
        assert sum(self.session.turn_tokens) == self.session.num_sampled


TestCallsInAnyOrder = CallsInAnyOrder.TestCase
