"""The ledger counts where groups, rollouts and sampled tokens are, or how they ended. It is exact at every time.

A lease adds one group and its rollouts. A group ends as trained (in an evaluation: delivered), as filtered, or as
dropped with one cause. In a trained group, each rollout is trained, masked with a cause, or failed. Tokens are counted
when the queue receives them. Only the queue's core changes the ledger.
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
    """The counters of one unit: groups, rollouts or tokens.

    Attributes:
        entered: the number of all that were ever counted: groups and rollouts when leased, tokens when received. It
            equals the sum of all other counters.
        in_flight: those that a generator is sampling.
        queued: those that are ready in the queue.
        taken: those that the learner has taken but not trained.
        done: those that were trained or, in an evaluation, delivered.
        filtered: those whose group had an accuracy outside ``queue.filter_range``.
        failed: rollouts of trained groups that failed.
        masked: those in trained groups that were left out of the loss, by cause.
        dropped: those whose group was dropped, by cause.
    """

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
    def outstanding(self) -> int:
        """The number of all that are in flight, queued or taken."""
        return self.in_flight + self.queued + self.taken

    @property
    def accounted(self) -> int:
        """The sum of all counters but ``entered``. The ledger is right only if this sum equals ``entered``."""
        return self.outstanding + self.done + self.filtered + self.failed + self.masked.total() + self.dropped.total()

    def leave(self, source: Place, amount: int) -> None:
        setattr(self, source, getattr(self, source) - amount)

    def void(self) -> None:
        """Change the counters as the restore of a snapshot requires.

        Amounts in flight count as rolled back, and taken amounts as queued.
        """
        self.dropped["rolled_back"] += self.in_flight
        self.queued += self.taken
        self.in_flight = self.taken = 0

    def roll_back(self, entered: int) -> None:
        """Count the amounts that entered the queue after the snapshot as rolled back.

        ``entered`` is the number that had entered before the rollback.
        """
        lost = max(0, entered - self.entered)
        self.entered += lost
        self.dropped["rolled_back"] += lost


class Ledger(msgspec.Struct, array_like=True):
    """The counters of groups, rollouts and tokens.

    ``final`` is the name of a group's successful end: ``trained``, or ``delivered`` in the ledger of evaluations.
    """

    final: str = "trained"
    groups: Account = msgspec.field(default_factory=Account)
    rollouts: Account = msgspec.field(default_factory=Account)
    tokens: Account = msgspec.field(default_factory=Account)

    def issue(self, rollouts: int) -> None:
        """Count a granted lease: one group and ``rollouts`` rollouts are now in flight."""
        for account, amount in ((self.groups, 1), (self.rollouts, rollouts)):
            account.entered += amount
            account.in_flight += amount

    def move(
        self, source: Place, to: Literal["queued", "filtered", "taken", "done"], rollouts: int, tokens: int
    ) -> None:
        """Move a group from one counter to another. ``rollouts`` and ``tokens`` are its numbers."""
        self._leave(source, rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            setattr(account, to, getattr(account, to) + amount)

    def drop(self, source: Place, cause: DropCause, rollouts: int, tokens: int) -> None:
        """Move a group from the counter ``source`` to the dropped ones, under ``cause``.

        If the group was in flight, ``tokens`` is the number of tokens that the generator returned with it, or 0.
        """
        self._leave(source, rollouts, tokens)
        for account, amount in self._amounts(rollouts, tokens):
            account.dropped[cause] += amount

    def late(self, cause: str, tokens: int) -> None:
        """Count tokens as dropped that arrived after their group had been dropped for ``cause``."""
        self.tokens.entered += tokens
        self.tokens.dropped[cause] += tokens

    def train(self, groups: int, rollouts: int, tokens: int, counts: TrainedCounts) -> None:
        """Move ``groups`` taken groups to trained. ``counts`` says how many rollouts and tokens were trained or masked.

        Raises:
            QueueError: the counts don't add up to the taken ``rollouts`` and ``tokens``.
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
        """Return the ledger after the queue was restored from a snapshot.

        ``self`` is the ledger in the snapshot, ``live`` the queue's ledger before the restore. What was in flight in
        the snapshot, or entered the queue after it, counts as rolled back.
        """
        after = copy.deepcopy(self)
        for name in ("groups", "rollouts", "tokens"):
            account: Account = getattr(after, name)
            account.void()
            account.roll_back(getattr(live, name).entered)
        return after

    def check(self) -> None:
        """Check that all counters add up.

        Raises:
            AssertionError: they don't. The message has every counter.
        """
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
        """Return all counters by name, as plain data for ``ledger.json`` and the status."""
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
        self.groups.leave(source, groups)
        self.rollouts.leave(source, rollouts)
        if source == "in_flight":
            self.tokens.entered += tokens
        else:
            self.tokens.leave(source, tokens)

    def _amounts(self, rollouts: int, tokens: int) -> tuple[tuple[Account, int], ...]:
        return (self.groups, 1), (self.rollouts, rollouts), (self.tokens, tokens)


def _by_cause(account: Account) -> dict[str, int]:
    return {**_NONE_DROPPED, **account.dropped}


class Sums(msgspec.Struct, array_like=True):
    """The number of groups that ended in the same way, and sums over them.

    ``rollouts`` and ``tokens`` are the groups' numbers of rollouts and sampled tokens. ``reward`` and ``accuracy`` are
    summed over the rollouts.
    """

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    reward: float = 0.0
    accuracy: float = 0.0


class Outcomes(msgspec.Struct, array_like=True):
    """Sums over all groups by how they ended. They show whether dropped groups differ from trained ones.

    A ``cancelled`` group was never received. Its tokens are the number that its generator reported last, and its reward
    and accuracy count as 0.
    """

    received: Sums = msgspec.field(default_factory=Sums)
    trained: Sums = msgspec.field(default_factory=Sums)
    filtered: Sums = msgspec.field(default_factory=Sums)
    dropped: Sums = msgspec.field(default_factory=Sums)
    cancelled: Sums = msgspec.field(default_factory=Sums)

    def add(self, outcome: Outcome, *, rollouts: int, tokens: int, reward: float, accuracy: float) -> None:
        """Add one group to the sums of ``outcome``. ``reward`` and ``accuracy`` are sums over the group's rollouts."""
        sums: Sums = getattr(self, outcome)
        sums.groups += 1
        sums.rollouts += rollouts
        sums.tokens += tokens
        sums.reward += reward
        sums.accuracy += accuracy

    def as_dict(self) -> dict[str, dict[str, float]]:
        return {outcome: msgspec.structs.asdict(getattr(self, outcome)) for outcome in self.__struct_fields__}
