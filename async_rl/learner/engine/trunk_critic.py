"""A critic without a model of its own: a value head on the last hidden states of the policy (``critic.trunk``).

The head is a vector w [d]. The value of a token is w h, where h is the hidden state before it, from which the policy
predicts it. Decoder and adapters of the policy, its *trunk*, are only read: the value loss stops at h. So the policy's
update is the one that ``[loss]`` describes, with its own gradient norm, whatever the scale of rewards and however stale
the value targets; and a frozen policy is one that gets no update. Values and each update of the head take one forward
pass of the policy, and no backward pass.

To the engine the head is a model of its own: the same commands, a learning rate, schedule, norm and AdamW of its own,
and a directory of its own in checkpoints. It is no part of the policy's module, so that nothing that publishes, exports
or compares the policy sees it. Every rank has the whole head, because it is small, and adds up the gradients of all.
``fsdp_engine.py`` calls this. Shape letters: M = trained tokens that this rank computes, d = hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from async_rl.config.config import Config
from async_rl.learner.checkpoints.stored_tensors import HostCopy, TrainingState, load_training_state
from async_rl.learner.data.packing import MicroBatch
from async_rl.learner.engine.passes import TokenStates
from async_rl.learner.engine.trained_model import TrainedModel, Updated, gathered_scores
from async_rl.learner.interface import UpdateCost
from async_rl.learner.layouts.sharding import end_forward
from async_rl.learner.losses.batch import TokenLogprobs
from async_rl.learner.losses.objective import Objective, StepOutcome, update_stats
from async_rl.learner.model.heads import SCORE_WEIGHT
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.optimizers.optimizer import AdamW, Schedule
from async_rl.learner.phases import PhaseClock, peak_memory_bytes
from async_rl.learner.ranks import Ranks
from async_rl.learner.sequences import TrainSequence


class TrunkCritic:
    """The value head on this rank, with its optimizer and schedule. Its methods are those of ``TrainedModel``.

    Attributes:
        head: w, float32 [1, d], at first 0.
    """

    def __init__(
        self, config: Config, ranks: Ranks, clock: PhaseClock, policy: TrainedModel, *, objective: Objective,
        schedule: Schedule,
    ) -> None:  # fmt: skip
        """Make a new head. All ranks do so at the same time.

        Args:
            config: the settings of the critic (``Config.of_critic``).
            ranks: the connection to the other ranks.
            clock: measures the phases.
            policy: the model that computes the hidden states, on all ranks or on those that share a sequence.
            objective: the value loss.
            schedule: the learning rates.
        """
        self._ranks, self._clock, self._policy = ranks, clock, policy
        self._objective, self._schedule = objective, schedule
        self._max_grad_norm = config.optimizer.max_grad_norm
        self.head = nn.Parameter(torch.zeros(1, policy.model.head.in_features, device=ranks.device))
        rates = config.optimizer.model_copy(update={"lr": schedule.lr})
        self._optimizer = AdamW({SCORE_WEIGHT: self.head}, rates)
        self._num_updates = 0
        self._host_copy = HostCopy()

    @property
    def model(self) -> PolicyModel:
        """The policy's."""
        return self._policy.model

    def pack(self, sequences: Sequence[TrainSequence]) -> list[list[MicroBatch]]:
        return self._policy.pack(sequences)

    def score(self, micro_batches: Sequence[MicroBatch], *, by_reference: bool) -> list[tuple[np.ndarray, ...]]:
        """Return values and zeros, as ``TrainedModel.score`` says. There is no reference."""
        assert not by_reference
        scored: list[tuple[Tensor, ...]] = []
        for states in self._states(micro_batches):
            with torch.no_grad():
                values = self._values(states.hidden)
            found = values if states.part is None else states.part.gather(values)
            scored.append((found.logprobs, found.entropies))
        return gathered_scores(scored, self._ranks)

    def update(self, micro_batches: Sequence[MicroBatch], version: int, *, records: bool = False) -> Updated:
        """Make an optimizer step of the head, as ``TrainedModel.update`` says. The peak memory is this rank's, and no
        tokens are recorded.
        """
        sums = torch.zeros(self._objective.statistics.num_values, dtype=torch.float64, device=self._ranks.device)
        for states in self._states(micro_batches):
            # The loss is a sum over tokens, so ranks that share a sequence need only their own.
            result = self._objective(states.batch, self._values(states.hidden), version=version)
            with self._clock.phase("backward"):
                result.loss_sum.backward()
            sums += result.sums
        with self._clock.phase("optimizer"):
            gradient = torch.zeros_like(self.head) if self.head.grad is None else self.head.grad
            total = self._ranks.all_reduce_sum(torch.cat([sums, gradient.double().flatten()]).cpu())
            sums, gradient = total.split([len(sums), self.head.numel()])
            outcome = self._step(gradient, self._objective.denominator(sums))
        stats = update_stats(sums, 0.0, [], outcome, objective=self._objective)
        return Updated(stats, peak_memory_bytes(self._ranks.device))

    def _states(self, micro_batches: Sequence[MicroBatch]) -> Iterator[TokenStates]:
        for micro_batch in micro_batches:
            with self._clock.phase("forward"):
                states = self._policy.passes.states(micro_batch)
            yield states
        if self._ranks.has_group:
            end_forward(self.model)

    def _values(self, hidden_Md: Tensor) -> TokenLogprobs:
        """Return values (with grad by the head) in the place of log-probabilities, float32 [M], and zeros."""
        values_M = linear(hidden_Md.float(), self.head)[:, 0]
        return TokenLogprobs(values_M, torch.zeros_like(values_M))

    def _step(self, gradient: Tensor, denominator: float) -> StepOutcome:
        """Scale, clip and apply the ``gradient`` of the loss sum, float64 [d] on the host. Every rank does the same."""
        lr = self._schedule.lr_at(self._num_updates)
        self.head.grad = None
        if not denominator:
            return StepOutcome("nothing is left to train on: every token is masked", 0.0, lr)
        gradient = gradient / denominator
        grad_norm = float(gradient.norm())
        if not math.isfinite(grad_norm):
            return StepOutcome(f"the gradient norm is {grad_norm}", grad_norm, lr)
        clip = min(1.0, self._max_grad_norm / (grad_norm + 1e-6))
        self.head.grad = (gradient * clip).to(self.head).view_as(self.head)
        self._optimizer.step(lr)
        self.head.grad = None
        self._num_updates += 1
        return StepOutcome("", grad_norm, lr)

    def cost(self, parts: Sequence[Sequence[MicroBatch]], peak_bytes: int) -> UpdateCost:
        trained = self._policy.cost(parts, peak_bytes)
        return replace(trained, flops=trained.flops / 3)  # the backward pass takes two thirds

    def training_state(self) -> TrainingState:
        tensors = {SCORE_WEIGHT: self.head.detach()}
        return TrainingState.of(tensors, self._optimizer.tensors(), num_updates=self._num_updates, ranks=self._ranks)

    def copied_state(self) -> TrainingState:
        return self._host_copy.take(self.training_state())

    def load(self, directory: Path) -> None:
        tensors = {SCORE_WEIGHT: self.head.detach()}
        self._num_updates = load_training_state(directory, tensors, self._optimizer.tensors(), ranks=self._ranks)
        self._optimizer.resume(self._num_updates)

    def write_files(self, directory: Path) -> None:
        """The head has no config and no tokenizer."""
