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
from async_rl.records import Group, Lease, Span, TokenSequence, Turn
from async_rl.routes import RoutingShape
from async_rl.sampling_mask import SamplingMask
from tests.queue.builders import LINEAGE, SAMPLING, ack, announce, group, leases, make_state, rows, take
from tests.queue.direct import RefusedError, Run

VOCAB = 100


def with_sequences(group: Group, *sequences: TokenSequence) -> Group:
    """The group with these sequences in its last rollout."""
    *others, last = group.rollouts
    return replace(group, rollouts=(*others, replace(last, sequences=sequences)))


def changed(group: Group, **columns: Callable[[np.ndarray], np.ndarray]) -> Group:
    """The group with these columns of its last sequence changed."""
    (sequence,) = group.rollouts[-1].sequences
    new = {name: change(getattr(sequence, name).copy()) for name, change in columns.items()}
    return with_sequences(group, replace(sequence, **new))


def at(index: int, value: object) -> Callable[[np.ndarray], np.ndarray]:
    def change(column: np.ndarray) -> np.ndarray:
        column[index] = value
        return column

    return change


def small_vocabulary(**changes: Any) -> QueueState:
    state = make_state(**changes)
    state.vocab_size = VOCAB
    return state


def forged(name: str, lease: Lease) -> Group:
    honest = group(lease)
    (sequence,) = honest.rollouts[-1].sequences
    nothing = replace(
        sequence,
        **{c: getattr(sequence, c)[:0] for c in ("token_ids", "loss_mask", "behavior_logprobs", "versions")},
    )
    last = honest.rollouts[-1]
    match name:
        case "a token beyond the vocabulary":
            return changed(honest, token_ids=at(0, VOCAB))
        case "a negative token":
            return changed(honest, token_ids=at(0, -1))
        case "a trained first token":
            return changed(honest, loss_mask=at(0, True), versions=at(0, 0))
        case "an empty second sequence":
            return with_sequences(honest, sequence, nothing)
        case "a sequence longer than the lease allows":
            return group(lease, prompt_tokens=14)
        case "more sampled tokens than the lease allows":
            return group(lease, tokens=9)
        case "a logprob above 0":
            return changed(honest, behavior_logprobs=at(-1, 0.002))
        case "a huge reward":
            return replace(honest, rollouts=(*honest.rollouts[:-1], replace(last, reward_parts={"correct": -2e6})))
        case "a huge turn reward":
            turns = (Turn(num_tokens=3, reward=2e6, score=0.0),)
            return replace(honest, rollouts=tuple(replace(r, turns=turns) for r in honest.rollouts))
        case "a turn reward that is no number":
            turns = (Turn(num_tokens=3, reward=math.nan, score=0.0),)
            return replace(honest, rollouts=tuple(replace(r, turns=turns) for r in honest.rollouts))
        case "a turn of more tokens than were sampled":
            turns = (Turn(num_tokens=4, reward=1.0, score=0.0),)
            return replace(honest, rollouts=tuple(replace(r, turns=turns) for r in honest.rollouts))
        case "spans that do not ascend":
            spans = (Span(end=2, reward=1.0), Span(end=2, reward=1.0))
            return replace(honest, rollouts=tuple(replace(r, spans=spans) for r in honest.rollouts))
    raise AssertionError(name)


FORGERIES = {
    "a token beyond the vocabulary": "token ids",
    "a negative token": "token ids",
    "a trained first token": "first token",
    "an empty second sequence": "lengths",
    "a sequence longer than the lease allows": "lengths",
    "more sampled tokens than the lease allows": "lengths",
    "a logprob above 0": "logprobs",
    "a huge reward": "rewards",
    "a huge turn reward": "rewards",
    "a turn reward that is no number": "rewards",
    "a turn of more tokens than were sampled": "turns",
    "spans that do not ascend": "turns",
}


