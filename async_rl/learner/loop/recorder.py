"""Records each step: which groups it trained on, its row of ``metrics.jsonl``, and its rollouts as text.

The trainer calls ``StepRecorder.record_trained`` when the queue has acknowledged a step, so a learner that was replaced
by a newer one records nothing. It calls ``record_step`` after it published the step's weights. ``log.rollouts_every``
says which steps write ``rollouts/step-NNNNNN.jsonl``, and ``log.rollouts_groups`` how many of their groups.

``StepClock`` measures where the learner's time goes and how busy the generators were. Overlap efficiency is steps/s
divided by ``1 / max(gen, train)``. gen is the time for which generators sample sequences, per step, divided by the
number of sequences that they can sample at once. train is the learner's busy seconds per step. At 1.0 the slower side
never waits.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch.profiler import record_function

from async_rl.config.config import Config
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.interface import UpdateStats
from async_rl.learner.loop.decode_times import decode_times
from async_rl.learner.loop.publishing import WeightsSender
from async_rl.learner.loop.step_result import StepResult, cut_metrics, device_metrics, queue_metrics
from async_rl.queue.messages import GENERATOR_TOTALS, Acked, GeneratorStats, TakenGroup
from async_rl.run.figures.progress import duration
from async_rl.run.records.eval_records import Decode, answer_record, write_json_lines

logger = logging.getLogger(__name__)


class RowWriter(Protocol):
    """Appends rows to a file: the metrics, or the log of the groups that each step trained on."""

    def write(self, row: dict[str, Any]) -> None: ...


class StepRecorder:
    """Writes the records of one start of the learner. Its ``clock`` times the steps."""

    def __init__(
        self,
        config: Config,
        state: TrainerState,
        *,
        metrics: RowWriter,
        step_log: RowWriter,
        weights: WeightsSender,
        run_dir: Path,
        decode: Decode,
        confirm: Callable[[], None],
    ) -> None:
        """Prepare the records of a run.

        Args:
            config: the run's config.
            state: the trainer's state, from which step and version are taken.
            metrics: takes the rows of ``metrics.jsonl``.
            step_log: takes the groups that each step trained on.
            weights: gives metrics of the weights that are sent.
            run_dir: the run directory.
            decode: turns token ids into text.
            confirm: raises LineageError if a newer learner has taken over the run.
        """
        self._confirm = confirm
        self.clock = StepClock(state.elapsed_s)
        self._config, self._state, self._run_dir, self._decode = config, state, run_dir, decode
        self._metrics, self._step_log = metrics, step_log
        self._weights = weights

    def record_trained(self, taken: tuple[TakenGroup, ...]) -> None:
        """Log which groups the acknowledged step trained on. The log proves that no prompt was skipped or trained
        twice.
        """
        groups = [(item.group.position, item.group.lease_id) for item in taken]
        self._step_log.write({"step": self._state.step, "lineage": self._state.lineage, "groups": groups})

    def record_step(
        self, result: StepResult, acked: Acked, figures: Mapping[str, float],
        other_updates: Sequence[UpdateStats] = (),
    ) -> None:  # fmt: skip
        """Write the metrics of the step that was just acknowledged and published, and its rollouts if they are due.

        ``figures`` are the metrics of the step's training. ``other_updates`` are optimizer steps of other models, which
        use the devices as the policy's do.
        """
        state, stats = self._state, acked.stats
        row = {**figures, **queue_metrics(stats)}
        row |= cut_metrics(
            [rollout for item in result.groups for rollout in item.group.rollouts],
            max_new_tokens=self._config.sampling.max_new_tokens,
            max_turn_tokens=self._config.environment.max_turn_tokens,
        )
        row |= self.clock.lap(stats.generators, stats.reports, trained_tokens=result.facts.tokens_trained)
        row |= device_metrics([*result.measured, *other_updates], row["time/train_s"])
        row |= self._weights.stats()
        self._metrics.write({"step": state.step, "version": state.version, **row})
        log_rollouts(
            self._run_dir,
            result.groups,
            step=state.step,
            version=result.version,
            config=self._config,
            decode=self._decode,
            confirm=self._confirm,
        )

    def record_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation that was requested at ``step``."""
        self._metrics.write({"step": step, "time_s": self.clock.elapsed_s, **figures})


