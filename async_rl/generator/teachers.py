"""Asks a run's teachers about what was sampled, before its group is returned.

``TaughtRollouts`` wraps the rollouts of one answer or of several turns. A scored rollout of a training lease gets the
scores of its prompt's teacher for each of its token sequences. While a teacher is away, its groups wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from async_rl.config.config import Config
from async_rl.config.distill import DistillConfig
from async_rl.data.chat import load_tokenizer
from async_rl.data.vocabulary import vocabulary_digest
from async_rl.errors import RewardError
from async_rl.generator.rollouts import Graded, Rollouts, WrappedRollouts, failure_of
from async_rl.net.keys import ClientKeys
from async_rl.records import Lease, Rollout, TeacherScores, TokenSequence
from async_rl.scorer.client.scorer_client import ScorerClient

_ROUNDING = 1e-3
"""How far above 0 rounding may bring a log-probability."""
Scores = Future[tuple[np.ndarray, ...]]


class Teachers:
    """The run's teachers: ``clients`` by the name of their scorer, which ``distill`` assigns to sources of the data."""

    def __init__(self, clients: Mapping[str, ScorerClient], distill: DistillConfig) -> None:
        self._clients, self._distill = clients, distill

    @property
    def trouble(self) -> str:
        """Why a teacher does not answer; empty if nothing is known to be wrong."""
        return next((client.trouble for client in self._clients.values() if client.trouble), "")

    @property
    def num_waiting(self) -> int:
        """The number of sequences about which a teacher was asked and has not answered."""
        return sum(client.num_waiting for client in self._clients.values())

    @property
    def top_k(self) -> int:
        """The number of the teacher's likeliest tokens that it is asked for."""
        return self._distill.top_k

    def ask(self, lease: Lease, sequence: TokenSequence) -> Scores:
        """Ask the teacher of the lease's prompt about a sequence."""
        name = self._distill.teacher_of(lease.prompt.source)
        assert name is not None  # the config's validation has checked it
        return self._clients[name].logprobs(
            sequence.token_ids,
            sequence.loss_mask,
            temperature=lease.sampling.temperature,
            top_k=self._distill.top_k,
        )


def build_teachers(config: Config, directory: Path, keys: ClientKeys | None, stack: ExitStack) -> Teachers | None:
    """Connect to the teachers of ``config``. None if there are none. ``stack`` closes the connections.

    Args:
        directory: that of the run's tokenizer, whose vocabulary the teachers must have.
        keys: this machine's keys, for scorers that have keys.

    Raises:
        ModelError: ``directory`` has no tokenizer.
    """
    if not config.distill.is_set:
        return None
    vocabulary = vocabulary_digest(load_tokenizer(directory, needs_template=False))
    clients: dict[str, ScorerClient] = {}
    for name in config.distill.by_use.values():
        if name not in clients:
            scorer = config.scorer[name]
            client = ScorerClient(name, scorer.address, keys, digest=scorer.digest, vocabulary=vocabulary)
            clients[name] = stack.enter_context(closing(client))
    return Teachers(clients, config.distill)


@dataclass(slots=True)
class _Asked:
    """A scored rollout, and what its teacher was asked about each of its sequences."""

    graded: Graded
    rollout: Rollout
    scores: list[Scores]


class TaughtRollouts(WrappedRollouts):
    """Plays rollouts as ``rollouts`` does, and adds the teachers' scores. It implements ``Rollouts``."""

    def __init__(self, rollouts: Rollouts, teachers: Teachers) -> None:
        super().__init__(rollouts)
        self._teachers = teachers
        self._asked: list[_Asked] = []

    @property
    def num_pending(self) -> int:
        return self._rollouts.num_pending + len(self._asked)

    def cancel(self, lease_id: str) -> None:
        self._rollouts.cancel(lease_id)
        self._asked = [asked for asked in self._asked if asked.graded.lease.lease_id != lease_id]

    def collect(self) -> list[Graded]:
        done: list[Graded] = []
        for graded in self._rollouts.collect():
            if graded.rollout is None or graded.lease.kind != "train":
                done.append(graded)
            else:
                scores = [self._teachers.ask(graded.lease, sequence) for sequence in graded.rollout.sequences]
                self._asked.append(_Asked(graded, graded.rollout, scores))
        waiting: list[_Asked] = []
        for asked in self._asked:
            if all(scores.done() for scores in asked.scores):
                done.append(_taught(asked, self._teachers.top_k))
            else:
                waiting.append(asked)
        self._asked = waiting
        return done


def _taught(asked: _Asked, top_k: int) -> Graded:
    """Return the rollout with its teacher's scores, or why its lease has failed."""
    try:
        sequences = tuple(
            structs.replace(sequence, teacher=_scores(scores.result(), top_k))
            for sequence, scores in zip(asked.rollout.sequences, asked.scores, strict=True)
        )
    except (RewardError, ValueError) as error:
        return replace(asked.graded, rollout=None, failure=failure_of(error, "reward_error"), error=error)
    return replace(asked.graded, rollout=structs.replace(asked.rollout, sequences=sequences))


def _scores(arrays: tuple[np.ndarray, ...], top_k: int) -> TeacherScores:
    if len(arrays) != 2 or arrays[1].shape[-1:] != (top_k,):
        shapes = [list(array.shape) for array in arrays]
        raise RewardError(
            f"expected log-probabilities and {top_k} likeliest tokens from the teacher, got arrays of the shapes "
            f"{shapes}; install the same version of async-rl on every machine"
        )
    if not np.isfinite(arrays[0]).all() or arrays[0].max(initial=0.0) > _ROUNDING:
        raise RewardError("expected finite log-probabilities of at most 0 from the teacher; check its model and dtype")
    return TeacherScores(*arrays)
