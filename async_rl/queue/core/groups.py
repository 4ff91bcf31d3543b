"""Groups of rollouts in the queue: the summary of a returned group, and the tables of stored groups.

``read_summary`` makes a ``GroupSummary`` from a group's bytes. It reads the tokens of all rollouts as four flat arrays,
so that the number of numpy calls does not depend on the number of rollouts. ``generator_requests`` checks the summary
and stores the group as a ``StoredGroup``, which has the place of the group's bytes and some numbers of the summary.
``learner_requests`` takes stored groups, and ``QueueState.forget_group`` deletes them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from types import MappingProxyType

import msgspec
import numpy as np

from async_rl.net.codec import FlatGroup, decode_flat_group
from async_rl.queue.storage.journal import Changes
from async_rl.queue.storage.payloads import Payload, PayloadRef
from async_rl.records import NO_VERSION, WITHOUT_REWARD, Lease, LeaseKind, why_parts_misfit
from async_rl.routes import RoutingShape
from async_rl.sampling_mask import contains, largest_id

_MAX_LOGPROB = 1e-3
"""Largest log-probability that is accepted. It is above 0 because of rounding."""
_MAX_TOKEN_ID = 2**31 - 1
_MOST_EXAMPLE = 160
"""Number of characters of an answer's end that are kept."""
_CAUSES = frozenset(
    {"token ids", "lengths", "first token", "logprobs", "rewards", "turns", "weights", "routes", "malformed"}
)

# The summary.


