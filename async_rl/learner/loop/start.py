"""Start a learner: build the ``Trainer`` with its real parts, restore the latest checkpoint, and run it.

``run_learner`` is the command ``async-rl learner`` on every rank. Rank 0 calls ``train_with``, which benchmarks call
with another engine.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.config.loading import config_from_toml, config_to_toml
from async_rl.data.answer_text import answer_decoder
from async_rl.data.chat import load_tokenizer, model_directory, model_files, model_routing, vocabulary_size
from async_rl.data.turn_end import turn_ends
from async_rl.errors import QueueError
from async_rl.learner.checkpoints.files import TrainerState, latest_checkpoint, read_extra, run_state
from async_rl.learner.checkpoints.fork import find_fork_point, fork_run, must_fork, notes_on_models
from async_rl.learner.checkpoints.resume import ResumePoint, find_resume_point, take_over
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.engine.roles import follow, lead
from async_rl.learner.export.model import export_checkpoint
from async_rl.learner.interface import Critic, Engine
from async_rl.learner.loop.critic import CriticPart
from async_rl.learner.loop.idle_sampling import IdleSampling
from async_rl.learner.loop.mirroring import MirrorPart
from async_rl.learner.loop.parity import ParityGate
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.publishing import FixedLagWeights, StagedWeights, WeightsSender
from async_rl.learner.loop.received import DropBias, ReceivedAccuracy
from async_rl.learner.loop.replay import RecordedRun, ReplayQueue, ReplayWeights, check_replayable
from async_rl.learner.loop.rollout_records import RolloutRecords
from async_rl.learner.loop.trainer import Trainer
from async_rl.learner.ranks import Ranks, compute_dtype, init_ranks
from async_rl.learner.sampling import MakeSampler, RankSampler, SamplingEngine
from async_rl.net.address import host_towards, is_loopback
from async_rl.net.keys import ServerKeys, client_keys_of
from async_rl.output import logged
from async_rl.process.child import reuse_freed_memory
from async_rl.process.stop import StopRequest
from async_rl.process.user_code import DIGESTS_FILE, changed_code, write_digests
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.server.start import QueueRestarter, ensure_queue, finish_queue
from async_rl.run.config_changes import record_change
from async_rl.run.directory import RunDir, unused
from async_rl.run.figures.progress import StepLines
from async_rl.run.following.follower import followed
from async_rl.run.following.sinks import check_sinks
from async_rl.run.lock import RunLock, locked_run_dir
from async_rl.run.records.eval_records import Decode
from async_rl.run.records.metrics import MetricsWriter
from async_rl.run.records.step_log import Row, StepLog, read_rows
from async_rl.run.reuse import check_run_dir, check_shared, has_ended, prepare_run_dir
from async_rl.weights.adapters import ADAPTER_BASE
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.channel.transports import choose_transport
from async_rl.weights.collective import nccl
from async_rl.weights.staging import Staging

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LearnerContext:
    """Settings that differ between a real learner and a benchmark's, and between a lone learner and one of ``launch``.

    Attributes:
        is_launched: whether ``launch`` started this learner, which then starts the queue server and shows the steps.
        files: name -> content of the model's files, which the queue sends to generators.
        decode: token ids -> the text that rewards read, for the logs.
        decode_all: the same with all special tokens. None: ``decode``.
        insecure: whether to leave connections unencrypted, even off loopback.
        device: the engine's device.
        on_queue: called with the queue's address once it is known.
        export: whether to write ``export/`` at the end.
        lock: the run directory's; if unset, nobody else can use the directory.
        stop_signal: returns the signal that asks the learner to save and end, 0 if there is none.
        sampling: the engine, if its ranks sample while the learner waits.
        critic: the engine's commands to the critic. None if there is none.
        replay: the recorded run whose groups are trained on, in the place of a queue server's. None in other runs.
    """

    is_launched: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    decode: Decode = lambda token_ids: " ".join(map(str, np.asarray(token_ids).tolist()))
    decode_all: Decode | None = None
    insecure: bool = False
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)
    on_queue: Callable[[str], None] | None = None
    export: bool = False
    lock: RunLock | None = None
    stop_signal: Callable[[], int] = lambda: 0
    sampling: SamplingEngine | None = None
    critic: Critic | None = None
    replay: RecordedRun | None = None

    def check_lock(self) -> None:
        """Raise LineageError if another process has taken over the run directory."""
        if self.lock is not None:
            self.lock.check()


def run_learner(
    config: Config, *, fresh: bool = False, insecure: bool = False, is_launched: bool = False,
    takeover: bool = False, source: str | None = None, make_sampler: MakeSampler | None = None,
    replay: RecordedRun | None = None,
) -> None:  # fmt: skip
    """Run the command ``async-rl learner``: rank 0 trains, the other ranks follow its commands until it ends.

    Args:
        config: the run's config.
        fresh: start over; the old run directory is moved aside.
        insecure: leave connections unencrypted, even beyond loopback.
        is_launched: ``launch`` started this learner. If not, start a queue server if there is none, and log each step.
        takeover: replace a process that uses the run directory.
        source: ``RUN`` or ``RUN@STEP``, the run from which to fork. None if the run is no fork.
        make_sampler: makes what samples on each rank while the learner waits. None: nothing does.
        replay: the recorded run whose groups are trained on. None: those that generators send.

    Raises:
        UserError: the run directory, the model or the log settings can't be used, or another process uses the
            directory.
        TrainingError: the run can't continue.
    """
    if replay is not None:
        check_replayable(config)
    run_dir = check_run_dir(config, fresh=fresh)
    point = None if source is None else find_fork_point(source)
    if point is not None and not must_fork(point, config, fresh=fresh):
        point = None
    if not fresh and has_ended(run_dir, config):
        logger.info(
            "the run in %s is finished; raise learner.steps to train on, or pass --fresh to start over", config.run.dir
        )
        finish_queue(config, run_dir.run_id)
        return
    check_sinks(config)
    reuse_freed_memory()
    ranks = init_ranks(config)
    sampler: RankSampler | None = None
    if make_sampler is not None:
        sampler = make_sampler(config, rank=ranks.rank, device=ranks.device, report=ranks.record_failure)
    if not ranks.is_leader:
        _follow(config, ranks, sampler)
        return
    with ExitStack() as held:
        with ranks.together("preparing the run directory"):
            lock = RunLock.inherit(RunDir(Path(config.run.dir)), "learner")
            if lock is None:
                _, lock = held.enter_context(locked_run_dir(config, role="learner", fresh=fresh, takeover=takeover))
                if point is not None:
                    for note in notes_on_models(point, fork_run(point, config), config):
                        logger.info("%s", note)
            else:
                held.callback(lock.close)
        if not is_launched:
            held.enter_context(followed(config, run_dir, lock, logger.warning))
        context = LearnerContext(insecure=insecure, is_launched=is_launched, lock=lock, replay=replay)
        _lead(config, ranks, sampler, context, fresh=fresh)


def _follow(config: Config, ranks: Ranks, sampler: RankSampler | None) -> None:
    """Run a rank other than 0 until rank 0 ends. A signal that this rank gets is reported to rank 0."""
    with logged(logger, f"loading the model {config.model.path}"):
        engine = FsdpEngine(config, ranks, sampler=sampler)
    follow(engine, ranks, config.checkpoint.grace_s)


def _lead(config: Config, ranks: Ranks, sampler: RankSampler | None, context: LearnerContext, *, fresh: bool) -> None:
    """Run rank 0 in the run directory, which this process has locked."""
    with ranks.together("reading tokenizer and code"):
        tokenizer = load_tokenizer(config.model.path, needs_template=config.data.prompt_format == "chat")
        ends = turn_ends(tokenizer, model_directory(config.model.path), config.data.template_arguments)
        context = replace(
            context,
            files={
                **model_files(config.model.path),
                DIGESTS_FILE: write_digests(Path(config.run.dir), config.recorded_code_names),
            },
            decode=answer_decoder(tokenizer, ends.ids),
            decode_all=lambda token_ids: str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)),
            device=ranks.device,
            export=True,
        )
    with logged(logger, f"loading the model {config.model.path}"):
        engine = FsdpEngine(config, ranks, sampler=sampler)

    def train(stop: StopRequest) -> None:
        files = {**context.files, **_base_file(config, engine)}
        whole = replace(
            context, stop_signal=stop.check, files=files, critic=engine.critic,
            sampling=None if sampler is None else engine,
        )  # fmt: skip
        train_with(config, engine, whole)

    lead(engine, ranks, config.checkpoint.grace_s, train, hint=", without --fresh" if fresh else "")


def _base_file(config: Config, engine: FsdpEngine) -> dict[str, bytes]:
    """Return the file from which generators learn which weights to load below adapters, if versions hold only these."""
    if not config.lora.publishes_adapters:
        return {}
    assert engine.base_weights is not None
    return {ADAPTER_BASE: engine.base_weights.to_json()}


def train_with(config: Config, engine: Engine, context: LearnerContext) -> list[dict[str, Any]]:
    """Train with ``engine`` until the run ends. Return the rows of ``metrics.jsonl``."""
    run_dir = prepare_run_dir(config)
    point = find_resume_point(run_dir.path)
    restored = _restore(engine, point.checkpoint, config)
    state = restored.state
    connected, written = ExitStack(), ExitStack()
    try:
        queue, weights = _connect(config, run_dir, engine, context, state, connected)
        if context.on_queue is not None:
            context.on_queue(queue.address)
        context.check_lock()
        shared = queue.attach(
            run_id=run_dir.run_id, lineage=state.lineage, parent_lineage=state.parent_lineage,
            fork_version=state.fork_version, step=state.step, num_steps=config.learner.steps,
            config_toml=config_to_toml(config), files=context.files, snapshot=restored.snapshot,
        )  # fmt: skip
        check_shared(config, shared)
        confirm = partial(queue.confirm, state.lineage)
        on_row = _show_steps(config, run_dir) if not context.is_launched else lambda row: None
        metrics, trained, summaries = _take_files_over(
            run_dir, point, state, config, written, on_row=on_row, confirm=confirm
        )
        _record_changes(run_dir, restored, config)
        trainer = _trainer(
            config, state, engine, queue, context, run_dir, weights=weights,
            metrics=metrics, trained=trained, summaries=summaries, confirm=confirm,
        )  # fmt: skip
        trainer.run()
        # Release the other ranks now: the export of a large model may outlast their timeout.
        engine.close()
        # Generators and queue stay until all is written, because a learner that dies now is restarted and needs them.
        _wrap_up(run_dir, state, export=context.export, confirm=confirm)
        _finish(queue, state)
    finally:
        connected.close()
        written.close()
    return read_rows(run_dir.metrics)


def _trainer(
    config: Config, state: TrainerState, engine: Engine, queue: LearnerQueue, context: LearnerContext,
    run_dir: RunDir, *, weights: WeightsSender, metrics: MetricsWriter, trained: StepLog,
    summaries: StepLog, confirm: Callable[[], None],
) -> Trainer:  # fmt: skip
    """Return the loop with its real parts, in the order in which a step calls them."""
    gate = _parity_gate(config, state, engine, queue, context.device)
    parts = step_parts(
        config, state, gate=gate, critic=context.critic, sampling=context.sampling, address=queue.address
    )
    records = RolloutRecords(
        config, state, run_dir=run_dir, summaries=summaries, decode=context.decode_all or context.decode,
        confirm=confirm,
    )  # fmt: skip
    return Trainer(
        config,
        state=state,
        engine=engine,
        queue=queue,
        weights=weights,
        metrics=metrics,
        step_log=trained,
        run_dir=run_dir.path,
        decode=context.decode,
        parts=[*parts, records],
        probes=gate,
        stop_signal=context.stop_signal,
        vocab_size=vocabulary_size(config.model.path),
        routing=model_routing(config.model.path) if config.model.routing_replay else None,
    )


def _connect(
    config: Config, run_dir: RunDir, engine: Engine, context: LearnerContext, state: TrainerState, opened: ExitStack
) -> tuple[LearnerQueue, WeightsSender]:
    """Return the client of the run's queue and what sends weights to its generators. ``opened`` closes both."""
    if context.replay is not None:
        return ReplayQueue(context.replay, context.check_lock), ReplayWeights(state)
    queue = opened.enter_context(closing(_connect_queue(config, run_dir, engine, context)))
    publisher = opened.enter_context(closing(_publisher(config, queue.address, context)))
    queue.trouble = lambda: publisher.stats().slow
    return queue, _weights_sender(config, publisher)


