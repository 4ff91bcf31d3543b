"""What the parts of a run take: measured in a run directory, known from a config, or given."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.plan.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the parts of a run take. Times are in seconds.

    Attributes:
        lengths: the lengths of answers.
        decode_step_s: time for one token of a running sequence.
        train_s: the part of a learner's step that does not depend on its tokens.
        train_token_s: time to train one token of a batch with ``num_ranks`` ranks of the learner.
        after_s: time from the end of a step's training until the learner can train the next one: publishing,
            checkpoints, records.
        transfer_s: time from the publication of a version until a generator activates it.
        pause_s: time for which activating a version stops a generator's decode steps.
        version_bytes: the size of a version of the weights; 0 if it is unknown.
        num_ranks: the learner's ranks for which the times hold.
        filtered: share of the groups that ``queue.filter_range`` filters.
        source: where the rates come from, in words.
    """

    lengths: Lengths
    decode_step_s: float
    train_s: float
    train_token_s: float = 0.0
    after_s: float = 0.0
    transfer_s: float = 0.0
    pause_s: float = 0.0
    version_bytes: float = 0.0
    num_ranks: int = 1
    filtered: float = 0.0
    source: str = ""

    def step_s(self, num_tokens: float, num_ranks: int) -> float:
        """Return the time in which the learner trains a batch. Only its tokens are divided over more ranks."""
        return self.train_s + self.train_token_s * num_tokens * self.num_ranks / num_ranks
