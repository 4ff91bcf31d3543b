"""The engine of real runs: FSDP2 on CUDA or CPU, one rank or many. It implements ``engine.Engine``.

Rank 0's calls become commands (``ranks.py``). Every rank executes them with the methods that begin with an underscore,
and the ranks other than 0 run ``follow``. The gradient does not depend on the micro-batches, the packing or the number
of ranks, because losses are summed over the step, and the gradient is divided once by the step's denominator.

``passes.py`` runs the forward and backward passes of micro-batches, whatever the layout of the ranks. Here are the
commands, the optimizer step, and what is saved and published.

FSDP does not wrap a single rank on the CPU in float32. There is nothing to shard, and the hooks cost up to 90 % of a
small step (4 layers, 128 wide, 100 tokens: 21 ms without, 31 to 39 ms with). All other code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_rl.config.config import Config
from async_rl.data.chat import model_files
from async_rl.errors import ModelError, TrainingError
from async_rl.learner.checkpoint import write_extra, write_model_files
from async_rl.learner.engine import PolicyScores, ScoredBy, UpdateCost, UpdateStats
from async_rl.learner.engine.compilation import GraphCount, check_compiled, compile_layers
from async_rl.learner.engine.flops import StepFlops, device_peak
from async_rl.learner.engine.heads import Head, with_value_config
from async_rl.learner.engine.loading import Weights, load_policy, load_reference, read_tested
from async_rl.learner.engine.lora import Adapters, published_name
from async_rl.learner.engine.mesh import Mesh
from async_rl.learner.engine.model import PolicyModel, to_device
from async_rl.learner.engine.muon import hidden_matrices
from async_rl.learner.engine.optimizer import Schedule, build_optimizer, by_mesh, check_optimizer
from async_rl.learner.engine.packing_choice import set_packing
from async_rl.learner.engine.passes import Passes
from async_rl.learner.engine.phases import PhaseClock, peak_memory_bytes
from async_rl.learner.engine.pipeline import Spec
from async_rl.learner.engine.ranks import Ranks, check_same_code, compute_dtype
from async_rl.learner.engine.routing import RoutingReplay
from async_rl.learner.engine.self_test import NEIGHBOURS_TOKENS, check_neighbours, check_replay, short_sequences
from async_rl.learner.engine.sequence_parallel import check_packing
from async_rl.learner.engine.sharding import check_offload, end_forward, shard
from async_rl.learner.engine.stages import check_stages
from async_rl.learner.losses.objective import (
    Objective,
    StepOutcome,
    policy_objective,
    sequence_ess,
    update_stats,
)
from async_rl.learner.packing import (
    MicroBatch,
    TrainSequence,
    by_sequence,
    from_arrays,
    pack,
    padded_cost,
    to_arrays,
)
from async_rl.learner.stored_tensors import HostCopy, TrainingState, load_training_state, write_training_state
from async_rl.net.wire import SAME_VERSION, Message, decode, encode
from async_rl.sampling_mask import largest_id
from async_rl.weights.adapters import BaseWeights

_BUG = "this is a bug in async-rl, please report it"
_ARRAYS_PER_BATCH = len(MicroBatch.__dataclass_fields__)


def policy_schedule(config: Config) -> Schedule:
    """Return the learning-rate schedule of a reinforcement learning run. Skipped optimizer steps don't advance it."""
    optimizer, learner = config.optimizer, config.learner
    return Schedule(
        kind=optimizer.schedule,
        lr=optimizer.lr,
        warmup_updates=optimizer.warmup_steps,
        total_updates=learner.steps * learner.versions_per_batch,
        min_ratio=optimizer.min_lr_ratio,
    )


