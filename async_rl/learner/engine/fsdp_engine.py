"""The engine of real runs: FSDP2 on CUDA or CPU, one rank or many. It implements ``interface.Engine``.

Rank 0's calls become commands (``learner/ranks.py``). Every rank executes them with the methods of a ``TrainedModel``,
and the ranks other than 0 run ``follow``. The gradient does not depend on the micro-batches, the packing or the number
of ranks, because losses are summed over the step, and the gradient is divided once by the step's denominator.

FSDP does not wrap a single rank on the CPU in float32. There is nothing to shard, and the hooks cost up to 90 % of a
small step (4 layers, 128 wide, 100 tokens: 21 ms without, 31 to 39 ms with). All other code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.errors import ModelError, RunError, TrainingError
from async_rl.learner.checkpoints.files import model_part, write_extra
from async_rl.learner.checkpoints.stored_tensors import write_training_state
from async_rl.learner.data.packing import MicroBatch, by_sequence, from_arrays, padded_cost, to_arrays
from async_rl.learner.engine.trained_model import TrainedModel
from async_rl.learner.interface import ModelName, PolicyScores, ScoredBy, TokenOutcomes, UpdateStats
from async_rl.learner.layouts.mesh import Mesh
from async_rl.learner.losses.objective import Objective, policy_objective
from async_rl.learner.losses.value import ValueObjective
from async_rl.learner.model.heads import Head
from async_rl.learner.model.self_test import NEIGHBOURS_TOKENS, check_neighbours, short_sequences
from async_rl.learner.optimizers.optimizer import Schedule, check_optimizer
from async_rl.learner.phases import PhaseClock
from async_rl.learner.ranks import Ranks, check_same_code
from async_rl.learner.sampling import RankSampler, SamplingOrder
from async_rl.learner.sequences import TrainSequence
from async_rl.net.wire import SAME_VERSION, Message, decode, encode
from async_rl.weights.adapters import BaseWeights

_BUG = "this is a bug in async-rl, please report it"
_ARRAYS_PER_BATCH = len(MicroBatch.__dataclass_fields__)


def policy_schedule(config: Config) -> Schedule:
    """Return the learning-rate schedule of a reinforcement learning run. Skipped optimizer steps don't advance it."""
    optimizer = config.optimizer
    return Schedule(
        kind=optimizer.schedule,
        lr=optimizer.lr,
        warmup_updates=optimizer.warmup_steps,
        total_updates=config.last_version,
        min_ratio=optimizer.min_lr_ratio,
    )


