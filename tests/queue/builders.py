"""Small queues, leases answered with made-up groups, and configs for the queue's tests."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import structs

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.config.queue import QueueConfig
from async_rl.net.codec import encode_group
from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.groups import read_summary
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import (
    Announcement,
    Failure,
    FailureCause,
    NotReady,
    StepAck,
    Taken,
    TrainedCounts,
    Verdict,
)
from async_rl.queue.storage.payloads import Payload
from async_rl.records import NO_VERSION, Group, Lease, Rollout, Sampling, TokenSequence

LINEAGE = "line-a"
SAMPLING = Sampling(1.0, 1.0, 0, 8, 8, ())
_MADE = ("max_filtered", "run_ahead")
"""Keys of the queue's section whose value is made from other keys too."""


@dataclass(frozen=True, slots=True)
class PlainRow:
    messages: tuple[Mapping[str, str], ...]
    reward_data: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


def rows(count: int) -> list[PlainRow]:
    return [PlainRow(({"role": "user", "content": f"row {i}"},), {"gt_answer": str(i)}) for i in range(count)]


def settings(**changes: Any) -> QueueSettings:
    """Those of ``make_config`` but for what keeps numbers small and leases simple."""
    simple = {
        "max_bytes": 1 << 20, "max_filtered": 3200, "lease_timeout_s": 10.0, "on_stale": "drop", "temperature_steps": 1,
        "mask_truncated": False, "run_ahead": "bound",
    }  # fmt: skip
    values = simple | changes
    of_queue = {key: values.pop(key) for key in QueueConfig.model_fields if key in values and key not in _MADE}
    base = _settings_of_config()
    return replace(base, queue=base.queue.model_copy(update=of_queue), **values)


@functools.cache
def _settings_of_config() -> QueueSettings:
    return QueueSettings.from_config(make_config("none"), vocab_size=None)


def make_state(
    *, num_rows: int = 100, epochs: int | None = None, num_steps: int = 100, attached: bool = True, **changes: Any
) -> QueueState:
    """A state with an attached learner at version 0, announced, in dataset order."""
    stream = PromptStream(num_rows, seed=0, shuffle=False, epochs=epochs)
    state = QueueState(settings(**changes), rows(num_rows), stream)
    if attached:
        learner_requests.attach(state, LINEAGE, "", 0, 0, num_steps, None, 0.0)
        announce(state, 0)
    return state


def announce(state: QueueState, version: int, lineage: str = LINEAGE) -> None:
    learner_requests.announce(state, Announcement(lineage, version, f"digest-{version}", "tcp://127.0.0.1:1"))


def leases(state: QueueState, count: int, version: int = 0, *, generator: str = "g0", now: float = 0.0) -> list[Lease]:
    lineage = state.learner.lineage if state.learner is not None else LINEAGE
    return list(generator_requests.lease(state, generator, (lineage, version), count, now).leases)


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


def with_failed(made: Group, num_failed: int) -> Group:
    """Return the group with its last ``num_failed`` rollouts failed."""
    first = len(made.rollouts) - num_failed
    failed = (structs.replace(rollout, accuracy=0.0, finish_reason="error") for rollout in made.rollouts[first:])
    return structs.replace(made, rollouts=(*made.rollouts[:first], *failed))


def put(state: QueueState, returned: Group, *, now: float = 0.0) -> Verdict:
    payload = encode_group(returned)
    return generator_requests.receive(state, returned.generator_id, read_summary(payload), payload, now)[0]


def fail(
    state: QueueState, lease: Lease, cause: FailureCause = "engine_error", *, generator: str = "g0", now: float = 0.0,
    detail: str = "KeyError: 'x' (/r.py, line 3, in score)", place: str = "KeyError at /r.py:3",
    is_transient: bool = False,
) -> Verdict:  # fmt: skip
    failure = Failure(cause, detail, place, is_transient)
    return generator_requests.fail(state, generator, lease.lease_id, failure, now)


def fail_until_excluded(state: QueueState, position: int, *, generator: str = "g0") -> int:
    """Fail the prompt at ``position`` again and again, and return good groups of the other prompts that are leased.

    Return how often it failed.
    """
    num_failed = 0
    while position not in state.last_excluded:
        (lease,) = leases(state, 1, generator=generator)
        if lease.prompt.position == position:
            fail(state, lease, generator=generator)
            num_failed += 1
        else:
            assert put(state, group(lease, generator=generator)) == "queued"
    return num_failed


def take(state: QueueState, *, now: float = 0.0) -> tuple[Taken[Payload], ...] | NotReady:
    learner = state.learner
    assert learner is not None
    return learner_requests.take(state, learner.lineage, learner.step, learner.version, now)


def positions(taken: tuple[Taken[Payload], ...] | NotReady) -> list[int]:
    assert not isinstance(taken, NotReady), taken.reason
    return [item.prompt.position for item in taken]


def fill_and_take(state: QueueState, version: int = 0) -> list[int]:
    """Sample one step's groups with ``version`` and take them. Return their positions."""
    for lease in leases(state, 2, version):
        assert put(state, group(lease, version)) == "queued"
    return positions(take(state))


def all_trained(groups: int = 2, rollouts: int = 2, tokens: int = 3) -> TrainedCounts:
    return TrainedCounts(True, groups * rollouts, {}, groups * rollouts * tokens, {})


def ack(
    state: QueueState, facts: TrainedCounts | None = None, *, snapshot: bool = False, now: float = 0.0,
    announced: bool = True,
) -> bytes | None:  # fmt: skip
    """Ack the taken step, one version on if it was stepped, and announce it."""
    learner = state.learner
    assert learner is not None
    facts = facts or all_trained(state.settings.groups_per_step)
    version = learner.version + facts.stepped
    payload = learner_requests.ack(
        state, StepAck(learner.lineage, learner.step, version, facts, snapshot=snapshot), now
    ).snapshot
    if announced:
        announce(state, version, learner.lineage)
    return payload


def groups_of(state: QueueState) -> dict[str, Any]:
    """The ledger of groups, after its check."""
    state.check()
    return dict(state.stats().ledger["groups"])


def dropped(state: QueueState) -> dict[str, int]:
    """Causes of dropped groups that are not zero."""
    return {cause: n for cause, n in groups_of(state)["dropped"].items() if n}


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