def give(state: QueueState, returned: Group) -> tuple[Verdict, str]:
    payload = encode_group(returned)
    return generator_requests.receive(state, returned.generator_id, read_summary(payload), payload, 0.0)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_group_is_refused_and_counted_by_cause(name):
    state = small_vocabulary()
    (lease,) = leases(state, 1)
    verdict, reason = give(state, forged(name, lease))
    assert verdict == "refused"
    assert f": {FORGERIES[name]}: " in reason
    (entry,) = state.generators.as_dicts(0.0)
    assert entry["refused"] == {FORGERIES[name]: 1}
    state.check()


def test_the_limits_themselves_are_accepted():
    state = small_vocabulary()
    (lease,) = leases(state, 1)
    # 8 prompt tokens and 8 sampled ones: what the lease allows.
    largest = changed(
        group(lease, prompt_tokens=8, tokens=8), token_ids=at(-1, VOCAB - 1), behavior_logprobs=at(-1, 0.0009)
    )
    last = largest.rollouts[-1]
    largest = replace(largest, rollouts=(*largest.rollouts[:-1], replace(last, reward_parts={"correct": 1e6})))
    assert give(state, largest) == ("queued", "")


def test_a_version_that_was_not_trained_is_refused():
    state = make_state()
    (lease,) = leases(state, 1)
    verdict, reason = give(state, group(lease, 1))
    assert (verdict, "versions 0..0, which the learner has trained" in reason) == ("refused", True)


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
        assert give(state, forged("a negative token", first))[0] == "refused"
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
    state.check()


def test_refusals_among_many_good_groups_are_forgotten():
    state = small_vocabulary(max_attempts=50, max_staleness=999, max_bytes=1 << 30)
    for number in range(3 * QUARANTINE_OF):
        (lease,) = leases(state, 1)
        # The good ones are all right, so they are filtered and take no room.
        returned = forged("a negative token", lease) if number % 10 == 0 else group(lease, accuracies=(1.0, 1.0))
        assert give(state, returned)[0] == ("filtered" if number % 10 else "refused")
    assert leases(state, 1)


