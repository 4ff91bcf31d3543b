"""The reference model of a KL that follows the policy: ``loss.reference_every``. Called by ``trained_model.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_rl.config.loss import LossConfig

Tensors = Callable[[], Mapping[str, Tensor]]
"""Returns a rank's shards by name, without grad. They are asked for each time, because FSDP may replace them."""


class MovingReference:
    """This rank's part of a reference that moves.

    At the steps of TRL 1.16's ``SyncRefModelCallback`` (TR-DPO, arXiv:2404.09656) ``reference = decay * reference +
    (1 - decay) * policy``, for each tensor. Departures from TRL: buffers follow too; a skipped step does not count; and
    adapters, which TRL refuses, have a mean of each of their matrices. Their product is the mean of the products but
    for ``decay (1 - decay) (B - B_ref) (A - A_ref)``.
    """

    def __init__(self, loss: LossConfig, policy: Tensors, reference: Tensors | None) -> None:
        """Store what returns the tensors of policy and reference. If ``reference`` is None, these are adapters, and the
        reference gets a copy.
        """
        self._every, self._decay = loss.reference_every, loss.reference_decay
        self._policy = policy
        copies = {} if reference else {name: tensor.clone() for name, tensor in policy().items()}
        self._reference = reference or (lambda: copies)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's shards of the reference, for checkpoints: all of a model, or of the adapters, by name."""
        return self._reference()

    @torch.no_grad()
    def follow(self, num_updates: int) -> None:
        """Move the reference, if that is due after so many optimizer steps."""
        if num_updates % self._every:
            return
        policy = self._policy()
        for name, tensor in self.tensors.items():
            target, source = _local(tensor), _local(policy[name])
            if self._decay and target.is_floating_point():
                target.mul_(self._decay).add_(source.to(target), alpha=1 - self._decay)
            else:
                target.copy_(source)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the policy have the reference's tensors while the ``with`` block runs."""
        own = {name: tensor.clone() for name, tensor in self._policy().items()}
        self._fill(self.tensors)
        try:
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self._policy().items():
            _local(tensor).copy_(_local(tensors[name]))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
