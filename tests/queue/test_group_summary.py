"""Facts read from a frame's columns say what the decoded group says, rollout by rollout."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from async_rl.errors import WireError
from async_rl.net.codec import decode_group, encode_group
from async_rl.queue.core.groups import read_summary, refusal_cause, why_unfit
from async_rl.records import NO_VERSION, Group, Lease, Prompt, Rollout, Sampling, TokenSequence
from async_rl.routes import RoutingShape
from async_rl.sampling_mask import SamplingMask, pack_ids
from tests.examples import examples

LEASE = Lease("id", "train", Prompt(7, 0, 0, (), {}), 2, Sampling(1.0, 1.0, 0, 8, 8, ()), "line", 0, 1, 1, 0)


def mostly(usual: object, *odd: object) -> st.SearchStrategy:
    """``usual`` in nineteen of twenty, or groups would hardly ever be fit."""
    return st.integers(0, 19).flatmap(lambda n: st.sampled_from(odd) if n == 7 else st.just(usual))


@st.composite
def sampling_masks(draw: st.DrawFn, tokens: list[int]) -> SamplingMask:
    """Sets of a vocabulary of 100, each mostly with its token."""
    others = draw(st.lists(st.sets(st.integers(0, 99), min_size=1), min_size=len(tokens), max_size=len(tokens)))
    sets = [o | {t} if draw(mostly(True, False)) else o for o, t in zip(others, tokens, strict=True)]
    ids = [token for each in sets for token in sorted(each)]
    return pack_ids(np.array([len(s) for s in sets], np.int64), np.array(ids, np.int32), vocab_size=100)


@st.composite
def sequences(draw: st.DrawFn, logprobs: list[float], versions: list[int], has_kept: bool) -> TokenSequence:
    """Of these logprobs and versions; often with a token that is not sampled, at times with none that is."""
    length = draw(st.integers(0, 4))

    def column(values: list, dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(st.sampled_from(values), min_size=length, max_size=length)), dtype)

    mask = column([True, False], np.bool_)
    return TokenSequence(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        sampling_mask=draw(sampling_masks(np.flatnonzero(mask).tolist())) if has_kept else None,
        behavior_logprobs=column(logprobs, np.float32),
        versions=column(versions, np.int32),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    logprobs = draw(st.sampled_from([[-0.5, -1.5], [-0.5, -1.5], [-0.5, math.nan, math.inf, -math.inf]]))
    versions = draw(st.sampled_from([[0, 3, 5], [0, 3, 5], [3, 6], [3, NO_VERSION], [3, -2]]))
    has_kept = draw(st.sampled_from([False, False, False, True]))
    rollouts = st.builds(
        Rollout,
        st.lists(sequences(logprobs, versions, has_kept), min_size=draw(st.integers(0, 1)), max_size=3).map(tuple),
        st.dictionaries(
            st.sampled_from(["correct", "format", "overlong"]),
            st.one_of(st.floats(-2, 2), mostly(1, math.nan, math.inf)),
        ),
        st.one_of(st.sampled_from([0, 0.0, 0.5, 1.0]), mostly(1.0, math.nan, math.inf, 1.5, -0.1)),
        st.sampled_from(["stop", "length", "error"]),
    )
    return Group(
        lease_id="id",
        kind=draw(mostly("train", "eval")),
        position=draw(mostly(7, 8)),
        generator_id="g0",
        lineage=draw(mostly("line", "other")),
        temperature=draw(mostly(1.0, 0.5, math.nan)),
        rollouts=tuple(draw(st.lists(rollouts, max_size=4))),
    )


def sampled_versions(group: Group) -> list[int]:
    return [int(v) for rollout in group.rollouts for s in rollout.sequences for v in s.versions[s.loss_mask]]


def check_against_decoded(payload: bytes) -> None:
    group, facts = decode_group(payload), read_summary(payload)
    assert (facts.lease_id, facts.kind, facts.position) == (group.lease_id, group.kind, group.position)
    assert (facts.generator_id, facts.lineage) == (group.generator_id, group.lineage)
    np.testing.assert_equal(facts.temperature, group.temperature)
    assert (facts.num_rollouts, facts.num_tokens) == (len(group.rollouts), group.num_sampled)
    if not facts.unfit:
        versions = sampled_versions(group)
        assert facts.oldest_version == min(versions, default=NO_VERSION) == group.oldest_version
        assert facts.newest_version == max(versions, default=NO_VERSION)
    assert facts.every_rollout_failed == all(r.finish_reason == "error" for r in group.rollouts)
    # The columns are added up in another order.
    np.testing.assert_allclose(facts.reward, float(sum(r.reward for r in group.rollouts)), rtol=1e-12, atol=1e-12)
    np.testing.assert_equal(facts.accuracy, float(sum(r.accuracy for r in group.rollouts)))
    np.testing.assert_allclose(
        facts.accuracy / max(1, facts.num_rollouts), np.mean([r.accuracy for r in group.rollouts] or [0.0]), rtol=1e-12
    )
    assert [type(x) for x in (facts.num_tokens, facts.oldest_version, facts.accuracy)] == [int, int, float]


@examples(300, num_quick=40)
@given(groups())
def test_facts_are_those_of_the_decoded_group(group: Group):
    check_against_decoded(encode_group(group))


@examples(200, num_quick=40)
@given(groups(), st.data())
def test_a_mutated_frame_is_refused_exactly_where_it_can_not_be_decoded(group: Group, data: st.DataObject):
    frame = bytearray(encode_group(group))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    payload = bytes(frame[: data.draw(st.integers(len(frame) - 20, len(frame)))])
    refusal = refusal_of(decode_group, payload)
    assert refusal_of(read_summary, payload) == refusal
    if not refusal:
        check_against_decoded(payload)


def refusal_of(read: Callable[[bytes], object], payload: bytes) -> str:
    try:
        read(payload)
    except WireError as error:
        return str(error)
    return ""


def fit_group(num_rollouts: int = 2, *, tokens: int = 3) -> Group:
    sequence = TokenSequence(
        token_ids=np.arange(tokens + 1, dtype=np.int32),
        loss_mask=np.arange(tokens + 1) > 0,
        behavior_logprobs=np.full(tokens + 1, -0.5, np.float32),
        versions=np.array([NO_VERSION, *range(tokens)], np.int32),
    )
    rollouts = tuple(
        Rollout((sequence,), {"correct": 1.0, "overlong": -0.25}, 1.0, "stop") for _ in range(num_rollouts)
    )
    return Group("id", "train", 7, "g0", "line", 1.0, rollouts)


def test_the_facts_of_a_group_worked_by_hand():
    # Two rollouts of three sampled tokens by versions 0, 1, 2; each earns 1 - 0.25.
    facts = read_summary(encode_group(fit_group()))
    assert (facts.num_rollouts, facts.num_tokens, facts.oldest_version, facts.newest_version) == (2, 6, 0, 2)
    assert (facts.reward, facts.accuracy, facts.every_rollout_failed, facts.unfit) == (1.5, 2.0, False, "")


def chosen_from(sets: list[list[int]]) -> Group:
    """The three tokens 1, 2, 3 of each rollout were chosen from these sets, of a vocabulary of 100."""
    counts, ids = np.array([len(s) for s in sets]), np.concatenate(sets).astype(np.int32)
    group, kept = fit_group(), pack_ids(counts, ids, vocab_size=100)
    rollouts = tuple(
        structs.replace(r, sequences=(structs.replace(r.sequences[0], sampling_mask=kept),)) for r in group.rollouts
    )
    return structs.replace(group, rollouts=rollouts)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (1.0, 5), (0.9, 5)])
def test_renormalised_logprobs_without_what_was_kept_are_unfit(top_p: float, top_k: int):
    lease = replace(LEASE, sampling=replace(LEASE.sampling, top_p=top_p, top_k=top_k))
    refusal = why_unfit(read_summary(encode_group(fit_group())), lease, newest_version=2)
    assert refusal.startswith(f"expected sampling masks under top_p = {top_p}, top_k = {top_k}")
    kept = read_summary(encode_group(chosen_from([[1], [2, 9], [0, 3]])))
    assert why_unfit(kept, lease, newest_version=2, vocab_size=10) == ""
    assert why_unfit(kept, lease, newest_version=2, vocab_size=9).startswith("token ids: ")
    assert why_unfit(kept, LEASE, newest_version=2).startswith("expected no sampling masks")
    # An evaluation has none, whatever its sampling.
    plain = replace(fit_group(), kind="eval")
    assert why_unfit(read_summary(encode_group(plain)), replace(lease, kind="eval"), newest_version=2) == ""


ROUTING = RoutingShape(num_layers=3, num_experts=8, top_k=2)
ROUTED_LEASE = replace(LEASE, wants_routes=True)


def routed_by(routes: np.ndarray) -> Group:
    """Both rollouts of the fit group, of four tokens each, with these routes."""
    group = fit_group()
    rollouts = tuple(
        structs.replace(r, sequences=(structs.replace(r.sequences[0], routes=routes),)) for r in group.rollouts
    )
    return structs.replace(group, rollouts=rollouts)


def routes(num_tokens: int, *, layers: int = 3, expert: int = 7, dtype: type[np.generic] = np.uint8) -> np.ndarray:
    return np.full((num_tokens, layers, 2), expert, dtype)


SHAPES = "expected (layers, experts for each token, bytes of an expert)"


@pytest.mark.parametrize(
    ("sent", "lease", "refusal"),
    [
        (routes(3), ROUTED_LEASE, ""),
        (routes(4), ROUTED_LEASE, ""),
        (routes(2), ROUTED_LEASE, "expected those of the first 3 tokens of sequence 0, got 2"),
        (routes(3, expert=8), ROUTED_LEASE, "expected experts 0..7, got 8"),
        (routes(3, layers=2), ROUTED_LEASE, f"{SHAPES} (3, 2, 1), got (2, 2, 1)"),
        (routes(3, dtype=np.uint16), ROUTED_LEASE, f"{SHAPES} (3, 2, 1), got (3, 2, 2)"),
        (routes(3), LEASE, f"{SHAPES} None, got (3, 2, 1)"),
        (None, ROUTED_LEASE, f"{SHAPES} (3, 2, 1), got None"),
    ],
)
def test_routes_are_those_of_the_runs_model_or_the_group_is_unfit(sent: Any, lease: Lease, refusal: str):
    group = fit_group() if sent is None else routed_by(sent)
    found = why_unfit(read_summary(encode_group(group)), lease, newest_version=2, routing=ROUTING)
    assert found == (f"routes: {refusal}" if refusal else "")
    assert refusal_cause(found) == ("routes" if refusal else "other")