def log_rollouts(
    run_dir: Path, taken: Sequence[TakenGroup], *, step: int, version: int, config: Config, decode: Decode,
    confirm: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Write the rollouts of ``step`` as text, if they are due at this step.

    ``version`` is the learner's version before the step. ``confirm`` is called right before the file appears.
    """
    indices = chosen_groups(len(taken), config, step)
    if not indices:
        return
    chosen = [taken[index] for index in indices]
    lines = [line for item in chosen for line in _lines(item, version, decode)]
    write_json_lines(run_dir / "rollouts" / f"step-{step:06d}.jsonl", lines, confirm)


def chosen_groups(num_groups: int, config: Config, step: int) -> list[int]:
    """Return the indices of the step's groups to log, in order, drawn at random from the run's seed and the step.

    The first groups would always be those of the oldest version. Empty if none are due:
    they are at the first step, at every ``log.rollouts_every``-th after it, and at the last. With ``log.replayable``
    all are.
    """
    if config.log.replayable:
        return list(range(num_groups))
    every = config.log.rollouts_every
    if not every or ((step - 1) % every and step != config.learner.steps):
        return []
    wanted = config.log.rollouts_groups
    if wanted == "all" or wanted >= num_groups:
        return list(range(num_groups))
    return sorted(random.Random(f"{config.run.seed}/{step}").sample(range(num_groups), wanted))


def _lines(item: TakenGroup, version: int, decode: Decode) -> list[dict[str, Any]]:
    group = item.group
    shared = {
        "position": group.position, "lease_id": group.lease_id, "generator": group.generator_id, "trained_at": version,
        "masked": item.masked, "temperature": group.temperature,
    }  # fmt: skip
    return [
        {**shared, "index": index, **answer_record(item.prompt, rollout, decode)}
        for index, rollout in enumerate(group.rollouts)
    ]


WAIT_LOG_S = 30.0
"""Interval between two log lines about one wait."""


class WaitLog:
    """Logs every ``every_s`` seconds how long one wait has lasted, and why. Create it where the wait begins."""

    def __init__(self, every_s: float = WAIT_LOG_S) -> None:
        self._every_s = every_s
        self._start = self._last_log = time.monotonic()

    def still_waiting(self, awaited: str, done: int = 0, total: int = 0) -> None:
        """Record that the wait goes on. Call this after every failed attempt.

        Args:
            awaited: for what, and why, if that is known: ``EvalWait.reason``, for example.
            done: how many of ``total`` awaited parts are done. If some are, the line has the time that is left at
                their mean rate since the wait began, and is no warning.
        """
        now = time.monotonic()
        if now - self._last_log >= self._every_s:
            waited_s = now - self._start
            left = f", about {duration(waited_s / done * (total - done))} left" if done else ""
            logger.log(
                logging.INFO if done else logging.WARNING, "waiting %.0f s for %s%s", waited_s, awaited, left
            )  # fmt: skip
            self._last_log = now


class StepClock:
    """Measures the time of each step and of its parts. ``lap`` ends the step and returns its metrics."""

    def __init__(self, elapsed_s: float) -> None:
        self._origin = time.monotonic() - elapsed_s
        self._lap_start = time.monotonic()
        self._parts: dict[str, float] = {}
        self._generators: dict[str, tuple[GeneratorStats, GeneratorStats | None]] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began. Time between a stop and a restart does not count."""
        return time.monotonic() - self._origin

    def start_lap(self) -> None:
        """Begin the first step now. Time before this call belongs to no step."""
        self._lap_start, self._parts = time.monotonic(), {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the duration of the ``with`` block to the step's part ``name``. In a trace the block is a range.

        The parts are ``wait``, ``train``, ``prepare`` (a part of ``train``), ``critic`` (likewise, with one only),
        ``publish`` and ``checkpoint``.
        """
        start = time.monotonic()
        try:
            with record_function(name):
                yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.monotonic() - start

    def lap(
        self, together: GeneratorStats, reports: Mapping[str, GeneratorStats], *, trained_tokens: int
    ) -> dict[str, float]:
        """End the current step and begin the next one. Return the time metrics of the step that ends.

        Args:
            together: decode steps and counters of all generators that are alive.
            reports: the last report of each of them. Its difference to the one before counts, until the next one.
            trained_tokens: number of tokens that the step trained on.
        """
        now = time.monotonic()
        wall = max(now - self._lap_start, 1e-9)
        parts = {name: self._parts.get(name, 0.0) for name in ("wait", "prepare", "train", "publish", "checkpoint")}
        busy = max(wall - parts["wait"], 0.0)
        metrics = {
            "time_s": self.elapsed_s,
            "time/step_s": wall,
            "time/wait_s": parts["wait"],
            "time/prepare_s": parts["prepare"],
            "time/train_s": parts["train"],
            "time/publish_s": parts["publish"],
            "time/checkpoint_s": parts["checkpoint"],
            **({"time/critic_s": self._parts["critic"]} if "critic" in self._parts else {}),
            "idle/learner": min(parts["wait"] / wall, 1.0),
            "throughput/trained_tokens_per_s": trained_tokens / wall,
            **{
                name if name.startswith("agent/") else f"grading/{name}": float(count)
                for name, count in together.counters.items()
            },
            **self._generator_metrics(together, reports, wall, busy),
        }
        self._lap_start, self._parts = now, {}
        return metrics

    def _generator_metrics(
        self, together: GeneratorStats, reports: Mapping[str, GeneratorStats], wall: float, learner_busy: float
    ) -> dict[str, float]:
        self._generators = {id_: _growth(self._generators.get(id_, (now, None)), now) for id_, now in reports.items()}
        growths = [growth for _, growth in self._generators.values() if growth is not None]
        if not growths:
            return {}
        num, slots = len(growths), sum(growth.max_running for growth in growths)

        def rate(name: str) -> float:
            return sum(getattr(growth, name) / growth.wall_s for growth in growths) / num

        activations = sum(growth.num_activations for growth in growths)
        # All decode steps since the start count: those of one step are too much alike to show what a sequence takes.
        times, used = decode_times(together.decoded), rate("busy_sequence_s") * num / slots
        running = rate("busy_sequence_s") / max(rate("busy_s"), 1e-9)
        return {
            "idle/generators": max(1.0 - rate("busy_s"), 0.0),
            "throughput/generated_tokens_per_s": rate("num_tokens") * num,
            "time/pause_s": sum(growth.pause_s for growth in growths) / activations if activations else 0.0,
            "time/generate_s": used * wall,
            "time/grading_s": rate("grading_s") * wall,
            "time/environment_s": rate("environment_s") * wall,
            **{f"idle/{cause}": rate(f"idle_{cause}_s") for cause in ("grading", "environment", "weights", "leases")},
            "overlap/efficiency": max(used * wall, learner_busy) / wall,
            **({} if times is None else _decode_metrics(times, used, running=running, slots=slots / num)),
        }


def _growth(
    known: tuple[GeneratorStats, GeneratorStats | None], report: GeneratorStats
) -> tuple[GeneratorStats, GeneratorStats | None]:
    """Return a generator's ``report``, and by how much it is more than the one before; None if that is not known.

    ``known`` is the result for the report before. Heartbeats may be rarer than steps: it stays until the next one.
    """
    before, _ = known
    # All totals but the first, max_running.
    more: dict[str, Any] = {name: getattr(report, name) - getattr(before, name) for name in GENERATOR_TOTALS[1:]}
    if not any(more.values()):
        return known
    # A generator that restarted under its name counts from 0 again, maybe with room for another number of sequences.
    is_growth = min(more.values()) >= 0 and more["wall_s"] > 0 and before.max_running == report.max_running > 0
    return report, GeneratorStats(report.max_running, **more) if is_growth else None


def _decode_metrics(times: tuple[float, float], used: float, *, running: float, slots: float) -> dict[str, float]:
    """Return the metrics of decode steps that take ``times``, of which ``used`` is the share of all slots in use.

    Full batches would take longer for each step than those of ``running`` sequences, but have more in it.
    """
    step_s, sequence_s = times
    now_s = step_s + sequence_s * running  # 0 if nothing ran, where no part is shared by all steps
    needed = used * (step_s + sequence_s * slots) / now_s if now_s else 0.0
    return {"time/decode_step_s": step_s, "time/decode_sequence_s": sequence_s, "idle/spare": max(0.0, 1.0 - needed)}
