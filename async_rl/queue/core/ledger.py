"""The ledger: counts groups, rollouts and sampled tokens by place or outcome. Exact at every instant. Pure.

A lease issues a group and its rollouts. They end as trained (in an evaluation: delivered), filtered, or dropped with
one cause. In a trained group, each rollout is trained, masked with a cause, or failed. Tokens count from the moment
they are received. Only the queue's core changes the ledger.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, Literal

import msgspec

from async_rl.errors import QueueError
from async_rl.queue.messages import DROP_CAUSES, DropCause, TrainedCounts

Place = Literal["in_flight", "queued", "taken"]
Outcome = Literal["received", "trained", "filtered", "dropped", "cancelled"]
_PLACES = ("in_flight", "queued", "taken")
_NONE_DROPPED: dict[str, int] = dict.fromkeys(DROP_CAUSES, 0)


class Account(msgspec.Struct, array_like=True):
    """The counters of groups, rollouts or tokens. ``entered`` counts issued groups or rollouts, or received tokens."""

    entered: int = 0
    in_flight: int = 0
    queued: int = 0
    taken: int = 0
    done: int = 0
    filtered: int = 0
    failed: int = 0
    masked: Counter[str] = msgspec.field(default_factory=Counter)
    dropped: Counter[str] = msgspec.field(default_factory=Counter)

    @property
    def accounted(self) -> int:
        """The sum of all counters but ``entered``. It must equal ``entered``."""
        places = self.in_flight + self.queued + self.taken
        return places + self.done + self.filtered + self.failed + self.masked.total() + self.dropped.total()

    def move(self, source: Place, amount: int) -> None:
        setattr(self, source, getattr(self, source) - amount)

    def void(self) -> None:
        """Count amounts in flight as rolled back, and taken amounts as queued."""
        self.dropped["rolled_back"] += self.in_flight
        self.queued += self.taken
        self.in_flight = self.taken = 0

    def roll_back(self, entered: int) -> None:
        """Raise ``self.entered`` to ``entered``. Count the difference as rolled back: it entered after the snapshot."""
        lost = max(0, entered - self.entered)
        self.entered += lost
        self.dropped["rolled_back"] += lost


class Ledger(msgspec.Struct, array_like=True):
    """Groups, rollouts and tokens. ``final`` names the success: ``trained``, or ``delivered`` for evaluations."""

    final: str = "trained"
    groups: Account = msgspec.field(default_factory=Account)
    rollouts: Account = msgspec.field(default_factory=Account)
    tokens: Account = msgspec.field(default_factory=Account)

    def issue(self, rollouts: int) -> None:
        """Count a granted lease."""
        for account, amount in ((self.groups, 1), (self.rollouts, rollouts)):
            account.entered += amount
            account.in_flight += amount

    def arrive(self, to: Literal["queued", "filtered"], rollouts: int, tokens: int) -> None:
        """Move a returned group from in flight to queued or filtered."""
        self._leave("in_flight", rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            setattr(account, to, getattr(account, to) + amount)

    def drop(self, source: Place, cause: DropCause, rollouts: int, tokens: int) -> None:
        """Drop a group. If it was in flight, ``tokens`` were received with it (0 if it was not returned)."""
        self._leave(source, rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            account.dropped[cause] += amount

    def late(self, cause: str, tokens: int) -> None:
        """Count tokens that arrived after their group was dropped for ``cause``."""
        self.tokens.entered += tokens
        self.tokens.dropped[cause] += tokens

    def take(self, rollouts: int, tokens: int) -> None:
        """Move a queued group to taken by the learner."""
        self._leave("queued", rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            account.taken += amount

    def deliver(self, rollouts: int, tokens: int) -> None:
        """Move a queued group of an evaluation to delivered."""
        self._leave("queued", rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            account.done += amount

    def train(self, groups: int, rollouts: int, tokens: int, counts: TrainedCounts) -> None:
        """Move taken groups to trained and masked, by ``counts``.

        Raises:
            QueueError: the counts don't add up to the taken amounts.
        """
        masked_rollouts, masked_tokens = Counter(counts.rollouts_masked), Counter(counts.tokens_masked)
        for unit, trained, masked, taken in (
            ("rollouts", counts.rollouts_trained, masked_rollouts, rollouts),
            ("tokens", counts.tokens_trained, masked_tokens, tokens),
        ):
            if trained + masked.total() != taken or trained < 0 or min(masked.values(), default=0) < 0:
                raise QueueError(
                    f"expected trained and masked {unit} to add up to the {taken} that were taken, got {trained} "
                    f"trained and {dict(masked)} masked; this is a bug in async-rl, please report it"
                )
        self._leave("taken", rollouts, tokens, groups)
        self.groups.done += groups
        self.rollouts.done += counts.rollouts_trained
        self.rollouts.failed += masked_rollouts.pop("failed", 0)
        self.rollouts.masked += masked_rollouts
        self.tokens.done += counts.tokens_trained
        self.tokens.masked += masked_tokens

    def restored_over(self, live: Ledger) -> Ledger:
        """Return a copy of this snapshot's ledger. Add amounts that entered ``live`` since then, as rolled back."""
        after = copy.deepcopy(self)
        for name in ("groups", "rollouts", "tokens"):
            account: Account = getattr(after, name)
            account.void()
            account.roll_back(getattr(live, name).entered)
        return after

    def check(self) -> None:
        """Check that all counters add up. Raises AssertionError, with every counter, if they don't."""
        for name in ("groups", "rollouts", "tokens"):
            account: Account = getattr(self, name)
            terms = [getattr(account, place) for place in _PLACES]
            terms += [account.done, account.filtered, account.failed, *account.masked.values()]
            terms += account.dropped.values()
            if account.entered != account.accounted or min(terms) < 0:
                raise AssertionError(
                    f"the ledger of {name} does not add up: {self.as_dict()[name]}; this is a bug in async-rl, please "
                    f"report it"
                )

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the terms of the identities by name."""
        groups, rollouts, tokens = self.groups, self.rollouts, self.tokens
        return {
            "groups": {
                "issued": groups.entered,
                **{place: getattr(groups, place) for place in _PLACES},
                self.final: groups.done,
                "filtered": groups.filtered,
                "dropped": _by_cause(groups),
            },
            "rollouts": {
                "issued": rollouts.entered,
                **{place: getattr(rollouts, place) for place in _PLACES},
                self.final: rollouts.done,
                "masked": dict(rollouts.masked),
                "failed": rollouts.failed,
                "filtered": rollouts.filtered,
                "dropped": _by_cause(rollouts),
            },
            "tokens": {
                "received": tokens.entered,
                "queued": tokens.queued,
                "taken": tokens.taken,
                self.final: tokens.done,
                "masked": dict(tokens.masked),
                "filtered": tokens.filtered,
                "dropped": _by_cause(tokens),
            },
        }

    def _leave(self, source: Place, rollouts: int, tokens: int, groups: int = 1) -> None:
        self.groups.move(source, groups)
        self.rollouts.move(source, rollouts)
        if source == "in_flight":
            self.tokens.entered += tokens
        else:
            self.tokens.move(source, tokens)

    def _amounts(self, rollouts: int, tokens: int) -> tuple[tuple[Account, int], ...]:
        return (self.groups, 1), (self.rollouts, rollouts), (self.tokens, tokens)


def _by_cause(account: Account) -> dict[str, int]:
    return {**_NONE_DROPPED, **account.dropped}


class Sums(msgspec.Struct, array_like=True):
    """Sums over groups. ``reward`` and ``accuracy`` are summed over their rollouts."""

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    reward: float = 0.0
    accuracy: float = 0.0


class Outcomes(msgspec.Struct, array_like=True):
    """Sums over groups by outcome. They show whether the dropped groups are biased.

    A ``cancelled`` group was not received: its tokens are those last reported; its reward and accuracy are unknown.
    """

    received: Sums = msgspec.field(default_factory=Sums)
    trained: Sums = msgspec.field(default_factory=Sums)
    filtered: Sums = msgspec.field(default_factory=Sums)
    dropped: Sums = msgspec.field(default_factory=Sums)
    cancelled: Sums = msgspec.field(default_factory=Sums)

    def add(self, outcome: Outcome, *, rollouts: int, tokens: int, reward: float, accuracy: float) -> None:
        """Add one group. ``reward`` and ``accuracy`` are sums over its rollouts."""
        sums: Sums = getattr(self, outcome)
        sums.groups += 1
        sums.rollouts += rollouts
        sums.tokens += tokens
        sums.reward += reward
        sums.accuracy += accuracy

    def as_dict(self) -> dict[str, dict[str, float]]:
        return {outcome: msgspec.structs.asdict(getattr(self, outcome)) for outcome in self.__struct_fields__}
