"""The ledger: where every group, rollout and sampled token is or went. True at every instant. Pure.

Groups and rollouts are issued with a lease and end trained (or delivered, in an evaluation), filtered or dropped with
one cause; inside trained groups a rollout is trained, masked with a cause, or failed. Tokens exist from the moment
they are received. The buffer moves amounts; nothing else writes here.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from async_rl.errors import QueueError
from async_rl.queue.messages import DROP_CAUSES, DropCause, TrainedFacts

Place = Literal["in_flight", "queued", "taken"]
_PLACES = ("in_flight", "queued", "taken")
_NONE_DROPPED: dict[str, int] = dict.fromkeys(DROP_CAUSES, 0)


@dataclass(slots=True)
class Account:
    """One unit's counters. ``entered`` is what was issued (groups, rollouts) or received (tokens)."""

    entered: int = 0
    in_flight: int = 0
    queued: int = 0
    taken: int = 0
    done: int = 0
    filtered: int = 0
    failed: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def save(self) -> list[Any]:
        """The terms in their order, as plain data."""
        return [
            self.entered, self.in_flight, self.queued, self.taken, self.done, self.filtered, self.failed,
            dict(self.masked), dict(self.dropped),
        ]  # fmt: skip

    @classmethod
    def load(cls, plain: Sequence[Any]) -> Self:
        """The inverse of ``save``."""
        account = cls(*plain)
        account.masked, account.dropped = Counter(account.masked), Counter(account.dropped)
        return account

    @property
    def accounted(self) -> int:
        """The sum of the right-hand side of the identity."""
        places = self.in_flight + self.queued + self.taken
        return places + self.done + self.filtered + self.failed + self.masked.total() + self.dropped.total()

    def move(self, source: Place, amount: int) -> None:
        setattr(self, source, getattr(self, source) - amount)

    def void(self) -> None:
        """What was in flight is rolled back; what was taken is queued again."""
        self.dropped["rolled_back"] += self.in_flight
        self.queued += self.taken
        self.in_flight = self.taken = 0

    def roll_back(self, entered: int) -> None:
        """Account for what entered, up to ``entered``, after the state that is restored here."""
        lost = max(0, entered - self.entered)
        self.entered += lost
        self.dropped["rolled_back"] += lost