class GroupSummary(msgspec.Struct, frozen=True, gc=False):
    """The facts about a returned group that the queue checks or counts, without its tokens.

    Attributes:
        num_tokens: the number of sampled tokens.
        oldest_version: the lowest weights version of a sampled token; ``NO_VERSION`` if there is no such token.
        newest_version: the highest weights version of a sampled token; ``NO_VERSION`` if there is no such token.
        reward: the sum of the rewards of all rollouts.
        accuracy: the sum of the accuracies of all rollouts.
        rewards_differ: whether the rewards of its rollouts differ. None if they have accuracies, all in 0..1.
        num_failed: the number of rollouts that failed: their finish reason is an error.
        num_unjudged: the number of rollouts that the reward does not judge.
        unfit: the reason why no lease could accept the group; empty if there is none.
        has_sampling_mask: whether the group has the sets of tokens that top-p and top-k left.
        route_shape: the layers, the experts for each token and the bytes of an expert in the routes. None if the group
            has no routes.
        largest_expert: the largest expert in the routes; -1 if there is none.
        largest_token_id: the largest token id. A negative id counts as 2^31 or more.
        longest_sequence: the number of tokens of the longest sequence.
        most_sampled: the largest number of sampled tokens in one rollout.
        largest_reward: the largest absolute value of a reward part, an accuracy or a turn's reward; 0 if ``unfit`` is
            not empty.
        versions: the weights versions of the sampled tokens, ascending.
        weights_digest: the digest of the weights of each version, as the generator computed it.
        rewards_vary: whether the rewards of its rollouts differ.
        cut: for each rollout that a limit has cut, its number of sampled tokens, and of those in its last turn.
        example: the end of one answer's text; empty if the group has none.
        kept: whether the user's own filter keeps it.
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
    num_failed: int
    unfit: str
    temperature: float
    has_sampling_mask: bool
    rewards_differ: bool | None = None
    route_shape: tuple[int, int, int] | None = None
    largest_expert: int = -1
    largest_token_id: int = 0
    longest_sequence: int = 0
    most_sampled: int = 0
    largest_reward: float = 0.0
    versions: tuple[int, ...] = ()
    weights_digest: dict[int, str] = {}
    rewards_vary: bool = False
    cut: tuple[tuple[int, int], ...] = ()
    example: str = ""
    num_unjudged: int = 0
    kept: bool = True

    @property
    def num_graded(self) -> int:
        """The number of rollouts that have a reward."""
        return self.num_rollouts - self.num_failed - self.num_unjudged

    @property
    def every_rollout_failed(self) -> bool:
        return self.num_failed == self.num_rollouts


def read_summary(payload: Payload) -> GroupSummary:
    """Read the summary of a group from its encoded bytes, ``payload``.

    Raises:
        WireError: as for ``decode_group``.
    """
    group = decode_flat_group(payload)
    fields = group.fields
    num_tokens = int(np.count_nonzero(group.loss_mask))
    versions = _sampled_versions(group) if num_tokens else (NO_VERSION,)
    num_failed = fields.finish_reason.count("error")
    reward = float(sum(sum(filter(None, values)) for values in fields.reward_parts.values()))
    accuracy = float(sum(fields.accuracy))
    unfit = "every rollout failed" if num_failed == group.num_rollouts else _first_fault(group, reward + accuracy)
    has_accuracy = not group.num_rollouts or 0.0 <= min(fields.accuracy) <= max(fields.accuracy) <= 1.0
    rewards_vary = _rewards_differ(group)
    return GroupSummary(
        lease_id=fields.lease_id,
        kind=fields.kind,
        position=fields.position,
        generator_id=fields.generator_id,
        lineage=fields.lineage,
        num_rollouts=group.num_rollouts,
        num_tokens=num_tokens,
        oldest_version=versions[0],
        newest_version=versions[-1],
        reward=reward,
        accuracy=accuracy,
        rewards_differ=None if has_accuracy else rewards_vary,
        num_failed=num_failed,
        num_unjudged=fields.finish_reason.count("unjudged"),
        unfit=unfit,
        temperature=fields.temperature,
        has_sampling_mask=group.sampling_mask is not None,
        route_shape=None if group.routes is None else (*group.routes.shape[1:], group.routes.itemsize),
        largest_expert=-1 if group.routes is None else int(group.routes.max(initial=0)),
        largest_token_id=_largest_token_id(group),
        longest_sequence=max(fields.lengths, default=0),
        most_sampled=max(_num_sampled(group), default=0),
        # An unfit group may have rewards that are not finite.
        largest_reward=0.0 if unfit else _largest_reward(group),
        versions=versions if num_tokens else (),
        weights_digest=fields.weights_digest,
        rewards_vary=rewards_vary,
        cut=() if unfit else _cut(group),
        example=fields.example[-_MOST_EXAMPLE:],
        kept=fields.kept,
    )


def _cut(group: FlatGroup) -> tuple[tuple[int, int], ...]:
    """Return the sampled tokens of each rollout that was cut, and those of its last turn."""
    reasons, turns = group.fields.finish_reason, group.fields.turns
    if "length" not in reasons:
        return ()
    num_sampled = _num_sampled(group)
    last_turns = num_sampled
    if turns is not None:
        last_turns = [of_rollout[-1].num_tokens if of_rollout else 0 for of_rollout in turns]
    rollouts = zip(reasons, num_sampled, last_turns, strict=True)
    return tuple((sampled, last_turn) for reason, sampled, last_turn in rollouts if reason == "length")


def _rewards_differ(group: FlatGroup) -> bool:
    """Return whether the rewards of the group's rollouts differ. Rollouts without a reward do not count."""
    fields = group.fields
    totals = {
        sum(values[index] or 0.0 for values in fields.reward_parts.values())
        for index, reason in enumerate(fields.finish_reason)
        if reason not in WITHOUT_REWARD
    }
    return len(totals) > 1


def _sampled_versions(group: FlatGroup) -> tuple[int, ...]:
    """Return the weights versions of the sampled tokens, ascending. The group must have a sampled token."""
    versions, sampled = group.versions, group.loss_mask.tobytes()
    first = int(versions[sampled.find(1)])
    # Most groups have only one version.
    if np.equal(versions, first).tobytes() == sampled:
        return (first,)
    return tuple(np.unique(versions[group.loss_mask]).tolist())


