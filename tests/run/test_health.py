"""Notes on the training of a run: one for each cause, by the third step that shows it, none for healthy runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from async_rl.run.figures.health import Health, Note
from async_rl.run.figures.progress import is_step_row
from async_rl.run.records.step_log import Row
from tests.run.health_runs import HEALTHY, SICK, load

GOOD: dict[str, float] = {
    "tokens/trained": 900.0, "lr": 1e-5, "accuracy/mean": 0.4, "entropy": 0.4, "grad_norm": 0.5, "staleness/mean": 3.0,
    "ratio/ess": 0.98, "ratio/kl": 0.001, "ratio/clip_fraction": 0.01, "mismatch_kl/lag_0": 0.0005,
    "lag_0/tokens": 900.0, "routing/unused": 0.25,
}  # fmt: skip


def a_row(step: int, figures: dict[str, Any]) -> Row:
    """A step's row: good figures but for ``figures``, whose names have ``__`` for the slash."""
    return {"step": step, "version": step, **GOOD, **{key.replace("__", "/"): value for key, value in figures.items()}}


def notes_of(rows: Sequence[Row]) -> list[Note]:
    health = Health()
    return [note for row in rows for note in health.add(row)]


def good_then(num_bad: int, *, num_good: int = 10, **figures: Any) -> list[Row]:
    """``num_good`` good steps, then ``num_bad`` with ``figures``."""
    good = [a_row(step, {}) for step in range(1, num_good + 1)]
    return [*good, *(a_row(num_good + number, figures) for number in range(1, num_bad + 1))]


@pytest.mark.parametrize(
    ("cause", "figures"),
    [
        ("samples", {"ratio__ess": 0.48}),  # below half of 0.98
        ("samples", {"ratio__kl": 0.21}),  # above half of the entropy, 0.2
        ("samples", {"ratio__clip_fraction": 0.31}),  # above 0.3
        ("engines", {"mismatch_kl__lag_0": 0.11}),
        ("certain", {"entropy": 0.019}),  # below a twentieth of 0.4
        ("random", {"entropy": 0.81}),  # above twice 0.4
        ("gradient", {"grad_norm": 10.1}),  # above 20 times 0.5
        ("reversed", {"advantage__agreement": -0.51}),  # three of four pairs
        ("experts", {"routing__unused": 0.31}),  # a twentieth of them more than 0.25
        ("no_gradient", {"grad_norm": 0.0}),
    ],
)
def test_every_cause_is_noted_by_the_third_step_that_shows_it_and_once(cause: str, figures: dict[str, Any]):
    notes = notes_of(good_then(20, **figures))
    assert [note.cause for note in notes] == [cause]
    assert notes[0].step <= 13
    suffices = cause == "engines"  # with the same weights there is no chance in it
    assert len(notes_of(good_then(1, **figures))) == suffices, "one bad step is no collapse"


def test_answers_that_have_become_worse_are_noted_once():
    good = [a_row(step, {"accuracy__received": 0.5}) for step in range(1, 17)]
    bad = [a_row(step, {"accuracy__received": 0.2, "lr": 3e-4}) for step in range(17, 60)]
    # The whole fall is 0.3; 0.25 of it are reached when five of eight steps are bad: 0.3125 < 0.75 * 0.5.
    (note,) = notes_of([*good, *bad])
    assert note.cause == "worse"
    assert note.step == 20, "the mean of steps 13 to 20 is 0.35"
    assert "accuracy 50 % -> 35 % (means of steps 1 to 8 and 13 to 20)" in note.finding
    assert "Lower optimizer.lr (now 0.0003)" in note.remedy
    assert not note.is_collapse


def test_evaluations_tell_that_the_answers_have_become_worse():
    def evaluation(step: int, accuracy: float) -> Row:
        return {"step": step, "time_s": 1.0, "eval/math/accuracy": accuracy, "eval/math/accuracy_se": 0.01}

    rows = good_then(0, num_good=20)
    health = Health([evaluation(0, 0.3), *rows[:10], evaluation(10, 0.4), *rows[10:]])
    assert health.notes == []
    (note,) = health.add(evaluation(20, 0.2))
    assert "accuracy 40 % -> 20 % (evaluations on math at steps 10 and 20). " in note.text
    assert health.add(evaluation(21, 0.1)) == []
    # The run goes back to step 9, and evaluates again.
    assert health.add(a_row(10, {})) == []
    assert health.notes == []
    assert health.add(evaluation(10, 0.41)) == []
    assert [note.step for note in health.add(evaluation(11, 0.2))] == [11]


def test_accuracies_of_steps_that_are_trained_again_are_forgotten():
    good, again = ([a_row(step, {"accuracy__received": share}) for step in range(1, 30)] for share in (0.9, 0.4))
    assert notes_of([*good, *again]) == []


def test_steps_that_can_not_be_compared_say_nothing_about_the_answers():
    # Without accuracy/received, as with a curriculum: the prompts become harder.
    assert notes_of(good_then(60, accuracy__mean=0.01)) == []


