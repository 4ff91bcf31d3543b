"""Sequential tests that find generators whose groups are not what they claim. Pure: numpy only, no torch, no clock.

For a sampled token, let delta be the learner's log-probability minus the one that its generator claims, in nats. If the
token was sampled from the claimed distribution mu, the mean of pi/mu - 1 = exp(delta) - 1 is 0, for any policy pi of
the learner: at any staleness, for any rounding of the learner, and for an engine with quantised weights. Three tests
rest on this and on a comparison with the other generators at the same staleness:

- *bias*: the mean of pi/mu - 1 is not 0: the claimed log-probabilities are shifted.
- *size*: the mean of |delta| is above that of the others by more than the parity limit: the tokens were not sampled
  from the named version, nor from one that is as near to it as the parity check demands of an engine.
- *outliers*: rollouts have a token to which the learner gives far less than claimed: tokens were changed.

Each test is a CUSUM (Page 1954): evidence adds up from group to group, and never falls below 0. A generator is found
when one sum reaches ``ALARM``. For outliers and rewards the sum is a log likelihood ratio. So an honest generator whose
rate is within the stated one is found by it at most once in exp(12), 160,000, rollouts on average (Lorden 1971). For
bias and size the sums are of standardised groups, at most 4 each.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Test = Literal["bias", "size", "outliers"]
_Kind = tuple[int, bool]
"""Staleness of tokens, and whether they follow tokens of another version. Only the same kind is compared."""

ALARM = 12.0
"""A generator is found when the sum of a test reaches this."""
TOLERANCE = 0.003
"""The mean of pi/mu - 1 that is not looked for: it changes a loss by no more than that share."""
STALE_TOLERANCE = 0.1
"""The further tolerance at a staleness above 0 without two others to compare with, in standard deviations of a token:
groups that the queue keeps for their rewards are a selection, for which the mean of pi/mu - 1 is not quite 0."""
MAX_BIAS_SIZE = 0.25
"""Groups with a larger mean |delta| are not tested for bias, because the cap of pi/mu at e lowers their mean."""
MIN_TOKENS = 512
"""A generator is tested for bias from so many audited tokens at a staleness on: the rare tokens that make up for the
common ones must have been seen, or their deviation is unknown."""
OUTLIER = 3.0
"""A token is an outlier if the learner gives it less than exp(-3) of the claimed probability."""
MIN_GROUPS = 8
"""Another generator counts in a comparison once it has so many audited groups at that staleness."""
_WINDOW = 64
_LARGEST_STEP = 4.0
_SLACKS = ((0.5, 1.0), (0.125, 1 / 4))
"""Of the tests of bias and size: the shift, in standard errors of a group, that does not add up; and the weight of the
sum. The first is quick for large shifts, the second finds small ones."""
_MEMORY = 0.995
"""Share of a generator's tokens that still count for their deviation after another group."""
_LEAST_DEVIATION = 1e-3
"""Smallest standard deviation of a token's delta that is assumed, so that float32 engines are not split by rounding."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the audit of one group at one staleness measured.

    Attributes:
        generator_id: the generator that returned the group.
        lag: the learner's version minus that of the tokens.
        bias: the mean of min(pi/mu, e) - 1 over the tokens.
        square: the mean of the squares of the same.
        size: the mean of min(|delta|, 1), nats.
        num_tokens: the number of tokens.
        num_rollouts: the number of rollouts with such tokens.
        num_outliers: the number of these with an outlier.
        follows_others: whether the tokens follow some that another version sampled. An engine that got new weights in
            mid-answer goes on with the keys and values of the old ones, so an honest one differs from the learner, too.
    """

    generator_id: str
    lag: int
    bias: float
    square: float
    size: float
    num_tokens: int
    num_rollouts: int
    num_outliers: int
    follows_others: bool = False

    @property
    def kind(self) -> _Kind:
        return self.lag, self.follows_others

    @property
    def is_compared_only(self) -> bool:
        """Whether honest tokens of this kind differ from the learner's by an amount that only others can tell."""
        return self.lag > 0 or self.follows_others