class FsdpEngine:
    """The models on this rank. Rank 0 calls the methods of ``Engine``, other ranks ``follow``.

    Attributes:
        policy: the policy, or the only model that is trained.
        models: what is trained, by name: the policy, and a critic if ``loss.advantage`` needs one.
        critic: the commands to the critic. None if there is none.
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
        sampler: RankSampler | None = None,
    ) -> None:
        """Load the model of ``model.path`` and shard it. All ranks build the same engine.

        Args:
            config: the run's config.
            ranks: the connection to the other ranks.
            objective: the loss. None: that of a reinforcement learning run.
            schedule: the learning rates. None: those of a reinforcement learning run.
            max_length: number of tokens of the longest sequence. None: that of a reinforcement learning run.
            head: what the model computes. Where a value model is trained, scores are its values.
            sampler: samples on this rank's device between ``sample`` and the next command. The engine closes it.

        Raises:
            ModelError: the model is missing, can't be trained, or computes wrong values for a micro-batch.
            ConfigError: the user's own loss fails its trial, or differs between the ranks' machines;
                ``learner.offload`` means nothing here; or ``optimizer.name`` needs what is missing here.
        """
        self._config, self._ranks, self._sampler = config, ranks, sampler
        self._sampled: tuple[str, int] | None = None
        with ranks.together("loading the loss"):
            of_policy = objective or policy_objective(config, device=ranks.device)
            if objective is None:
                check_same_code(config, ranks)
        with ranks.together("checking the optimizer"):
            check_optimizer(config.optimizer, torch.device("cpu") if config.learner.offload == "all" else ranks.device)
        with ranks.together("loading the model"):
            torch.manual_seed(config.run.seed + ranks.rank)
            mesh = Mesh.build(ranks.layout, ranks.device.type, ranks.timeout) if ranks.has_group else None
            self._clock = PhaseClock(ranks.device)
            sampling = config.sampling
            max_length = max_length or sampling.max_prompt_tokens + sampling.max_new_tokens
            self.policy = policy = TrainedModel(
                config, ranks, mesh, self._clock, objective=of_policy, schedule=schedule or policy_schedule(config),
                head=head, max_length=max_length, is_policy=objective is None,
            )  # fmt: skip
            self.models: dict[ModelName, TrainedModel] = {"policy": policy}
            self.critic: CriticCommands | None = None
            if objective is None and config.loss.has_critic:
                self.models["critic"] = _load_critic(config, ranks, mesh, self._clock, policy, max_length=max_length)
                self.critic = CriticCommands(self)
            self._gathering = False
            self._is_closed = False
            self._saver = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-tensors")
            self._saving: Future[None] | None = None

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
        for name, trained in self.models.items():
            if self._config.learner.compile:
                parts = trained.pack(short_sequences(trained.model, copies=copies))
                with self._command("check_compiled"):
                    self._scatter("check_compiled", {"model": name}, parts)
                    trained.check_compiled(parts[0])
            if layout.tensor <= 2:
                model = trained.model
                check_neighbours(
                    lambda sequences, name=name: self._scores(sequences, name)[0], model.causal_lm.config,
                    num_ranks=copies, packing=model.packing,
                )  # fmt: skip

    def update(self, sequences: Sequence[TrainSequence], *, version: int, model: ModelName = "policy") -> UpdateStats:
        """Make one optimizer step of a ``model``, as ``Engine.update`` says.

        Raises:
            ValueError: a sequence can't be packed (``packing.pack``).
            TrainingError: another rank failed.
        """
        with self._clock.phase("pack"):
            trained = self.models[model]
            parts = trained.pack(sequences)
        with self._command("update"):
            records = model == "policy" and any(sequence.is_recorded for sequence in sequences)
            with self._clock.phase("scatter"):
                self._scatter("update", {"model": model, "version": version, "records": records}, parts)
            stats, peak_bytes, of_ranks = trained.update(parts[0], version, records=records)
        columns = [by_sequence(parts, values) for values in zip(*of_ranks, strict=True)]
        recorded = [sequence.sequence_id for sequence in sequences if sequence.is_recorded and columns]
        return replace(
            stats,
            tokens={i: TokenOutcomes(*(values[i] for values in columns)) for i in recorded},
            padded_cost=padded_cost(parts) if trained.model.packing == "padded" else None,
            cost=trained.cost(parts, peak_bytes),
        )

    def score(self, sequences: Sequence[TrainSequence], *, of: ScoredBy) -> dict[int, np.ndarray]:
        """Return the log-probabilities of trained tokens, as ``Engine.score`` says.

        Raises:
            ValueError: a sequence can't be packed (``packing.pack``).
            TrainingError: another rank failed.
        """
        assert of == "policy" or self.policy.has_reference
        return self._scores(sequences, by_reference=of == "reference")[0]

    def score_policy(self, sequences: Sequence[TrainSequence]) -> dict[int, PolicyScores]:
        """Return the policy's log-probabilities and entropies, as ``Engine.score_policy`` says.

        Raises:
            ValueError: a sequence can't be packed (``packing.pack``).
            TrainingError: another rank failed.
        """
        logprobs, entropies = self._scores(sequences)
        return {i: PolicyScores(values, entropies[i]) for i, values in logprobs.items()}

    def values(self, sequences: Sequence[TrainSequence]) -> dict[int, np.ndarray]:
        """Return the critic's values, as ``Critic.score`` says.

        Raises:
            ValueError: a sequence can't be packed (``packing.pack``).
            TrainingError: another rank failed.
        """
        return self._scores(sequences, "critic")[0]

    def _scores(
        self, sequences: Sequence[TrainSequence], model: ModelName = "policy", *, by_reference: bool = False
    ) -> list[dict[int, np.ndarray]]:
        """Return the log-probabilities and the entropies (or values and zeros), each by sequence id."""
        parts = self.models[model].pack(sequences)
        with self._command("score"):
            self._scatter("score", {"model": model, "by_reference": by_reference}, parts)
            of_ranks = self.models[model].score(parts[0], by_reference=by_reference)
        return [by_sequence(parts, values) for values in zip(*of_ranks, strict=True)]

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded parameters, as ``Engine.gather`` says. They are valid until ``update``.

        Parameters have the dtype that the model computes in. If the caller stops early, the remaining parameters are
        gathered and discarded.
        """
        with self._command("gather"):
            self._ranks.broadcast(encode("gather", {}))
            self._gathering = True
            tensors = self.policy.gather()
            try:
                yield from tensors
            finally:
                for _ in tensors:
                    pass
                self._gathering = False

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint, as ``Engine.save`` says, with the model's config and tokenizer files for an export
        without the run. The critic is in a subdirectory of its own.

        For a model with adapters only the adapters are written, and the path of the frozen weights. Exporting such a
        checkpoint needs ``model.path``.
        """
        with self._command("save"):
            self._ranks.broadcast(encode("save", {"directory": str(directory)}))
            self._save(directory)
            self._write_files(directory, extra)

    def begin_save(self, directory: Path, extra: Mapping[str, Any]) -> Future[None]:
        """Copy the state and write it in the background, as ``Engine.begin_save`` says."""
        with self._command("save"):
            self._ranks.broadcast(encode("begin_save", {"directory": str(directory)}))
            return self._begin_save(directory, lambda: self._write_files(directory, extra))

    @property
    def base_weights(self) -> BaseWeights | None:
        """What the adapters' frozen weights are, on rank 0. None without adapters."""
        return None if self.policy.adapters is None else self.policy.adapters.base

    def _write_files(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """On rank 0, write the files of a checkpoint that have no tensors."""
        write_extra(directory, extra)
        for name, trained in self.models.items():
            trained.write_files(model_part(directory, name))

    def load(self, directory: Path) -> None:
        """Restore a checkpoint, as ``Engine.load`` says.

        Raises:
            RunError: ``directory`` is no checkpoint, or the checkpoint or its adapters belong to another model, or it
                has no critic and this run needs one.
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
        if self._sampler is not None:
            self._sampler.check()
        failure = self._ranks.first_failure()
        if failure:
            raise TrainingError(failure)
        with self._command("tick"):
            self._ranks.broadcast(encode("tick", {}))

    def sample(self, order: SamplingOrder) -> None:
        """Let every rank sample, as ``SamplingEngine.sample`` says."""
        is_new = self._sampled != (order.lineage, order.version)
        self._sampled = (order.lineage, order.version)
        with self._command("sample"):
            self._ranks.broadcast(encode("sample", {"order": asdict(order), "is_new": is_new}))
            self._resume_sampling(order, is_new=is_new)

    def stop_sampling(self) -> float:
        """Let rank 0 sample no more, as ``SamplingEngine.stop_sampling`` says."""
        sampler = self._own_sampler
        sampler.pause()
        return sampler.busy_s

    @property
    def _own_sampler(self) -> RankSampler:
        assert self._sampler is not None, f"sampling needs a sampler on every rank; {_BUG}"
        return self._sampler

    def _resume_sampling(self, order: SamplingOrder, *, is_new: bool) -> None:
        """Give this rank's sampler the whole policy, if its version is new, and let it go on."""
        self._own_sampler.resume(order, self.policy.gather() if is_new else None)

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
                self._use_device(message.type)
                self._execute(message)

    def _leave(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        if not self._ranks.is_broken:
            self._finish_save()  # its collectives need the process group
        self._ranks.close()

    def _execute(self, message: Message) -> None:
        match message.type:
            case "update":
                version, records = int(message.fields["version"]), bool(message.fields["records"])
                self._addressed(message).update(_micro_batches(message), version, records=records)
                self._clock.read()  # only rank 0's phases are reported
            case "score":
                by_reference = bool(message.fields["by_reference"])
                self._addressed(message).score(_micro_batches(message), by_reference=by_reference)
            case "check_compiled":
                trained = self._addressed(message)
                assert isinstance(trained, TrainedModel), f"only a model has compiled layers; {_BUG}"
                trained.check_compiled(_micro_batches(message))
            case "gather":
                for _ in self.policy.gather():
                    pass
            case "save":
                self._save(Path(message.fields["directory"]))
            case "begin_save":
                self._begin_save(Path(message.fields["directory"]), lambda: None)
            case "load":
                self._load(Path(message.fields["directory"]))
            case "sample":
                self._resume_sampling(SamplingOrder(**message.fields["order"]), is_new=message.fields["is_new"])
            case "tick":
                pass
            case _:
                raise ValueError(f"expected a known command of rank 0, got {message.type!r}; {SAME_VERSION}")

    def _addressed(self, message: Message) -> TrainedModel:
        return self.models[message.fields["model"]]

    @contextmanager
    def _command(self, what: str) -> Iterator[None]:
        if self._gathering:
            raise RuntimeError(
                f"{what}: expected no open gather(), got one whose iterator was not read to its end; {_BUG}"
            )
        self._use_device(what)
        with self._ranks.together(what):
            yield

    def _use_device(self, command: str) -> None:
        """Let this rank sample no more, because ``command`` uses its device."""
        if self._sampler is not None and command != "tick":
            self._sampler.pause()

    def _scatter(self, command: str, fields: Mapping[str, Any], parts: Sequence[Sequence[MicroBatch]]) -> None:
        """Send every other rank the command and the micro-batches of its data rank."""
        if self._ranks.world_size > 1:
            self._ranks.scatter_parts(
                lambda data_rank: encode(command, fields, [a for mb in parts[data_rank] for a in to_arrays(mb)])
            )

    def _save(self, directory: Path) -> None:
        for name, trained in self.models.items():
            write_training_state(model_part(directory, name), trained.training_state(), self._ranks)

    def _load(self, directory: Path) -> None:
        for name, trained in self.models.items():
            part = model_part(directory, name)
            if directory.is_dir() and not part.is_dir():
                raise RunError(
                    f"expected a {name} in the checkpoint {directory}, got none: it was written without one; resume "
                    f"with the loss.advantage that the run began with, or start over with --fresh"
                )
            trained.load(part)

    def _begin_save(self, directory: Path, then: Callable[[], None]) -> Future[None]:
        """Copy this rank's state, and write it in a thread that then calls ``then``."""
        self._finish_save()  # another rank may know earlier that all have written
        states = {name: trained.copied_state() for name, trained in self.models.items()}

        def write() -> None:
            for name, state in states.items():
                write_training_state(model_part(directory, name), state, self._ranks)
            then()

        self._saving = self._saver.submit(write)
        return self._saving

    def _finish_save(self) -> None:
        """Wait until this rank writes nothing. Rank 0 reports errors."""
        if self._saving is not None:
            wait([self._saving])
        self._saving = None


class CriticCommands:
    """Rank 0's commands to an engine's critic. It implements ``engine.Critic``."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    def score(self, sequences: Sequence[TrainSequence]) -> dict[int, np.ndarray]:
        return self._engine.values(sequences)

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        return self._engine.update(sequences, version=version, model="critic")


def _load_critic(
    config: Config, ranks: Ranks, mesh: Mesh | None, clock: PhaseClock, policy: TrainedModel, *, max_length: int
) -> TrainedModel:
    """Load the critic of ``[critic]``. All ranks do so at the same time.

    Raises:
        ModelError: its model can't be used, or has another vocabulary than the policy's.
    """
    settings = config.of_critic
    try:
        critic = TrainedModel(
            settings, ranks, mesh, clock, objective=ValueObjective(config.critic.value_clip),
            schedule=policy_schedule(settings), head="value", max_length=max_length, is_policy=False,
        )  # fmt: skip
    except ModelError as error:
        raise ModelError(
            f"can't use the critic's model {settings.model.path} (critic.path, or model.path if that is unset): "
            f"{str(error).removeprefix('model.path: ')}"
        ) from error
    if critic.model.vocab_size != policy.model.vocab_size:
        raise ModelError(
            f"critic.path: expected a model of the policy's vocabulary, {policy.model.vocab_size} tokens, got "
            f"{critic.model.vocab_size}; choose one with the same tokenizer"
        )
    return critic


def _micro_batches(message: Message) -> list[MicroBatch]:
    arrays = message.arrays
    starts = range(0, len(arrays), _ARRAYS_PER_BATCH)
    return [from_arrays(arrays[start : start + _ARRAYS_PER_BATCH]) for start in starts]
