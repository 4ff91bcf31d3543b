"""One model that the engine trains, on this rank: with its optimizer, its loss, its adapters, and a reference model.

``fsdp_engine.py`` has commands of rank 0 that name a model; all ranks then call the same method here, at the same time.
``passes.py`` runs the forward and backward passes of micro-batches, whatever the layout of the ranks. Here are the
optimizer step, and what is saved and published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_rl.config.config import Config
from async_rl.config.learner import check_offload
from async_rl.data.chat import model_files
from async_rl.errors import ModelError
from async_rl.learner.checkpoints.files import write_model_files
from async_rl.learner.checkpoints.stored_tensors import HostCopy, TrainingState, load_training_state
from async_rl.learner.data.packing import MicroBatch, pack
from async_rl.learner.engine.compilation import check_compiled, compile_layers
from async_rl.learner.engine.flops import StepFlops, device_peak
from async_rl.learner.engine.moving_reference import MovingReference
from async_rl.learner.engine.passes import Passes
from async_rl.learner.interface import UpdateCost, UpdateStats
from async_rl.learner.layouts.mesh import Mesh
from async_rl.learner.layouts.pipeline import Spec
from async_rl.learner.layouts.sequence_parallel import check_packing
from async_rl.learner.layouts.sharding import end_forward, shard
from async_rl.learner.layouts.stages import check_stages
from async_rl.learner.losses.objective import Objective, StepOutcome, sequence_ess, update_stats
from async_rl.learner.model.heads import Head, with_value_config
from async_rl.learner.model.loading import Weights, load_policy, load_reference, read_tested
from async_rl.learner.model.lora import Adapters, published_name
from async_rl.learner.model.packing_choice import set_packing
from async_rl.learner.model.policy_model import PolicyModel, to_device
from async_rl.learner.model.routing import RouterHooks
from async_rl.learner.model.self_test import check_replay
from async_rl.learner.optimizers.muon import hidden_matrices
from async_rl.learner.optimizers.optimizer import Schedule, build_optimizer, by_mesh
from async_rl.learner.phases import PhaseClock, peak_memory_bytes
from async_rl.learner.ranks import Ranks, compute_dtype
from async_rl.learner.sequences import TrainSequence
from async_rl.net.wire import decode, encode
from async_rl.routes import has_routers


class Updated(NamedTuple):
    """What an optimizer step gives rank 0.

    Attributes:
        stats: its statistics.
        peak_bytes: the highest peak memory of a rank.
        tokens: for each data rank the arrays of ``interface.TokenOutcomes`` over its trained tokens. Empty if they are
            not recorded.
    """

    stats: UpdateStats
    peak_bytes: int
    tokens: Sequence[tuple[np.ndarray, ...]] = ()


class TrainedModel:
    """A model with its optimizer and schedule on this rank.

    Attributes:
        config: the run's config, with this model's settings in ``model``, ``optimizer`` and ``lora``.
        model: the model.
        objective: its loss.
        adapters: its adapters. None if all weights are trained.
        reference: the reference model of the KL. None if there is none of its own.
        has_reference: whether the loss needs a reference model.
        passes: the passes through the model's part on this rank.
        parameters: what is trained, by name.
        optimizer: the optimizer.
        host_copy: memory for copies of the training state.
        flops: counts floating-point operations.
    """

    def __init__(
        self, config: Config, ranks: Ranks, mesh: Mesh | None, clock: PhaseClock, *, objective: Objective,
        schedule: Schedule, head: Head, max_length: int, is_policy: bool,
    ) -> None:  # fmt: skip
        """Load the model of ``model.path`` and shard it. All ranks do so at the same time.

        Args:
            config: the run's config.
            ranks: the connection to the other ranks.
            mesh: their groups. None: the model is not sharded.
            clock: measures the phases.
            objective: the loss.
            schedule: the learning rates.
            head: what the model computes.
            max_length: number of tokens of the longest sequence.
            is_policy: whether the loss is that of ``[loss]``, so that there may be a reference, and routers matter.

        Raises:
            ModelError: the model is missing, can't be trained, or computes wrong values for a micro-batch.
            ConfigError: ``learner.offload`` means nothing here.
        """
        self.config, self._ranks, self._mesh, self._clock = config, ranks, mesh, clock
        self.objective, self._schedule = objective, schedule
        self._dtype, self._is_sharded = compute_dtype(config, ranks.device), ranks.has_group
        self.model, weights = load_policy(config.model, "padded", is_sharded=self._is_sharded, head=head)
        self._test_model(weights, max_length=max_length, is_policy=is_policy)
        self._names = self.model.tensor_names()
        self._specs = self._tensor_specs()
        self.adapters: Adapters | None = None
        if config.lora.is_set:
            self.adapters = Adapters(
                self.model, config, dtype=self._dtype, device=ranks.device, is_leader=ranks.is_leader, weights=weights
            )
        self.has_reference = is_policy and config.loss.needs_reference
        self.reference, reference_weights = self._load_reference()
        self.flops = StepFlops.of_model(self.model.causal_lm)
        self.passes = self._divided()
        self._shard(weights, reference_weights)
        copy = self.passes.copied_weight
        named = self.model.causal_lm.named_parameters()
        self.parameters = {name: p for name, p in named if p.requires_grad and p is not copy}
        rates = config.optimizer.model_copy(update={"lr": schedule.lr})  # sft, rm and dpo have lr of their own
        self.optimizer = build_optimizer(self.parameters, rates, hidden_matrices(self.model))
        self._num_updates = 0
        self._moving: MovingReference | None = None
        if self.has_reference and config.loss.reference_every:
            of_reference = None if self.reference is None else partial(self._stored_tensors, self.reference)
            self._moving = MovingReference(config.loss, self.tensors, of_reference)
        self._files = model_files(config.model.path) if ranks.is_leader else {}
        if ranks.is_leader and head == "value":
            self._files = with_value_config(self._files, self.model.causal_lm)
        self._host_copy = HostCopy()

    def _test_model(self, weights: Weights | None, *, max_length: int, is_policy: bool) -> None:
        """Test the model on rank 0, choose how it computes micro-batches, and prepare its routers."""
        config, ranks = self.config, self._ranks
        tested = read_tested(config.model, self.model, weights) if ranks.is_leader else None
        set_packing(self.model, config.learner.packing, ranks, tested=tested, max_length=max_length)
        check_packing(self.model.packing, ranks.layout.sequence)
        if tested is not None and ranks.layout.pipeline > 1:
            check_stages(tested)
        coef, replays = config.loss.load_balancing_coef, config.model.routing_replay
        measures = has_routers(self.model.causal_lm) and not config.learner.compile
        if is_policy and (replays or coef or measures):
            self.model.routers = RouterHooks(self.model.causal_lm, replays=replays, balance_coef=coef)
            if tested is not None and replays:
                tested.routers = tested.routers or RouterHooks(tested.causal_lm)
                check_replay(tested)

    def _load_reference(self) -> tuple[PolicyModel | None, Weights | None]:
        """Return the reference model of the KL, if one of its own is needed, and its weights if it has none yet."""
        config = self.config
        # The policy with its adapters disabled is the model that the run began with: no second model is needed.
        is_of_its_own = self.adapters is None or bool(config.loss.kl_reference)
        if not (self.has_reference and is_of_its_own):
            return None, None
        reference, weights = load_reference(config, self._dtype, self.model.packing, is_sharded=self._is_sharded)
        if reference.vocab_size != self.model.vocab_size:
            raise ModelError(
                f"loss.kl_reference: expected a model of the policy's vocabulary, {self.model.vocab_size} tokens, "
                f"got {reference.vocab_size}; choose one with the same tokenizer"
            )
        return reference, weights

    def _divided(self) -> Passes:
        """Cut the models down to this rank's stage of a pipeline, if there is one. Return the passes through them.

        Raises:
            ConfigError: there are fewer layers than stages.
            ModelError: a model can't be divided.
        """
        config = self.config
        if self.adapters is not None and config.lora.publishes_adapters:
            parameters = dict(self.model.causal_lm.named_parameters())
            self._specs = {name: Spec(tuple(parameters[name].shape), self._dtype) for name in self.adapters.names}
        passes = Passes(
            self._models, self._ranks, self._mesh, self._clock, dtype=self._dtype, reshard=config.learner.reshard
        )
        if passes.stage is not None:
            self._names = passes.stage.present(self._names)
            if self.adapters is not None:
                self.adapters.keep(passes.stage.present)
        return passes

    def _shard(self, *weights: Weights | None) -> None:
        """Shard the models, and fill those that have no weights yet with theirs."""
        learner, device = self.config.learner, self._ranks.device
        check_offload(learner.offload, device.type, has_reference=self.reference is not None)
        for model in self._models if learner.compile else ():
            compile_layers(model)
        if self._mesh is None:
            return
        for model, of_model in zip(self._models, weights, strict=False):
            is_offloaded = learner.offload == "all" or (learner.offload == "reference" and model is self.reference)
            shard(model, self._mesh, self._dtype, reshard=learner.reshard, is_offloaded=is_offloaded)
            if of_model is not None:
                of_model.fill(model, torch.device("cpu") if is_offloaded else device)

    @property
    def _models(self) -> list[PolicyModel]:
        return [self.model] if self.reference is None else [self.model, self.reference]

    def pack(self, sequences: Sequence[TrainSequence]) -> list[list[MicroBatch]]:
        return pack(
            sequences,
            max_tokens=self.config.longest_sequence,
            num_ranks=self._ranks.layout.num_data_ranks,
            packing=self.model.packing,
            work=self.flops.work,
            min_rounds=self._ranks.layout.pipeline,
        )

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch], *, by_reference: bool) -> list[tuple[np.ndarray, ...]]:
        """Return, on rank 0, the log-probabilities and entropies (or values and zeros) of each data rank's trained
        tokens, float32, in the order of its micro-batches. They are the model's own, or the reference's.

        On the other ranks the list is empty.
        """
        model, context = self.model, nullcontext()
        if by_reference and self.reference is not None:
            model = self.reference
        elif by_reference and self._moving is not None:
            context = self._moving.lent()
        elif by_reference:
            context = cast(Adapters, self.adapters).off()
        with context:
            # The reference routes as it would sample.
            scored = self.passes.score(model, micro_batches, replays=not by_reference)
        if self._is_sharded:
            end_forward(model)
        arrays = [torch.cat(values).cpu().numpy() for values in zip(*scored, strict=True)]
        return [decode(frame).arrays for frame in self._ranks.gather_reports(encode("scores", {}, arrays))]

    def check_compiled(self, micro_batches: Sequence[MicroBatch]) -> None:
        batches = [to_device(mb, self._ranks.device, self.model.packing) for mb in micro_batches]
        check_compiled(
            self.model, batches, lambda index: self.passes.begin_backward(index, len(batches)), dtype=self._dtype
        )

    def cost(self, parts: Sequence[Sequence[MicroBatch]], peak_bytes: int) -> UpdateCost:
        peak = device_peak(self._ranks.device, self._dtype)
        return UpdateCost(
            phase_s=self._clock.read(),
            flops=sum(self.flops.of(micro_batch) for part in parts for micro_batch in part),
            peak_flops_per_s=None if peak is None else peak * self._ranks.world_size,
            peak_memory_bytes=peak_bytes,
        )

    def update(self, micro_batches: Sequence[MicroBatch], version: int, *, records: bool = False) -> Updated:
        """Make an optimizer step. What it returns is of use on rank 0. ``records``: return its tokens, too."""
        if self.model.routers is not None:
            self.model.routers.reset_counts()
        sums, ratio_max, skipped, tokens = self.passes.accumulate(
            micro_batches, self.objective, version, records=records
        )
        if not self._ranks.layout.is_reporter(self._ranks.rank):
            sums, skipped, tokens = torch.zeros_like(sums), skipped[:0], ()  # another rank reports the same
        with self._clock.phase("optimizer"):
            sums = self._ranks.all_reduce_sum(sums.cpu())
            routing = self._routing(self.objective.denominator(sums))
            lr = self._schedule.lr_at(self._num_updates) * self._ess_scale(sums)
            outcome = self._step(self.objective.denominator(sums), lr, self.objective.why_skip(sums))
        fields = {"ratio_max": float(ratio_max), "peak_bytes": peak_memory_bytes(self._ranks.device)}
        frames = self._ranks.gather(encode("skipped", fields, [skipped, *tokens]))
        reports = [decode(frame) for frame in frames]
        skipped_ids = sorted(int(i) for report in reports for i in report.arrays[0])
        ratio_max = max((r.fields["ratio_max"] for r in reports), default=0.0)
        stats = update_stats(sums, ratio_max, skipped_ids, outcome, objective=self.objective)
        return Updated(
            replace(stats, **routing),
            peak_bytes=max((r.fields["peak_bytes"] for r in reports), default=0),
            tokens=[tuple(r.arrays[1:]) for r in reports if len(r.arrays) > 1],
        )

    def _routing(self, denominator: float) -> dict[str, Any]:
        """Return what ``UpdateStats`` has about routers, by field, over all ranks."""
        if (routers := self.model.routers) is None:
            return {}
        is_reporter = self._ranks.layout.is_reporter(self._ranks.rank)  # others have the same loss
        numbers = [float(routers.num_different), routers.num_counted, float(routers.balance) * is_reporter]
        own = torch.cat([torch.tensor(numbers, dtype=torch.float64), routers.load_LE.cpu().flatten().double()])
        different, counted, balance, *load = self._ranks.all_reduce_sum(own).tolist()
        return {
            "routing": (int(different), int(counted)) if counted else None,
            "expert_load": np.array(load).reshape(routers.num_layers, -1),
            "balance_loss": balance / (denominator or 1.0) if routers.balance_coef else None,
        }

    def _ess_scale(self, sums: Tensor) -> float:
        """Return the factor of the learning rate by ``optimizer.ess_reference`` (VCPO, arXiv:2602.17616)."""
        reference = self.config.optimizer.ess_reference
        return min(1.0, sequence_ess(sums, self.objective.statistics) / reference) ** 0.5 if reference else 1.0

    def _step(self, denominator: float, lr: float, why_skip: str) -> StepOutcome:
        """Scale and clip the gradients of the loss sum, and apply them. Every rank makes the same decision.

        A skipped step does not change weights, optimizer and schedule.
        """
        self.passes.add_tied_gradients()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not denominator:
            self._free_gradients()
            return StepOutcome("nothing is left to train on: every sequence was skipped or masked", 0.0, lr)
        # FSDP averages gradients over ranks, but we need their sum.
        scale = (self._ranks.layout.num_summed if self._is_sharded else 1) / denominator
        grad_norm = scale * self.passes.total_norm(gradients)
        if why_skip or not np.isfinite(grad_norm):
            self._free_gradients()
            return StepOutcome(why_skip or f"the gradient norm is {grad_norm}", grad_norm, lr)
        # As clip_grad_norm_ does, in one pass over the gradients with the scaling.
        clip = min(1.0, self.config.optimizer.max_grad_norm / (grad_norm + 1e-6))
        for of_mesh in by_mesh(gradients):
            torch._foreach_mul_(of_mesh, scale * clip)
        self.optimizer.step(lr)
        self._free_gradients()
        self.passes.copy_tied_weight()
        self._num_updates += 1
        if self._moving is not None:
            self._moving.follow(self._num_updates)
        return StepOutcome("", grad_norm, lr)

    def _free_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _tensor_specs(self) -> dict[str, Spec]:
        """Return shape and dtype of each tensor that ``gather`` yields. Buffers keep their dtype, because the model
        computes in it.
        """
        state = self.model.causal_lm.state_dict()
        parameters = {name for name, _ in self.model.causal_lm.named_parameters()}
        return {
            name: Spec(tuple(state[name].shape), self._dtype if name in parameters else state[name].dtype)
            for name in self._names
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of the parameters and buffers that a checkpoint holds, by name, in a fixed
        order.
        """
        return self._stored_tensors(self.model)

    def _stored_tensors(self, model: PolicyModel) -> dict[str, Tensor]:
        state = model.causal_lm.state_dict()
        names = self._names if self.adapters is None else self.adapters.names
        return {name: state[name].detach() for name in names}

    @property
    def _reference_tensors(self) -> Mapping[str, Tensor]:
        """The tensors of a reference that moves, which a checkpoint holds. Empty if it does not."""
        return {} if self._moving is None else self._moving.tensors

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        stage, pipeline = self.passes.stage, self.passes.pipeline
        if stage is None or pipeline is None:
            yield from self._gathered(self._names)
            return
        own = [name for name in self._names if stage.owner(name) == pipeline.index]
        for name, tensor in pipeline.collected(self._gathered(own), self._specs, stage.owner):
            yield published_name(name) if self.config.lora.publishes_adapters else name, tensor

    def _gathered(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors ``names`` of this rank's stage, unsharded."""
        if self.adapters is not None:
            if self.config.lora.publishes_adapters:
                yield from self.adapters.published(self._dtype, self._ranks.device)
            else:
                yield from self.adapters.merged(names, self._dtype, self._ranks.device)
            return
        tensors = self.tensors()
        for name in names:
            wire = tensors[name].to(self._ranks.device, self._specs[name].dtype)
            yield name, wire.full_tensor() if isinstance(wire, DTensor) else wire

    def training_state(self) -> TrainingState:
        tensors, reference = self.tensors(), self._reference_tensors
        if self.passes.stage is not None:
            tensors, reference = (self.passes.stage.owned(each) for each in (tensors, reference))
        return TrainingState.of(
            tensors, self.optimizer.tensors(), reference, num_updates=self._num_updates, ranks=self._ranks
        )

    def copied_state(self) -> TrainingState:
        """Return a copy of ``training_state`` that the next optimizer step does not change, valid until the next
        call.
        """
        return self._host_copy.take(self.training_state())

    def load(self, directory: Path) -> None:
        if self.adapters is not None:
            self.adapters.check(directory)
        self._num_updates = load_training_state(
            directory, self.tensors(), self.optimizer.tensors(), self._reference_tensors, ranks=self._ranks
        )
        self.optimizer.resume(self._num_updates)

    def write_files(self, directory: Path) -> None:
        """On rank 0, write the model's config and tokenizer into a checkpoint, and the adapters' description."""
        write_model_files(directory, self._files)
        if self.adapters is not None:
            self.adapters.save_config(directory)