def observe(generator_id: str, lag: int, deltas: Sequence[np.ndarray], *, follows_others: bool = False) -> Observation:
    """Return the observation of a group's tokens of one staleness, which follow others of another version or not.

    Args:
        generator_id: the generator that returned the group.
        lag: the staleness.
        deltas: for each rollout, its tokens' delta, float [N], at least one number. A number that is not finite counts
            as an outlier of 1 nat.
    """
    delta = np.concatenate(deltas).astype(np.float64)
    delta = np.where(np.isfinite(delta), delta, -1.0)
    excess = np.expm1(np.clip(delta, -30.0, 1.0))
    return Observation(
        generator_id=generator_id,
        lag=lag,
        bias=float(excess.mean()),
        square=float((excess**2).mean()),
        size=float(np.minimum(np.abs(delta), 1.0).mean()),
        num_tokens=len(delta),
        num_rollouts=len(deltas),
        num_outliers=sum(not bool((one >= -OUTLIER).all()) for one in deltas),
        follows_others=follows_others,
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """A generator that is not what it claims: by which test, after how many audited groups, and why as text."""

    generator_id: str
    test: Test
    num_groups: int
    why: str


class Auditor:
    """The tests of all generators since the learner started.

    ``size_limit`` is how much the mean |delta| of an honest engine may exceed that of the others, in nats.
    """

    def __init__(self, size_limit: float) -> None:
        self._size_limit = size_limit
        self._seen: defaultdict[_Kind, dict[str, deque[Observation]]] = defaultdict(dict)
        self._tokens: defaultdict[tuple[str, _Kind], float] = defaultdict(float)
        self._squares: defaultdict[tuple[str, _Kind], float] = defaultdict(float)
        self._sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._num_groups: defaultdict[str, int] = defaultdict(int)
        self._found: set[str] = set()

    def add(self, observations: Iterable[Observation]) -> list[Finding]:
        """Add the groups of a step. Return the generators that are found by them; each is found once."""
        mine = [one for one in observations if one.generator_id not in self._found]
        for one in mine:
            self._seen[one.kind].setdefault(one.generator_id, deque(maxlen=_WINDOW)).append(one)
            key = one.generator_id, one.kind
            self._tokens[key] = _MEMORY * self._tokens[key] + one.num_tokens
            self._squares[key] = _MEMORY * self._squares[key] + one.num_tokens * one.square
        for one in mine:
            self._num_groups[one.generator_id] += 1
        found = [finding for one in mine for finding in self._judge(one)]
        self._forget(found)
        return found

    def _forget(self, found: Iterable[Finding]) -> None:
        """Compare the others no longer with the generators that are found."""
        for finding in found:
            for groups in self._seen.values():
                groups.pop(finding.generator_id, None)

    def _judge(self, one: Observation) -> list[Finding]:
        others = {
            name: groups for name, groups in self._seen[one.kind].items()
            if name != one.generator_id and len(groups) >= MIN_GROUPS
        }  # fmt: skip
        return self._bias(one, others) + self._size(one, others) + self._outliers(one, others)

    def _bias(self, one: Observation, others: Mapping[str, deque[Observation]]) -> list[Finding]:
        num_tokens = self._tokens[one.generator_id, one.kind]
        if one.size > MAX_BIAS_SIZE or num_tokens < MIN_TOKENS:
            return []
        # Of one deviation for all groups: most short answers have none of the rare tokens that make up for the common
        # ones, and those that have some must not count for less.
        square = self._squares[one.generator_id, one.kind] / num_tokens
        deviation = max(math.sqrt(square), _LEAST_DEVIATION)
        tolerance = TOLERANCE
        if one.is_compared_only and len(others) < 2:
            tolerance += STALE_TOLERANCE * deviation
        # A selection that shifts everybody's mean is nobody's lie: what the others have, too, does not count.
        usual = _median((float(np.mean([g.bias for g in groups])) for groups in others.values()), 0.0)
        found: list[Finding] = []
        for sign in (1.0, -1.0):
            shared = max(0.0, sign * usual)
            score = (sign * one.bias - shared - tolerance) / (deviation / math.sqrt(one.num_tokens))
            why = (
                f"the mean of pi/mu - 1 over its tokens of staleness {one.lag} is {self._mean(one, 'bias'):+.4f}, "
                f"expected 0 within {tolerance + shared:.4f}: its log-probabilities are not those it sampled with"
            )
            found += self._standardised(one, "bias", f"bias{sign:+.0f}", score, why)
        return found

    def _size(self, one: Observation, others: Mapping[str, deque[Observation]]) -> list[Finding]:
        if one.is_compared_only and not others:
            return []  # what staleness does is not known
        # Only of their newest groups: what a version moves changes during a run.
        sizes = {name: [g.size for g in list(groups)[-MIN_GROUPS:]] for name, groups in others.items()}
        usual = _median((float(np.mean(values)) for values in sizes.values()), 0.0)
        spreads = (float(np.std(values)) for values in sizes.values())
        limit = usual + max(self._size_limit, usual / 4)
        score = (one.size - limit) / max(_median(spreads, 0.0), limit / 10)
        why = (
            f"the mean |difference| to the learner's log-probabilities at staleness {one.lag} is "
            f"{self._mean(one, 'size'):.2g} nats, that of the others {usual:.2g}, limit {limit:.2g}: the version that "
            f"it names would not sample its tokens so"
        )
        return self._standardised(one, "size", "size", score, why)

    def _outliers(self, one: Observation, others: Mapping[str, deque[Observation]]) -> list[Finding]:
        rates = [_rate((g.num_outliers, g.num_rollouts) for g in groups) for groups in others.values()]
        usual = max(0.05, 2 * _median(rates, 0.0)) if rates else 0.2
        if usual > 0.25:
            return []  # outliers are common here, so they show nothing
        evidence = log_ratio(one.num_outliers, one.num_rollouts, usual, 0.5)
        groups = self._seen[one.kind][one.generator_id]
        rate = _rate((g.num_outliers, g.num_rollouts) for g in groups)
        why = (
            f"{rate:.0%} of its rollouts have a token that the learner gives less than {math.exp(-OUTLIER):.0%} of "
            f"the claimed probability, up to {usual:.0%} is usual: tokens were changed"
        )
        return self._evidence(one.generator_id, "outliers", "outliers", evidence, why)

    def _mean(self, one: Observation, name: Literal["bias", "size"]) -> float:
        return float(np.mean([getattr(g, name) for g in self._seen[one.kind][one.generator_id]]))

    def _standardised(self, one: Observation, test: Test, key: str, score: float, why: str) -> list[Finding]:
        score = min(score, _LARGEST_STEP)  # not from below: a rare token counts in full against many common ones
        found: list[Finding] = []
        for slack, weight in _SLACKS:
            found += self._evidence(one.generator_id, test, f"{key}/{slack}", weight * (score - slack), why)
        return found[:1]

    def _evidence(self, generator_id: str, test: Test, key: str, evidence: float, why: str) -> list[Finding]:
        total = self._sums[generator_id, key] = max(0.0, self._sums[generator_id, key] + evidence)
        if total < ALARM or generator_id in self._found:
            return []
        self._found.add(generator_id)
        return [Finding(generator_id, test, self._num_groups[generator_id], why)]


def log_ratio(count: int, num: int, usual: float, forged: float) -> float:
    """Return the log likelihood ratio of ``count`` events in ``num`` trials, of the rate ``forged`` to ``usual``."""
    return count * math.log(forged / usual) + (num - count) * math.log((1 - forged) / (1 - usual))


def _rate(counts: Iterable[tuple[int, int]]) -> float:
    events, trials = map(sum, zip(*counts, strict=True))
    return events / trials


def _median(values: Iterable[float], default: float) -> float:
    found = list(values)
    return float(np.median(found)) if found else default
