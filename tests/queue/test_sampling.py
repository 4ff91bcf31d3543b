"""What leases say about sampling: the temperature of their version, and the room that sampling masks may take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from async_rl.config.loading import parse_config
from async_rl.errors import ConfigError
from async_rl.net.codec import encode_group
from async_rl.queue.core import persistence
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.state import QueueState
from async_rl.records import BYTES_PER_TOKEN, Rollout, Span, TokenSequence
from async_rl.routes import RoutingShape
from tests.queue.builders import SAMPLING, ack, group, leases, make_config, make_state, put, settings, take

pytestmark = pytest.mark.usefixtures("fixed_admission")

COOLING = {"temperature_end": 0.6, "temperature_steps": 4}


def temperatures(state: QueueState, version: int) -> list[float]:
    return [lease.sampling.temperature for lease in leases(state, 2, version)]


def test_temperature_goes_down_on_a_line_over_the_versions_and_stays():
    # From 1.0 to 0.6 over 4 versions: 0.1 a version.
    cooling = settings(**COOLING)
    found = [cooling.sampling_at(version).temperature for version in range(7)]
    assert found == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.6, 0.6])
    assert found[4] == 0.6
    assert replace(cooling.sampling_at(3), temperature=1.0) == SAMPLING
    assert settings().sampling_at(3) is settings().sampling


def test_a_lease_has_the_temperature_of_the_version_that_samples_it():
    state = make_state(max_staleness=1, **COOLING)
    first = leases(state, 2)
    assert [lease.sampling.temperature for lease in first] == [1.0, 1.0]
    for lease in first:
        assert put(state, group(lease)) == "queued"
    take(state)
    ack(state)
    # The learner is at version 1, the generator still at 0 or already at 1.
    assert temperatures(state, 0) == [1.0, 1.0]
    assert temperatures(state, 1) == pytest.approx([0.9, 0.9])


def test_samples_at_the_temperature_of_another_version_are_refused():
    state = make_state(**COOLING)
    (lease,) = leases(state, 1)
    assert put(state, structs.replace(group(lease), temperature=0.9)) == "refused"


def test_a_restarted_queue_gives_its_leases_the_temperature_they_had():
    state = make_state(max_staleness=1, **COOLING)
    for lease in leases(state, 2):
        put(state, group(lease))
    take(state)
    ack(state)
    for lease in leases(state, 1, version=0) + leases(state, 1, version=1):
        held = state.leases.get(lease.lease_id)
        assert held is not None
        assert persistence.build_active_lease(state, lease.lease_id, held.record()).lease == lease


# 2 rollouts a group, 8 + 8 tokens each, 1024 bytes a rollout and 4096 a group.
PLAIN_BYTES = 2 * (16 * BYTES_PER_TOKEN + 1024) + 4096


@pytest.mark.parametrize(
    ("top_p", "top_k", "vocab_size", "words"),
    [
        (1.0, 0, None, None),  # nothing is left out
        (1.0, 50, None, 50),  # 50 ids
        (0.9, 50, None, 50),
        (0.9, 0, 1000, 32),  # 1000 bits
        (0.9, 20, 1000, 20),
        (1.0, 50, 1000, 32),
    ],
)
def test_a_lease_reserves_what_its_sampling_masks_may_take(
    top_p: float, top_k: int, vocab_size: int | None, words: int | None
):
    found = settings(sampling=replace(SAMPLING, top_p=top_p, top_k=top_k), vocab_size=vocab_size).worst_case_bytes
    # For each of 2 * 8 sampled tokens a size and the words, 4 bytes each.
    assert found == PLAIN_BYTES + (0 if words is None else 2 * 8 * 4 * (1 + words))


def test_a_lease_reserves_what_its_routes_take():
    # 3 layers, 2 of 8 experts: 6 bytes for each token of prompt and answer, of 2 rollouts.
    tokens = 2 * (SAMPLING.max_prompt_tokens + SAMPLING.max_new_tokens)
    assert settings(routing=RoutingShape(3, 8, 2)).worst_case_bytes == PLAIN_BYTES + 6 * tokens
    with pytest.raises(ConfigError, match=r"model\.routing_replay = false: routes take 1200 bytes a token$"):
        settings(routing=RoutingShape(60, 512, 10), max_bytes=PLAIN_BYTES)


def test_an_agents_lease_reserves_its_own_limit_instead_of_turns_times_length():
    def reserved(**environment: int) -> int:
        config = parse_config(
            {
                "run": {"dir": "x"}, "model": {"path": "m"}, "environment": {"name": "mine.py:run", **environment},
                "generator": {"serve": True},
                "sampling": {"group_size": 2, "max_prompt_tokens": 1000, "max_new_tokens": 100},
            },
            "test",
        )  # fmt: skip
        return QueueSettings.from_config(config, vocab_size=None).worst_case_bytes

    # Two rollouts of 100,000 tokens, each with up to 100 answers.
    assert reserved(max_rollout_tokens=100_000) == 2 * (100_000 * BYTES_PER_TOKEN + 100 * 64 + 1024) + 4096
    assert reserved() == 2 * (1100 * BYTES_PER_TOKEN + 100 * 64 + 1024) + 4096


def test_a_lease_reserves_what_spans_may_take_if_a_reward_can_make_them():
    tokens = 2000

    def reserved(reward: dict[str, Any]) -> int:
        config = parse_config(
            {
                "run": {"dir": "x"}, "model": {"path": "m"}, "reward": reward,
                "sampling": {"group_size": 2, "max_prompt_tokens": 1, "max_new_tokens": tokens},
            },
            "test",
        )  # fmt: skip
        return QueueSettings.from_config(config, vocab_size=None).worst_case_bytes

    # Each of 2 * 2000 sampled tokens may end a span of 15 bytes.
    most = reserved({"type": "mine.py:reward"})
    assert most - reserved({}) == 2 * tokens * 15
    assert reserved({"extra": {"mine.py:reward": 0.5}}) == most
    ids = np.arange(1 + tokens, dtype=np.int32)
    one = TokenSequence(ids, ids > 0, np.zeros(1 + tokens, np.float32), np.zeros(1 + tokens, np.int32))
    spans = tuple(Span(end, 0.125) for end in range(1, tokens + 1))
    full = group(leases(make_state(), 1)[0])
    full = structs.replace(full, rollouts=(Rollout((one,), {"process": 1.0}, 1.0, "stop", spans=spans),) * 2)
    assert reserved({}) < len(encode_group(full)) < most


def test_top_p_alone_is_refused_where_nothing_bounds_what_it_keeps():
    with pytest.raises(ConfigError, match=r"sampling\.top_p: 0\.9 alone may keep .*; set sampling\.top_k"):
        settings(sampling=replace(SAMPLING, top_p=0.9))


def test_a_step_that_sampling_masks_make_too_large_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"queue\.max_bytes: .*or lower \(or set\) sampling\.top_k"):
        settings(sampling=replace(SAMPLING, top_p=0.9), vocab_size=1 << 21)  # 256 KiB a token, of 1 MiB
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens$"):
        settings(max_bytes=100)


def test_settings_come_from_the_config():
    config = make_config("r", sampling={"temperature": 1.2, "temperature_end": 0.8, "top_p": 0.9, "group_size": 2})
    found = QueueSettings.from_config(config, vocab_size=100)
    assert (found.sampling.top_p, found.vocab_size) == (0.9, 100)
    # 3 steps of one update each.
    assert [found.sampling_at(v).temperature for v in (0, 3, 4)] == pytest.approx([1.2, 0.8, 0.8])
