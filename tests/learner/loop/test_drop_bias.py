"""The drop-bias metrics and their warning, with sums worked by hand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import pytest

from async_rl.learner.loop.received import WINDOW_STEPS, DropBias, received_accuracy
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
            right = GROUP_SIZE * accuracy
            outcomes.add(
                cast(Outcome, outcome),
                rollouts=GROUP_SIZE,
                tokens=GROUP_SIZE * tokens,
                reward=2 * right,
                accuracy=right,
            )
    return {"outcomes": outcomes.as_dict(), "tokens": {"masked": {"stale": stale_tokens}}}


def metrics_after(*readings: Mapping[str, Any]) -> dict[str, float]:
    bias, metrics = DropBias(), dict[str, float]()
    for reading in (ledger(), *readings):
        metrics = bias.step(reading)
    return metrics


def test_what_was_kept_is_compared_with_all_that_ended():
    # 6 groups of 10 tokens kept, 2 of 30 dropped, 2 of at least 40 cancelled: 10 / (60 + 60 + 80) * 10 = 0.5.
    # Received: accuracy (6 * 0.5 + 2 * 1.0) / 8 = 0.625, reward twice that.
    metrics = metrics_after(ledger(trained=(6, 10, 0.5), dropped=(2, 30, 1.0), cancelled=(2, 40, 0.0)))
    assert metrics == pytest.approx(
        {"bias/groups": 10, "bias/lost": 0.4, "bias/length": 0.5, "bias/reward": -0.25, "bias/accuracy": -0.125}
    )


def test_the_filter_is_no_bias():
    metrics = metrics_after(ledger(trained=(4, 10, 0.5), filtered=(6, 90, 1.0)))
    assert metrics == {
        "bias/groups": 10,
        "bias/lost": 0.0,
        "bias/length": 1.0,
        "bias/reward": 0.0,
        "bias/accuracy": 0.0,
    }


def test_tokens_masked_as_stale_count_as_lost_length():
    # 4 groups of 2 rollouts of 10 tokens; 8 of the 80 tokens are masked.
    assert metrics_after(ledger(stale_tokens=8, trained=(4, 10, 0.5)))["bias/length"] == pytest.approx(0.9)


def test_the_accuracy_of_what_was_received_counts_filtered_groups_and_those_that_were_dropped():
    # Since the first reading: 2 groups of 0.5, 1 of 1.0 and 1 of 0.0. The cancelled one was not graded.
    before = ledger(trained=(4, 10, 0.5), filtered=(1, 10, 1.0))
    after = ledger(trained=(6, 10, 0.5), filtered=(2, 10, 1.0), dropped=(1, 10, 0.0), cancelled=(1, 10, 0.0))
    assert received_accuracy(before, after) == pytest.approx(0.5)
    assert received_accuracy(ledger(), ledger(filtered=(1, 10, 1.0))) == 1.0
    assert received_accuracy(after, after) is None


def test_only_the_last_steps_count():
    bias = DropBias()
    bias.step(ledger())
    assert bias.step(ledger(trained=(1, 10, 0.5), dropped=(1, 30, 0.5)))["bias/length"] == pytest.approx(0.5)
    rows = [bias.step(ledger(trained=(n, 10, 0.5), dropped=(1, 30, 0.5))) for n in range(2, WINDOW_STEPS + 2)]
    assert rows[-1]["bias/length"] == 1.0


def test_a_step_without_anything_kept_has_no_such_metrics():
    assert metrics_after(ledger(trained=(3, 10, 0.5)), ledger(trained=(3, 10, 0.5)))["bias/lost"] == 0.0
    assert metrics_after() == metrics_after(ledger(dropped=(3, 10, 0.5))) == {}


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
    assert [("raise queue.max_staleness" in r.getMessage()) for r in caplog.records] == [True] * warns


def test_the_warning_comes_once_in_a_window(caplog: pytest.LogCaptureFixture):
    bias = DropBias()
    with caplog.at_level(logging.WARNING):
        for step in range(2 * WINDOW_STEPS + 1):
            bias.step(ledger(trained=(9 * step, 10, 0.5), cancelled=(step, 20, 0.0)))
    # 100 groups ended after 10 steps: the first one is at step 10, the second a window later.
    assert len(caplog.records) == 2


def test_a_cancelled_lease_counts_with_the_tokens_that_its_holder_reported():
    # Two groups of two rollouts a step; the third lease is cancelled when the second batch is taken without it.
    queue_state = make_state()
    bias = DropBias()
    bias.step(queue_state.stats().ledger)
    late = leases(queue_state, 3)
    generator_requests.heartbeat(queue_state, "g0", {late[2].lease_id: 16}, GeneratorStats(), 1.0)
    for lease in late[:2]:
        put(queue_state, group(lease))
    take(queue_state)
    ack(queue_state)
    for lease in leases(queue_state, 2, version=1):
        put(queue_state, group(lease, 1))
    take(queue_state)
    ack(queue_state)
    # Trained: 8 rollouts of 3 tokens. Cancelled: 2 of at least 8. All: (24 + 16) / 10 = 4.
    metrics = bias.step(queue_state.stats().ledger)
    assert metrics["bias/lost"] == pytest.approx(1 / 5)
    assert metrics["bias/length"] == pytest.approx(3 / 4)
