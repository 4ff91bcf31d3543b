"""The learner's loop over the real queue, checkpoints and metrics: deaths and restarts, skips, ends, publications."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from async_rl.errors import RunStoppedError, TrainingError
from async_rl.learner.checkpoints.files import latest_checkpoint
from async_rl.queue.core import generator_requests
from async_rl.queue.core.prompts import PromptStream
from async_rl.records import Group, Lease
from async_rl.run.records.step_log import read_rows
from tests.learner.loop.direct_queue import NUM_EVAL_ROWS
from tests.learner.loop.scripted_run import Run, all_wrong, answered, cut_short, make_run, retune
from tests.queue.builders import group

M2 = {"name": "m2", "level": "step", "statistic": "k2", "above": 9.0, "when": "always", "action": "mask"}


def test_every_set_is_evaluated_at_its_own_steps_and_at_the_start_and_the_end(tmp_path: Path):
    run = make_run(
        tmp_path,
        data={"eval": {"test": "a.jsonl", "rare": "b.jsonl", "often": "c.jsonl"}},
        eval={"sets": {"rare": {"every": 0}, "often": {"every": 1}}},
    )
    state = run.start()
    assert (run.steps, state.step, state.version) == ([1, 2, 3, 4, 5], 5, 5)
    assert run.queue is not None
    asked = {name: [step for of, step, _ in run.queue.asked if of == name] for name in ("test", "rare", "often")}
    assert asked == {"test": [0, 2, 4, 5], "rare": [0, 5], "often": [0, 1, 2, 3, 4, 5]}
    assert all(exclusive == (step in (0, 5)) for _, step, exclusive in run.queue.asked)
    assert sorted(path.name[-8:] for path in (run.path / "eval").glob("rare-*")) == ["00.jsonl", "05.jsonl"]
    eval_groups = run.ledger["eval"]["groups"]
    assert eval_groups["delivered"] == eval_groups["issued"] == 12 * NUM_EVAL_ROWS


@pytest.mark.parametrize(("request_name", "at_step"), [("await_eval", 0), ("take", 0), ("take", 1), ("ack", 1)])
def test_a_learner_killed_before_its_first_checkpoint_starts_over(tmp_path: Path, request_name: str, at_step: int):
    run = make_run(tmp_path)
    run.dies(request_name, at_step)
    assert latest_checkpoint(run.path) is None
    before = len(run.all_rows)
    run.start()
    assert run.queue is not None
    assert run.queue.asked[0] == ("test", 0, True)
    assert (run.steps, run.evals) == ([1, 2, 3, 4, 5], [0, 2, 4, 5])
    assert len(read_rows(run.path / "metrics.rolled_back-1.jsonl")) == before
    assert run.ledger["groups"]["trained"] == 10
    assert (run.dropped.get("rolled_back", 0) > 0) == (request_name != "await_eval")


def test_data_that_ended_goes_on_with_more_epochs(tmp_path: Path):
    # The third step has one group, and a checkpoint that knows of the end.
    run = make_run(tmp_path, num_rows=5, data={"epochs": 1}, learner={"steps": 9})
    assert run.start().exhausted
    assert run.steps == [1, 2, 3]
    retune(run, data={"epochs": 2})
    PromptStream.__init__(run.queue_state.stream, 5, seed=0, shuffle=False, epochs=2)
    assert run.start().exhausted
    assert run.steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("request_name", "at_step"),
    [
        ("", 0), ("take", 2), ("ack", 2), ("take", 3), ("checkpoint_committed", 3), ("await_eval", 3), ("finish", 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("every", [1, 2])
def test_the_last_step_of_the_data_trains_on_what_is_left_and_every_row_once_whenever_the_learner_is_killed(
    tmp_path: Path, request_name: str, at_step: int, every: int
):
    # Five rows, two groups a step: the third step has one group.
    run = make_run(
        tmp_path, num_rows=5, data={"epochs": 1}, learner={"steps": 99},
        checkpoint={"every": every, "asynchronous": False},
    )  # fmt: skip
    if request_name:
        run.dies(request_name, at_step)
    state = run.start()
    assert (state.step, state.version, state.exhausted) == (3, 3, True)
    assert run.positions == [[0, 1], [2, 3], [4]]
    assert (run.steps, set(run.evals)) == ([1, 2, 3], {0, 2, 3})
    assert (run.ledger["groups"]["trained"], set(run.dropped) <= {"rolled_back"}) == (5, True)
    assert latest_checkpoint(run.path) == run.path / "checkpoints" / "step-000003"


def test_a_smaller_batch_makes_fewer_updates_of_the_usual_size(tmp_path: Path):
    # Four groups a step in two updates of two. What is left are three groups: updates of two and of one; or one group.
    for num_rows, last in ((7, [2, 1]), (5, [1])):
        run = make_run(
            tmp_path / f"{num_rows}", num_rows=num_rows, data={"epochs": 1}, queue={"max_staleness": 2},
            learner={"steps": 99, "groups_per_step": 4, "updates_per_batch": 2},
        )  # fmt: skip
        state = run.start()
        assert [len(sequences) // 2 for _, sequences in run.engine.calls] == [2, 2, *last]
        assert (state.step, state.version) == (2, 2 + len(last))
        assert (run.ledger["groups"]["trained"], run.dropped) == (num_rows, {})


def test_filtered_groups_leave_a_smaller_last_step_and_masked_ones_do_not(tmp_path: Path):
    def answer(lease: Lease, version: int) -> Group:
        return (answered if lease.prompt.position % 3 else all_wrong)(lease, version)

    # Of rows 0 to 6, positions 0, 3 and 6 have wrong answers alone.
    keys: dict[str, Any] = {"data": {"epochs": 1}, "learner": {"steps": 99}}
    run = make_run(tmp_path / "refill", num_rows=8, **keys)
    assert run.start(answer=answer).step == 3
    assert run.positions == [[1, 2], [4, 5], [7]]
    masked = make_run(tmp_path / "masked", num_rows=7, queue={"refill": False}, **keys)
    state = masked.start(answer=answer)
    # The last step has only position 6, whose answers are masked.
    assert (state.step, state.version, masked.dropped) == (4, 3, {"step_skipped": 1})


def test_data_of_which_no_group_can_be_trained_is_no_success(tmp_path: Path):
    run = make_run(tmp_path, num_rows=5, data={"epochs": 1})
    with pytest.raises(RunStoppedError, match=r"trained nothing: .*data\.epochs.* 5 filtered \(5 with only wrong"):
        run.start(answer=all_wrong)
    assert (run.steps, latest_checkpoint(run.path)) == ([], None)
    # The same command, with data that the model can do, begins anew.
    assert run.start().step == 3
    assert run.positions == [[0, 1], [2, 3], [4]]


def test_a_run_whose_steps_were_all_skipped_is_no_success(tmp_path: Path):
    run = make_run(tmp_path, num_rows=4, data={"epochs": 1}, learner={"steps": 99})
    run.engine.stepped = [False, False]
    with pytest.raises(RunStoppedError, match="this run has trained nothing: no step of 2 has changed the weights"):
        run.start()


def test_a_step_whose_gradient_is_not_finite_leaves_what_it_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    # Five steps of two groups of two answers; all gradients but the first are NaN. Three files are enough.
    run = make_run(tmp_path, experimental={"max_skipped_steps": 9})
    run.engine.stepped = [True, False, False, False, False]
    run.engine.grad_norm = math.nan
    run.start()
    files = sorted((run.path / "nonfinite").iterdir())
    assert [file.name for file in files] == ["step-000002.jsonl", "step-000003.jsonl", "step-000004.jsonl"]
    assert str(files[0]) in caplog.text
    head, *lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert (head["step"], head["version"], head["reason"]) == (2, 1, "the gradient norm is nan")
    assert math.isnan(head["grad_norm"])
    assert [(line["position"], line["accuracy"]) for line in lines] == [(2, 1.0), (2, 0.0), (3, 1.0), (3, 0.0)]
    for line, sequence in zip(lines, run.engine.calls[1][1], strict=True):
        for name in ("token_ids", "advantages", "behavior_logprobs"):
            assert line[name] == getattr(sequence, name).tolist()


def test_an_evaluation_set_that_is_gone_at_a_restart_is_not_awaited(tmp_path: Path):
    run = make_run(tmp_path, data={"eval": {"test": "a.jsonl", "rare": "b.jsonl"}}, learner={"steps": 3})
    run.dies("await_eval", 3)
    retune(run, data={"eval": {"rare": "b.jsonl"}})
    state = run.start()
    assert (state.step, state.pending_evals) == (3, [])
    assert run.queue is not None
    assert {name for name, _, _ in run.queue.asked} == {"rare"}


def test_a_staleness_bound_lowered_at_a_restart_holds_for_the_groups_that_wait(tmp_path: Path):
    run = make_run(tmp_path, queue={"max_staleness": 4}, learner={"steps": 6})
    run.dies("take", 3)
    retune(run, queue={"max_staleness": 0})
    run.start()
    assert run.steps == [1, 2, 3, 4, 5, 6]
    assert [row["staleness/max"] for row in run.rows[2:]] == [0] * 4


@pytest.mark.parametrize("request_name", ["await_eval", "finish"])
def test_a_learner_killed_after_its_last_step_only_evaluates_again(tmp_path: Path, request_name: str):
    run = make_run(tmp_path)
    run.dies(request_name, 5)
    state = run.start()
    assert len(run.engine.calls) == 5
    assert (run.steps, run.evals, state.step) == ([1, 2, 3, 4, 5], [0, 2, 4, 5], 5)
    assert len(list((run.path / "eval").glob("*.jsonl"))) == 4


def test_an_evaluation_that_a_checkpoint_waits_for_is_asked_again_and_recorded_once(tmp_path: Path):
    # The evaluation of step 2 is asked for just before the checkpoint of step 2, and written after it.
    run = make_run(tmp_path)
    run.dies("ack", 3)
    assert run.evals == [0, 2]
    run.start()
    assert run.queue is not None
    assert run.queue.asked[0] == ("test", 2, False)
    assert (run.steps, run.evals) == ([1, 2, 3, 4, 5], [0, 2, 4, 5])
    assert (run.path / "eval" / "rolled_back-1" / "test-step-000002.jsonl").exists()


def test_skipped_optimizer_steps_in_a_row_go_on_with_new_groups_and_no_new_version(tmp_path: Path):
    run = make_run(tmp_path, queue={"max_staleness": 0})
    run.engine.stepped = [False, False, False, True, False]
    state = run.start()
    assert (run.steps, state.version, run.weights.published) == ([1, 2, 3, 4, 5], 1, [0, 1])
    assert (run.dropped, run.ledger["groups"]["trained"]) == ({"step_skipped": 8}, 2)
    assert [row["tokens/trained"] for row in run.rows] == [0, 0, 0, 12, 0]


def test_a_batch_of_two_updates_may_be_skipped_in_part(tmp_path: Path):
    run = make_run(tmp_path, learner={"steps": 3, "updates_per_batch": 2}, queue={"max_staleness": 2})
    run.engine.stepped = [True, False, False, True, True, True]
    state = run.start()
    # Versions before each update: a step that was skipped leaves the version as it is.
    assert run.engine.versions == [0, 1, 1, 1, 2, 3]
    assert (state.version, run.weights.published) == (4, [0, 1, 2, 4])
    # Two groups a step, one an update: two updates were skipped, with two rollouts of three tokens each.
    rollouts, tokens = run.ledger["rollouts"], run.ledger["tokens"]
    assert (rollouts["trained"], rollouts["masked"]) == (8, {"step_skipped": 4})
    assert (tokens["trained"], tokens["masked"]) == (24, {"step_skipped": 12})


@pytest.mark.parametrize(("num_steps", "published"), [(5, [0, 2, 4, 5]), (4, [0, 2, 4])])
def test_every_second_version_is_published_and_the_last_one_always(
    tmp_path: Path, num_steps: int, published: list[int]
):
    run = make_run(
        tmp_path, learner={"steps": num_steps}, queue={"max_staleness": 1}, weights={"sync_every": 2}, eval={"every": 1}
    )
    run.start()
    assert run.weights.published == published
    assert sorted(run.evals) == list(range(num_steps + 1))
    assert versions_of_last_evaluation(run) == [num_steps, num_steps]


def versions_of_last_evaluation(run: Run) -> list[int]:
    """By which the first answer was sampled."""
    path = run.path / "eval" / f"test-step-{run.steps[-1]:06d}.jsonl"
    return json.loads(path.read_text().splitlines()[0])["versions"]


def test_groups_in_the_queue_are_trained_after_a_restart_that_lays_the_weights_out_anew(tmp_path: Path):
    # The step of the checkpoint was skipped, so that its version was published before, and groups of it are queued.
    run = make_run(tmp_path, queue={"max_staleness": 2})
    run.engine.stepped = [True, False]
    run.dies("take", 2)
    run.weights.name = "laid-out-anew"

    def sampled_anew(lease: Lease, version: int) -> Group:
        return structs.replace(answered(lease, version), weights_digest={version: f"laid-out-anew-{version}"})

    run.start(answer=sampled_anew)
    assert run.steps == [1, 2, 3, 4, 5]
    assert run.dropped == {"step_skipped": 2}  # nothing beside the scripted one


def test_rollouts_of_unknown_weights_that_the_queue_let_pass_are_masked(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(generator_requests, "why_unfit", lambda *args, **kwargs: "")

    def forged(lease: Lease, version: int) -> Group:
        honest = answered(lease, version)
        return honest if lease.kind == "eval" or lease.prompt.position else structs.replace(honest, weights_digest={})

    run = make_run(tmp_path)
    run.start(answer=forged)
    assert run.rows[0]["masked/unknown_weights"] == 2
    assert run.ledger["rollouts"]["masked"] == {"unknown_weights": 2}


@pytest.mark.parametrize("fixed_lag", [0, 1, 3])
def test_fixed_lag_holds_the_lag_of_every_token(tmp_path: Path, fixed_lag: int):
    def every_third_is_filtered(lease: Lease, version: int) -> Group:
        accuracies = [1.0, float(lease.prompt.position % 3 == 0)]
        return group(lease, version, accuracies=accuracies[: lease.group_size])

    run = make_run(
        tmp_path, learner={"steps": 9, "fixed_lag": fixed_lag}, queue={"max_staleness": fixed_lag},
        checkpoint={"every": 0}, eval={"every": 3},
    )  # fmt: skip
    run.engine.stepped = [True] * 5 + [False]
    state = run.start(answer=every_third_is_filtered)
    # The sixth step is skipped: its version trains again, on a new batch that is as old.
    assert run.engine.versions == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    expected = [min(version, fixed_lag) for version in run.engine.versions]
    assert [(row["staleness/mean"], row["staleness/max"]) for row in run.rows] == [(lag, lag) for lag in expected]
    # The last step publishes what there is: the evaluation after training is wholly of the final version.
    assert run.weights.published[-1] == state.version == 8
    assert run.evals == [0, 3, 6, 9]
    assert versions_of_last_evaluation(run) == [8, 8]


def test_fixed_lag_after_a_restart_begins_with_the_version_of_the_checkpoint(tmp_path: Path):
    run = make_run(tmp_path, learner={"steps": 7, "fixed_lag": 2}, queue={"max_staleness": 2}, checkpoint={"every": 3})
    run.dies("ack", 3)
    run.start()
    assert [row["staleness/mean"] for row in run.rows] == [0, 1, 2, 0, 1, 2, 2]


def test_skipped_steps_in_a_row_are_counted_over_a_restart_and_stop_the_run_past_the_budget(tmp_path: Path):
    run = make_run(tmp_path, experimental={"max_skipped_steps": 2}, learner={"steps": 9})
    run.engine.stepped = [True, False]
    run.dies("take", 2)
    run.engine.stepped = [False, False]
    with pytest.raises(TrainingError, match=r"3 optimizer steps in a row were skipped, expected at most 2\..*is nan"):
        run.start()
    assert run.steps == [1, 2, 3, 4]


def test_batches_with_nothing_to_train_on_are_dropped_and_count_as_skipped(tmp_path: Path):
    run = make_run(tmp_path, experimental={"max_skipped_steps": 2})
    with pytest.raises(TrainingError, match="every token was masked"):
        run.start(answer=cut_short)
    assert (run.steps, run.engine.versions, run.dropped) == ([1, 2, 3], [], {"step_skipped": 6})


EVERYTHING = {
    "preset": "decoupled_ppo", "kl_coef": 0.1, "kl_placement": "reward", "kl_policy": "trained", "rules": [M2],
}  # fmt: skip
SCORED: dict[str, tuple[dict[str, Any], int, list[bool], list[tuple[str, int]]]] = {
    "nothing that the loss does not use": ({}, 1, [], []),
    "no policy for a batch of one update": ({"preset": "decoupled_ppo"}, 1, [], []),
    "the off-policy baseline": ({"advantage": "off_policy_optimal"}, 1, [], [("policy", 0)]),
    "reference and proximal policy before the first update": (
        {"preset": "decoupled_ppo", "kl_coef": 0.1, "kl_placement": "loss"}, 2, [], [("policy", 0), ("reference", 0)],
    ),
    "a rule before each update": ({"rules": [M2]}, 2, [], [("policy", 0), ("policy", 1)]),
    # Before the first update for the KL, the proximal policy and the rule; before the second one for the rule.
    "all that needs the policy at once": (EVERYTHING, 2, [], [("policy", 0), ("policy", 1), ("reference", 0)]),
    # After a skipped update the weights are still those of the first scores.
    "nothing again after a skipped update": (EVERYTHING, 2, [False, True], [("policy", 0), ("reference", 0)]),
}  # fmt: skip
"""Name -> [loss], updates of the one batch, which of them step, and what is scored after how many updates."""


@pytest.mark.parametrize(("loss", "num_updates", "stepped", "scored"), SCORED.values(), ids=SCORED)
def test_models_score_what_the_settings_need_and_only_that(
    loss: dict[str, Any], num_updates: int, stepped: list[bool], scored: list[tuple[str, int]], tmp_path: Path
):
    keys: dict[str, Any] = {"learner": {"steps": 1, "updates_per_batch": num_updates}, "queue": {"max_staleness": 2}}
    run = make_run(tmp_path, loss=loss, **keys)
    run.engine.stepped = stepped
    run.start()
    assert sorted(run.engine.scored) == scored
    has_proximal = loss.get("preset") == "decoupled_ppo" and num_updates > 1
    assert len(run.engine.trained_on) == 4
    for sequence in run.engine.trained_on:
        for found, logprob, is_there in (
            (sequence.reference_logprobs, -1.0, "kl_coef" in loss),
            (sequence.proximal_logprobs, -2.0, has_proximal),
        ):
            assert found.tolist() == (np.where(sequence.loss_mask, logprob, 0.0).tolist() if is_there else [])