def _first_fault(group: FlatGroup, sum_of_scores: float) -> str:
    """Return a description of the first fault found in the group's rewards and rollouts; empty if there is none.

    ``sum_of_scores`` is the sum of all rewards and accuracies.
    """
    # A sum is finite only if all its terms are. A sum that overflows is refused, too.
    if not math.isfinite(sum_of_scores):
        return "a reward is not finite, or too large"
    fields = group.fields
    # Searching byte strings runs in C; a numpy call for each rollout costs ten times as much.
    sampled = group.loss_mask.tobytes()
    if np.greater_equal(group.versions, 0).tobytes() != sampled:
        return f"expected a version of at least 0 for every sampled token and {NO_VERSION} for other tokens, got others"
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
    if _has_large_logprob(group):
        return f"logprobs: expected at most {_MAX_LOGPROB:g} for a sampled token, got a larger one"
    return _sequence_fault(group, sampled) or _turn_fault(group)


def _has_large_logprob(group: FlatGroup) -> bool:
    """Return whether the log-probability of a sampled token exceeds ``_MAX_LOGPROB``."""
    logprobs = group.behavior_logprobs
    # For most groups one reduction is enough. It is not if a token outside the mask has a NaN.
    if not len(logprobs) or np.maximum.reduce(logprobs) <= _MAX_LOGPROB:
        return False
    return bool((logprobs[group.loss_mask] > _MAX_LOGPROB).any())


def _sequence_fault(group: FlatGroup, sampled: bytes) -> str:
    """Return a fault in the token sequences that would stop the learner when it packs them; empty if there is none.

    ``sampled`` is the loss mask as bytes.
    """
    start = 0
    routed = group.fields.num_computed or group.fields.lengths
    for index, (length, num_routed) in enumerate(zip(group.fields.lengths, routed, strict=True)):
        if not length:
            return f"lengths: expected at least one token in every sequence, got none in sequence {index}"
        if sampled[start]:
            return f"first token: sequence {index} has its first token under the mask, but no token precedes it"
        last = sampled.rfind(1, start, start + length) - start
        if num_routed < last:
            return f"routes: expected those of the first {last} tokens of sequence {index}, got {num_routed}"
        start += length
    return ""


def _turn_fault(group: FlatGroup) -> str:
    turns, spans = group.fields.turns or (), group.fields.spans or ()
    if not math.isfinite(sum(turn.reward + turn.score for of_rollout in turns for turn in of_rollout)):
        return "rewards: a turn's reward or score is not finite, or too large"
    if not math.isfinite(sum(span.reward for of_rollout in spans for span in of_rollout)):
        return "rewards: a span's reward is not finite, or too large"
    if not turns and not spans:
        return ""
    for index, (num_sampled, of_turns, of_spans) in enumerate(zip_longest(_num_sampled(group), turns, spans)):
        turn_tokens, span_ends = [turn.num_tokens for turn in of_turns or ()], [span.end for span in of_spans or ()]
        misfit = why_parts_misfit(num_sampled, turn_tokens, span_ends)
        if misfit:
            return f"turns: rollout {index}: {misfit}"
    return ""


def _largest_token_id(group: FlatGroup) -> int:
    """Return the largest token id in the group's tokens and sampling masks. A negative id counts as 2^31 or more."""
    ids = group.token_ids
    largest = int(np.maximum.reduce(ids.view(np.uint32))) if len(ids) else 0
    return largest if group.sampling_mask is None else max(largest, largest_id(group.sampling_mask))


def _num_sampled(group: FlatGroup) -> list[int]:
    """Return the number of sampled tokens of each rollout."""
    sampled, end, found = group.loss_mask.tobytes(), 0, list[int]()
    for length in _rollout_lengths(group):
        start, end = end, end + length
        found.append(sampled.count(1, start, end))
    return found


def _largest_reward(group: FlatGroup) -> float:
    parts = group.fields.reward_parts.values()
    amounts = [abs(value) for values in parts for value in values if value]
    for of_rollout in (*(group.fields.turns or ()), *(group.fields.spans or ())):
        amounts += [abs(part.reward) for part in of_rollout]
    amounts += map(abs, group.fields.accuracy)  # they may be rewards
    return max(amounts, default=0.0)