class Ledger:
    """Groups, rollouts and tokens. ``final`` names the good end: ``trained``, or ``delivered`` for evaluations."""

    def __init__(self, final: str = "trained") -> None:
        self.groups, self.rollouts, self.tokens = Account(), Account(), Account()
        self._final = final

    def issue(self, rollouts: int) -> None:
        """A lease is given out."""
        for account, amount in ((self.groups, 1), (self.rollouts, rollouts)):
            account.entered += amount
            account.in_flight += amount

    def arrive(self, to: Literal["queued", "filtered"], rollouts: int, tokens: int) -> None:
        """A group in flight is returned and kept, or filtered."""
        self._leave("in_flight", rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            setattr(account, to, getattr(account, to) + amount)

    def drop(self, source: Place, cause: DropCause, rollouts: int, tokens: int) -> None:
        """A group is dropped. From in flight, ``tokens`` are those received with it (0 if it never came)."""
        self._leave(source, rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            account.dropped[cause] += amount

    def late(self, cause: str, tokens: int) -> None:
        """Tokens that came after their group was dropped for ``cause``."""
        self.tokens.entered += tokens
        self.tokens.dropped[cause] += tokens

    def take(self, rollouts: int, tokens: int) -> None:
        """A queued group is handed to the learner."""
        self._leave("queued", rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            account.taken += amount

    def deliver(self, rollouts: int, tokens: int) -> None:
        """A queued group has reached its reader (evaluations)."""
        self._leave("queued", rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            account.done += amount

    def train(self, groups: int, rollouts: int, tokens: int, facts: TrainedFacts) -> None:
        """Taken groups were trained on, as ``facts`` says.

        Raises:
            QueueError: the facts don't add up to what was taken.
        """
        masked_rollouts, masked_tokens = Counter(facts.rollouts_masked), Counter(facts.tokens_masked)
        for unit, trained, masked, taken in (
            ("rollouts", facts.rollouts_trained, masked_rollouts, rollouts),
            ("tokens", facts.tokens_trained, masked_tokens, tokens),
        ):
            if trained + masked.total() != taken or trained < 0 or min(masked.values(), default=0) < 0:
                raise QueueError(
                    f"expected {unit} trained + masked to be the {taken} that were taken, got {trained} and "
                    f"{dict(masked)}"
                )
        self._leave("taken", rollouts, tokens, groups)
        self.groups.done += groups
        self.rollouts.done += facts.rollouts_trained
        self.rollouts.failed += masked_rollouts.pop("failed", 0)
        self.rollouts.masked += masked_rollouts
        self.tokens.done += facts.tokens_trained
        self.tokens.masked += masked_tokens

    def restored_over(self, live: Ledger) -> Ledger:
        """This ledger (a snapshot's) as the history goes on from it; what ``live`` saw since is rolled back."""
        after = copy.deepcopy(self)
        for name in ("groups", "rollouts", "tokens"):
            account: Account = getattr(after, name)
            account.void()
            account.roll_back(getattr(live, name).entered)
        return after

    def check(self) -> None:
        """Raises AssertionError, with every term, if an identity is broken."""
        for name in ("groups", "rollouts", "tokens"):
            account: Account = getattr(self, name)
            terms = [getattr(account, place) for place in _PLACES]
            terms += [account.done, account.filtered, account.failed, *account.masked.values()]
            terms += account.dropped.values()
            if account.entered != account.accounted or min(terms) < 0:
                raise AssertionError(f"the ledger of {name} does not add up: {self.as_dict()[name]}")

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the terms of the identities by name."""
        groups, rollouts, tokens = self.groups, self.rollouts, self.tokens
        return {
            "groups": {
                "issued": groups.entered,
                **{place: getattr(groups, place) for place in _PLACES},
                self._final: groups.done,
                "filtered": groups.filtered,
                "dropped": _by_cause(groups),
            },
            "rollouts": {
                "issued": rollouts.entered,
                **{place: getattr(rollouts, place) for place in _PLACES},
                self._final: rollouts.done,
                "masked": dict(rollouts.masked),
                "failed": rollouts.failed,
                "filtered": rollouts.filtered,
                "dropped": _by_cause(rollouts),
            },
            "tokens": {
                "received": tokens.entered,
                "queued": tokens.queued,
                "taken": tokens.taken,
                self._final: tokens.done,
                "masked": dict(tokens.masked),
                "filtered": tokens.filtered,
                "dropped": _by_cause(tokens),
            },
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], final: str = "trained") -> Self:
        """The inverse of ``as_dict``."""
        ledger = cls(final)
        for name, entered in (("groups", "issued"), ("rollouts", "issued"), ("tokens", "received")):
            terms = plain[name]
            account = Account(
                entered=terms[entered],
                in_flight=terms.get("in_flight", 0),
                queued=terms["queued"],
                taken=terms["taken"],
                done=terms[final],
                filtered=terms["filtered"],
                failed=terms.get("failed", 0),
                masked=Counter(terms.get("masked", {})),
                dropped=Counter(terms["dropped"]),
            )
            setattr(ledger, name, account)
        return ledger

    def save(self) -> list[Any]:
        """As ``as_dict``, but without names: written with every commit."""
        return [self.groups.save(), self.rollouts.save(), self.tokens.save()]

    @classmethod
    def load(cls, plain: Sequence[Any], final: str = "trained") -> Self:
        """The inverse of ``save``."""
        ledger = cls(final)
        ledger.groups, ledger.rollouts, ledger.tokens = map(Account.load, plain)
        return ledger

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


@dataclass(slots=True)
class Sums:
    """Over groups; ``reward`` and ``accuracy`` are summed over their rollouts."""

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    reward: float = 0.0
    accuracy: float = 0.0


class Outcomes:
    """Sums over groups by what became of them, so that a bias in what is dropped can be seen. Additive.

    What is ``cancelled`` was not received: its tokens are those reported before, its reward and accuracy are unknown.
    """

    FATES = ("received", "trained", "filtered", "dropped", "cancelled")

    def __init__(self) -> None:
        self._sums = {fate: Sums() for fate in self.FATES}

    def add(self, fate: str, *, rollouts: int, tokens: int, reward: float, accuracy: float) -> None:
        """One group; ``reward`` and ``accuracy`` are sums over its rollouts."""
        sums = self._sums[fate]
        sums.groups += 1
        sums.rollouts += rollouts
        sums.tokens += tokens
        sums.reward += reward
        sums.accuracy += accuracy

    def save(self) -> list[list[float]]:
        """The sums of each fate in their order."""
        return [[s.groups, s.rollouts, s.tokens, s.reward, s.accuracy] for s in self._sums.values()]

    @classmethod
    def load(cls, plain: Sequence[Sequence[Any]]) -> Self:
        """The inverse of ``save``."""
        outcomes = cls()
        outcomes._sums = {fate: Sums(*sums) for fate, sums in zip(cls.FATES, plain, strict=True)}
        return outcomes

    def as_dict(self) -> dict[str, dict[str, float]]:
        return {fate: {name: getattr(sums, name) for name in Sums.__slots__} for fate, sums in self._sums.items()}
