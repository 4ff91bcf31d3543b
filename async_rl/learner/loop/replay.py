"""Trains on the recorded rollouts of a run again: ``async-rl replay``. Neither queue server nor generators run.

A run with ``log.replayable`` records all that its steps train on: the text of ``rollouts/step-NNNNNN.jsonl`` has
rewards and ends, the token columns beside it have tokens, versions and log-probabilities. ``ReplayQueue`` hands them to
the trainer in the place of the queue, step by step, so that another loss or learning rate sees the same samples. With
the run's own settings every step is the same to the bit, where the device computes the same twice.

A rollout is as many versions old as it was. If the replay has made fewer versions by then, because it skipped a step
that the run made, or more of them, its versions are counted from the replay's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.config.config import Config
from async_rl.config.loading import config_from_toml
from async_rl.errors import ConfigError, RunError
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.loop.publishing import NamedTensors, Published
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.core.ledger import Ledger
from async_rl.queue.messages import (
    Acked,
    Announcement,
    Batch,
    GeneratorStats,
    NotReady,
    QueueStats,
    StepAck,
    TakenGroup,
)
from async_rl.records import NO_VERSION, AgentSession, Group, Prompt, Rollout, Span, TokenSequence, Turn
from async_rl.run.directory import RunDir
from async_rl.run.records.step_log import Row, iter_rows
from async_rl.run.records.token_columns import GIVEN, TokenTable, columns_path, read_token_columns
from async_rl.run.reuse import shared_values

FIXED = ("data.eval={}", "eval.sets={}", "weights.parity=off", "weights.sync_every=1", "learner.generate=false")
"""Settings of every replay: nobody samples, so nothing is evaluated or compared."""
_DIGEST = "replayed"
_NOBODY = QueueStats(0, 0, 0, 0, GeneratorStats(), {**Ledger().as_dict(), "outcomes": {}})


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The groups that a run trained on.

    Attributes:
        run_dir: the run directory.
        sizes: for each step of which there are records, the numbers of rollouts of its groups.
    """

    run_dir: RunDir
    sizes: Mapping[int, Sequence[int]]

    @classmethod
    def find(cls, path: Path) -> RecordedRun:
        """Read which steps are recorded.

        Raises:
            RunError: the run in ``path`` recorded no rollouts.
        """
        run_dir = RunDir(path)
        sizes = {row["step"]: row["sizes"] for row in iter_rows(run_dir.rollout_summaries)}
        if not sizes:
            raise RunError(f"replay: {path} has recorded no rollouts; train it with log.replayable = true")
        return cls(run_dir, sizes)

    def read(self, step: int, version: int) -> tuple[TakenGroup, ...]:
        """Return the groups of a step, for a learner whose weights are of ``version`` before it.

        Raises:
            RunError: not all of the step is recorded, or its files are damaged.
        """
        path = self.run_dir.rollouts / f"step-{step:06d}.jsonl"
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            by_group = [list(lines) for _, lines in groupby(lines, itemgetter("position"))]
            sequences = _sequences(read_token_columns(columns_path(path)), version - lines[0]["trained_at"])
            groups = tuple(_group(group, sequences, version) for group in by_group)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"replay: step {step} can't be read from {path} and the token columns beside it: "
                f"{type(error).__name__}: {error}; record all steps with log.replayable = true"
            ) from error
        if (found := [len(item.group.rollouts) for item in groups]) != list(self.sizes[step]):
            raise RunError(
                f"replay: step {step} trained on {sum(self.sizes[step])} rollouts, of which {path} has {sum(found)}; "
                f"record all of them with log.replayable = true"
            )
        return groups


def _sequences(table: TokenTable, shift: int) -> dict[tuple[int, int], list[TokenSequence]]:
    """Return the sequences of each rollout, known by its group's position and its index. ``shift`` is added to their
    versions.
    """
    found: dict[tuple[int, int], list[TokenSequence]] = {}
    ends = np.cumsum(table.sizes)
    outcomes = np.array(table.outcomes, object)
    for number, end in enumerate(ends):
        part = slice(end - table.sizes[number], end)
        mask = outcomes[part] != GIVEN
        versions = np.maximum(table.numbers["versions"][part] + shift, 0)
        sequence = TokenSequence(
            token_ids=table.numbers["token_ids"][part],
            loss_mask=mask,
            behavior_logprobs=np.where(mask, table.numbers["behavior_logprobs"][part], 0.0).astype(np.float32),
            versions=np.where(mask, versions, NO_VERSION).astype(np.int32),
        )
        place = int(table.places["position"][number]), int(table.places["index"][number])
        found.setdefault(place, []).append(sequence)
    return found


