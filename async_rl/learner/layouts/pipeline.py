"""The pipeline: the ranks that have one stage of the model each, and the order in which they compute micro-batches.

The schedule 1F1B is our own instead of that of ``torch.distributed.pipelining``: torch's stages have one shape for all
micro-batches of a step, so packed rows would have to be padded to the longest. Here each micro-batch keeps its true
size. Every rank knows all of them, so nothing is negotiated. Stages exchange the hidden states of a row's tokens, even
if the model computes padded rows.

With S stages and M micro-batches a rank is idle for (S - 1) / (M + S - 1) of a step. Called by ``passes.py``.
Shape letters: T = tokens of a row, d = hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from async_rl.errors import ModelError
from async_rl.learner.phases import PhaseClock
from async_rl.learner.ranks import Ranks

Forward = Callable[[int, Tensor | None], Tensor]
"""(index of a micro-batch, what the stage before computed [T, d], if any) -> hidden states [T, d], or in the last stage
the loss."""
Backward = Callable[[int, Tensor, Tensor | None], None]
"""(index of a micro-batch, the result of its forward pass, the gradient of that result if it is not the loss)."""


class Spec(NamedTuple):
    """Shape and dtype of a tensor that another stage may have."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Pipeline:
    """This rank's connection to the ranks of the other stages.

    Attributes:
        index: this rank's stage.
        is_last: whether it is the last one, which computes log-probabilities and the loss.
    """

    def __init__(self, mesh: DeviceMesh, ranks: Ranks, dtype: torch.dtype) -> None:
        """Connect the stages. All ranks call this at the same time.

        Args:
            mesh: one rank of each stage.
            ranks: the connection to all ranks.
            dtype: of the hidden states.
        """
        self._group = mesh.get_group()
        self._ranks, self._dtype = ranks, dtype
        self.num_stages, self.index = mesh.size(), mesh.get_local_rank()
        self.is_last = self.index == self.num_stages - 1
        self._has_leader = dist.get_global_rank(self._group, 0) == 0
        self._sending: list[tuple[Any, Tensor]] = []
        # NCCL needs a first collective of all ranks before some of them exchange.
        dist.all_reduce(torch.zeros(1, device=ranks.device), group=self._group)

    def train(self, shapes: Sequence[tuple[int, int]], forward: Forward, backward: Backward, clock: PhaseClock) -> None:
        """Run ``forward`` and ``backward`` of a step's micro-batches, as 1F1B (PipeDream-Flush, arXiv:2006.09503).

        A stage first computes as many micro-batches forward as stages follow it, itself included. Then a backward pass
        and a forward pass alternate, so no stage keeps more activations than these. ``shapes`` are those of the hidden
        states, [T, d] for each micro-batch. Waits for other stages count as the ``clock``'s phases.
        """
        ahead = min(len(shapes), self.num_stages - self.index)
        in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}

        def compute(index: int, received: Tensor | None) -> Tensor | None:
            """Return what the next stage gets."""
            received = None if received is None else received.requires_grad_()
            output = forward(index, received)
            in_flight[index] = received, output
            return None if self.is_last else self._checked(output.detach(), shapes[index])

        down = None
        for index in range(ahead):
            with clock.phase("forward"):
                received = self._exchange(down=down, from_before=shapes[index])
            down = compute(index, received)
        for index, shape in enumerate(shapes):
            with clock.phase("backward"):
                gradient = self._exchange(down=down, from_after=shape)
            received, output = in_flight.pop(index)
            if output.requires_grad:  # nothing is trained in a stage of frozen weights without adapters
                backward(index, output, gradient)
            up = None if received is None else _gradient(received)
            down, new = None, index + ahead
            with clock.phase("forward"):
                received = self._exchange(up=up, from_before=shapes[new] if new < len(shapes) else None)
            if new < len(shapes):
                down = compute(new, received)
        self._finish_sending()

    def score(self, shapes: Sequence[tuple[int, int]], forward: Forward) -> None:
        """Run ``forward`` of micro-batches whose hidden states have these ``shapes``, without backward passes."""
        for index, shape in enumerate(shapes):
            output = forward(index, self._exchange(from_before=shape))
            self._exchange(down=None if self.is_last else self._checked(output, shape))
        self._finish_sending()

    def total_norm(self, norm: float) -> float:
        """Return the norm over all stages, from that of this rank's stage. It is the same number on all ranks."""
        layout = self._ranks.layout
        is_first = self._ranks.rank % (layout.num_ranks // layout.pipeline) == 0
        square = torch.tensor(norm**2 if is_first else 0.0, dtype=torch.float64)
        return math.sqrt(float(self._ranks.all_reduce_sum(square)))

    def add_tied(self, gradient: Tensor) -> None:
        """Add, in the first stage, to the gradient of a tied embedding that of its copy, which the last stage has."""
        if (of_copy := self._passed(gradient, self.num_stages - 1, 0)) is not None:
            _local(gradient).add_(of_copy.to(_local(gradient).device))

    def copy_tied(self, weight: Tensor) -> None:
        """Let, in the last stage, the copy of a tied embedding be that of the first stage, bit for bit."""
        if (of_first := self._passed(weight, 0, self.num_stages - 1)) is not None:
            _local(weight).copy_(of_first)

    def _passed(self, tensor: Tensor, source: int, target: int) -> Tensor | None:
        """Send this rank's part of a tensor from stage ``source`` to ``target``, and return it there, else None."""
        local = _local(tensor).to(self._ranks.device).contiguous()
        if self.index == source and local.numel():
            self._wait([self._operation(dist.isend, local, target)])
        if self.index != target or not local.numel():
            return None
        received = torch.empty_like(local)
        self._wait([self._operation(dist.irecv, received, source)])
        return received

    def collected(
        self, own: Iterator[tuple[str, Tensor]], specs: Mapping[str, Spec], owner: Callable[[str], int]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all stages on rank 0, and those of its stage on another rank, in the order of ``specs``.

        Args:
            own: this stage's tensors, in the same order, unsharded.
            specs: all tensors by name.
            owner: the stage of a tensor, by name.
        """
        for name, spec in specs.items():
            stage = owner(name)
            if stage == self.index:
                _, tensor = next(own)
                if stage and self._has_leader:
                    self._wait([self._operation(dist.isend, tensor.contiguous(), 0)])
                yield name, tensor
            elif self.index == 0 and self._has_leader:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._ranks.device)
                self._wait([self._operation(dist.irecv, tensor, stage)])
                yield name, tensor

    def _checked(self, output_Td: Tensor, shape: tuple[int, int]) -> Tensor:
        if output_Td.shape != shape or output_Td.dtype != self._dtype:
            raise ModelError(
                f"parallel.pipeline: expected hidden states {list(shape)} in {self._dtype} between decoder layers, got "
                f"{list(output_Td.shape)} in {output_Td.dtype}; leave the key out"
            )
        return output_Td

    def _exchange(
        self,
        *,
        down: Tensor | None = None,
        up: Tensor | None = None,
        from_before: tuple[int, int] | None = None,
        from_after: tuple[int, int] | None = None,
    ) -> Tensor | None:
        """Send ``down`` to the next stage or ``up`` to the one before, and return what one of them sends, of that
        shape. The first and the last stage have one neighbour only.

        Both directions are one call, without which NCCL would wait for one before the other. A result that is only
        sent may still be on its way afterwards.
        """
        peers = ((down, self.index + 1), (up, self.index - 1))
        sent = [self._operation(dist.isend, t.contiguous(), p) for t, p in peers if t is not None and self._exists(p)]
        received: Tensor | None = None
        for shape, peer in ((from_before, self.index - 1), (from_after, self.index + 1)):
            if shape is not None and self._exists(peer):
                received = torch.empty(shape, dtype=self._dtype, device=self._ranks.device)
                self._wait([*sent, self._operation(dist.irecv, received, peer)])
        if received is None and sent:
            self._finish_sending()
            self._sending = [(work, sent[0].tensor) for work in dist.batch_isend_irecv(sent)]
        return received

    def _exists(self, stage: int) -> bool:
        return 0 <= stage < self.num_stages

    def _operation(self, kind: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self._group, group_peer=peer)

    def _wait(self, operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _finish_sending(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending = []


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(received: Tensor) -> Tensor:
    return torch.zeros_like(received) if received.grad is None else received.grad
