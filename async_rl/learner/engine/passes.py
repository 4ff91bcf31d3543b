"""The passes of a step's micro-batches through this rank's part of the model. Called by ``trained_model.py``.

A rank computes its micro-batches one after the other, each in a forward and a backward pass. Ranks that share sequences
compute a part of each (``sequence_parallel.py``). Ranks of a pipeline hold one stage of the model (``stages.py``), and
micro-batches pass through the stages (``pipeline.py``): only the last stage has the loss. Everything else about a
layout is in the model itself, once it is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.config.learner import Reshard
from async_rl.learner.data.packing import MicroBatch
from async_rl.learner.layouts.mesh import Mesh
from async_rl.learner.layouts.pipeline import Pipeline
from async_rl.learner.layouts.sequence_parallel import Part
from async_rl.learner.layouts.sharding import begin_backward
from async_rl.learner.layouts.stages import Stage
from async_rl.learner.losses.batch import IndexedSlopeFunction, TokenLogprobs
from async_rl.learner.losses.objective import MicroBatchResult, Objective, TokenResults
from async_rl.learner.model.policy_model import DeviceBatch, PolicyModel, to_device
from async_rl.learner.optimizers.optimizer import total_norm
from async_rl.learner.phases import PhaseClock
from async_rl.learner.ranks import Ranks
from async_rl.process.fault_points import fault_point

_BUG = "this is a bug in async-rl, please report it"


class Accumulated(NamedTuple):
    """What the micro-batches of one rank add to a step's statistics. Only the last stage of a pipeline knows it.

    Attributes:
        sums: float64, the sum of ``MicroBatchResult.sums``.
        ratio_max: the largest ratio, float64 [].
        skipped: int64, the ids of the sequences that the loss skipped.
        tokens: the arrays of ``interface.TokenOutcomes`` over all trained tokens, if they are recorded.
    """

    sums: Tensor
    ratio_max: Tensor
    skipped: np.ndarray
    tokens: tuple[np.ndarray, ...] = ()


class Passes:
    """Forward and backward passes on one rank.

    Attributes:
        pipeline: the connection to other stages; None if there are none.
    """

    def __init__(
        self,
        models: Sequence[PolicyModel],
        ranks: Ranks,
        mesh: Mesh | None,
        clock: PhaseClock,
        *,
        dtype: torch.dtype,
        reshard: Reshard,
    ) -> None:
        """Connect the stages, and cut ``models`` down to this rank's. All ranks call this at the same time.

        Args:
            models: the policy, and a reference model if there is one. Not sharded yet.
            ranks: the connection to the other ranks.
            mesh: their groups. None: the model is not sharded.
            clock: measures the phases.
            dtype: in which the models compute.
            reshard: the value of ``learner.reshard``.

        Raises:
            ConfigError: a model has fewer layers than there are stages.
            ModelError: a model can't be divided into stages.
        """
        self._policy, self._ranks, self._clock = models[0], ranks, clock
        self._reshard: Reshard = reshard
        self._is_sharded = mesh is not None
        self._sequence = None if mesh is None else mesh.sequence
        self.pipeline: Pipeline | None = None
        self._stages: dict[PolicyModel, Stage] = {}
        if mesh is not None and mesh.pipeline is not None:
            self.pipeline = pipeline = Pipeline(mesh.pipeline, ranks, dtype)
            for model in models:
                self._stages[model] = Stage(model, dtype, index=pipeline.index, num_stages=pipeline.num_stages)

    @property
    def stage(self) -> Stage | None:
        """This rank's stage of the policy. None without a pipeline."""
        return self._stages.get(self._policy)

    @torch.no_grad()
    def score(
        self, model: PolicyModel, micro_batches: Sequence[MicroBatch], *, replays: bool
    ) -> list[tuple[Tensor, ...]]:
        """Return the log-probabilities and entropies of each micro-batch by ``model``, [N] on the device. In a stage
        without loss the list is empty. If not ``replays``, the model's routers choose.
        """
        scored: list[tuple[Tensor, ...]] = []

        def forward(index: int, received: Tensor | None = None) -> Tensor:
            batch = to_device(micro_batches[index], self._ranks.device, model.packing)
            batch = replace(batch, teacher_top_ids=batch.teacher_top_ids[:0], **({} if replays else {"routes": None}))
            with self._entered(model, batch, received):
                if not self._has_loss:
                    return model(self._own_part(micro_batches[index], batch))
                found = self._compute(model, micro_batches[index], batch)
                scored.append((found.logprobs, found.entropies))
            return scored[-1][0]

        if self.pipeline is not None:
            self.pipeline.score(self._shapes(model, micro_batches), forward)
        else:
            for index in range(len(micro_batches)):
                forward(index)
        return scored

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, version: int, *, records: bool = False
    ) -> Accumulated:
        """Accumulate the gradients of the loss *sum* of this rank's micro-batches. ``records``: keep ``tokens``."""
        results: list[MicroBatchResult] = []
        batches: dict[int, DeviceBatch] = {}

        def forward(index: int, received: Tensor | None = None) -> Tensor:
            with self._clock.phase("forward"):
                batch = to_device(micro_batches[index], self._ranks.device, self._policy.packing)
                batches[index] = batch
                with self._entered(self._policy, batch, received):
                    output = self._forward(micro_batches[index], batch, objective, version)
            self._fault_point("learner.forward")  # a micro-batch's loss is computed
            if isinstance(output, Tensor):
                return output
            tokens = output.tokens if records else None
            results.append(output._replace(loss_sum=output.loss_sum.detach(), tokens=tokens))
            return output.loss_sum

        def backward(index: int, output: Tensor, gradient: Tensor | None = None) -> None:
            batch = batches.pop(index)
            self.begin_backward(index, len(micro_batches))
            with self._clock.phase("backward"):
                if self.pipeline is not None and batch.routes is not None:
                    self._policy.route_again(self._own_part(micro_batches[index], batch))
                output.backward(gradient)
            # A micro-batch's gradients are accumulated, the optimizer has not stepped.
            self._fault_point("learner.backward")

        if self.pipeline is not None:
            self.pipeline.train(self._shapes(self._policy, micro_batches), forward, backward, self._clock)
        else:
            for index in range(len(micro_batches)):
                backward(index, forward(index))
        if not results:
            nothing = torch.zeros(objective.statistics.num_values, dtype=torch.float64, device=self._ranks.device)
            return Accumulated(nothing, nothing.new_zeros(()), np.zeros(0, np.int64))
        flags = torch.cat([r.skipped for r in results]).cpu().numpy()
        ids = np.concatenate([mb.sequence_ids for mb in micro_batches])
        sums = torch.stack([r.sums for r in results]).sum(0)
        tokens = _recorded([r.tokens for r in results if r.tokens is not None])
        return Accumulated(sums, torch.stack([r.ratio_max for r in results]).max(), ids[flags], tokens)

    def begin_backward(self, index: int, num_micro_batches: int) -> None:
        """Prepare the policy for the backward pass of micro-batch ``index`` of a step."""
        if self._is_sharded:
            begin_backward(
                self._policy,
                reshard=self._reshard,
                is_last=index == num_micro_batches - 1,
                in_pipeline=self.pipeline is not None,
            )

    @property
    def copied_weight(self) -> Tensor | None:
        """The copy of a tied embedding, in the last stage of a pipeline. The optimizer does not know it: the first
        stage makes the step, with the gradients of both, and the copy gets the result.
        """
        is_last_stage = self.pipeline is not None and self.pipeline.is_last
        return self.stage.tied_weight if is_last_stage and self.stage is not None else None

    def add_tied_gradients(self) -> None:
        """Add the gradient of a tied embedding's copy to that of the embedding."""
        tied = None if self.stage is None else self.stage.tied_weight
        if self.pipeline is None or tied is None or tied.grad is None:
            return
        self.pipeline.add_tied(tied.grad)
        if tied is self.copied_weight:
            tied.grad = None

    def copy_tied_weight(self) -> None:
        """Let the copy of a tied embedding be the embedding, after the first stage has made a step."""
        tied = None if self.stage is None else self.stage.tied_weight
        if self.pipeline is not None and tied is not None and tied.requires_grad:
            self.pipeline.copy_tied(tied)

    def total_norm(self, gradients: Iterable[Tensor]) -> float:
        """Return the norm of the policy's ``gradients``, which are those of this rank, over all ranks."""
        norm = total_norm(gradients)
        return norm if self.pipeline is None else self.pipeline.total_norm(norm)

    def _forward(
        self, micro_batch: MicroBatch, batch: DeviceBatch, objective: Objective, version: int
    ) -> MicroBatchResult | Tensor:
        """Return the loss of ``batch``, or in a stage of a pipeline without loss its hidden states, [T, d]."""
        if not self._has_loss:
            return self._policy(self._own_part(micro_batch, batch))
        scored = self._compute(
            self._policy,
            micro_batch,
            batch,
            entropy_grad=objective.needs_entropy_grad,
            predict=objective.predict_slopes(batch, version=version),
        )
        result = objective(batch, scored, version=version)
        routers = self._policy.routers
        if routers is None or not routers.balance_coef:
            return result
        weight = objective.statistics.of(result.sums, "denominator")[0]
        group = None if self._sequence is None else self._sequence.get_group()
        balance = routers.balance_loss(weight, len(micro_batch.token_ids), group)
        return result._replace(loss_sum=result.loss_sum + balance)

    def _compute(
        self,
        model: PolicyModel,
        micro_batch: MicroBatch,
        batch: DeviceBatch,
        *,
        entropy_grad: bool = False,
        predict: IndexedSlopeFunction | None = None,
    ) -> TokenLogprobs:
        """Return ``model``'s values of ``micro_batch``, which is ``batch`` on the device. Ranks that share a sequence
        compute it together.
        """
        if self._sequence is None:
            return model(batch, entropy_grad=entropy_grad, predict=predict)
        part = Part.of(micro_batch, batch, self._sequence.get_group())
        return part.gather(model(part.batch, entropy_grad=entropy_grad, predict=part.predicts(predict)))

    def _own_part(self, micro_batch: MicroBatch, batch: DeviceBatch) -> DeviceBatch:
        """Return the part of ``batch`` that this rank computes, if ranks share sequences."""
        if self._sequence is None:
            return batch
        return Part.of(micro_batch, batch, self._sequence.get_group()).batch

    @property
    def _has_loss(self) -> bool:
        """Whether this rank computes log-probabilities: all do, or the last stage of a pipeline."""
        return self.pipeline is None or self.pipeline.is_last

    def _entered(self, model: PolicyModel, batch: DeviceBatch, received: Tensor | None) -> AbstractContextManager[None]:
        """Let a stage of ``model`` continue at the hidden states that it ``received``."""
        return nullcontext() if received is None else self._stages[model].entered(batch, received)

    def _shapes(self, model: PolicyModel, micro_batches: Sequence[MicroBatch]) -> list[tuple[int, int]]:
        """Return the shapes of the hidden states between the stages of ``model``, of this rank's part of each row."""
        num_parts, width = self._ranks.layout.sequence, self._stages[model].width
        return [(-(-len(micro_batch.token_ids) // num_parts), width) for micro_batch in micro_batches]

    def _fault_point(self, name: str) -> None:
        fault_point(name if self._ranks.is_leader else f"{name}-rank-{self._ranks.rank}")


def _recorded(tokens: Sequence[TokenResults]) -> tuple[np.ndarray, ...]:
    """Return the arrays of ``interface.TokenOutcomes`` over all micro-batches, on the host."""
    if not tokens:
        return ()
    found = ([t.logprobs.float() for t in tokens], [t.entropies.float() for t in tokens], [t.fates() for t in tokens])
    return tuple(torch.cat(values).cpu().numpy() for values in found)
