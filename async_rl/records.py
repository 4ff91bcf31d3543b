"""The records that processes exchange: prompts and leases to generators, groups of rollouts back. No torch, no sockets.

They hold facts only: tokens, masks, behavior logprobs, versions, reward parts. The learner computes advantages and
losses. ``T`` is the number of tokens of one sequence, prompt and environment tokens included. The records are msgspec
``Struct``s: these are constructed ten times as fast as dataclasses, and encoded and checked in C.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.sampling_mask import SamplingMask

FinishReason = Literal["stop", "length", "error"]
LeaseKind = Literal["train", "eval"]

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]

NO_VERSION = -1
"""Version of a token that no policy sampled (prompt and environment tokens)."""


TEXT_ROLE = "text"
"""Role of a prompt's only message if the prompt is text to continue without a chat template."""


class Prompt(msgspec.Struct, frozen=True):
    """One dataset row at its place in the stream.

    ``position`` counts from 0 over all epochs and never repeats within a run; ``row`` is the row's index in its
    file. ``reward_data`` is what the reward needs (``gt_answer``), opaque to everything else.
    """

    position: int
    row: int
    epoch: int
    messages: tuple[Mapping[str, str], ...]
    reward_data: Mapping[str, Any]


class Sampling(msgspec.Struct, frozen=True):
    """How to sample one rollout. ``temperature`` 0 is greedy decoding."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    max_prompt_tokens: int
    stop: tuple[str, ...]

    @property
    def keeps_all(self) -> bool:
        """Whether every token can be sampled: top-p and top-k are off, or have no effect because decoding is greedy."""
        return self.temperature == 0 or (self.top_p == 1 and self.top_k == 0)


class Lease(msgspec.Struct, frozen=True):
    """Permission, given to one generator, to sample one group.

    ``min_version`` is the oldest version it may be sampled with; ``max_staleness`` the bound it was given under.
    ``seed`` and the rollout's index determine every random number of the group, on any generator.
    """

    lease_id: str
    kind: LeaseKind
    prompt: Prompt
    group_size: int
    sampling: Sampling
    lineage: str
    min_version: int
    max_staleness: int
    attempt: int
    seed: int

    @property
    def wants_sampling_mask(self) -> bool:
        """Whether each sampled token needs its sampling mask. Only training needs it."""
        return self.kind == "train" and not self.sampling.keeps_all


class TokenSequence(msgspec.Struct, frozen=True, eq=False):
    """One contiguous token sequence that the policy saw and continued.

    Attributes:
        token_ids: int32 [T].
        loss_mask: bool [T], True on tokens that the policy sampled.
        behavior_logprobs: float32 [T], nats; 0 off the mask.
        versions: int32 [T], the version that sampled each token; ``NO_VERSION`` off the mask.
        sampling_mask: for each token under the loss mask, the ids that top-p and top-k kept; its behavior logprob is
            renormalised over them. None if they kept all.
    """

    token_ids: Int32Array
    loss_mask: BoolArray
    behavior_logprobs: Float32Array
    versions: Int32Array
    sampling_mask: SamplingMask | None = None

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.loss_mask) == len(self.behavior_logprobs) == len(self.versions):
            lengths = [len(a) for a in (self.token_ids, self.loss_mask, self.behavior_logprobs, self.versions)]
            raise ValueError(
                f"a token sequence: expected token_ids, loss_mask, behavior_logprobs and versions of one length, got "
                f"{lengths}"
            )
        if self.sampling_mask is not None and len(self.sampling_mask) != (
            num_sampled := np.count_nonzero(self.loss_mask)
        ):
            raise ValueError(
                f"a token sequence: expected a sampling mask for {num_sampled} sampled tokens, got one for "
                f"{len(self.sampling_mask)}"
            )


class Turn(msgspec.Struct, frozen=True):
    """One answer in a rollout of several turns: the next ``num_tokens`` tokens under the mask, and what they earned.

    ``reward`` belongs to the last of these tokens; ``score`` is only logged.
    """

    num_tokens: int
    reward: float
    score: float


class Rollout(msgspec.Struct, frozen=True, eq=False):
    """One scored trajectory.

    ``reward_parts`` are summed to the reward. ``accuracy`` is 1.0 or 0.0 (or a partial credit between) and never
    includes shaping. ``num_sampled`` counts the tokens under the mask. ``turns`` is empty unless an environment played
    the rollout.
    """

    sequences: tuple[TokenSequence, ...]
    reward_parts: Mapping[str, float]
    accuracy: float
    finish_reason: FinishReason
    extracted: str | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def score(self) -> float:
        """Sum of the turns' scores."""
        return float(sum(turn.score for turn in self.turns))

    @property
    def reward(self) -> float:
        return float(sum(self.reward_parts.values()))

    @property
    def num_sampled(self) -> int:
        return int(sum(int(s.loss_mask.sum()) for s in self.sequences))

    @property
    def oldest_version(self) -> int:
        """The oldest version among sampled tokens; ``NO_VERSION`` if nothing was sampled."""
        oldest = [int(s.versions[s.loss_mask].min()) for s in self.sequences if s.loss_mask.any()]
        return min(oldest, default=NO_VERSION)


class Group(msgspec.Struct, frozen=True, eq=False):
    """The rollouts of one prompt under one lease: the unit of delivery, of advantage and of the ledger.

    ``weights_digest`` maps every version that sampled here to the digest of its weights, as the generator
    verified it; the learner refuses what it did not publish.
    """

    lease_id: str
    kind: LeaseKind
    position: int
    generator_id: str
    lineage: str
    temperature: float
    rollouts: tuple[Rollout, ...]
    weights_digest: Mapping[int, str] = msgspec.field(default_factory=dict)
    sampling_time_s: float = 0.0

    @property
    def oldest_version(self) -> int:
        """The oldest version among all sampled tokens of the group."""
        known = [v for r in self.rollouts if (v := r.oldest_version) != NO_VERSION]
        return min(known, default=NO_VERSION)

    @property
    def num_sampled(self) -> int:
        return sum(r.num_sampled for r in self.rollouts)