def _connect_queue(config: Config, run_dir: RunDir, engine: Engine, context: LearnerContext) -> LearnerQueue:
    """Find or start the run's queue server. Return a client that starts it again if it dies, where that is possible."""
    log_path = run_dir.logs / "queue.log"
    address = ensure_queue(config, run_dir.run_id, context.insecure, log_path, may_start=not context.is_launched)
    # Without a journal a restarted queue is empty, and the learner has to start again from its checkpoint.
    restarter = QueueRestarter(config, run_dir.run_id, context.insecure, log_path, address)
    may_revive = not context.is_launched and config.experimental.journal

    def revive() -> bool:
        context.check_lock()  # a queue server that an older learner starts would write over the run's files
        return restarter()

    return LearnerQueue(
        address, REQUEST_TIMEOUT_S, client_keys_of(config.queue.keys),
        revive=revive if may_revive else None, while_waiting=engine.tick, check_lock=context.check_lock,
    )  # fmt: skip


def _show_steps(config: Config, run_dir: RunDir) -> Callable[[Row], None]:
    """Log where to watch the run. Return a function that logs a line for each step."""
    logger.info(
        "training to step %d; async-rl status %s shows who works and who waits, %s has all figures",
        config.learner.steps, run_dir.path, run_dir.metrics,
    )  # fmt: skip
    return StepLines(config.learner.steps).add


