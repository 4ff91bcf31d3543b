"""What the figures say about the staleness bound."""

import json
from pathlib import Path

import pytest

from async_rl.extensions.insight.comparison.advice import Advice, advise, recommend
from async_rl.extensions.insight.comparison.points import Point
from async_rl.extensions.insight.comparison.summary import summarise

from .runs import a_run, step_row, write_run


def point(
    bound: int, speed: float, accuracy: float | None = 0.9, error: float = 0.01, *, ess: float = 0.99,
    speed_error: float = 0.0, first: float | None = None, reached_s: float | None = None,
) -> Point:  # fmt: skip
    staleness = bound / 2
    return Point(bound, speed, speed_error, accuracy, error, ess, staleness, first, reached_s)


def rising(bound: int, speed: float, reached_s: float) -> Point:
    return point(bound, speed, first=0.2, reached_s=reached_s)


def advice_on(*points: Point, has_enough: bool = True) -> Advice:
    return recommend(points, has_enough=has_enough)


@pytest.mark.parametrize(
    ("points", "bound", "says"),
    [
        pytest.param(
            [point(0, 1.0), point(1, 1.5), point(4, 1.98, speed_error=0.03), point(16, 2.0)], 4,
            "No higher bound is faster than 4 by more than 5% and 2 standard errors.",
            id="the lowest that is about as fast as the fastest",
        ),
        pytest.param(
            [rising(0, 1.0, 30.0), rising(1, 1.5, 20.0), rising(4, 2.0, 19.5)], 1,
            "The steps at 4 are faster than at 1, but the accuracy that every run reached came no sooner.",
            id="faster steps that learn no sooner do not pay",
        ),
        pytest.param(
            [rising(0, 1.0, 30.0), rising(1, 1.5, 20.0), rising(4, 2.0, 15.0)], 4,
            "came after 30.0 s at 0, 20.0 s at 1, 15.0 s at 4.", id="faster steps that learn sooner pay",
        ),
        pytest.param(
            [point(bound, 1.0 + bound, 0.21, first=0.2, reached_s=5.0) for bound in (0, 4)], 4,
            "The accuracy does not tell yet: it began at 0.200", id="without a clear rise speed decides",
        ),
        pytest.param(  # 0.95 - 0.80 is 10 standard errors of a difference (0.014); 0.95 - 0.93 is 1.4
            [point(0, 1.0, 0.95), point(1, 1.5, 0.93), point(4, 2.0, 0.80)], 1,
            "clearly lower than 0.950 ± 0.010 at 0: 0.800 ± 0.010 at 4. So 4 is not recommended.",
            id="a bound that clearly costs accuracy",
        ),
        pytest.param(
            [point(0, 1.0), point(4, 2.0, ess=0.7)], 4, "0.700, which is low: consider a lower bound or optimizer.lr",
            id="a low effective sample size is a warning",
        ),
    ],
)  # fmt: skip
def test_a_higher_bound_is_recommended_where_it_pays(points: list[Point], bound: int, says: str):
    advice = advice_on(*points)
    assert (advice.bound, advice.is_certain) == (bound, True)
    assert says in " ".join(advice.reasons)


def test_a_gain_within_the_noise_leaves_the_lower_bound_and_says_so():
    # From 4 to 16 the gain of 0.27 is below 2 x sqrt(0.1^2 + 0.127^2) = 0.32; from 0 to 4 that of 0.5 is above 0.22.
    noisy = [point(0, 0.5, speed_error=0.05), point(4, 1.0, speed_error=0.1), point(16, 1.27, speed_error=0.127)]
    advice = advice_on(*noisy, has_enough=False)
    assert (advice.bound, advice.is_certain) == (4, False)
    assert "for now: these runs can't tell whether 16 pays" in advice.sentence
    assert advice.reasons[-2].endswith("async-rl sweep CONFIG --over queue.max_staleness=4,16 --seeds 3")
    assert "the difference is below 2 standard errors. To find out: " in advice_on(*noisy).reasons[-2]
    # Two other runs of the same bounds, in which 16 happened to be the slower one, give the same bound.
    swapped = [point(4, 1.27, speed_error=0.127), point(16, 1.0, speed_error=0.1)]
    assert advice_on(*swapped, has_enough=False).bound == 4


def test_runs_that_can_not_be_compared_get_no_advice(tmp_path: Path):
    whole = a_run(tmp_path / "whole", 4, 1.0)
    rows = [step_row(step) for step in range(6, 11)]
    fork = summarise(write_run(tmp_path / "fork", rows, bound=16, forked_at=5, run={"seed": 0}))
    same = summarise(write_run(tmp_path / "same", rows, bound=4, forked_at=5, run={"seed": 0}))
    assert advise([same, fork]).bound == 4
    other_lr = summarise(write_run(tmp_path / "lr", rows, bound=16, optimizer={"lr": 2e-6}))
    short = a_run(tmp_path / "short", 16, 1.0, num_steps=8)
    two_bounds = a_run(tmp_path / "changed", 16, 1.0)
    assert advise([whole, two_bounds]).bound == 4
    change = {"step": 5, "changed": {"queue.max_staleness": [4, 16], "learner.steps": [5, 10]}}
    (tmp_path / "changed" / "config_changes.jsonl").write_text(json.dumps(change) + "\n")
    for other, reason in (
        (fork, "fork is a fork and has the steps 6 to 10, but whole has the steps 1 to 10."),
        (short, "short has made 8 steps, whole 10."),
        (other_lr, "The runs also differ in optimizer.lr."),
        (summarise(tmp_path / "changed"), "In changed queue.max_staleness changed after step 5"),
    ):
        advice = advise([whole, other])
        assert advice.bound is None
        assert advice.reasons[0].startswith(reason)
    assert f"{tmp_path}/whole/config.toml --from runs/source@5 --set run.dir=NEW" in advise([whole, fork]).sentence


def test_runs_of_one_bound_get_the_sweep_that_tells(tmp_path: Path):
    advice = advise([a_run(tmp_path / name, 4, 1.0) for name in ("a", "b")])
    assert (advice.sentence, advice.bound) == ("No advice on queue.max_staleness: all runs have 4.", None)
    assert advice.reasons[0].endswith("async-rl sweep CONFIG --over queue.max_staleness=4,8,16.")