def _group(
    lines: Sequence[Row], sequences: Mapping[tuple[int, int], Sequence[TokenSequence]], version: int
) -> TakenGroup:
    """Return the group of which ``lines`` are the answers."""
    first = lines[0]
    position = first["position"]
    rollouts = tuple(_rollout(line, sequences[position, line["index"]]) for line in lines)
    sampled = {int(v) for r in rollouts for s in r.sequences for v in np.unique(s.versions[s.loss_mask])}
    group = Group(
        lease_id=first["lease_id"],
        kind="train",
        position=position,
        generator_id=first["generator"],
        lineage="",
        temperature=first["temperature"],
        rollouts=rollouts,
        weights_digest=dict.fromkeys(sampled, _DIGEST),
    )
    answer = {"gt_answer": first["expected"]} if "expected" in first else {}
    prompt = Prompt(position, first["row"], 0, tuple(first["messages"]), answer, first.get("source", ""))
    return TakenGroup(group, prompt, queued_s=0.0, arrival_version=version, masked=first["masked"])


def _rollout(line: Row, sequences: Sequence[TokenSequence]) -> Rollout:
    session = line.get("session")
    return Rollout(
        sequences=tuple(sequences),
        reward_parts=line["reward_parts"],
        accuracy=line["accuracy"],
        finish_reason=line["finish_reason"],
        extracted=line["extracted"],
        turns=tuple(Turn(**turn) for turn in line.get("turns", ())),
        spans=tuple(Span(end, reward) for end, reward in line.get("spans", ())),
        session=None if session is None else msgspec.convert(session, AgentSession),
        metrics=line.get("metrics", {}),
    )


def check_replayable(config: Config) -> None:
    """Check that ``rollouts/`` has all that ``config`` trains on.

    Raises:
        ConfigError: it needs what is not recorded.
    """
    sampling = config.sampling
    missing = {
        "model.routing_replay": config.model.routing_replay and "routes of experts",
        "distill": config.distill.is_set and "log-probabilities of a teacher",
        "sampling": (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
        and "the tokens that top_p, top_k and min_p left",
    }
    for key, what in missing.items():
        if what:
            raise ConfigError(f"{key}: a replay can't train on {what}, because rollouts/ does not have them")


class ReplayQueue(LearnerQueue):
    """Hands out recorded groups in the place of a queue server. Nothing is sent, and nobody can take the run over.

    ``check_lock`` raises LineageError if another process has taken over the run directory.
    """

    def __init__(self, recorded: RecordedRun, check_lock: Callable[[], None]) -> None:
        self._recorded, self._check_lock = recorded, check_lock
        self.address = ""
        self.trouble = lambda: ""

    @property
    def is_take_answered(self) -> bool:
        return True

    def attach(
        self, run_id: str, lineage: str, parent_lineage: str, fork_version: int, step: int, num_steps: int,
        config_toml: str, files: Mapping[str, bytes], snapshot: bytes | None,
    ) -> dict[str, Any]:  # fmt: skip
        return shared_values(config_from_toml(config_toml, "the config of the replay"))

    def confirm(self, lineage: str) -> None:
        self._check_lock()

    def confirm_awaited(self, lineage: str, evaluations: Iterable[tuple[str, int]]) -> None:
        self._check_lock()

    def announce(self, announcement: Announcement) -> None:
        """Nobody waits for a version."""

    def take(self, lineage: str, step: int, version: int, wait_s: float) -> Batch | NotReady:
        if step + 1 not in self._recorded.sizes:
            reason = f"{self._recorded.run_dir.path} has no records of step {step + 1}"
            return NotReady(reason, _NOBODY, exhausted=True)
        return Batch(self._recorded.read(step + 1, version))

    def ack(self, ack: StepAck, *, next_take_s: float | None = None) -> Acked:
        return Acked(_NOBODY, b"" if ack.snapshot else None)

    def checkpoint_committed(self, lineage: str, step: int) -> None:
        """Nothing is kept for a checkpoint."""

    def snapshot(self, lineage: str) -> bytes:
        return b""

    def finish(self, lineage: str) -> None:
        """Nobody waits for the end."""

    def close(self) -> None:
        """Nothing is open."""


class ReplayWeights:
    """Sends no weights, for nobody samples. Every version's digest is that of the recorded groups."""

    channel = ""
    ports: tuple[int, ...] = ()

    def __init__(self, state: TrainerState) -> None:
        self._state = state

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published:
        self._state.digests = dict.fromkeys(range(version), (_DIGEST,))  # also of versions within a step
        return Published(version, _DIGEST)

    def stats(self) -> dict[str, float]:
        return {}
