"""A majority vote over the answers to one question. Pure; called by the figures of evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from async_rl.config.config import Config
from async_rl.rewards.equality import canonical_form

VoteKey = Callable[[str], Hashable]
"""From an extracted answer to what it votes for: answers with one key vote together."""


def vote_key_of(config: Config) -> VoteKey | None:
    """How the run's answers vote; None where no vote is taken.

    Where answers are compared as mathematics, those that are equal by sight vote together (``equality``'s first two
    steps, no verifier): ``1/2`` and ``0.50`` do, ``x+1`` and ``1+x`` don't. Else the same text does, space around it
    aside.
    """
    if not config.takes_votes:
        return None
    is_mathematics = config.reward.types[0].compares_mathematics and config.reward.equality == "math"
    return canonical_form if is_mathematics else str.strip


def majority(answers: Sequence[str | None], vote_key: VoteKey) -> int | None:
    """The index of the answer that most agree with: of those, the first that was given. None if nobody answered.

    A rollout without an answer (None) has no vote. Of answers with equally many votes, the one given first wins.
    """
    keys = [None if answer is None else (vote_key(answer),) for answer in answers]
    votes = Counter(key for key in keys if key is not None)
    if not votes:
        return None
    most = max(votes.values())
    return next(index for index, key in enumerate(keys) if key is not None and votes[key] == most)