class FsdpEngine:
    """The model, the optimizer and the schedule on this rank. Rank 0 calls the methods of ``Engine``, other ranks
    ``follow``.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        *,
        objective: Objective | None = None,
        schedule: Schedule | None = None,
        max_length: int | None = None,
        head: Head = "tokens",
    ) -> None:
        """Load the model of ``model.path`` and shard it. All ranks build the same engine.

        Args:
            config: the run's config.
            ranks: the connection to the other ranks.
            objective: the loss. None: that of a reinforcement learning run.
            schedule: the learning rates. None: those of a reinforcement learning run.
            max_length: number of tokens of the longest sequence. None: that of a reinforcement learning run.
            head: what the model computes. Where a value model is trained, scores are its values.

        Raises:
            ModelError: the model is missing, can't be trained, or computes wrong values for a micro-batch.
            ConfigError: the user's own loss fails its trial, or differs between the ranks' machines;
                ``learner.offload`` means nothing here; or ``optimizer.name`` needs what is missing here.
        """
        self._config, self._ranks = config, ranks
        with ranks.together("loading the loss"):
            self._objective = objective or policy_objective(config, device=ranks.device)
            if objective is None:
                check_same_code(config, ranks)
        self._schedule = schedule or policy_schedule(config)
        with ranks.together("checking the optimizer"):
            check_optimizer(config.optimizer, _optimizer_device(config, ranks))
        with ranks.together("loading the model"):
            self._dtype = compute_dtype(config, ranks.device)
            torch.manual_seed(config.run.seed + ranks.rank)
            self._is_sharded = ranks.has_group
            self._mesh = Mesh.build(ranks.layout, ranks.device.type) if ranks.has_group else None
            self._model, weights = load_policy(config.model, "padded", is_sharded=self._is_sharded, head=head)
            sampling = config.sampling
            max_length = max_length or sampling.max_prompt_tokens + sampling.max_new_tokens
            self._test_model(weights, max_length=max_length, may_replay=objective is None)
            self._names = self._model.tensor_names()
            self._specs = self._tensor_specs()
            self._adapters: Adapters | None = None
            if config.lora.is_set:
                self._adapters = Adapters(
                    self._model, config, dtype=self._dtype, device=ranks.device, is_leader=ranks.is_leader,
                    weights=weights,
                )  # fmt: skip
            # A given objective does not use [loss], so it needs no reference.
            self._has_reference = objective is None and config.loss.needs_reference
            self._reference, reference_weights = self._load_reference()
            self._flops = StepFlops.of_model(self._model.causal_lm)
            self._clock = PhaseClock(ranks.device)
            self._passes = self._divided()
            self._shard(weights, reference_weights)
            copy = self._passes.copied_weight
            named = self._model.causal_lm.named_parameters()
            self._parameters = {name: p for name, p in named if p.requires_grad and p is not copy}
            self._optimizer = build_optimizer(self._parameters, config.optimizer, hidden_matrices(self._model))
            self._num_updates = 0
            self._graphs = GraphCount() if config.learner.compile else None
            self._files = model_files(config.model.path) if ranks.is_leader else {}
            if ranks.is_leader and head == "value":
                self._files = with_value_config(self._files, self._model.causal_lm)
            self._gathering = False
            self._is_closed = False
            self._saver = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-tensors")
            self._saving: Future[None] | None = None
            self._host_copy = HostCopy()

    def _test_model(self, weights: Weights | None, *, max_length: int, may_replay: bool) -> None:
        """Test the model on rank 0, choose how it computes micro-batches, and prepare it to replay routes."""
        config, ranks = self._config, self._ranks
        tested = read_tested(config.model, self._model, weights) if ranks.is_leader else None
        set_packing(self._model, config.learner.packing, ranks, tested=tested, max_length=max_length)
        check_packing(self._model.packing, ranks.layout.sequence)
        if tested is not None and ranks.layout.pipeline > 1:
            check_stages(tested)
        if config.model.routing_replay and may_replay:
            self._model.replay = RoutingReplay(self._model.causal_lm)
            if tested is not None:
                tested.replay = tested.replay or RoutingReplay(tested.causal_lm)
                check_replay(tested)

    def _load_reference(self) -> tuple[PolicyModel | None, Weights | None]:
        """Return the reference model of the KL, if one of its own is needed, and its weights if it has none yet."""
        config = self._config
        # The policy with its adapters disabled is the model that the run began with: no second model is needed.
        is_of_its_own = self._adapters is None or bool(config.loss.kl_reference)
        if not (self._has_reference and is_of_its_own):
            return None, None
        reference, weights = load_reference(config, self._dtype, self._model.packing, is_sharded=self._is_sharded)
        if reference.vocab_size != self._model.vocab_size:
            raise ModelError(
                f"loss.kl_reference: expected a model of the policy's vocabulary, {self._model.vocab_size} tokens, "
                f"got {reference.vocab_size}; choose one with the same tokenizer"
            )
        return reference, weights

    def _divided(self) -> Passes:
        """Cut the models down to this rank's stage of a pipeline, if there is one. Return the passes through them.

        Raises:
            ConfigError: there are fewer layers than stages.
            ModelError: a model can't be divided.
        """
        config = self._config
        if self._adapters is not None and config.lora.publishes_adapters:
            parameters = dict(self._model.causal_lm.named_parameters())
            self._specs = {name: Spec(tuple(parameters[name].shape), self._dtype) for name in self._adapters.names}
        passes = Passes(
            self._models, self._ranks, self._mesh, self._clock, dtype=self._dtype, reshard=config.learner.reshard
        )
        if passes.stage is not None:
            self._names = passes.stage.present(self._names)
            if self._adapters is not None:
                self._adapters.keep(passes.stage.present)
        return passes

    def _shard(self, *weights: Weights | None) -> None:
        """Shard the models, and fill those that have no weights yet with theirs."""
        learner, device = self._config.learner, self._ranks.device
        check_offload(learner.offload, device, has_reference=self._reference is not None)
        for model in self._models if learner.compile else ():
            compile_layers(model)
        if self._mesh is None:
            return
        for model, of_model in zip(self._models, weights, strict=False):
            is_offloaded = learner.offload == "all" or (learner.offload == "reference" and model is self._reference)
            shard(model, self._mesh, self._dtype, reshard=learner.reshard, is_offloaded=is_offloaded)
            if of_model is not None:
                of_model.fill(model, torch.device("cpu") if is_offloaded else device)

    def self_test(self) -> None:
        """Check that the sequences of a micro-batch do not change each other's values, and that compiled layers compute
        the same as uncompiled ones. Rank 0 calls it, others follow.

        Nothing is checked if micro-batches are too small to hold the test's sequences together, or if more than two
        ranks add up parts of a layer: the order of such a sum, and so its rounding, depends on a token's place.

        Raises:
            ModelError: they do, or compiled layers don't.
        """
        if self._config.longest_sequence < NEIGHBOURS_TOKENS:
            return
        layout = self._ranks.layout
        copies = layout.num_data_ranks * layout.pipeline
        if self._config.learner.compile:
            parts = self._pack(short_sequences(self._model, copies=copies))
            with self._command("check_compiled"):
                self._scatter("check_compiled", {}, parts)
                self._check_compiled(parts[0])
        if layout.tensor <= 2:
            check_neighbours(self, self._model.causal_lm.config, num_ranks=copies, packing=self._model.packing)

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        """Make one optimizer step, as ``Engine.update`` says.

        Raises:
            ValueError: a sequence can't be packed (``packing.pack``), or is newer than ``version``.
            TrainingError: another rank failed.
        """
        with self._clock.phase("pack"):
            parts = self._pack(sequences)
        with self._command("update"):
            with self._clock.phase("scatter"):
                self._scatter("update", {"version": version}, parts)
            stats, peak_bytes = self._update(parts[0], version)
        if self._graphs is not None:
            self._graphs.log()
        return replace(
            stats,
            padded_cost=padded_cost(parts) if self._model.packing == "padded" else None,
            cost=self._cost(parts, peak_bytes),
        )

    def score(self, sequences: Sequence[TrainSequence], *, of: ScoredBy) -> dict[int, np.ndarray]:
        """Return the log-probabilities of trained tokens, as ``Engine.score`` says.

        Raises:
            ValueError: a sequence can't be packed (``packing.pack``), or there is no reference (``loss.kl_coef`` is 0).
            TrainingError: another rank failed.
        """
        if of == "reference" and not self._has_reference:
            raise ValueError(
                "expected a reference model for the scores, but none is loaded: loss.kl_coef is 0; set loss.kl_coef"
            )
        return self._scores(sequences, of)[0]

    def score_policy(self, sequences: Sequence[TrainSequence]) -> dict[int, PolicyScores]:
        """Return the policy's log-probabilities and entropies, as ``Engine.score_policy`` says.

        Raises:
            ValueError: a sequence can't be packed (``packing.pack``).
            TrainingError: another rank failed.
        """
        logprobs, entropies = self._scores(sequences, "policy")
        return {i: PolicyScores(values, entropies[i]) for i, values in logprobs.items()}

    def _scores(self, sequences: Sequence[TrainSequence], of: ScoredBy) -> list[dict[int, np.ndarray]]:
        """Return the log-probabilities and the entropies, each by sequence id."""
        parts = self._pack(sequences)
        with self._command("score"):
            self._scatter("score", {"of": of}, parts)
            of_ranks = self._score(parts[0], of)
        return [by_sequence(parts, values) for values in zip(*of_ranks, strict=True)]

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded parameters, as ``Engine.gather`` says. They are valid until ``update``.

        Parameters have the dtype that the model computes in. If the caller stops early, the remaining parameters are
        gathered and discarded.
        """
        with self._command("gather"):
            self._ranks.broadcast(encode("gather", {}))
            self._gathering = True
            tensors = self._gather()
            try:
                yield from tensors
            finally:
                for _ in tensors:
                    pass
                self._gathering = False

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint, as ``Engine.save`` says, with the model's config and tokenizer files for an export
        without the run.

        For a model with adapters only the adapters are written, and the path of the frozen weights. Exporting such a
        checkpoint needs ``model.path``.
        """
        with self._command("save"):
            self._ranks.broadcast(encode("save", {"directory": str(directory)}))
            write_training_state(directory, self._training_state(), self._ranks)
            self._write_files(directory, extra)

    def begin_save(self, directory: Path, extra: Mapping[str, Any]) -> Future[None]:
        """Copy the state and write it in the background, as ``Engine.begin_save`` says."""
        with self._command("save"):
            self._ranks.broadcast(encode("begin_save", {"directory": str(directory)}))
            return self._begin_save(directory, lambda: self._write_files(directory, extra))

    @property
    def base_weights(self) -> BaseWeights | None:
        """What the adapters' frozen weights are, on rank 0. None without adapters."""
        return None if self._adapters is None else self._adapters.base

    def _write_files(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """On rank 0, write the files of a checkpoint that have no tensors."""
        write_extra(directory, extra)
        write_model_files(directory, self._files)
        if self._adapters is not None:
            self._adapters.save_config(directory)

    def load(self, directory: Path) -> None:
        """Restore a checkpoint, as ``Engine.load`` says.

        Raises:
            RunError: ``directory`` is no checkpoint, or the checkpoint or its adapters belong to another model.
        """
        with self._command("load"):
            self._ranks.broadcast(encode("load", {"directory": str(directory)}))
            self._load(directory)

    def tick(self) -> None:
        """Notify the other ranks that rank 0 is alive. Nothing happens after the engine is closed.

        Raises:
            TrainingError: another rank has failed.
        """
        if self._is_closed:
            return
        failure = self._ranks.first_failure()
        if failure:
            raise TrainingError(failure)
        with self._command("tick"):
            self._ranks.broadcast(encode("tick", {}))

    def close(self, cause: str = "", *, exit_code: int = 0) -> None:
        """Let the other ranks end with ``exit_code``. If ``cause`` is given, they fail and report this cause instead.

        If a collective has failed before, the other ranks get no message and fail. Later calls do nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._ranks.is_leader and self._ranks.world_size > 1 and not self._ranks.is_broken:
            with self._ranks.together("closing"):
                self._ranks.broadcast(encode("close", {"cause": cause, "exit_code": exit_code}))
        self._leave()

    def follow(self) -> int:
        """Execute rank 0's commands until rank 0 closes the engine. Return the exit code that rank 0 chose for all
        ranks.

        All ranks except rank 0 call this.

        Raises:
            TrainingError: a rank failed. The message is the first cause.
        """
        while True:
            with self._ranks.together("waiting for rank 0"):
                message = decode(self._ranks.receive())
            if message.type == "close":
                self._leave()
                if message.fields["cause"]:
                    raise TrainingError(f"rank 0: {message.fields['cause']}")
                return int(message.fields["exit_code"])
            with self._ranks.together(message.type):
                self._execute(message)

    def _leave(self) -> None:
        if not self._ranks.is_broken:
            self._finish_save()  # its collectives need the process group
        self._ranks.close()

    def _execute(self, message: Message) -> None:
        match message.type:
            case "update":
                self._update(_micro_batches(message), int(message.fields["version"]))
                self._clock.read()  # only rank 0's phases are reported
            case "score":
                self._score(_micro_batches(message), message.fields["of"])
            case "check_compiled":
                self._check_compiled(_micro_batches(message))
            case "gather":
                for _ in self._gather():
                    pass
            case "save":
                write_training_state(Path(message.fields["directory"]), self._training_state(), self._ranks)
            case "begin_save":
                self._begin_save(Path(message.fields["directory"]), lambda: None)
            case "load":
                self._load(Path(message.fields["directory"]))
            case "tick":
                pass
            case _:
                raise ValueError(f"expected a known command of rank 0, got {message.type!r}; {SAME_VERSION}")

    @contextmanager
    def _command(self, what: str) -> Iterator[None]:
        if self._gathering:
            raise RuntimeError(
                f"{what}: expected no open gather(), got one whose iterator was not read to its end; {_BUG}"
            )
        with self._ranks.together(what):
            yield

    @property
    def _models(self) -> list[PolicyModel]:
        return [self._model] if self._reference is None else [self._model, self._reference]

    def _pack(self, sequences: Sequence[TrainSequence]) -> list[list[MicroBatch]]:
        vocab_size = self._model.vocab_size
        for sequence in sequences:
            # Checked on the host, because an index out of range makes the CUDA device unusable.
            if sequence.sampling_mask is not None and (unknown := largest_id(sequence.sampling_mask)) >= vocab_size:
                raise ValueError(
                    f"sequence {sequence.sequence_id}: expected token ids below the model's vocabulary size "
                    f"{vocab_size} in its sampling mask, got {unknown}; check that its generator runs the same model"
                )
        return pack(
            sequences,
            max_tokens=self._config.longest_sequence,
            num_ranks=self._ranks.layout.num_data_ranks,
            packing=self._model.packing,
            work=self._flops.work,
            min_rounds=self._ranks.layout.pipeline,
        )

    def _scatter(self, command: str, fields: Mapping[str, Any], parts: Sequence[Sequence[MicroBatch]]) -> None:
        """Send every other rank the command and the micro-batches of its data rank."""
        if self._ranks.world_size > 1:
            self._ranks.scatter_parts(
                lambda data_rank: encode(command, fields, [a for mb in parts[data_rank] for a in to_arrays(mb)])
            )

    @torch.no_grad()
    def _score(self, micro_batches: Sequence[MicroBatch], of: ScoredBy) -> list[tuple[np.ndarray, ...]]:
        """Return, on rank 0, the log-probabilities and entropies of each data rank's trained tokens, float32, in the
        order of its micro-batches.

        On the other ranks the list is empty.
        """
        model, context = self._model, nullcontext()
        if of == "reference" and self._reference is not None:
            model = self._reference
        elif of == "reference":
            context = cast(Adapters, self._adapters).off()
        with context:
            # The reference routes as it would sample.
            scored = self._passes.score(model, micro_batches, replays=of != "reference")
        if self._is_sharded:
            end_forward(model)
        arrays = [torch.cat(values).numpy() for values in zip(*scored, strict=True)]
        return [decode(frame).arrays for frame in self._ranks.gather_reports(encode("scores", {}, arrays))]

    def _check_compiled(self, micro_batches: Sequence[MicroBatch]) -> None:
        batches = [to_device(mb, self._ranks.device, self._model.packing) for mb in micro_batches]
        check_compiled(
            self._model, batches, lambda index: self._passes.begin_backward(index, len(batches)), dtype=self._dtype
        )

    def _cost(self, parts: Sequence[Sequence[MicroBatch]], peak_bytes: int) -> UpdateCost:
        peak = device_peak(self._ranks.device, self._dtype)
        return UpdateCost(
            phase_s=self._clock.read(),
            flops=sum(self._flops.of(micro_batch) for part in parts for micro_batch in part),
            peak_flops_per_s=None if peak is None else peak * self._ranks.world_size,
            peak_memory_bytes=peak_bytes,
        )

    def _update(self, micro_batches: Sequence[MicroBatch], version: int) -> tuple[UpdateStats, int]:
        """Return the step's statistics and the highest peak memory of a rank in bytes. Both are of use on rank 0."""
        if self._model.replay is not None:
            self._model.replay.reset_counts()
        sums, ratio_max, skipped = self._passes.accumulate(micro_batches, self._objective, version)
        if not self._ranks.layout.is_reporter(self._ranks.rank):
            sums, skipped = torch.zeros_like(sums), skipped[:0]  # another rank reports the same
        with self._clock.phase("optimizer"):
            sums = self._ranks.all_reduce_sum(sums.cpu())
            routing = self._replayed()
            lr = self._schedule.lr_at(self._num_updates) * self._ess_scale(sums)
            outcome = self._step(self._objective.denominator(sums), lr, self._objective.why_skip(sums))
        fields = {"ratio_max": float(ratio_max), "peak_bytes": peak_memory_bytes(self._ranks.device)}
        frames = self._ranks.gather(encode("skipped", fields, [skipped]))
        reports = [decode(frame) for frame in frames]
        skipped_ids = sorted(int(i) for report in reports for i in report.arrays[0])
        ratio_max = max((r.fields["ratio_max"] for r in reports), default=0.0)
        stats = update_stats(sums, ratio_max, skipped_ids, outcome, objective=self._objective)
        return replace(stats, routing=routing), max((r.fields["peak_bytes"] for r in reports), default=0)

    def _replayed(self) -> tuple[int, int] | None:
        """Return the counts of ``UpdateStats.routing``, over all ranks."""
        if (replay := self._model.replay) is None:
            return None
        counts = torch.tensor([int(replay.num_different), replay.num_counted])
        num_different, num_counted = self._ranks.all_reduce_sum(counts).tolist()
        return num_different, num_counted

    def _ess_scale(self, sums: Tensor) -> float:
        """Return the factor of the learning rate by ``optimizer.ess_reference`` (VCPO, arXiv:2602.17616)."""
        reference = self._config.optimizer.ess_reference
        return min(1.0, sequence_ess(sums) / reference) ** 0.5 if reference else 1.0

    def _step(self, denominator: float, lr: float, why_skip: str) -> StepOutcome:
        """Scale and clip the gradients of the loss sum, and apply them. Every rank makes the same decision.

        A skipped step does not change weights, optimizer and schedule.
        """
        self._passes.add_tied_gradients()
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not denominator:
            self._optimizer.zero_grad()
            return StepOutcome("nothing is left to train on: every sequence was skipped or masked", 0.0, lr)
        # FSDP averages gradients over ranks, but we need their sum.
        scale = (self._ranks.layout.num_summed if self._is_sharded else 1) / denominator
        grad_norm = scale * self._passes.total_norm(gradients)
        if why_skip or not np.isfinite(grad_norm):
            self._optimizer.zero_grad()
            return StepOutcome(why_skip or f"the gradient norm is {grad_norm}", grad_norm, lr)
        # As clip_grad_norm_ does, in one pass over the gradients with the scaling.
        clip = min(1.0, self._config.optimizer.max_grad_norm / (grad_norm + 1e-6))
        for of_mesh in by_mesh(gradients):
            torch._foreach_mul_(of_mesh, scale * clip)
        self._optimizer.step(lr)
        self._optimizer.zero_grad()
        self._passes.copy_tied_weight()
        self._num_updates += 1
        return StepOutcome("", grad_norm, lr)

    def _tensor_specs(self) -> dict[str, Spec]:
        """Return shape and dtype of each tensor that ``gather`` yields. Buffers keep their dtype, because the model
        computes in it.
        """
        state = self._model.causal_lm.state_dict()
        parameters = {name for name, _ in self._model.causal_lm.named_parameters()}
        return {
            name: Spec(tuple(state[name].shape), self._dtype if name in parameters else state[name].dtype)
            for name in self._names
        }

    def _tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of the parameters and buffers that a checkpoint holds, by name, in a fixed
        order.
        """
        state = self._model.causal_lm.state_dict()
        names = self._names if self._adapters is None else self._adapters.names
        return {name: state[name].detach() for name in names}

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        stage, pipeline = self._passes.stage, self._passes.pipeline
        if stage is None or pipeline is None:
            yield from self._gathered(self._names)
            return
        own = [name for name in self._names if stage.owner(name) == pipeline.index]
        for name, tensor in pipeline.collected(self._gathered(own), self._specs, stage.owner):
            yield published_name(name) if self._config.lora.publishes_adapters else name, tensor

    def _gathered(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors ``names`` of this rank's stage, unsharded."""
        if self._adapters is not None:
            if self._config.lora.publishes_adapters:
                yield from self._adapters.published(self._dtype, self._ranks.device)
            else:
                yield from self._adapters.merged(names, self._dtype, self._ranks.device)
            return
        tensors = self._tensors()
        for name in names:
            wire = tensors[name].to(self._ranks.device, self._specs[name].dtype)
            yield name, wire.full_tensor() if isinstance(wire, DTensor) else wire

    def _training_state(self) -> TrainingState:
        tensors = self._tensors()
        if self._passes.stage is not None:
            tensors = self._passes.stage.owned(tensors)
        return TrainingState.of(tensors, self._optimizer.tensors(), num_updates=self._num_updates, ranks=self._ranks)

    def _begin_save(self, directory: Path, then: Callable[[], None]) -> Future[None]:
        """Copy this rank's state, and write it in a thread that then calls ``then``."""
        self._finish_save()  # another rank may know earlier that all have written
        state = self._host_copy.take(self._training_state())

        def write() -> None:
            write_training_state(directory, state, self._ranks)
            then()

        self._saving = self._saver.submit(write)
        return self._saving

    def _finish_save(self) -> None:
        """Wait until this rank writes nothing. Rank 0 reports errors."""
        if self._saving is not None:
            wait([self._saving])
        self._saving = None

    def _load(self, directory: Path) -> None:
        if self._adapters is not None:
            self._adapters.check(directory)
        self._num_updates = load_training_state(
            directory, self._tensors(), self._optimizer.tensors(), ranks=self._ranks
        )
        self._optimizer.resume(self._num_updates)


def _optimizer_device(config: Config, ranks: Ranks) -> torch.device:
    return torch.device("cpu") if config.learner.offload == "all" else ranks.device


def _micro_batches(message: Message) -> list[MicroBatch]:
    arrays = message.arrays
    starts = range(0, len(arrays), _ARRAYS_PER_BATCH)
    return [from_arrays(arrays[start : start + _ARRAYS_PER_BATCH]) for start in starts]