def _record_changes(run_dir: RunDir, restored: Restored, config: Config) -> None:
    """Record and log which keys and sources differ from those with which the checkpoint was trained."""
    code = changed_code(restored.code_digests, config.recorded_code_names)
    change = record_change(run_dir, restored.state.step, restored.config, config, code)
    for line in change.lines:
        logger.info("%s", line)


def _take_files_over(
    run_dir: RunDir, point: ResumePoint, state: TrainerState, config: Config, written: ExitStack, *,
    confirm: Callable[[], None], on_row: Callable[[Row], None] = lambda row: None,
) -> tuple[MetricsWriter, StepLog, StepLog]:  # fmt: skip
    """Bring the run's files back to ``point``, from which this learner attached. ``written`` closes them.

    From here on the queue refuses older learners, so they finish no file of the run any more.

    Raises:
        LineageError: another learner has committed a newer checkpoint since this one read its own, or has taken over.
    """
    take_over(run_dir.path, point, lineage=state.lineage, confirm=confirm)
    if not state.is_resumed:
        run_dir.origin.unlink(missing_ok=True)  # of a fork that was not completed
    metrics = MetricsWriter(run_dir.path, config, on_row=on_row)
    written.callback(metrics.close)
    trained, summaries = StepLog(run_dir.trained), StepLog(run_dir.rollout_summaries)
    for step_log in (trained, summaries):
        written.callback(step_log.close)
        step_log.rewind_to(state.step if state.is_resumed else -1)
    _rewind(run_dir, metrics, state, config)
    return metrics, trained, summaries


