"""What a returned group may not claim: each was accepted, and stopped the learner or trained it on nonsense."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.errors import QueueError
from async_rl.net.codec import encode_group
from async_rl.queue import messages
from async_rl.queue.core import diagnosis, generator_requests, learner_requests, persistence
from async_rl.queue.core.generators import QUARANTINE_OF
from async_rl.queue.core.groups import read_summary
from async_rl.queue.core.state import QueueState, stop_reason
from async_rl.queue.messages import NotReady, Verdict
from async_rl.records import Group, Lease, Span, Turn
from async_rl.sampling_mask import SamplingMask
from tests.queue.builders import LINEAGE, SAMPLING, ack, announce, group, leases, make_state, rows, take
from tests.queue.direct import RefusedError

VOCAB = 100


def with_last(group: Group, **fields: Any) -> Group:
    """The group with these fields of its last rollout changed."""
    *others, last = group.rollouts
    return replace(group, rollouts=(*others, replace(last, **fields)))


def changed(group: Group, **columns: Callable[[np.ndarray], np.ndarray]) -> Group:
    """The group with these columns of its last sequence changed."""
    (sequence,) = group.rollouts[-1].sequences
    new = {name: change(getattr(sequence, name).copy()) for name, change in columns.items()}
    return with_last(group, sequences=(replace(sequence, **new),))


def at(index: int, value: object) -> Callable[[np.ndarray], np.ndarray]:
    def change(column: np.ndarray) -> np.ndarray:
        column[index] = value
        return column

    return change


def small_vocabulary(**changes: Any) -> QueueState:
    state = make_state(**changes)
    state.vocab_size = VOCAB
    return state


def with_empty_sequence(group: Group) -> Group:
    (sequence,) = group.rollouts[-1].sequences
    columns = ("token_ids", "loss_mask", "behavior_logprobs", "versions")
    nothing = replace(sequence, **{name: getattr(sequence, name)[:0] for name in columns})
    return with_last(group, sequences=(sequence, nothing))


def with_turn(num_tokens: int, reward: float) -> Callable[[Lease], Group]:
    return lambda lease: with_last(group(lease), turns=(Turn(num_tokens, reward, score=0.0),))


FORGERIES: dict[str, tuple[str, Callable[[Lease], Group]]] = {
    "a token beyond the vocabulary": ("token ids", lambda lease: changed(group(lease), token_ids=at(0, VOCAB))),
    "a negative token": ("token ids", lambda lease: changed(group(lease), token_ids=at(0, -1))),
    "a trained first token": (
        "first token", lambda lease: changed(group(lease), loss_mask=at(0, True), versions=at(0, 0))
    ),
    "an empty second sequence": ("lengths", lambda lease: with_empty_sequence(group(lease))),
    "a sequence longer than the lease allows": ("lengths", lambda lease: group(lease, prompt_tokens=14)),
    "more sampled tokens than the lease allows": ("lengths", lambda lease: group(lease, tokens=9)),
    "a logprob above 0": ("logprobs", lambda lease: changed(group(lease), behavior_logprobs=at(-1, 0.002))),
    "a huge reward": ("rewards", lambda lease: with_last(group(lease), reward_parts={"correct": -2e6})),
    "a huge turn reward": ("rewards", with_turn(3, 2e6)),
    "a turn reward that is no number": ("rewards", with_turn(3, math.nan)),
    "a turn of more tokens than were sampled": ("turns", with_turn(4, 1.0)),
    "a version below 0 for a sampled token": ("other", lambda lease: changed(group(lease), versions=at(-1, -1))),
    "a version for a token of the prompt": ("other", lambda lease: changed(group(lease), versions=at(0, 0))),
    "a version that was not trained": ("other", lambda lease: group(lease, 1)),
    "a logprob that is no number": ("other", lambda lease: changed(group(lease), behavior_logprobs=at(-1, math.nan))),
    "a reward that is no number": ("other", lambda lease: with_last(group(lease), reward_parts={"correct": math.nan})),
    "another lineage": ("other", lambda lease: replace(group(lease), lineage="line-b")),
    "another kind": ("other", lambda lease: replace(group(lease), kind="eval")),
    "another temperature": ("other", lambda lease: replace(group(lease), temperature=0.9)),
    "another prompt's position": ("other", lambda lease: replace(group(lease), position=99)),
    "a rollout too many": ("other", lambda lease: group(lease, accuracies=(1.0, 0.0, 1.0))),
    "a rollout without sampled tokens": ("other", lambda lease: with_last(group(lease), sequences=())),
    "spans that do not ascend": ("turns", lambda lease: with_last(group(lease), spans=(Span(2, 1.0), Span(2, 1.0)))),
}  # fmt: skip
"""The cause under which each is counted."""
NEGATIVE_TOKEN = FORGERIES["a negative token"][1]


def give(state: QueueState, returned: Group) -> tuple[Verdict, str]:
    payload = encode_group(returned)
    return generator_requests.receive(state, returned.generator_id, read_summary(payload), payload, 0.0)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_group_is_refused_and_counted_by_cause(name):
    state = small_vocabulary()
    (lease,) = leases(state, 1)
    cause, forge = FORGERIES[name]
    verdict, reason = give(state, forge(lease))
    assert verdict == "refused"
    assert cause == "other" or f": {cause}: " in reason
    (entry,) = state.generators.as_dicts(0.0)
    assert entry["refused"] == {cause: 1}
    state.check()


def keeping(made: Group, offset: int) -> Group:
    """Each sampled token with a set of one: the token plus ``offset``."""
    rollouts = []
    for rollout in made.rollouts:
        (sequence,) = rollout.sequences
        kept = sequence.token_ids[sequence.loss_mask] + offset
        mask = SamplingMask(np.ones(len(kept), np.int32), kept.astype(np.int32))
        rollouts.append(replace(rollout, sequences=(replace(sequence, sampling_mask=mask),)))
    return replace(made, rollouts=tuple(rollouts))


def test_a_sampled_token_that_was_not_kept_is_refused():
    state = make_state(sampling=replace(SAMPLING, top_k=1))
    honest, forged = leases(state, 2)
    assert give(state, keeping(group(honest), 0)) == ("queued", "")
    assert give(state, keeping(group(forged), 1))[0] == "refused"
    assert state.generators.as_dicts(0.0)[0]["refused"] == {"other": 1}


def test_the_limits_themselves_are_accepted():
    state = small_vocabulary()
    (lease,) = leases(state, 1)
    # 8 prompt tokens and 8 sampled ones: what the lease allows.
    largest = changed(
        group(lease, prompt_tokens=8, tokens=8), token_ids=at(-1, VOCAB - 1), behavior_logprobs=at(-1, 0.0009)
    )
    assert give(state, with_last(largest, reward_parts={"correct": 1e6})) == ("queued", "")


def test_a_version_that_is_published_and_not_yet_announced_is_accepted():
    state = make_state()
    ahead, *others = leases(state, 3)
    for lease in others:
        assert give(state, group(lease, 0)) == ("queued", "")
    take(state)
    ack(state, announced=False)
    assert give(state, group(ahead, 1)) == ("queued", "")


def test_a_generator_whose_groups_are_refused_too_often_is_quarantined_and_the_run_says_so():
    # 0.1 of the last 100: 10 refused groups are allowed, the 11th is one too many.
    state = small_vocabulary(max_attempts=50, max_staleness=99)
    for _ in range(11):
        assert isinstance(learner_requests.take(state, LINEAGE, 0, 0, 0.0), NotReady)
        assert not stop_reason(state)
        first, *_ = leases(state, 2)
        assert give(state, NEGATIVE_TOKEN(first))[0] == "refused"
    granted = generator_requests.lease(state, "g0", (LINEAGE, 0), 1, 0.0)
    assert not granted.leases
    assert "quarantined" in granted.reason
    assert state.ledger.groups.in_flight == 0
    answer = learner_requests.take(state, LINEAGE, 0, 0, 0.0)
    assert isinstance(answer, NotReady)
    assert "every generator is quarantined" in answer.stop
    assert "g0: 11 of its last 100 groups were refused (token ids: 11)" in answer.stop
    # Another generator goes on.
    assert leases(state, 1, generator="g1")
    assert not stop_reason(state)
    # Who is lifted begins anew: its old groups count no more.
    generator_requests.lift_quarantine(state, "g0")
    assert give(state, NEGATIVE_TOKEN(leases(state, 1)[0]))[0] == "refused"
    assert leases(state, 1)
    state.check()


def test_refusals_among_many_good_groups_are_forgotten():
    state = small_vocabulary(max_attempts=50, max_staleness=999, max_bytes=1 << 30)
    for number in range(3 * QUARANTINE_OF):
        (lease,) = leases(state, 1)
        # The good ones are all right, so they are filtered and take no room.
        returned = NEGATIVE_TOKEN(lease) if number % 10 == 0 else group(lease, accuracies=(1.0, 1.0))
        assert give(state, returned)[0] == ("filtered" if number % 10 else "refused")
    assert leases(state, 1)


def test_the_vocabulary_is_that_of_the_learner_also_after_a_reload(run):
    attach = messages.Attach("run", "line-b", LINEAGE, 0, 0, 3, "[run]", ("config.json",), has_snapshot=False)
    run.call(b"learner", attach, [b'{"vocab_size": 100}'])
    assert run.server._state.vocab_size == 100
    assert run.server._journal is not None
    run.server._durable.revert()
    assert run.server._state.vocab_size == 100


def test_the_learner_quarantines_a_generator_whose_groups_are_then_dropped_and_given_out_again():
    state = make_state(max_staleness=9)
    bad = leases(state, 3)
    for lease in bad[:2]:
        assert give(state, group(lease)) == ("queued", "")
    (good,) = leases(state, 1, generator="g1")
    assert give(state, group(good, generator="g1")) == ("queued", "")
    generator_requests.quarantine(state, "g0", "far from the learner")
    assert [stored.generator_id for stored in state.queued] == ["g1"]
    assert (state.ledger.groups.in_flight, state.ledger.groups.dropped["refused"]) == (0, 2)
    assert not leases(state, 1)
    # Another generator gets the same prompts.
    again = leases(state, 3, generator="g1")
    assert [lease.prompt.position for lease in again] == [lease.prompt.position for lease in bad]
    assert give(state, group(bad[2])) == ("unknown_lease", "")
    state.check()


def test_a_quarantine_outlives_the_server(run):
    run.call(b"peer", messages.Hello("g0", "host", "fake"))
    run.learner(messages.Quarantine(LINEAGE, "g0", "far from the learner"))
    assert run.server._journal is not None
    run.server._durable.revert()
    reply = run.call(b"peer", messages.LeaseRequest("g0", LINEAGE, 0, 1))
    assert reply.fields["reason"] == "this generator is quarantined: far from the learner"
    (note,) = persistence.ledger_file(run.server._state)["group_notes"].values()
    assert note.startswith("generator 'g0' was quarantined after step 0, it gets no more leases: far from the learner;")


def test_a_quarantine_is_noted_until_it_is_lifted_also_when_its_generator_has_left():
    state = make_state()
    for generator in ("g0", "g1"):
        leases(state, 1, generator=generator)
        generator_requests.quarantine(state, generator, "far from the learner")
    assert state.news == list(diagnosis.notes(state).values())
    generator_requests.goodbye(state, "g0", 0.0)
    generator_requests.lift_quarantine(state, "g1")
    assert list(state.quarantines) == ["g0"]
    assert state.news[-1] == "the quarantine of generator 'g1' is lifted"
    assert len(leases(state, 1, generator="g1")) == 1
    for generator in ("g0", "g1", "nobody"):
        with pytest.raises(QueueError, match=f"expected the id of a quarantined generator, got '{generator}'"):
            generator_requests.lift_quarantine(state, generator)


def test_no_flood_of_ids_grows_the_notes():
    state = make_state()
    for number in range(40):
        leases(state, 1, generator=f"g{number}")
        generator_requests.quarantine(state, f"g{number}", "forged")
    assert list(state.quarantines) == [f"g{number}" for number in range(24, 40)]


def test_a_generator_that_starts_again_has_its_leases_again():
    # With a key its id stays its own, and a killed process says no goodbye: a run of this one would stop for ever.
    state = make_state()
    leases(state, 1)
    generator_requests.quarantine(state, "g0", "an older engine")
    assert "every generator is quarantined: g0: an older engine" in stop_reason(state)
    generator_requests.hello(state, "g0", "host", "fake", 1.0)
    assert stop_reason(state) == ""
    assert len(leases(state, 1)) == 1


def test_an_answer_to_a_probe_that_the_learner_could_not_read_is_refused(run):
    with pytest.raises(RefusedError):
        run.call(b"peer", messages.AnswerProbe("g0", LINEAGE, 0, b"no answer"))
    assert run.server._state.generators.probe_answers(LINEAGE, 0) == {}


@pytest.mark.parametrize("digests", [{}, {0: "digest-1"}, {1: "digest-0"}])
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_group_of_other_weights_than_the_published_ones_is_refused(digests: dict[int, str], kind: str):
    state = make_state(max_staleness=9)
    if kind == "eval":
        learner_requests.evaluate(state, "test", 0, rows(2), 2, SAMPLING, 0, True)
    (lease,) = leases(state, 1)
    assert lease.kind == kind
    # The lease may use version 0, whatever is announced before its group comes.
    assert state.learner is not None
    state.learner.version = 1
    announce(state, 1)
    verdict, reason = give(state, replace(group(lease), weights_digest=digests))
    assert (verdict, "weights: expected digest 'digest-0' of version 0, as published" in reason) == ("refused", True)
    entry = state.generators.get("g0")
    assert entry is not None
    assert entry.refused == {"weights": 1}