def test_the_vocabulary_is_that_of_the_learner_also_after_a_reload(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    attach = messages.Attach("run", LINEAGE, "", 0, 0, 3, "[run]", ("config.json",), has_snapshot=False)
    run.call(b"learner", attach, [b'{"vocab_size": 100}'])
    assert run.server._state.vocab_size == 100
    assert run.server._journal is not None
    run.server._durable.revert()
    assert run.server._state.vocab_size == 100
    run.close()


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


def test_a_quarantine_outlives_the_server(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.learner(messages.Attach("run", LINEAGE, "", 0, 0, 3, "[run]", (), has_snapshot=False))
    run.call(b"peer", messages.Hello("g0", "host", "fake"))
    run.learner(messages.Quarantine(LINEAGE, "g0", "far from the learner"))
    assert run.server._journal is not None
    run.server._durable.revert()
    reply = run.call(b"peer", messages.LeaseRequest("g0", LINEAGE, 0, 1))
    assert reply.fields["reason"] == "this generator is quarantined: far from the learner"
    (note,) = persistence.ledger_file(run.server._state)["group_notes"].values()
    assert note.startswith("generator 'g0' was quarantined after step 0, it gets no more leases: far from the learner;")
    run.close()


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


def test_who_is_lifted_is_not_quarantined_again_for_its_old_groups():
    state = make_state(max_staleness=300, num_rows=400, max_refused_share=0.01)
    for _ in range(2):
        assert not any(entry.quarantined for entry in state.generators.alive(0.0))
        for lease in leases(state, 2):
            give(state, forged("a huge reward", lease))
        assert state.generators.seen("g0", 0.0).quarantined
        generator_requests.lift_quarantine(state, "g0")


def test_a_generator_that_starts_again_has_its_leases_again():
    # With a key its id stays its own, and a killed process says no goodbye: a run of this one would stop for ever.
    state = make_state()
    leases(state, 1)
    generator_requests.quarantine(state, "g0", "an older engine")
    assert "every generator is quarantined: g0: an older engine" in stop_reason(state)
    generator_requests.hello(state, "g0", "host", "fake", 1.0)
    assert stop_reason(state) == ""
    assert len(leases(state, 1)) == 1


def test_an_answer_to_a_probe_that_the_learner_could_not_read_is_refused(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.learner(messages.Attach("run", LINEAGE, "", 0, 0, 3, "[run]", (), has_snapshot=False))
    with pytest.raises(RefusedError):
        run.call(b"peer", messages.AnswerProbe("g0", LINEAGE, 0, b"no answer"))
    assert run.server._state.generators.probe_answers(LINEAGE, 0) == {}
    run.close()


@pytest.mark.parametrize("digests", [{}, {0: "digest-1"}, {1: "digest-0"}])
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_group_of_other_weights_than_the_published_ones_is_refused(digests: dict[int, str], kind: str):
    state = make_state(max_staleness=9)
    if kind == "eval":
        learner_requests.evaluate(state, "test", 0, rows(2), 2, SAMPLING, 0, True)
    (lease,) = leases(state, 1)
    assert lease.kind == kind
    verdict, reason = give(state, replace(group(lease), weights_digest=digests))
    assert (verdict, "weights: expected digest 'digest-0' of version 0, as published" in reason) == ("refused", True)
    entry = state.generators.get("g0")
    assert entry is not None
    assert entry.refused == {"weights": 1}


def test_the_digests_of_versions_that_a_lease_may_still_use_are_kept_and_no_others():
    state = make_state(max_staleness=1)
    learner_requests.evaluate(state, "test", 0, rows(2), 2, SAMPLING, 0, False)
    assert [lease.kind for lease in leases(state, 1)] == ["eval"]
    learner = state.learner
    assert learner is not None
    for version in range(1, 4):
        learner.version = version
        announce(state, version)
    # The evaluation's lease may use version 0.
    assert learner.digests == {version: f"digest-{version}" for version in range(4)}
    state.evals.clear()
    for active in state.leases:
        state.leases.close(active.lease.lease_id, "cancelled")
    learner.version = 4
    announce(state, 4)
    assert learner.digests == {3: "digest-3", 4: "digest-4"}


def test_a_sampling_mask_with_a_token_beyond_the_vocabulary_is_refused():
    state = make_state(sampling=replace(SAMPLING, top_k=2))
    state.vocab_size = VOCAB
    (lease,) = leases(state, 1)
    honest = group(lease)
    for beyond, verdict in ((VOCAB - 1, "queued"), (VOCAB, "refused")):
        rollouts = []
        for rollout in honest.rollouts:
            (sequence,) = rollout.sequences
            ids = [id_ for token in sequence.token_ids[sequence.loss_mask].tolist() for id_ in (token, beyond)]
            mask = SamplingMask(np.full(3, 2, np.int32), np.array(ids, np.int32))
            rollouts.append(replace(rollout, sequences=(replace(sequence, sampling_mask=mask),)))
        assert give(state, replace(honest, rollouts=tuple(rollouts)))[0] == verdict
        (lease,) = leases(state, 1)
        honest = group(lease)
    entry = state.generators.get("g0")
    assert entry is not None
    assert entry.refused == {"token ids": 1}


def test_routes_are_asked_for_in_training_only_and_checked():
    state = make_state(routing=RoutingShape(3, 8, 2))
    for expert, verdict in ((7, "queued"), (8, "refused")):
        (lease,) = leases(state, 1)
        assert lease.wants_routes
        honest = group(lease)
        rollouts = []
        for rollout in honest.rollouts:
            (sequence,) = rollout.sequences
            routes = np.full((len(sequence.token_ids) - 1, 3, 2), expert, np.uint8)
            rollouts.append(replace(rollout, sequences=(replace(sequence, routes=routes),)))
        assert give(state, replace(honest, rollouts=tuple(rollouts)))[0] == verdict
    entry = state.generators.get("g0")
    assert entry is not None
    assert entry.refused == {"routes": 1}