@pytest.mark.parametrize(
    "figures",
    [
        {"ratio__ess": 0.5},
        {"ratio__kl": 0.19},
        {"ratio__clip_fraction": 0.29},
        {"mismatch_kl__lag_0": 0.09},
        {"mismatch_kl__lag_0": 3.0, "lag_0__tokens": 450},  # ends of answers that began with older weights
        {"entropy": 0.021},
        {"entropy": 0.79},
        {"grad_norm": 9.9},
        {"advantage__agreement": -0.49},
        {"advantage__agreement": -1.0, "distill__kl": 0.1},  # the teacher's advantages do not ask for the accuracy
        {"grad_norm": 0.0, "tokens__trained": 0},
        # More answers are right: certainty, no gradient and a larger one are what learning looks like.
        {"entropy": 0.001, "accuracy__mean": 0.46},
        {"grad_norm": 0.0, "accuracy__mean": 1.0},
        {"grad_norm": 11.0, "accuracy__mean": 0.8},
        # A student that imitates a teacher takes on the teacher's entropy.
        {"entropy": 0.001, "distill__kl": 0.1},
    ],
)
def test_what_is_within_the_limits_draws_no_note(figures: dict[str, Any]):
    assert notes_of(good_then(20, **figures)) == []


def test_a_note_has_the_course_of_each_metric_and_what_to_change():
    rows = good_then(0)
    rows += [a_row(11, {"ratio__kl": 0.3, "lr": 3e-4}), a_row(12, {"ratio__kl": 36.0, "ratio__ess": 0.004, "lr": 3e-4})]
    (note,) = notes_of(rows)
    assert (
        "effective sample size 0.98 -> 0.004 within one step, KL to the sampling policy 0.001 -> 36 nats" in note.text
    )
    assert "Lower optimizer.lr (now 0.0003) or queue.max_staleness (the data is 3.0 versions old)" in note.text
    # What follows a collapse refers to its note.
    rows = good_then(3, ratio__kl=1.0) + [a_row(step, {"entropy": 0.001}) for step in (14, 15)]
    first, second = notes_of(rows)
    assert (first.cause, second.cause) == ("samples", "certain")
    assert second.text.endswith("The note of step 12 has the remedy")


@pytest.mark.parametrize(
    ("in_queue", "others", "said"),
    [
        (2.5, {}, 'set queue.run_ahead = "auto", or choose'),
        (2.5, {"queue__run_ahead_limit": 20}, "or choose"),  # paced already
        (1.5, {}, "or choose"),  # no more than a paced run has
    ],
)
def test_the_note_on_old_data_says_how_much_of_the_age_is_running_ahead(in_queue: float, others: Any, said: str):
    (note,) = notes_of(good_then(20, ratio__kl=0.21, staleness__in_queue_mean=in_queue, **others))
    assert f"{3 - in_queue} from sampling answers, {in_queue} from running ahead), {said}" in note.remedy


def test_a_run_that_is_sick_from_its_first_step_is_judged_without_a_beginning():
    assert [note.step for note in notes_of(good_then(3, num_good=0, ratio__ess=0.2))] == [2]
    # All rewards are equal, so also all accuracies, whether 0 or 1.
    for accuracy in (0.0, 1.0):
        notes = notes_of(good_then(5, num_good=0, grad_norm=0.0, accuracy__mean=accuracy))
        assert [(note.cause, note.step) for note in notes] == [("no_gradient", 3)]


def test_figures_that_are_missing_or_not_finite_say_nothing():
    rows = good_then(5, ratio__kl=None, ratio__ess=float("nan"), entropy=float("inf"))
    assert notes_of(rows) == []
    rows = [{"step": step, "version": step, "tokens/trained": 0} for step in range(1, 9)]
    assert notes_of(rows) == []
    assert notes_of([{"step": 3, "time_s": 1.0, "eval/math/accuracy": 0.0}]) == []


def test_a_resume_neither_repeats_nor_forgets_a_note():
    resumed = Health(good_then(10, ratio__kl=1.0))
    assert [note.step for note in resumed.notes] == [12]
    assert resumed.add(a_row(21, {"ratio__kl": 1.0})) == []
    # The learner goes on from step 9: what happened after it is trained again, first well and then badly.
    assert resumed.add(a_row(10, {})) == []
    assert resumed.notes == []
    assert [note.step for step in (11, 12) for note in resumed.add(a_row(step, {"ratio__kl": 1.0}))] == [12]


def test_a_collapse_counts_again_after_two_steps_of_a_resumed_run():
    health = Health(good_then(10, ratio__kl=1.0))
    assert health.collapse_after(0) is not None
    assert health.collapse_after(20) is None
    health.add(a_row(21, {"ratio__kl": 1.0}))
    assert health.collapse_after(20) is None
    health.add(a_row(22, {"ratio__kl": 1.0}))
    note = health.collapse_after(20)
    assert note is not None
    assert note.remedy.startswith("Lower optimizer.lr"), "the message that stops a run has its remedy"
    health.add(a_row(23, {}))
    assert health.collapse_after(20) is None


def test_a_run_with_nothing_to_learn_is_not_stopped_as_collapsed():
    assert Health(good_then(9, grad_norm=0.0)).collapse_after(0) is None


RUNS = load()


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_draws_no_note(name: str):
    assert notes_of(RUNS[name]) == []


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_named_where_the_metrics_show_it(name: str):
    run = SICK[name]
    notes = notes_of(RUNS[name])
    assert [(note.cause, note.step) for note in notes[:1]] == ([(run["cause"], run["step"])] if run["cause"] else [])
    assert run["cause"] or run["named_by"], "somebody must name it"
    if run["cause"] in ("samples", "random"):  # a run that stops on collapse ends at the first note
        steps = (row for row in RUNS[name] if is_step_row(row) and row["step"] <= run["step"])
        note = Health(steps).collapse_after(0)
        assert note is not None
        assert note.cause == run["cause"]
