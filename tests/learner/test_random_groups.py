"""Whatever groups a generator returns, the learner goes on: nothing raises, and every loss is finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from async_rl.config.config import Config
from async_rl.data.chat import vocabulary_size
from async_rl.errors import WireError
from async_rl.learner.data.batch import prepare_batch, with_scores
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.loop.recorder import log_rollouts
from async_rl.learner.loop.staleness import check_staleness
from async_rl.learner.loop.step_result import queue_metrics, step_result, trained_metrics
from async_rl.learner.losses.advantages import with_advantages
from async_rl.learner.ranks import init_ranks
from async_rl.net.codec import decode_group
from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.groups import read_summary, refusal_cause
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import StepAck, TakenGroup
from async_rl.records import Group, Prompt
from tests.examples import is_full
from tests.learner.random_groups import near_valid
from tests.learner.tiny import tiny_config, tiny_model
from tests.queue.builders import LINEAGE, announce, leases, rows

GROUPS_PER_EXAMPLE = 10
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
DRAWN = settings(database=None, suppress_health_check=SLOW, phases=[Phase.generate], deadline=None)


@dataclass
class Learner:
    """A learner's step on a tiny model, and counts of what became of the groups that it was given."""

    config: Config
    engine: FsdpEngine
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def vocab_size(self) -> int:
        size = vocabulary_size(self.config.model.path)
        assert size is not None
        return size

    def train(self, taken: Sequence[TakenGroup], version: int) -> Any:
        """As ``Trainer`` does it, without a queue. The weights of all versions so far are known."""
        queue = self.config.queue

        def known_weights(group: Group) -> bool:
            sampled = [s.versions[s.loss_mask] for rollout in group.rollouts for s in rollout.sequences]
            return all(((versions >= 0) & (versions <= version)).all() for versions in sampled)

        prepared = prepare_batch(
            taken, mask_truncated=False, num_updates=1, known_weights=known_weights,
            oldest_version=version - queue.max_staleness if queue.on_stale == "mask" else None,
            vocab_size=self.vocab_size,
        )  # fmt: skip
        check_staleness(prepared, version=version, max_staleness=queue.max_staleness)
        prepared = with_advantages(with_scores(prepared, self.engine, self.config.loss), self.config.loss)
        updates = [
            self.engine.update(sequences, version=version) if sequences else None for sequences in prepared.mini_batches
        ]
        assert all(math.isfinite(update.loss) for update in updates if update is not None)
        self.counts["steps"] += 1
        self.counts["optimizer steps"] += sum(update is not None and update.stepped for update in updates)
        self.counts["masked rollouts"] += len(prepared.masked)
        return step_result(tuple(taken), prepared, updates, version=version)


def make_learner(directory: Path, **sampling: Any) -> Learner:
    if not (directory / "model").exists():
        tiny_model(directory / "model")
    config = tiny_config(
        directory, "model",
        sampling={"group_size": 2, "max_new_tokens": 8, "max_prompt_tokens": 8, **sampling},
        learner={"groups_per_step": 2, "steps": 10**9, "max_tokens": 64},
        queue={"refill": True, "filter_range": [-1.0, 2.0], "max_staleness": 1, "max_attempts": 10**6},
        optimizer={"lr": 1e-9},
    )  # fmt: skip
    return Learner(config, FsdpEngine(config, init_ranks(config)))


@pytest.fixture(scope="module")
def learners(tmp_path_factory: pytest.TempPathFactory) -> list[Learner]:
    """One that samples from all tokens, and one with top-k."""
    directory = tmp_path_factory.mktemp("random")
    return [make_learner(directory), make_learner(directory, top_k=5)]


def make_queue(learner: Learner) -> QueueState:
    queue_settings = QueueSettings.from_config(learner.config, vocab_size=learner.vocab_size)
    state = QueueState(queue_settings, rows(20), PromptStream(20, seed=0, shuffle=False, epochs=None))
    state.vocab_size = learner.vocab_size
    learner_requests.attach(state, LINEAGE, "", 0, 0, 10**9, None, 0.0)
    announce(state, 0)
    return state


def give(state: QueueState, lease_id: str, generator_id: str, payload: bytes) -> str:
    """As the server does it. The verdict, and the cause of a refusal."""
    try:
        group = read_summary(payload)
        if group.lease_id != lease_id:
            raise WireError("another lease")
    except WireError:
        return f"{generator_requests.refuse(state, generator_id, lease_id, 0.0)}: malformed"
    verdict, reason = generator_requests.receive(state, generator_id, group, payload, 0.0)
    cause = refusal_cause(reason.partition(": ")[2])
    return verdict if verdict != "refused" else f"refused: {cause}"


def through_the_queue(learner: Learner, state: QueueState, data: st.DataObject) -> None:
    """One random group through the queue. If a step is complete, train it."""
    assert state.learner is not None
    version, generator_id = state.learner.version, "g0"
    granted = generator_requests.lease(state, generator_id, (LINEAGE, version), 1, 0.0)
    assert granted.leases, granted.reason
    (lease,) = granted.leases
    payload = near_valid(data, lease, version=version, generator_id=generator_id, vocab_size=learner.vocab_size)
    learner.counts["groups"] += 1
    learner.counts[give(state, lease.lease_id, generator_id, payload)] += 1
    # A new generator each time, since one would soon be quarantined.
    generator_requests.goodbye(state, generator_id, 0.0)
    step = state.learner.step
    if len(state.queued) < 2:
        return
    answer = learner_requests.take(state, LINEAGE, step, version, 0.0)
    assert isinstance(answer, tuple)
    taken = [taken.with_group(decode_group(bytes(taken.group))) for taken in answer]
    result = learner.train(taken, version)
    # The queue's checks leave nothing to the learner's.
    assert "invalid" not in result.prepared.masked.values()
    trained_metrics(result)
    queue_metrics(state.stats())
    log_rollouts(Path(learner.config.run.dir), taken, step=1, version=version, config=learner.config, decode=str)
    acked = learner_requests.ack(state, StepAck(LINEAGE, step, version + result.facts.stepped, result.facts), 0.0)
    assert acked is not None
    announce(state, state.learner.version)
    state.check()


def test_the_learner_trains_on_all_that_the_queue_accepts_of_random_groups(learners):
    num_examples = 100 if is_full() else 10

    @settings(parent=DRAWN, max_examples=num_examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        learner = learners[data.draw(st.integers(0, len(learners) - 1))]
        state = make_queue(learner)
        for _ in range(GROUPS_PER_EXAMPLE):
            through_the_queue(learner, state, data)

    check()
    total = sum((learner.counts for learner in learners), Counter[str]())
    # The test must reach the learner, and be refused for many causes.
    assert total["steps"] > num_examples // 2
    assert sum(key.startswith("refused: ") for key in total) >= 3


@settings(parent=DRAWN, max_examples=25)
@given(st.data())
def test_the_learner_masks_what_it_cant_train_if_the_queue_lets_it_pass(learners, data):
    learner = learners[data.draw(st.integers(0, 1))]
    (lease,) = leases(make_queue(learner), 1, 0)
    taken: list[TakenGroup] = []
    for position in range(4):
        payload = near_valid(data, lease, version=0, generator_id="g0", vocab_size=learner.vocab_size)
        try:
            taken.append(TakenGroup(decode_group(payload), Prompt(position, 0, 0, (), {}), 0.0, 0))
        except WireError:
            learner.counts["malformed"] += 1
    if not taken:
        return
    result = learner.train(taken, 0)
    trained_metrics(result)
    assert np.isfinite(result.prepared.rewards).all()