def _rollout_lengths(group: FlatGroup) -> list[int]:
    """Return the number of tokens of each rollout, summed over its sequences."""
    counts, lengths = group.fields.num_sequences, group.fields.lengths
    if counts.count(1) == len(counts):
        return lengths
    left = iter(lengths)
    return [sum(islice(left, count)) for count in counts]


def why_unfit(
    group: GroupSummary, lease: Lease, *, newest_version: int, vocab_size: int | None = None,
    max_abs_reward: float = math.inf, digests: Mapping[int, str] = MappingProxyType({}),
    routing: RoutingShape | None = None,
) -> str:  # fmt: skip
    """Return the reason why a returned group does not fit its lease; empty if the group fits.

    The group is also unfit if all its rollouts failed, or if a rollout that did not fail has no sampled token.
    ``refusal_cause`` turns the reason into the cause under which it is counted.

    Args:
        newest_version: the newest version that the learner may have published.
        vocab_size: token ids must be below it. None for no limit.
        max_abs_reward: limit on the absolute value of each reward part.
        digests: the digests of published versions. The generator's digests must equal them.
        routing: the shape of the routes that the lease may want.
    """
    if (group.kind, group.position, group.lineage) != (lease.kind, lease.prompt.position, lease.lineage):
        return (
            f"expected {lease.kind} position {lease.prompt.position} of lineage {lease.lineage}, got {group.kind} "
            f"position {group.position} of lineage {group.lineage}"
        )
    if group.num_rollouts != lease.group_size:
        return f"expected {lease.group_size} rollouts, got {group.num_rollouts}"
    if group.unfit:
        return group.unfit
    sampling = lease.sampling
    if group.temperature != sampling.temperature:
        return f"expected samples at temperature {sampling.temperature}, got {group.temperature}"
    # Log-probabilities after top-p, top-k or min-p are meaningless without the set of tokens that was left.
    if group.num_tokens and group.has_sampling_mask != lease.wants_sampling_mask:
        wanted = "" if lease.wants_sampling_mask else "no "
        return (
            f"expected {wanted}sampling masks under top_p = {sampling.top_p}, top_k = {sampling.top_k} and min_p = "
            f"{sampling.min_p}{'' if lease.kind == 'train' else ', in an evaluation'}, got "
            f"{'some' if group.has_sampling_mask else 'none'}"
        )
    if group.num_tokens and not 0 <= group.oldest_version <= group.newest_version <= newest_version:
        return (
            f"expected tokens of versions 0..{newest_version}, which the learner has trained, got versions "
            f"{group.oldest_version}..{group.newest_version}"
        )
    for version in group.versions:
        if version in digests and group.weights_digest.get(version) != digests[version]:
            return (
                f"weights: expected digest {digests[version]!r} of version {version}, as published, got "
                f"{group.weights_digest.get(version)!r}"
            )
    return _why_misrouted(group, routing if lease.wants_routes else None) or _why_beyond(
        group, lease, vocab_size, max_abs_reward
    )


def _why_misrouted(group: GroupSummary, routing: RoutingShape | None) -> str:
    """Return why the group's routes are not those of a model of the shape ``routing``; empty if they are.

    Without ``routing`` there must be none.
    """
    wanted = None if routing is None else (routing.num_layers, routing.top_k, routing.dtype.itemsize)
    if group.num_tokens and group.route_shape != wanted:
        return (
            f"routes: expected (layers, experts for each token, bytes of an expert) {wanted}, got {group.route_shape}"
        )
    if routing is not None and group.largest_expert >= routing.num_experts:
        return f"routes: expected experts 0..{routing.num_experts - 1}, got {group.largest_expert}"
    return ""


