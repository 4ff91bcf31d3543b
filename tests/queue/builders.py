"""Small buffers, leases answered with made-up groups, and configs for the queue's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.net.codec import encode_group
from async_rl.queue.core.admission import BufferSettings
from async_rl.queue.core.batches import TakenPayload
from async_rl.queue.core.buffer import Buffer
from async_rl.queue.core.ingest import read_summary
from async_rl.queue.core.prompt_stream import PromptStream
from async_rl.queue.messages import Announcement, NotReady, StepAck, TrainedCounts, Verdict
from async_rl.records import NO_VERSION, Group, Lease, Rollout, Sampling, TokenSequence

LINEAGE = "line-a"
SAMPLING = Sampling(1.0, 1.0, 0, 8, 8, ())


@dataclass(frozen=True, slots=True)
class PlainRow:
    messages: tuple[Mapping[str, str], ...]
    reward_data: Mapping[str, Any] = field(default_factory=dict)


def rows(count: int) -> list[PlainRow]:
    return [PlainRow(({"role": "user", "content": f"row {i}"},), {"gt_answer": str(i)}) for i in range(count)]


def settings(**changes: Any) -> BufferSettings:
    plain: dict[str, Any] = {
        "group_size": 2,
        "groups_per_step": 2,
        "max_staleness": 1,
        "sampling": SAMPLING,
        "updates_per_batch": 1,
        "sync_every": 1,
        "max_bytes": 1 << 20,
        "filter_range": (0.01, 0.99),
        "refill": True,
        "max_filtered": 3200,
        "lease_timeout_s": 10.0,
        "max_attempts": 3,
        "seed": 0,
        "generator_timeout_s": 30.0,
        "on_stale": "drop",
        "wait_s": 60.0,
        "accepts_changed_data": False,
        "temperature_end": None,
        "temperature_steps": 1,
        "vocab_size": None,
        "max_turns": 1,
    }
    return BufferSettings(**(plain | changes))


def make_buffer(
    *, num_rows: int = 100, epochs: int | None = None, num_steps: int = 100, attached: bool = True, **changes: Any
) -> Buffer:
    """A buffer with an attached learner at version 0, announced, in dataset order."""
    stream = PromptStream(num_rows, seed=0, shuffle=False, epochs=epochs)
    buffer = Buffer(settings(**changes), rows(num_rows), stream)
    if attached:
        buffer.attach(LINEAGE, "", 0, 0, num_steps, None, 0.0)
        announce(buffer, 0)
    return buffer


def announce(buffer: Buffer, version: int, lineage: str = LINEAGE) -> None:
    buffer.announce(Announcement(lineage, version, f"digest-{version}", "tcp://127.0.0.1:1"))


def leases(buffer: Buffer, count: int, version: int = 0, *, generator: str = "g0", now: float = 0.0) -> list[Lease]:
    lineage = buffer.learner.lineage if buffer.learner is not None else LINEAGE
    return list(buffer.lease(generator, (lineage, version), count, now).leases)


def group(
    lease: Lease, version: int = 0, *, accuracies: Sequence[float] = (1.0, 0.0), tokens: int = 3, generator: str = "g0",
    finish_reason: Any = "stop", prompt_tokens: int = 2,
) -> Group:  # fmt: skip
    """A group with ``tokens`` sampled tokens a rollout, all of ``version``."""
    mask = np.array([False] * prompt_tokens + [True] * tokens)
    sequence = TokenSequence(
        token_ids=np.arange(prompt_tokens + tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, version, NO_VERSION).astype(np.int32),
    )
    rollouts = tuple(Rollout((sequence,), {"correct": a}, a, finish_reason) for a in accuracies)
    return Group(
        lease_id=lease.lease_id,
        kind=lease.kind,
        position=lease.prompt.position,
        generator_id=generator,
        lineage=lease.lineage,
        temperature=lease.sampling.temperature,
        rollouts=rollouts,
        weights_digest={version: f"digest-{version}"},
    )


def put(buffer: Buffer, returned: Group, *, now: float = 0.0) -> Verdict:
    payload = encode_group(returned)
    return buffer.put(returned.generator_id, read_summary(payload), payload, now)


def take(buffer: Buffer, *, now: float = 0.0) -> tuple[TakenPayload, ...] | NotReady:
    learner = buffer.learner
    assert learner is not None
    return buffer.take(learner.lineage, learner.step, learner.version, buffer.settings.groups_per_step, now)


def positions(taken: tuple[TakenPayload, ...] | NotReady) -> list[int]:
    assert not isinstance(taken, NotReady), taken.reason
    return [item.prompt.position for item in taken]


def all_trained(groups: int = 2, rollouts: int = 2, tokens: int = 3) -> TrainedCounts:
    return TrainedCounts(True, groups * rollouts, {}, groups * rollouts * tokens, {})


SKIPPED = TrainedCounts(False, 0)


def ack(
    buffer: Buffer, facts: TrainedCounts | None = None, *, snapshot: bool = False, now: float = 0.0,
    lease_bound: int | None = None, announced: bool = True,
) -> bytes | None:  # fmt: skip
    """Ack the taken step, one version on if it was stepped, and announce it."""
    learner = buffer.learner
    assert learner is not None
    facts = facts or all_trained(buffer.settings.groups_per_step)
    version = learner.version + facts.stepped
    payload = buffer.ack(
        StepAck(learner.lineage, learner.step, version, facts, snapshot=snapshot, lease_bound=lease_bound), now
    ).snapshot
    if announced:
        announce(buffer, version, learner.lineage)
    return payload


def groups_of(buffer: Buffer) -> dict[str, Any]:
    """The ledger of groups, after its check."""
    buffer.check()
    return dict(buffer.stats().ledger["groups"])


def dropped(buffer: Buffer) -> dict[str, int]:
    """Causes of dropped groups that are not zero."""
    return {cause: n for cause, n in groups_of(buffer)["dropped"].items() if n}


def make_config(run_dir: str, **sections: Mapping[str, Any]) -> Config:
    raw: dict[str, Any] = {
        "run": {"dir": run_dir},
        "model": {"path": "none"},
        "data": {"train": "none.jsonl", "shuffle": False},
        "sampling": {"group_size": 2, "max_new_tokens": 8, "max_prompt_tokens": 8},
        "reward": {"cache_length": 2},
        "learner": {"groups_per_step": 2, "steps": 3},
        "queue": {"max_staleness": 1, "linger_s": 5.0},
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return parse_config(raw, "test")