def _weights_sender(config: Config, publisher: Publisher) -> WeightsSender:
    """Return the object that stages and sends versions. It delays each version if ``learner.fixed_lag`` is set."""
    staging = Staging(
        config.weights.staging_bytes,
        config.experimental.bucket_bytes,
        deadline_s=config.weights.deadline_s,
        is_pulled=publisher.are_all_pulled,
        # A version stays until its pulls end, so publishing the next one needs room for a second.
        min_versions=2,
    )
    weights = StagedWeights(staging, publisher)
    return weights if config.learner.fixed_lag is None else FixedLagWeights(weights, config.learner.fixed_lag)


def step_parts(
    config: Config, state: TrainerState, *, gate: ParityGate | None, critic: Critic | None,
    sampling: SamplingEngine | None, address: str,
) -> list[StepPart]:  # fmt: skip
    """Return what this run has beside the algorithm, in the order in which a step calls it.

    ``address`` is the queue server's. What is None is not part of the run.
    """
    parts: list[StepPart] = [ReceivedAccuracy(config), DropBias()]
    if gate is not None:
        parts.append(gate)
    if critic is not None:
        parts.append(CriticPart(critic, config, state))
    if config.checkpoint.mirror is not None:
        parts.append(MirrorPart(RunDir(Path(config.run.dir))))
    if sampling is not None:
        parts.append(IdleSampling(sampling, address=address, lineage=state.lineage))
    return parts


