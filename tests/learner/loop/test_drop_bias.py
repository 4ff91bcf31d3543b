"""The drop-bias metrics and their warning, with sums worked by hand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import pytest

from async_rl.learner.loop.received import DropBias, received_accuracy
from async_rl.queue.core import generator_requests
from async_rl.queue.core.ledger import Outcome, Outcomes
from async_rl.queue.messages import GeneratorStats
from tests.queue.builders import ack, group, leases, make_state, put, take

pytestmark = pytest.mark.usefixtures("fixed_admission")

GROUP_SIZE = 2


def ledger(stale_tokens: int = 0, **groups: tuple[int, int, float]) -> dict[str, Any]:
    """Cumulative: by outcome, groups of two rollouts, the tokens of a rollout, its accuracy (and reward)."""
    outcomes = Outcomes()
    for outcome, (count, tokens, accuracy) in groups.items():
        for _ in range(count):
            right, size = GROUP_SIZE * accuracy, GROUP_SIZE * tokens
            outcomes.add(cast(Outcome, outcome), rollouts=GROUP_SIZE, tokens=size, reward=2 * right, accuracy=right)
    return {"outcomes": outcomes.as_dict(), "tokens": {"masked": {"stale": stale_tokens}}}


def metrics_after(*readings: Mapping[str, Any]) -> dict[str, float]:
    bias, metrics = DropBias(), dict[str, float]()
    for reading in (ledger(), *readings):
        metrics = bias.step(reading)
    return metrics


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        # 6 groups of 10 tokens kept, 2 of 30 dropped, 2 of at least 40 cancelled: 10 / (60 + 60 + 80) * 10 = 0.5.
        # Received: accuracy (6 * 0.5 + 2 * 1.0) / 8 = 0.625, reward twice that.
        ({"trained": (6, 10, 0.5), "dropped": (2, 30, 1.0), "cancelled": (2, 40, 0.0)}, (10, 0.4, 0.5, -0.25, -0.125)),
        # The filter is no bias.
        ({"trained": (4, 10, 0.5), "filtered": (6, 90, 1.0)}, (10, 0.0, 1.0, 0.0, 0.0)),
        # 4 groups of 2 rollouts of 10 tokens; 8 of the 80 tokens are masked as stale.
        ({"stale_tokens": 8, "trained": (4, 10, 0.5)}, (4, 0.0, 0.9, 0.0, 0.0)),
        # Nothing was kept.
        ({}, ()),
        ({"dropped": (3, 10, 0.5)}, ()),
    ],
)
def test_what_was_kept_is_compared_with_all_that_ended(ended: dict[str, Any], expected: tuple[float, ...]):
    names = [f"bias/{name}" for name in ("groups", "lost", "length", "reward", "accuracy")]
    assert metrics_after(ledger(**ended)) == pytest.approx(dict(zip(names, expected, strict=False)))


def test_the_accuracy_of_what_was_received_counts_filtered_groups_and_those_that_were_dropped():
    # Since the first reading: 2 groups of 0.5, 1 of 1.0 and 1 of 0.0. The cancelled one was not graded.
    before = ledger(trained=(4, 10, 0.5), filtered=(1, 10, 1.0))
    after = ledger(trained=(6, 10, 0.5), filtered=(2, 10, 1.0), dropped=(1, 10, 0.0), cancelled=(1, 10, 0.0))
    assert received_accuracy(before, after) == pytest.approx(0.5)
    assert received_accuracy(ledger(), ledger(filtered=(1, 10, 1.0))) == 1.0
    assert received_accuracy(after, after) is None


@pytest.mark.parametrize(
    ("ended", "warns"),
    [
        ({"trained": (90, 10, 0.5), "cancelled": (10, 20, 0.0)}, True),  # 10 / 11
        ({"trained": (90, 10, 0.5), "cancelled": (10, 13, 0.0)}, False),  # 10 / 10.3
        ({"trained": (80, 10, 0.5), "dropped": (20, 10, 0.2)}, True),  # 0.5 - 0.44
        ({"trained": (80, 10, 0.5), "dropped": (20, 10, 0.3)}, False),  # 0.5 - 0.46
        ({"trained": (80, 10, 0.5), "cancelled": (19, 30, 0.0)}, False),  # too few groups
    ],
)
def test_a_warning_says_what_to_do_when_the_skew_is_large(
    caplog: pytest.LogCaptureFixture, ended: dict[str, Any], warns: bool
):
    with caplog.at_level(logging.WARNING):
        metrics_after(ledger(**ended))
    assert ["raise queue.max_staleness" in r.getMessage() for r in caplog.records] == [True] * warns


def test_a_cancelled_lease_counts_with_the_tokens_that_its_holder_reported():
    # Two groups of two rollouts a step; the third lease is cancelled when the second batch is taken without it.
    queue_state = make_state()
    bias = DropBias()
    bias.step(queue_state.stats().ledger)
    late = leases(queue_state, 3)
    generator_requests.heartbeat(queue_state, "g0", {late[2].lease_id: 16}, GeneratorStats(), 1.0)
    for version in (0, 1):
        for lease in late[:2] if version == 0 else leases(queue_state, 2, version=1):
            put(queue_state, group(lease, version))
        take(queue_state)
        ack(queue_state)
    # Trained: 8 rollouts of 3 tokens. Cancelled: 2 of at least 8. All: (24 + 16) / 10 = 4.
    metrics = bias.step(queue_state.stats().ledger)
    assert (metrics["bias/lost"], metrics["bias/length"]) == pytest.approx((1 / 5, 3 / 4))
