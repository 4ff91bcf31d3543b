"""The lines at the end of a run: what it has learned, what became of its groups, its files, and what to do next."""

import json
from pathlib import Path

from async_rl.launch.summary import filter_note, ledger_line, next_lines, summary
from async_rl.run.directory import RunDir
from tests.config.made import a_config
from tests.launch.rows import a_row, append


def test_the_summary_tells_accuracies_before_and_after_and_the_ledger(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    append(run_dir.metrics, {"step": 0, "eval/gsm8k/accuracy": 0.25}, a_row(1), {"step": 1, "eval/gsm8k/accuracy": 0.5})
    ledger = {"issued": 9, "in_flight": 0, "queued": 0, "taken": 0, "trained": 6, "filtered": 2}
    run_dir.ledger.write_text(json.dumps({"groups": {**ledger, "dropped": {"stale": 1, "expired": 0}}}))
    run_dir.mark_finished({"step": 1})
    lines = summary(run_dir, 3.0)
    assert lines[0] == "finished: 1 steps, this launch took 3s"
    assert "accuracy on gsm8k: 0.250 -> 0.500" in lines
    assert "groups: issued 9 = trained 6 + filtered 2 + dropped as stale 1" in lines


def test_the_summary_says_if_the_best_evaluation_was_before_the_last(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    points = {0: 0.3, 40: 0.9, 60: 0.85, 80: 0.5}
    error = {"eval/a/accuracy_se": 0.02}
    append(run_dir.metrics, *({"step": step, "eval/a/accuracy": value, **error} for step, value in points.items()))
    line = "best on a: 0.900 at step 40, the last is 0.500 at step 80"
    assert f"{line}; its checkpoint is gone (checkpoint.keep_every keeps more)" in summary(run_dir, 3.0)
    checkpoint = run_dir.checkpoints / "step-000040"
    checkpoint.mkdir(parents=True)
    assert f"{line}; export it: async-rl export {checkpoint} OUT" in summary(run_dir, 3.0)
    # Two standard errors of the difference are 2 * sqrt(2) * 0.02 = 0.057.
    append(run_dir.metrics, {"step": 100, "eval/a/accuracy": 0.87, **error})
    assert any("the last is 0.870 at step 100, which may be chance; export" in line for line in summary(run_dir, 3.0))
    append(run_dir.metrics, {"step": 120, "eval/a/accuracy": 0.9, **error})
    assert not any("best on" in line for line in summary(run_dir, 3.0))
    append(run_dir.metrics, {"step": 0, "eval/b/accuracy": 0.3}, {"step": 9, "eval/b/accuracy": 0.0})
    line = "best on b: 0.300 at step 0, the last is 0.000 at step 9; that is the model at model.path"
    assert line in summary(run_dir, 3.0)


def test_the_end_of_a_run_names_its_files_and_what_to_do_next(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    append(run_dir.metrics, a_row(8))
    run_dir.eval.mkdir()
    (run_dir.eval / "gsm8k-step-000008.jsonl").touch()
    run_dir.export.mkdir()
    run_dir.rollouts.mkdir()
    (run_dir.rollouts / "step-000001.jsonl").touch()
    (run_dir.rollouts / "summaries.jsonl").touch()
    run_dir.curve.touch()
    files = "curve.png, eval/gsm8k-step-000008.jsonl, export"
    assert summary(run_dir, 3.0)[-1] == f"run directory: {tmp_path} ({files})"
    (run_dir.eval / "gsm8k-step-000008.jsonl").unlink()
    assert "rollouts/step-000001.jsonl" in summary(run_dir, 3.0)[-1]
    commands = [line.split("    #")[0] for line in next_lines(run_dir, a_config(tmp_path, learner={"steps": 8}))]
    assert commands == [
        f"next: async-rl report {tmp_path}",
        f"      async-rl launch {tmp_path}/config.toml --set learner.steps=16",
    ]
    data_ended = a_config(tmp_path, learner={"steps": 9}, data={"train": "d", "epochs": 2})
    assert "--set data.epochs=3 " in next_lines(run_dir, data_ended)[1]


def test_a_run_ends_with_at_most_eight_lines_and_no_note_that_a_view_has_shown(tmp_path: Path):
    run_dir, evals = RunDir(tmp_path), {f"eval/{name}/accuracy": 0.5 for name in "abc"}
    for step in range(1, 5):
        bad = {"ratio/ess": 0.01, "length/truncated": 1.0}
        append(run_dir.metrics, a_row(step, **bad), {"step": step, **evals, "eval/b/accuracy": 1 / step})
    ledger = {"issued": 9, "in_flight": 0, "queued": 0, "taken": 0, "trained": 0, "filtered": 9, "dropped": {}}
    run_dir.ledger.write_text(json.dumps({"groups": ledger}))
    lines = summary(run_dir, 3.0, has_notes=False)
    assert lines[1] == "accuracy on a: 0.500 -> 0.500, on b: 1.000 -> 0.250, on c: 0.500 -> 0.500"
    assert len([*lines, *next_lines(run_dir, a_config(tmp_path))]) == 8
    assert {line[:12] for line in {*summary(run_dir, 3.0)} - {*lines}} == {"note: step 2"}


def test_a_run_that_filtered_most_groups_says_what_that_means():
    # 30 of 40 groups that ended in one of the two states are three quarters.
    (note,) = filter_note({"groups": {"trained": 10, "filtered": 30, "dropped": {}}})
    assert note.startswith("note: 75% of these groups were filtered")
    assert filter_note({"groups": {"trained": 10, "filtered": 29, "dropped": {}}}) == []
    # Two of ten groups were filtered, and the run trained on none: the others were dropped.
    assert filter_note({"groups": {"trained": 0, "filtered": 2, "dropped": {"poison": 8}}}) == []
    empty = dict.fromkeys(("issued", "in_flight", "queued", "taken", "trained", "filtered"), 0)
    assert ledger_line({"groups": {**empty, "dropped": {}}}) == "groups: issued 0 = 0"
    assert filter_note({"groups": {**empty, "dropped": {}}}) == []


def test_a_run_without_evaluations_says_whether_its_answers_have_become_better(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    append(run_dir.metrics, a_row(1), *(a_row(n, **{"accuracy/received": n / 100}) for n in range(2, 9)))
    assert not any("sampled answers" in line for line in summary(run_dir)), "seven steps are too few"
    append(run_dir.metrics, a_row(9, **{"accuracy/received": 0.09}))
    line = "accuracy of all sampled answers: 0.035 -> 0.075 (first and last 4 steps; "  # 0.02 to 0.05, and 0.06 to 0.09
    assert any(shown.startswith(line) for shown in summary(run_dir))
    append(run_dir.metrics, *(a_row(n, **{"accuracy/received": 0.5}) for n in range(10, 32)))
    # Of ten steps at most, 0.02 to 0.09 and two of 0.5.
    assert any(
        line.startswith("accuracy of all sampled answers: 0.144 -> 0.500 (first and") for line in summary(run_dir)
    )
    append(run_dir.metrics, {"step": 31, "eval/a/accuracy": 0.5})
    assert not any("sampled answers" in line for line in summary(run_dir))
