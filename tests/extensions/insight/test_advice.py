"""What the figures say about the staleness bound."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.extensions.insight.comparison.advice import Advice, advise, recommend
from async_rl.extensions.insight.comparison.points import Point
from async_rl.extensions.insight.comparison.summary import summarise

from .runs import a_run, eval_row, step_row, write_run


def point(
    bound: int, speed: float, accuracy: float | None = 0.9, error: float = 0.01, *, ess: float = 0.99,
    speed_error: float = 0.0, first: float | None = None, reached_s: float | None = None,
) -> Point:  # fmt: skip
    staleness = bound / 2
    return Point(bound, speed, speed_error, accuracy, error, ess, staleness, first, reached_s)


def advice_on(*points: Point, has_enough: bool = True) -> Advice:
    return recommend(points, has_enough=has_enough)


def test_the_lowest_bound_that_is_about_as_fast_as_the_fastest_is_recommended():
    advice = advice_on(point(0, 1.0), point(1, 1.5), point(4, 1.98, speed_error=0.03), point(16, 2.0))
    assert (advice.bound, advice.is_certain) == (4, True)
    assert advice.sentence == "Set queue.max_staleness = 4."
    assert advice.reasons == (
        "Steps/s: 1 ± 0 at 0, 1.5 ± 0 at 1 (1.50 times that at 0), 1.98 ± 0.03 at 4 (1.32 times that at 1), 2 ± 0 at "
        "16 (1.01 times that at 4).",
        "Above 0 a higher bound pays: at 1 the steps are clearly faster.",
        "Above 1 a higher bound pays: at 4 the steps are clearly faster.",
        "No higher bound is faster than 4 by more than 5% and 2 standard errors.",
        "The accuracy at the end does not suffer: 0.900 ± 0.010 at 0, 0.900 ± 0.010 at 1, 0.900 ± 0.010 at 4, 0.900 ± "
        "0.010 at 16.",
        "At 4 a trained token is 2.0 versions old on average, and the effective sample size is 0.990.",
    )


def test_the_highest_bound_may_not_be_the_last_word():
    advice = advice_on(point(0, 1.0), point(4, 2.0))
    assert advice.bound == 4
    assert advice.reasons[2] == "4 is the highest bound that was tried, so a higher one may pay too."


def test_a_gain_within_the_noise_leaves_the_lower_bound_and_says_so():
    # From 4 to 16 the gain of 0.27 is below 2 x sqrt(0.1^2 + 0.127^2) = 0.32; from 0 to 4 that of 0.5 is above 0.22.
    noisy = [point(0, 0.5, speed_error=0.05), point(4, 1.0, speed_error=0.1), point(16, 1.27, speed_error=0.127)]
    advice = advice_on(*noisy, has_enough=False)
    assert (advice.bound, advice.is_certain) == (4, False)
    assert advice.sentence == "Set queue.max_staleness = 4 for now: these runs can't tell whether 16 pays."
    assert advice.reasons[-2] == (
        "16 made 1.27 times the steps/s of 4, but with so few seeds that may be noise, since two runs of one bound may "
        "differ by 10% and more. To find out: async-rl sweep CONFIG --over queue.max_staleness=4,16 --seeds 3"
    )
    assert "the difference is below 2 standard errors. To find out: " in advice_on(*noisy).reasons[-2]
    # Two other runs of the same bounds, in which 16 happened to be the slower one, give the same bound.
    swapped = [point(4, 1.27, speed_error=0.127), point(16, 1.0, speed_error=0.1)]
    assert advice_on(*swapped, has_enough=False).bound == 4


def test_faster_steps_that_learn_no_sooner_do_not_pay():
    def of(bound: int, speed: float, reached_s: float) -> Point:
        return point(bound, speed, first=0.2, reached_s=reached_s)

    advice = advice_on(of(0, 1.0, 30.0), of(1, 1.5, 20.0), of(4, 2.0, 19.5))
    assert (advice.bound, advice.is_certain) == (1, True)
    assert advice.reasons[1:4] == (
        "Above 0 a higher bound pays: at 1 the steps are clearly faster, and the accuracy that every run reached came "
        "sooner.",
        "The steps at 4 are faster than at 1, but the accuracy that every run reached came no sooner.",
        "The accuracy that every run reached came after 30.0 s at 0, 20.0 s at 1, 19.5 s at 4.",
    )
    assert advice_on(of(0, 1.0, 30.0), of(1, 1.5, 20.0), of(4, 2.0, 15.0)).bound == 4


def test_without_a_clear_rise_the_time_to_an_accuracy_decides_nothing():
    flat = [point(bound, 1.0 + bound, 0.21, first=0.2, reached_s=5.0) for bound in (0, 4)]
    advice = advice_on(*flat)
    assert advice.bound == 4
    assert "The accuracy does not tell yet: it began at 0.200" in advice.reasons[3]


def test_a_bound_that_clearly_costs_accuracy_is_not_recommended():
    # 0.95 - 0.80 is 10 standard errors of a difference (0.014); 0.95 - 0.93 is 1.4.
    advice = advice_on(point(0, 1.0, 0.95), point(1, 1.5, 0.93), point(4, 2.0, 0.80))
    assert advice.bound == 1
    assert advice.reasons[3] == (
        "The accuracy at the end is clearly lower than 0.950 ± 0.010 at 0: 0.800 ± 0.010 at 4. So 4 is not recommended."
    )


def test_a_low_effective_sample_size_is_a_warning():
    advice = advice_on(point(0, 1.0), point(4, 2.0, ess=0.7))
    assert "0.700, which is low: consider a lower bound or optimizer.lr" in advice.reasons[-1]


def test_without_evaluations_speed_alone_decides():
    advice = advice_on(point(0, 1.0, None), point(4, 2.0, None))
    assert advice.bound == 4
    assert len(advice.reasons) == 4


def test_one_run_that_was_disturbed_does_not_hide_what_the_other_bounds_tell(tmp_path: Path):
    # One of three runs at bound 16 was nine times slower. From 0 to 4 the gain of 2 stays clear.
    speeds = {0: (1.0, 1.05, 0.95), 4: (2.0, 2.1, 1.9), 16: (2.0, 2.1, 0.23)}
    runs = [
        a_run(tmp_path / f"{bound}-{seed}", bound, 1 / speed, seed=seed)
        for bound, of_bound in speeds.items()
        for seed, speed in enumerate(of_bound)
    ]
    advice = advise(runs)
    assert (advice.bound, advice.is_certain) == (4, True)


def test_a_run_and_its_fork_over_other_steps_get_no_advice(tmp_path: Path):
    whole = a_run(tmp_path / "whole", 4, 1.0)
    rows = [step_row(step) for step in range(6, 11)]
    fork = summarise(write_run(tmp_path / "fork", rows, bound=16, forked_at=5, run={"seed": 0}))
    advice = advise([whole, fork])
    assert advice.bound is None
    assert advice.sentence == (
        "No advice on queue.max_staleness: compare forks of the same step, such as this one: async-rl launch "
        f"{tmp_path}/whole/config.toml --from runs/source@5 --set run.dir=NEW --set queue.max_staleness=4"
    )
    assert advice.reasons == ("fork is a fork and has the steps 6 to 10, but whole has the steps 1 to 10.",)
    same = summarise(write_run(tmp_path / "same", rows, bound=4, forked_at=5, run={"seed": 0}))
    assert advise([same, fork]).bound == 4


def test_runs_of_other_lengths_and_of_two_bounds_get_no_advice(tmp_path: Path):
    whole = a_run(tmp_path / "whole", 4, 1.0)
    short = a_run(tmp_path / "short", 16, 1.0, num_steps=8)
    advice = advise([whole, short])
    assert (advice.bound, advice.reasons) == (None, ("short has made 8 steps, whole 10.",))
    other = a_run(tmp_path / "other", 16, 1.0)
    change = {"step": 5, "changed": {"queue.max_staleness": [4, 16], "learner.steps": [5, 10]}}
    (tmp_path / "other" / "config_changes.jsonl").write_text(json.dumps(change) + "\n")
    assert advise([whole, other]).bound == 4
    advice = advise([whole, summarise(tmp_path / "other")])
    assert advice.bound is None
    assert advice.reasons == ("In other queue.max_staleness changed after step 5, so its figures are of both values.",)


@pytest.mark.parametrize(
    ("last", "says"), [((0.31, 0.30), "does not tell yet: it began at 0.300"), ((0.9, 0.9), "does not suffer")]
)
def test_runs_that_have_learned_nothing_clear_say_nothing_about_accuracy(
    tmp_path: Path, last: tuple[float, float], says: str
):
    # The rows' standard error is 0.01 or more: 0.31 - 0.30 is noise, 0.9 - 0.3 is not.
    runs = []
    for bound, accuracy in zip((0, 4), last, strict=True):
        rows = [step_row(1), eval_row(0, 0.3), step_row(20), eval_row(20, accuracy)]
        runs.append(summarise(write_run(tmp_path / str(bound), rows, bound=bound)))
    assert says in " ".join(advise(runs).reasons)


def test_runs_that_differ_in_another_key_get_no_advice(tmp_path: Path):
    runs = [
        summarise(write_run(tmp_path / name, [step_row(1)], bound=bound, optimizer={"lr": lr}))
        for name, bound, lr in (("a", 0, 1e-6), ("b", 4, 2e-6))
    ]
    advice = advise(runs)
    assert advice.bound is None
    assert advice.reasons == ("The runs also differ in optimizer.lr.",)


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ({"overlap__efficiency": 0.6}, "Try a queue.max_staleness above 4."),
        ({"ratio__ess": 0.5}, "Lower queue.max_staleness below 4, or lower optimizer.lr."),
        ({"idle__learner": 0.5}, "Add generators, or raise generator.batch_size."),
        ({"overlap__efficiency": 0.97}, "Nothing speaks against queue.max_staleness = 4."),
    ],
)
def test_a_single_run_shows_what_to_change(tmp_path: Path, figures: dict[str, float], sentence: str):
    assert advise([summarise(write_run(tmp_path / "run", [step_row(1, **figures)]))]).sentence == sentence


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"queue": {"run_ahead": "bound"}}, 'Set queue.run_ahead = "auto": younger data at the same speed.'),
        ({}, "Nothing speaks against queue.max_staleness = 4."),
        (
            {"queue": {"run_ahead": "bound"}, "learner": {"fixed_lag": 4, "nproc": 1}},
            "Nothing speaks against queue.max_staleness = 4.",
        ),
    ],
)
def test_a_full_queue_is_a_fault_where_only_the_bound_holds(tmp_path: Path, sections: dict[str, Any], sentence: str):
    rows = [step_row(1, idle__generators=0.4, staleness__mean=3.9)]
    assert advise([summarise(write_run(tmp_path / "run", rows, **sections))]).sentence == sentence


def test_lost_data_asks_for_a_higher_bound(tmp_path: Path):
    ledger = {
        "groups": {"trained": 95, "filtered": 0, "dropped": {"stale": 5}},
        "tokens": {"trained": 90, "masked": {}},
    }
    advice = advise([summarise(write_run(tmp_path / "run", [step_row(1)], ledger=ledger))])
    assert advice.sentence == "Raise queue.max_staleness above 4."
    assert advice.reasons == ("5.0% of the data was lost because it was too old.",)
