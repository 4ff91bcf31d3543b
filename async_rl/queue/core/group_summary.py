"""What the queue needs to know of a returned group, read from its frame without taking it apart.

A frame comes in, ``GroupFacts`` leave; the handlers read them at arrival, and the buffer judges by them alone. The
tokens are looked at as four flat columns: numpy runs a fixed number of times a group, however many its rollouts.
"""

from __future__ import annotations

import math
from itertools import islice

import msgspec
import numpy as np

from async_rl.net.codec import FlatGroup, decode_flat_group
from async_rl.net.wire import DEFAULT_LIMITS, Limits
from async_rl.queue.storage.payloads import Bytes
from async_rl.records import NO_VERSION, Lease, LeaseKind
from async_rl.sampling_mask import contains


class GroupFacts(msgspec.Struct, frozen=True, gc=False):
    """One returned group.

    ``num_tokens`` counts those under the mask; ``oldest_version`` and ``newest_version`` are among them, both
    ``NO_VERSION`` if there is none, and meaningless if versions don't go with the mask. ``reward`` and ``accuracy`` are
    sums over rollouts. ``unfit`` says why no learner could train on it whatever the lease and the version; empty if
    nothing speaks against it. ``has_sampling_mask`` says whether it tells what top-p and top-k left to be sampled.
    """

    lease_id: str
    kind: LeaseKind
    position: int
    generator_id: str
    lineage: str
    num_rollouts: int
    num_tokens: int
    oldest_version: int
    newest_version: int
    reward: float
    accuracy: float
    every_rollout_failed: bool
    unfit: str
    temperature: float
    has_sampling_mask: bool


def read_facts(body: Bytes, limits: Limits = DEFAULT_LIMITS) -> GroupFacts:
    """The facts of an encoded group.

    Raises:
        WireError: where ``decode_group`` does.
    """
    group = decode_flat_group(body, limits)
    fields = group.fields
    num_tokens = int(np.count_nonzero(group.loss_mask))
    oldest_version, newest_version = _version_range(group) if num_tokens else (NO_VERSION, NO_VERSION)
    every_rollout_failed = fields.finish_reason.count("error") == group.num_rollouts
    reward = float(sum(sum(filter(None, values)) for values in fields.reward_parts.values()))
    accuracy = float(sum(fields.accuracy))
    return GroupFacts(
        lease_id=fields.lease_id,
        kind=fields.kind,
        position=fields.position,
        generator_id=fields.generator_id,
        lineage=fields.lineage,
        num_rollouts=group.num_rollouts,
        num_tokens=num_tokens,
        oldest_version=oldest_version,
        newest_version=newest_version,
        reward=reward,
        accuracy=accuracy,
        every_rollout_failed=every_rollout_failed,
        unfit="every rollout failed" if every_rollout_failed else _first_fault(group, reward + accuracy),
        temperature=fields.temperature,
        has_sampling_mask=group.sampling_mask is not None,
    )


def _version_range(group: FlatGroup) -> tuple[int, int]:
    """The oldest and the newest version of a group with a sampled token."""
    versions, sampled = group.versions, group.loss_mask.tobytes()
    first = int(versions[sampled.find(1)])
    # Most groups know only one. To see that costs a third of two reductions.
    if np.equal(versions, first).tobytes() == sampled:
        return first, first
    # NO_VERSION, off the mask, is the largest of unsigned numbers and the smallest of signed ones.
    return int(np.minimum.reduce(versions.view(np.uint32)).view(np.int32)), int(np.maximum.reduce(versions))


def _first_fault(group: FlatGroup, sum_of_scores: float) -> str:
    """Of its rewards, then of the first rollout with one; empty if there is none."""
    # A sum is finite only if all its terms are; and if it overflows, none of them means anything.
    if not math.isfinite(sum_of_scores):
        return "a reward is not finite, or too large"
    fields, accuracy = group.fields, group.fields.accuracy
    if group.num_rollouts and not 0.0 <= min(accuracy) <= max(accuracy) <= 1.0:
        return f"expected accuracies in 0..1, got {min(accuracy)} to {max(accuracy)}"
    # As byte strings, searched in C: a numpy call for each rollout costs ten times as much.
    sampled = group.loss_mask.tobytes()
    if np.greater_equal(group.versions, 0).tobytes() != sampled:
        return f"expected a version from 0 on for every sampled token, and {NO_VERSION} for all others"
    not_finite = np.less(np.isfinite(group.behavior_logprobs), group.loss_mask).tobytes().find(1)
    end = 0
    for index, (length, finish_reason) in enumerate(zip(_rollout_lengths(group), fields.finish_reason, strict=True)):
        start, end = end, end + length
        if sampled.find(1, start, end) < 0 and finish_reason != "error":
            return f"rollout {index} has no sampled token"
        if start <= not_finite < end:
            return f"rollout {index} has a behavior logprob that is not finite"
    if group.sampling_mask is not None and not contains(group.sampling_mask, group.token_ids[group.loss_mask]).all():
        return "a sampled token is not among those that top-p and top-k kept"
    return ""


def _rollout_lengths(group: FlatGroup) -> list[int]:
    """Tokens of each rollout, in all its sequences."""
    counts, lengths = group.fields.num_sequences, group.fields.lengths
    if counts.count(1) == len(counts):
        return lengths
    left = iter(lengths)
    return [sum(islice(left, count)) for count in counts]


def why_unfit(facts: GroupFacts, lease: Lease, *, newest_version: int) -> str:
    """Why a returned group can't be what its lease asked for; empty if it can.

    ``newest_version`` is the learner's. A group in which no rollout has a sampled token, or every rollout failed, is
    unfit too.
    """
    if (facts.kind, facts.position, facts.lineage) != (lease.kind, lease.prompt.position, lease.lineage):
        return (
            f"expected {lease.kind} position {lease.prompt.position} of lineage {lease.lineage}, got {facts.kind} "
            f"{facts.position} of {facts.lineage}"
        )
    if facts.num_rollouts != lease.group_size:
        return f"expected {lease.group_size} rollouts, got {facts.num_rollouts}"
    if facts.unfit:
        return facts.unfit
    sampling = lease.sampling
    if facts.temperature != sampling.temperature:
        return f"expected samples at temperature {sampling.temperature}, got {facts.temperature}"
    # Logprobs of a renormalised distribution mean nothing without what it was renormalised over.
    if facts.num_tokens and facts.has_sampling_mask != lease.wants_sampling_mask:
        wanted = "" if lease.wants_sampling_mask else "no "
        return (
            f"expected {wanted}sampling masks under top_p = {sampling.top_p} and top_k = "
            f"{sampling.top_k}{'' if lease.kind == 'train' else ', in an evaluation'}, got "
            f"{'some' if facts.has_sampling_mask else 'none'}"
        )
    if facts.num_tokens and not 0 <= facts.oldest_version <= facts.newest_version <= newest_version:
        return (
            f"the group was sampled by versions {facts.oldest_version}..{facts.newest_version}, known are "
            f"0..{newest_version}"
        )
    return ""
