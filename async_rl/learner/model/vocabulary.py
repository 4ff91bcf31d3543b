"""The part of the vocabulary that a rank has, if tensor parallelism divides embedding and head over a group of ranks.

Used by ``tensor_parallel.py`` and ``logprobs.py``. Shape letters: C = tokens, V = size of the part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


class Normaliser(NamedTuple):
    """What the softmax of each row needs from all parts, float32 [C, 1].

    Attributes:
        log_sum: of the exponentials over the whole vocabulary, less the largest logit.
        target: the target's logit, less the largest.
        mean: the expected logit, less the largest.
        share: the probability of the tokens of this rank's part.
    """

    log_sum: Tensor
    target: Tensor
    mean: Tensor
    share: Tensor


class VocabularyPart(NamedTuple):
    """The tokens from ``first`` up to, but not including, ``end``.

    Attributes:
        largest_size: the number of tokens of the largest part. Parts differ if the vocabulary is no multiple.
        group: the ranks that have the other parts.
    """

    first: int
    end: int
    largest_size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, weight: Tensor) -> VocabularyPart | None:
        """Return the part of a matrix [vocabulary, d] that this rank has. None if it has the whole."""
        if not isinstance(weight, DTensor):
            return None
        mesh = weight.device_mesh
        assert weight.placements == (Shard(0),)
        largest = -(-weight.shape[0] // mesh.size())
        first = mesh.get_local_rank() * largest
        return cls(first, min(first + largest, weight.shape[0]), largest, mesh.get_group())

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of ``ids`` in the part, 0 for tokens of other parts, and whether they are in it."""
        is_own = (ids >= self.first) & (ids < self.end)
        return torch.where(is_own, ids - self.first, 0), is_own

    def maximum(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum over the ranks."""
        result = values.clone()
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self.group)
        return result

    def add_up(self, values: Tensor) -> Tensor:
        """Add the values of the other ranks in place, and return them."""
        dist.all_reduce(values, group=self.group)
        return values

    def normaliser(self, logits_CV: Tensor, probs_CV: Tensor, largest_C1: Tensor, targets_C1: Tensor) -> Normaliser:
        """Return what the parts have together. ``logits_CV`` are then multiplied by ``probs_CV``.

        Args:
            logits_CV: the part's logits, less the largest of the whole vocabulary.
            probs_CV: their softmax over the part alone.
            largest_C1: the largest of them.
            targets_C1: the targets' ids.
        """
        places_C1, is_own_C1 = self.places(targets_C1)
        target_C1 = torch.where(is_own_C1, logits_CV.gather(-1, places_C1), 0.0)
        # The largest logit's probability is its exponential over the part's sum.
        sum_C1 = largest_C1.exp() / probs_CV.amax(-1, keepdim=True)
        mean_C1 = logits_CV.mul_(probs_CV).sum(-1, keepdim=True)
        whole_C3 = self.add_up(torch.cat([sum_C1, sum_C1 * mean_C1, target_C1], dim=-1))
        total_C1, weighted_C1 = whole_C3[:, 0:1], whole_C3[:, 1:2]
        return Normaliser(total_C1.log(), whole_C3[:, 2:3], weighted_C1 / total_C1, sum_C1 / total_C1)