def _parity_gate(
    config: Config, state: TrainerState, engine: Engine, queue: LearnerQueue, device: torch.device
) -> ParityGate | None:
    """Return the parity check of this run. None if it is off, or if the backend has no model and so nothing to
    compare.
    """
    if config.weights.parity == "off" or not has_model(config.generator.backend):
        return None
    dtype = str(compute_dtype(config, device)).removeprefix("torch.")
    return ParityGate(config, state, engine, queue, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a learner continues from.

    Attributes:
        state: the trainer's state, under a new lineage.
        snapshot: the queue's state. None if there is no checkpoint.
        config: the config with which the checkpoint was trained; the run's own config if there is no checkpoint.
        code_digests: the digest of each user code with which it was trained, by name.
    """

    state: TrainerState
    snapshot: bytes | None
    config: Config
    code_digests: Mapping[str, str] = field(default_factory=dict)


def _restore(engine: Engine, checkpoint: Path | None, config: Config) -> Restored:
    """Restore the engine from ``checkpoint``, and return the rest of it, changed where ``config`` differs."""
    if checkpoint is None:
        return Restored(TrainerState().fork(), None, config)
    extra = read_extra(checkpoint)
    with logged(logger, f"reading {checkpoint}"):
        engine.load(checkpoint)
    config_toml, stored, snapshot = run_state(checkpoint, extra)
    old = config_from_toml(config_toml, f"the config in {checkpoint}")
    state = stored.fitted(config).fork()
    if config.data.epochs != old.data.epochs:
        state.exhausted = False
    logger.info("resuming from %s: step %d, version %d", checkpoint, state.step, state.version)
    return Restored(state, snapshot, old, extra.get("code_digests", {}))


def _publisher(config: Config, queue_address: str, context: LearnerContext) -> Publisher:
    host, weights = host_towards(queue_address), config.weights
    is_trusted = context.insecure or weights.trusted_network
    has_nccl = context.device.type == "cuda" and nccl.is_installed()
    transport = choose_transport(
        weights.transport, has_cuda=has_nccl, is_trusted=is_trusted or is_loopback(host),
        has_ports=weights.port is not None,
    )  # fmt: skip
    publisher = Publisher(
        host,
        deadline_s=weights.deadline_s,
        insecure=is_trusted,
        keys=None if config.queue.keys is None else ServerKeys.ephemeral(config.queue.keys),
        transport=transport,
        device=str(context.device) if context.device.type == "cuda" else None,
        chunk_bytes=config.experimental.bucket_bytes,
        has_deltas=None if weights.deltas == "auto" else weights.deltas == "on",
        has_peers=weights.peers,
        ports=weights.ports,
    )
    why = "" if weights.port is None else "; weights.port is set, and gloo and nccl would choose their own ports"
    if context.device.type == "cuda" and weights.transport == "auto" and not has_nccl:
        why += "; nccl needs the package nccl4py: pip install 'async-rl[nccl]'"
    control, stream = publisher.ports
    logger.info("weights travel by %s from %s, ports %d and %d%s", transport, host, control, stream, why)
    return publisher


def _rewind(run_dir: RunDir, metrics: MetricsWriter, state: TrainerState, config: Config) -> None:
    """Move aside what was written after the checkpoint, or everything if there is no checkpoint.

    The evaluations of the last step are recorded after its checkpoint. They are requested again, unless the run now
    goes on beyond that step.
    """
    step = state.step if state.is_resumed else -1
    evals = set(state.pending_evals)
    if state.exhausted or state.step >= config.learner.steps:
        evals |= {(dataset, state.step) for dataset in config.data.eval}
    metrics.rewind_to(step, evals_to_come=evals)
    anew = {f"{dataset}-step-{step:06d}" for dataset, step in evals}
    for folder in (run_dir.rollouts, run_dir.eval):
        written = list(folder.glob("*step-*.jsonl"))
        gone = [p for p in written if int(p.stem.rpartition("-")[2]) > step or p.stem in anew]
        if gone:
            aside = unused(folder / "rolled_back")
            aside.mkdir()
            for path in gone:
                path.rename(aside / path.name)


def _wrap_up(run_dir: RunDir, state: TrainerState, *, export: bool, confirm: Callable[[], None]) -> None:
    """Write the last files. ``confirm`` raises LineageError if a newer learner has taken over the run."""
    confirm()
    checkpoint = latest_checkpoint(run_dir.path)
    if export and checkpoint is not None:
        # A learner that died after its export left these files. The export never replaces files.
        for remains in (run_dir.export, *run_dir.path.glob(f".{run_dir.export.name}.*.partial")):
            shutil.rmtree(remains, ignore_errors=True)
        with logged(logger, f"exporting the model to {run_dir.export}"):
            export_checkpoint(checkpoint, run_dir.export)
        confirm()
    run_dir.mark_finished({"step": state.step, "version": state.version, "elapsed_s": round(state.elapsed_s, 3)})
    logger.info("finished: step %d, version %d; %s", state.step, state.version, run_dir.path)


def _finish(queue: LearnerQueue, state: TrainerState) -> None:
    """Tell the queue, and so the generators, that the run is over."""
    try:
        queue.finish(state.lineage)
    except QueueError as error:
        logger.warning("the run is finished, but its queue server did not accept the end of the run: %s", error)
