"""A client with a valid key that sends forged groups and failures: no other generator and no prompt suffers from it.

``liar`` and ``g0`` sample the same prompts. ``g0`` returns a good group for each lease that it gets.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import WireError
from async_rl.net.codec import encode_group, read_as
from async_rl.net.wire import decode, encode
from async_rl.queue.core import diagnosis, generator_requests, persistence
from async_rl.queue.core.state import QueueState, encode_state
from async_rl.queue.messages import (
    GENERATOR_TOTALS,
    Decoded,
    FailedRollouts,
    FailLease,
    Failure,
    FailureCause,
    GeneratorStats,
    NotReady,
    ReturnGroups,
)
from async_rl.queue.server.handlers import Handlers, owner_of
from async_rl.queue.server.sockets import MessageLimits
from async_rl.records import Lease
from tests.examples import examples
from tests.queue.builders import (
    ack,
    all_trained,
    fail,
    group,
    groups_of,
    leases,
    make_config,
    make_state,
    put,
    rows,
    take,
    with_failed,
)
from tests.queue.test_fuzz import handle

LIAR = "liar"
CAUSES: tuple[FailureCause, ...] = ("engine_error", "reward_error", "environment_error", "prompt_too_long")
FAILURES = st.builds(
    Failure, st.sampled_from(CAUSES), st.text(max_size=9), st.sampled_from(["", "a", "b", "x" * 2000]), st.booleans()
)
COUNTS = st.sampled_from([0, 1, 2, 3, 2**53])
FIELDS = (
    "lease_id", "kind", "position", "generator_id", "lineage", "temperature", "weights_digest", "sampling_time_s",
    "num_sequences", "lengths", "reward_parts", "accuracy", "finish_reason", "extracted", "turns", "columns", "spans",
    "num_computed", "example", "metrics",
)  # fmt: skip
VALUES = st.sampled_from(
    [None, True, 0, -1, 1, 2**31, 2**53, 0.5, 1e308, float("nan"), "", "x", [], {}, [0, 0], [1, 1], [1e308, 1e308],
     [float("nan"), 0.0], ["error", "error"], ["error", "stop"], ["length", "x"], {"correct": [1.0]}, {"0": "x"}]
)  # fmt: skip
ACTIONS = st.one_of(
    st.tuples(st.just("fail"), FAILURES),
    st.tuples(st.just("forge"), st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2)),
    st.tuples(st.just("failed"), st.integers(0, 2), st.lists(st.tuples(FAILURES, COUNTS), max_size=4)),
    st.tuples(st.sampled_from(["good", "old", "bytes", "hold", "foreign"])),
)


class Lies:
    """A queue, the learner and ``g0``, and what ``liar`` did to them."""

    def __init__(self) -> None:
        self.state = make_state(num_rows=200, epochs=1, max_staleness=3, max_bytes=1 << 24)
        self.handlers = Handlers(self.state, make_config("unused"), {"test": rows(2)}, "run")
        self.now, self.num_lied, self.sizes = 0.0, 0, MessageLimits(1 << 20)
        for name in ("g0", LIAR):
            generator_requests.claim(self.state, name, owner_of("", ""), 0.0)
            generator_requests.hello(self.state, name, "h", "fake", 0.0)
        self.live()

    def live(self) -> None:
        """``g0`` and the learner do their work once."""
        self.now += 0.1
        for lease in leases(self.state, 2, self._version, generator="g0", now=self.now):
            assert put(self.state, group(lease, self._version, generator="g0"), now=self.now) == "queued"
        answer = take(self.state, now=self.now)
        if not isinstance(answer, NotReady):
            ack(self.state, all_trained(len(answer)), now=self.now)
        else:
            assert answer.stop == ""

    def lie(self, count: int, actions: list[Any]) -> None:
        held = leases(self.state, count, self._version, generator=LIAR, now=self.now)
        self.num_lied += len(held)
        for lease, action in zip(held, actions, strict=False):
            self._act(lease, *action)

    def check(self) -> None:
        state = self.state
        state.check()
        json.dumps(persistence.ledger_file(state), allow_nan=False)
        json.dumps(persistence.status(state, self.now), allow_nan=False)
        assert encode_state(state)
        assert persistence.excluded(state) == []
        honest = state.generators.get("g0")
        assert honest is not None
        assert (honest.quarantined, honest.failing.count, honest.refused.total()) == ("", 0, 0)
        places = list(state.failed_places.values())
        assert all(place.rollouts for place in places), places
        assert sum(place.rollouts for place in places) <= 2 * self.num_lied

    @property
    def _version(self) -> int:
        assert self.state.learner is not None
        return self.state.learner.version

    def _act(self, lease: Lease, kind: str, *given_: Any) -> None:
        honest = group(lease, self._version, generator=LIAR)
        match kind:
            case "fail":
                self._send("fail", FailLease(LIAR, lease.lease_id, given_[0]))
            case "good":
                self._return(lease, encode_group(honest))
            case "old":
                self._return(lease, encode_group(group(lease, 0, generator=LIAR)))
            case "bytes":
                self._return(lease, encode_group(honest)[:-9])
            case "failed":
                num_failed, failed = given_
                payload = encode_group(with_failed(honest, num_failed))
                self._return(lease, payload, [FailedRollouts(lease.lease_id, one, count) for one, count in failed])
            case "forge":
                self._return(lease, self._forged(honest, given_[0]))
            case "foreign":
                for other in leases(self.state, 1, self._version, generator="g0", now=self.now):
                    self._send("fail", FailLease(LIAR, other.lease_id, Failure("reward_error", "x")))
                    self._return(other, encode_group(group(other, self._version, generator=LIAR)))
                    assert put(self.state, group(other, self._version, generator="g0"), now=self.now) == "queued"
            case _:
                assert kind == "hold"  # it never returns this lease

    def _forged(self, honest: Any, changes: dict[str, Any]) -> bytes:
        message = decode(encode_group(honest))
        return encode("group", {**message.fields, **changes}, message.arrays)

    def _return(self, lease: Lease, payload: bytes, failed: Any = ()) -> None:
        self._send("return", ReturnGroups(LIAR, (lease.lease_id,), tuple(failed)), payload)

    def _send(self, type_: str, record: msgspec.Struct, *parts: bytes) -> None:
        fields = {**msgspec.structs.asdict(record), "request_id": "r"}
        handle(self.handlers, (encode(type_, fields, num_parts=len(parts)), *parts), self.sizes, self.now)


@examples(400, num_quick=15)
@given(st.lists(st.tuples(st.integers(1, 4), st.lists(ACTIONS, min_size=4, max_size=4)), max_size=20))
def test_forged_messages_exclude_no_prompt_and_harm_no_other_generator(rounds: list[Any]):
    lies = Lies()
    for count, actions in rounds:
        lies.lie(count, actions)
        lies.live()
        lies.check()
    lies.now += 100.0  # what the liar still holds expires
    for _ in range(2 * len(rounds) + 2):  # of up to four lies a round, two are sampled at a time
        lies.live()
    lies.check()
    assert not lies.state.stream.cursor.requeued, "the other generator samples the prompts of all lies"


# One kind of lie at a time.


def two_generators(**changes: Any) -> QueueState:
    """``liar`` has a good group, and ``g0`` samples, too."""
    state = make_state(groups_per_step=20, max_bytes=1 << 24, generator_timeout_s=1e9, **changes)
    for name in (LIAR, "g0"):
        (lease,) = leases(state, 1, generator=name)
        assert put(state, group(lease, generator=name)) == "queued"
    return state


def positions(state: QueueState, count: int, generator: str) -> list[int]:
    return [lease.prompt.position for lease in leases(state, count, generator=generator)]


@pytest.mark.parametrize("lie", ["fail", "refuse", "hold"])
def test_a_prompt_that_failed_goes_to_another_generator_first(lie: str):
    state = two_generators()
    (lease,) = leases(state, 1, generator=LIAR)
    position, now = lease.prompt.position, 0.0
    match lie:
        case "fail":
            fail(state, lease, generator=LIAR)
        case "refuse":
            generator_requests.refuse(state, LIAR, lease.lease_id, 0.0)
        case _:
            now = 11.0  # queue.lease_timeout_s is 10
    (other,) = leases(state, 1, generator="g0", now=now)
    assert put(state, group(other, generator="g0"), now=now) == "queued"
    assert position in (other.prompt.position, *positions(state, 1, "g0"))


def test_a_prompt_is_excluded_as_too_long_on_the_word_of_two_generators():
    state = two_generators()
    (lease,) = leases(state, 1, generator=LIAR)
    fail(state, lease, "prompt_too_long", generator=LIAR)
    assert (state.prompts_too_long, persistence.excluded(state)) == (0, [])
    put(state, group(leases(state, 1, generator=LIAR)[0], generator=LIAR))
    (again,) = leases(state, 1, generator="g0")
    assert again.prompt.position == lease.prompt.position
    fail(state, again, "prompt_too_long", generator="g0")
    assert (state.prompts_too_long, groups_of(state)["dropped"]["refused"]) == (1, 2)


def test_no_claimed_progress_makes_a_sum_too_large_for_the_journal():
    # The largest integer of a message; with the second of them the server could not write its journal any more.
    state = make_state()
    held = leases(state, 2)
    claimed = {lease.lease_id: 2**64 - 1 for lease in held}
    generator_requests.heartbeat(state, "g0", claimed, GeneratorStats(), 1.0)
    for lease in held:
        active = state.leases.get(lease.lease_id)
        assert active is not None
        state.lose_lease(active, "cancelled", counts=None)
    assert state.outcomes.cancelled.tokens == 2 * 2 * 8  # two answers of 8 tokens in each lease
    assert encode_state(state)


def test_the_prompts_of_a_generator_that_is_quarantined_for_its_groups_are_charged_nothing():
    state = two_generators(max_attempts=1)
    held = leases(state, 15, generator=LIAR)
    queued, *others = held
    assert put(state, group(queued, generator=LIAR)) == "queued"
    for lease in others[:11]:
        generator_requests.refuse(state, LIAR, lease.lease_id, 0.0)
    liar = state.generators.get(LIAR)
    assert liar is not None
    assert liar.quarantined
    assert {lease.prompt.position for lease in others[11:]} <= set(state.stream.cursor.requeued)
    assert queued.prompt.position in state.stream.cursor.requeued
    excluded = {found["position"] for found in persistence.excluded(state)}
    # With one attempt a prompt, each refusal excludes it: the generator had a good group before.
    assert excluded == {lease.prompt.position for lease in others[:11]}


@pytest.mark.parametrize("value", [math.inf, math.nan, -1, 2**54])
def test_totals_of_a_generator_that_are_no_plausible_numbers_are_refused(value: float):
    decoded = [{"decoded": [numbers]} for numbers in ([value, 1.0, 1], [1.0, value, 1], [1.0, 1.0, value])]
    for fields in [*({name: value} for name in GENERATOR_TOTALS), *decoded, {"counters": {"judged": value}}]:
        with pytest.raises(WireError):
            read_as(fields, GeneratorStats)


def test_the_largest_sums_over_all_generators_reach_the_learner():
    state, most = two_generators(), 2**53
    stats = GeneratorStats(decoded=(Decoded(most, most, most),), counters={"judged": most})
    invented = {"judged": most} | {f"a{number}": 1 for number in range(63)}
    generator_requests.heartbeat(state, "g0", {}, msgspec.structs.replace(stats, counters={"judged": 1, "z": 1}), 0.0)
    generator_requests.heartbeat(state, LIAR, {}, msgspec.structs.replace(stats, counters=invented), 0.0)
    found = read_as(msgspec.to_builtins(state.generators.total(0.0)), GeneratorStats)
    assert msgspec.structs.replace(found, counters={"judged": found.counters["judged"]}) == stats
    assert len(found.counters) == 64


def test_a_text_of_a_generator_makes_no_line_of_its_own():
    state, forged = two_generators(), "x\n12:00 INFO the run is finished\r\u2028y"
    generator_requests.heartbeat(state, LIAR, {}, GeneratorStats(), 0.0, forged)
    liar = state.generators.get(LIAR)
    assert liar is not None
    for lease in leases(state, 8, generator=LIAR):
        fail(state, lease, generator=LIAR, detail=forged, place=forged)
    said = [*state.news, *diagnosis.notes(state).values(), liar.trouble, *state.failed_places]
    assert len(said) == 6
    assert all(len(text.splitlines()) == 1 for text in said), said