def _why_beyond(group: GroupSummary, lease: Lease, vocab_size: int | None, max_abs_reward: float) -> str:
    """Return which limit (token ids, lengths, rewards) the group exceeds; empty if it exceeds none."""
    most = _MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    if group.largest_token_id >= most:
        got = group.largest_token_id
        return f"token ids: expected 0..{most - 1}, got {got if got <= _MAX_TOKEN_ID else got - 2**32}"
    sampling = lease.sampling
    longest = sampling.max_prompt_tokens + sampling.max_new_tokens
    if group.longest_sequence > longest:
        return f"lengths: expected sequences of at most {longest} tokens, got one of {group.longest_sequence}"
    if group.most_sampled > sampling.max_new_tokens:
        return (
            f"lengths: expected at most {sampling.max_new_tokens} sampled tokens in a rollout, got {group.most_sampled}"
        )
    if group.largest_reward > max_abs_reward:
        return f"rewards: expected amounts of at most reward.max_abs = {max_abs_reward:g}, got {group.largest_reward:g}"
    return ""


def refusal_cause(unfit: str) -> str:
    """Return the cause under which a refused group is counted, from the reason that ``why_unfit`` returned."""
    cause = unfit.partition(":")[0]
    return cause if cause in _CAUSES else "other"


def fits_filter(filter_range: tuple[float, float] | None, accuracy: float, rewards_differ: bool | None) -> bool:
    """Return whether a group passes the filter: by its mean accuracy, or by differing rewards if it has none."""
    if filter_range is None:
        return True
    return filter_range[0] < accuracy < filter_range[1] if rewards_differ is None else rewards_differ


# The groups that are stored.


class StoredGroup(msgspec.Struct, frozen=True, gc=False):
    """A group that is ready to be taken, is taken, or belongs to a snapshot. The tokens are in the payload store.

    Attributes:
        lease_id: the id of the lease under which the group was sampled.
        generator_id: the generator that sent the group.
        position: the position of its prompt in the stream of prompts.
        named_version: the generator's active version when it requested the lease. Groups are delivered in the order of
            ``named_version`` and ``position``.
        oldest_version: the lowest version of its tokens.
        newest_version: the highest version of its tokens.
        bound_version: the version to which the staleness bound applies: ``oldest_version`` or ``newest_version``, as
            ``queue.on_stale`` says.
        num_rollouts: its number of rollouts.
        num_tokens: its number of sampled tokens.
        reward: the sum of the rewards of its rollouts.
        accuracy: the sum of the accuracies of its rollouts.
        arrived_at: the time at which it arrived.
        arrival_version: the newest announced version when it arrived.
        masked: whether a filter did not keep it.
        ref: the place of its bytes in the payload store.
    """

    lease_id: str
    generator_id: str
    position: int
    named_version: int
    oldest_version: int
    newest_version: int
    bound_version: int
    num_rollouts: int
    num_tokens: int
    reward: float
    accuracy: float
    arrived_at: float
    arrival_version: int
    masked: bool
    ref: PayloadRef

    @property
    def order(self) -> tuple[int, int]:
        return self.named_version, self.position


class GroupRecord(msgspec.Struct, frozen=True, gc=False):
    """A group as the journal stores it.

    ``is_live`` is False if the group is neither ready nor taken, but in a snapshot.
    """

    group: StoredGroup
    is_live: bool = True


