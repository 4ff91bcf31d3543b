"""The budget of skipped optimizer steps in a row: what counts, where it ends, and what the user is told then."""

from __future__ import annotations

import pytest

from async_rl.errors import TrainingError
from async_rl.learner.interface import UpdateStats
from async_rl.learner.loop.step_result import check_skipped, count_skipped


def update(reason: str = "") -> UpdateStats:
    return UpdateStats(
        stepped=not reason, reason=reason, loss=0.0, grad_norm=0.25, lr=1.0, tokens_trained=3, ratio_mean=1.5,
        ratio_max=9.0, clip_fraction=0.0, ess=0.125, entropy=0.0, mean_abs_log_ratio=0.0,
        mismatch_kl={4: (2.0, 4), 0: (0.03, 3), 7: (0.0, 0)},
    )  # fmt: skip


def test_a_step_resets_the_count_and_an_update_with_nothing_to_train_on_adds_to_it():
    assert count_skipped(2, [update("ess")]) == 3
    assert count_skipped(2, [None, update("ess")]) == 4
    assert count_skipped(2, [update(), update("ess")]) == 1
    assert count_skipped(2, [update("ess"), update()]) == 0


def test_the_run_goes_on_up_to_the_budget_and_stops_past_it():
    check_skipped(3, update("ess"), most=3)
    with pytest.raises(TrainingError, match=r"4 optimizer steps in a row were skipped, expected at most 3\."):
        check_skipped(4, update("ess"), most=3)


def test_the_diagnosis_says_what_was_measured_and_what_may_help():
    with pytest.raises(TrainingError) as stopped:
        check_skipped(11, update("the effective sample size is low"), most=10)
    text = str(stopped.value)
    # 0.03 nats over 3 tokens, 2 over 4; no token at lag 7.
    for part in (
        "the effective sample size is low (ESS 0.125, ratio mean 1.5 and max 9, gradient norm 0.25; ",
        "mismatch_kl in nats: 0.01 at lag 0, 0.5 at lag 4)",
        "queue.max_staleness",
        "optimizer.lr",
        "loss.min_ess",
    ):
        assert part in text
    with pytest.raises(TrainingError, match="every token was masked"):
        check_skipped(11, None, most=10)