class ReadyGroups:
    """The groups that are ready to be taken, by lease id. Adding or taking a group costs O(log n).

    One heap has them in the order in which they are given out, another by the version that staleness is counted from,
    oldest first. A removed group's entries stay in the heaps, and are skipped when they reach the top.
    """

    def __init__(self, groups: Iterable[StoredGroup] = ()) -> None:
        self._groups: dict[str, StoredGroup] = {}
        self._by_order: list[tuple[int, int, str]] = []
        self._by_bound: list[tuple[int, str]] = []
        self.num_bytes = 0
        self.num_tokens = 0
        for group in groups:
            self.add(group)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[StoredGroup]:
        return iter(list(self._groups.values()))

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._groups

    def add(self, group: StoredGroup) -> None:
        """Add a group whose lease id is not present yet."""
        self._groups[group.lease_id] = group
        heapq.heappush(self._by_order, (*group.order, group.lease_id))
        heapq.heappush(self._by_bound, (group.bound_version, group.lease_id))
        self.num_bytes += group.ref.disk_bytes
        self.num_tokens += group.num_tokens

    def remove(self, lease_id: str) -> StoredGroup:
        group = self._groups.pop(lease_id)
        self.num_bytes -= group.ref.disk_bytes
        self.num_tokens -= group.num_tokens
        return group

    def pop_first(self, count: int) -> tuple[StoredGroup, ...]:
        """Remove and return the next ``count`` groups in the order of delivery, (named version, stream position).

        There must be that many groups.
        """
        popped: list[StoredGroup] = []
        while len(popped) < count:
            lease_id = heapq.heappop(self._by_order)[-1]
            if lease_id in self._groups:
                popped.append(self.remove(lease_id))
        return tuple(popped)

    def pop_older_than(self, oldest: int) -> list[StoredGroup]:
        """Remove and return every group whose ``bound_version`` is below ``oldest``."""
        popped: list[StoredGroup] = []
        while self._by_bound and (self._by_bound[0][0] < oldest or self._by_bound[0][1] not in self._groups):
            lease_id = heapq.heappop(self._by_bound)[1]
            if lease_id in self._groups:
                popped.append(self.remove(lease_id))
        return popped

    def pop_all(self) -> list[StoredGroup]:
        """Remove and return every group, in the order of delivery."""
        return list(self.pop_first(len(self)))


def snapshot_key(lineage: str, step: int) -> str:
    """Return the name of the queue's snapshot after ``step`` optimizer steps of the learner ``lineage``."""
    return f"{lineage}/{step}"


class SnapshotRecord(msgspec.Struct, frozen=True, gc=False):
    """The lease ids of the groups that belong to one snapshot of the queue."""

    lease_ids: tuple[str, ...]


class SnapshotRefs:
    """The snapshots that a learner may restore, by name, and the groups that belong to them.

    The bytes of these groups stay stored until a newer checkpoint is complete, even after the groups were trained, so a
    checkpoint needs no copy of them. The caller deletes the groups that ``add`` and ``release_all_but`` return.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._snapshots: dict[str, SnapshotRecord] = {}
        self._groups: dict[str, StoredGroup] = {}
        self._counts: Counter[str] = Counter()

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._groups

    def __iter__(self) -> Iterator[tuple[str, SnapshotRecord]]:
        return iter(self._snapshots.items())

    @property
    def groups(self) -> list[StoredGroup]:
        """Every group that belongs to at least one snapshot, once."""
        return list(self._groups.values())

    def has_snapshot(self, key: str) -> bool:
        return key in self._snapshots

    def get(self, lease_id: str) -> StoredGroup | None:
        """Return the group of the lease ``lease_id`` if it belongs to a snapshot, else None."""
        return self._groups.get(lease_id)

    def add(self, key: str, groups: Iterable[StoredGroup]) -> list[StoredGroup]:
        """Add a snapshot with these groups, or replace the snapshot of this name.

        Returns:
            The groups of the replaced snapshot that belong to no snapshot any more.
        """
        before, found = self._snapshots.get(key), list(groups)
        self._snapshots[key] = added = SnapshotRecord(tuple(group.lease_id for group in found))
        self._groups |= {group.lease_id: group for group in found}
        self._counts.update(added.lease_ids)
        self._changes.put("snapshot", key, added)
        return [] if before is None else self._uncount(before)

    def release_all_but(self, key: str | None) -> list[StoredGroup]:
        """Remove all snapshots except ``key``. Return the groups that belong to no snapshot any more."""
        released: list[StoredGroup] = []
        for name in [name for name in self._snapshots if name != key]:
            self._changes.delete("snapshot", name)
            released += self._uncount(self._snapshots.pop(name))
        return released

    def _uncount(self, removed: SnapshotRecord) -> list[StoredGroup]:
        self._counts.subtract(removed.lease_ids)
        gone = [lease_id for lease_id in removed.lease_ids if not self._counts[lease_id]]
        for lease_id in gone:
            del self._counts[lease_id]
        return [self._groups.pop(lease_id) for lease_id in gone]
