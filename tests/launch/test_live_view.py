"""What ``launch`` shows while a run goes: a line a step, or a table on a terminal; and its notes."""

from __future__ import annotations

import io
import json
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from async_rl.errors import QueueError
from async_rl.launch.hints import Hints, LedgerNotes
from async_rl.launch.live_view import LiveView, PlainView, newest_message
from async_rl.launch.summary import summary
from async_rl.launch.supervisor import ProcessStatus
from async_rl.run.directory import RunDir
from async_rl.run.figures.progress import RunProgress, duration, eval_accuracies, eval_lines, step_line
from async_rl.run.records.step_log import StepLogTail
from tests.end_to_end.harness import wait_until
from tests.launch.rows import a_row, append

# --- the file of metrics, read while it grows


def test_the_tail_gives_each_new_row_once_and_history_apart(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    append(path, a_row(1))
    tail = StepLogTail(path)
    assert [row["step"] for row in tail.history] == [1]
    append(path, a_row(2))
    with path.open("a") as out:
        out.write('{"step": 3')
    assert [row["step"] for row in tail.poll()] == [2]
    assert tail.poll() == []
    with path.open("a") as out:
        out.write("}\n")
    assert tail.poll() == [{"step": 3}]
    # A rollback replaces the file by a shorter one.
    append(tmp_path / "kept", a_row(1))
    (tmp_path / "kept").replace(path)
    assert tail.poll() == []
    append(path, a_row(2))
    assert [row["step"] for row in tail.poll()] == [2]


def test_the_history_of_a_long_run_is_read_row_by_row_and_none_is_kept(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    append(path, *(a_row(step, **{f"metric/{number}": number + 0.5 for number in range(50)}) for step in range(2000)))
    tracemalloc.start()
    try:
        tail = StepLogTail(path)
        progress = RunProgress(3000, tail.history)
        Hints(tail.history)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert progress.step_row["step"] == 1999
    assert peak < 1 << 20  # 2,000 rows of more than 3 kB would be 6 MB


# --- lines


def test_the_eta_is_the_pace_of_this_launch_times_what_is_left():
    progress = RunProgress(10, history=[a_row(1)])
    assert progress.eta_s is None
    progress.add({"step": 2, "version": 2, "tokens/trained": 1, "time_s": 100.0})
    progress.add({"step": 4, "version": 4, "tokens/trained": 1, "time_s": 106.0})
    assert progress.eta_s == 18.0  # 3 s a step, 6 steps left
    assert [duration(seconds) for seconds in (5.4, 61, 3723)] == ["5s", "1m01s", "1h02m"]


def test_a_step_is_one_line_of_at_most_120_letters_and_missing_figures_are_left_out():
    shares = {"idle/learner": 0.53, "idle/generators": 0.19, "idle/leases": 0.125}
    figures = {"reward/mean": 0.4844, "staleness/mean": 1.5, "staleness/max": 4, "time/step_s": 1.324, **shares}
    evaluated = {"step": 12_000, "eval/a_set_of_many_letters/accuracy": 0.98}
    progress = RunProgress(20_000, [evaluated, a_row(12_345, **figures)])
    line = (
        "step 12345/20000 | reward 0.484 | a_set_of_man 0.980 @12000 | 1.32 s/step | idle learner 53%, generators 19%"
    )
    assert (step_line(progress), len(f"{line} | ETA 1h03m")) == (line, 120)
    assert "| staleness 1.5 (max 4) | idle learner 53%, generators 19% (12% for" in step_line(progress, has_all=True)
    taught = RunProgress(10, [a_row(3, **{"reward/mean": 0.0, "distill/kl": 0.0134})])
    assert step_line(taught) == "step 3/10 | reward 0 | KL to the teacher 0.0134"


def test_an_evaluation_is_a_line_with_the_rows_without_an_answer_and_the_versions_that_answered():
    row = {"step": 3, "eval/a/b/accuracy": 0.5, "eval/a/b/unanswered": 2, "eval/a/b/rows": 8, "eval/c/accuracy": None}
    assert eval_accuracies({**row, "eval/c/pass_at_k": 1.0}) == {"a/b": 0.5}
    assert eval_lines(row) == ["eval a/b of step 3: accuracy 0.500 (2 of 8 rows without an answer)"]
    beside = {"step": 40, "eval/a/accuracy": 0.5, "eval/a/version_min": 40, "eval/a/version_max": 43}
    assert eval_lines(beside) == ["eval a of step 40 (versions 40 to 43): accuracy 0.500"]
    assert eval_lines({**beside, "eval/a/version_max": 40}) == ["eval a of step 40: accuracy 0.500"]


def console(width: int = 100, *, is_terminal: bool) -> Console:
    return Console(width=width, force_terminal=is_terminal, record=True, file=io.StringIO())


def shown_lines(tmp_path: Path, *rows: dict[str, float]) -> list[str]:
    """What the plain view prints for these rows."""
    plain = console(60, is_terminal=False)
    view = PlainView(plain, tmp_path / "metrics.jsonl", 10)
    append(tmp_path / "metrics.jsonl", *rows)
    view.refresh([])
    view.close()
    return plain.export_text().splitlines()


def notes_of(tmp_path: Path, *rows: dict[str, float]) -> list[str]:
    return [line for line in shown_lines(tmp_path, *rows) if line.startswith("note")]


# --- notes on what goes wrong

COLLAPSED = {"ratio/ess": 0.01, "ratio/kl": 2.5, "entropy": 0.125, "grad_norm": 7.5}


def test_a_collapse_is_told_once_also_by_the_next_launch(tmp_path: Path):
    (note,) = notes_of(tmp_path, *(a_row(n, **COLLAPSED) for n in range(1, 6)))
    assert note.startswith("note: step 2: the policy has left the samples that it trains on: effective sample size")
    assert notes_of(tmp_path, a_row(6, **COLLAPSED)) == []
    assert note in summary(RunDir(tmp_path), 3.0)


def test_an_evaluation_that_is_much_worse_is_told_below_its_line(tmp_path: Path):
    evals = [{"step": n, "eval/a/accuracy": right, "eval/a/accuracy_se": 0.01} for n, right in ((0, 0.5), (9, 0.125))]
    lines = shown_lines(tmp_path, evals[0], a_row(9), evals[1])
    assert lines[-2] == "eval a of step 9: accuracy 0.125"
    worse = "note: step 9: the answers have become worse: accuracy 50 % -> 12.5 % (evaluations on a at steps 0 and 9)"
    assert lines[-1].startswith(worse)
    assert lines[-1] in summary(RunDir(tmp_path), 3.0)


def test_most_answers_cut_at_the_limit_are_told_once_with_what_it_costs(tmp_path: Path):
    cut = {"length/truncated": 0.75, "reward/overlong": -0.5, "masked/truncated": 6}
    # Means over the last five steps: 0, 0.375, 0.5, 0.5625.
    (note,) = notes_of(tmp_path, a_row(1), *(a_row(n, **cut) for n in range(2, 9)))
    assert note.startswith("note: 56% of the answers of the last 4 steps were cut at sampling.max_new_tokens.")
    assert notes_of(tmp_path, *(a_row(n, **{"length/truncated": 0.75}) for n in range(9, 13))) == []  # it costs nothing
    for words in ("by 0.38 (reward.soft_overlong)", "(loss.mask_truncated)", "Raise sampling.max_new_tokens"):
        assert words in note


@pytest.mark.parametrize(
    ("key", "of_agents", "limit", "raised"),
    [
        ("length/cut_turn", {}, "environment.max_turn_tokens", "environment.max_turn_tokens"),
        ("length/cut_context", {}, "the end of the context", "sampling.max_prompt_tokens or sampling.max_new_tokens"),
        ("length/cut_context", {"agent/sessions": 8.0}, "the end of the context",
         "environment.max_rollout_tokens, sampling.max_prompt_tokens or sampling.max_new_tokens"),
    ],
)  # fmt: skip
def test_the_note_about_cut_answers_names_the_limit_that_cut_most(
    tmp_path: Path, key: str, of_agents: dict[str, float], limit: str, raised: str
):
    cut = {"length/truncated": 0.75, key: 0.5, "skip/steps": 1, "masked/truncated": 6, **of_agents}
    of_step, of_answers = notes_of(tmp_path, *(a_row(n, **cut) for n in range(1, 4)))
    assert of_answers.startswith(f"note: 75% of the answers of the last 3 steps were cut at {limit}.")
    assert f"Raise {raised}, or let the prompt" in of_answers
    assert f"(6 truncated); raise {raised}, or set loss.mask_truncated = false" in of_step


def test_a_step_that_trained_nothing_says_why_once(tmp_path: Path):
    empty = {"skip/steps": 1, "masked/truncated": 16}
    skipped = {"skip/steps": 1, "loss/policy": 0.1, "grad_norm": 1.0}
    of_critic = {"skip/steps": 0, "masked/policy_frozen": 16}
    rows = [of_critic, empty, empty, skipped, skipped]
    notes = notes_of(tmp_path, *(a_row(step, **row) for step, row in enumerate(rows)))
    assert [note.partition(" (")[0] for note in notes] == [
        "note: step 1 trained nothing, because all its answers are left out of the loss",
        "note: an optimizer step of step 3 was skipped",
    ]
    assert "(16 truncated); raise sampling.max_new_tokens" in notes[0]


@pytest.mark.parametrize(
    ("shares", "more", "said"),
    [
        ((0.25, 0.5, 0.75), {}, "50% of the groups of the last 3 steps"),
        ((0.25, None, 0.25, 0.25), {}, "25% of the groups of the last 3 steps"),
        ((0.25, 0.25), {}, ""),
        ((0.2, 0.2, 0.2, 0.2), {}, ""),
        ((1.0, 1.0, 1.0, 1.0), {}, ""),  # run.health says it
        ((0.5, 0.5, 0.5, 0.5), {"distill/kl": 0.1}, ""),
    ],
)
def test_a_note_says_how_many_groups_train_nothing(shares: Sequence[float | None], more: dict[str, float], said: str):
    hints = Hints()
    rows = [{**a_row(step, **more), "advantage/zero_groups": share} for step, share in enumerate(shares)]
    notes = [note for row in rows for note in hints.add(row) if "train nothing" in note]
    assert [note.removeprefix("note: ").partition(" train nothing")[0] for note in notes] == ([said] if said else [])
    assert all("queue.filter_range" in note for note in notes)


def write_ledger(directory: Path, lineage: str, **notes: str) -> None:
    (directory / "ledger.json").write_text(json.dumps({"lineage": lineage, "group_notes": notes}), encoding="utf-8")


def both_views(tmp_path: Path, width: int = 100) -> tuple[Console, Console, list[PlainView | LiveView]]:
    """A plain and a live console, and their views."""
    plain, live = console(width, is_terminal=False), console(width, is_terminal=True)
    path = tmp_path / "metrics.jsonl"
    return plain, live, [PlainView(plain, path, 10), LiveView(live, path, 10)]


def test_notes_of_the_queue_are_shown_once_for_each_cause_and_not_those_of_an_earlier_launch(tmp_path: Path):
    write_ledger(tmp_path, "before", wrong="of the launch before")
    plain, live, views = both_views(tmp_path, width=60)
    for number, notes in enumerate(({}, {"wrong": "all 8 \x1b[2J"}, {"wrong": "all 9", "too_slow": "1 prompt"})):
        write_ledger(tmp_path, "now" if number else "before", **notes)
        for view in views:
            view.refresh([])
    for view in views:
        view.close()
    assert plain.export_text() == "note: all 8 \\x1b[2J\nnote: 1 prompt\n"
    assert "note: 1 prompt" in live.export_text()


def test_a_damaged_ledger_has_no_notes(tmp_path: Path):
    (tmp_path / "ledger.json").write_text("{", encoding="utf-8")
    notes = LedgerNotes(RunDir(tmp_path))
    (tmp_path / "ledger.json").write_text("[]", encoding="utf-8")
    assert notes.poll() == []
    write_ledger(tmp_path, "now", wrong="all 8")
    assert notes.poll() == ["note: all 8"]


# --- the table


def table_of(tmp_path: Path, *rows: dict[str, float], members: Sequence[ProcessStatus] = ()) -> str:
    """The last table of a view that sees these rows arrive."""
    live = console(200, is_terminal=True)
    view = LiveView(live, tmp_path / "metrics.jsonl", 10)
    append(tmp_path / "metrics.jsonl", *rows)
    if members:
        view.refresh(members)
    view.close()
    return live.export_text()


def test_the_table_shows_step_members_evaluations_and_who_waits_for_whom(tmp_path: Path):
    shares = {"idle/learner": 0.0, "idle/generators": 0.45, "idle/leases": 0.4, "idle/spare": 0.6}
    rows = ({"step": 0, "eval/a [b]/accuracy": 0.5}, a_row(1, **{"reward/mean": 1.0, "time/step_s": 1.0}, **shares))
    members = [ProcessStatus("queue", "running", 0), ProcessStatus("generator-0", "restarting", 2)]
    table = " ".join(table_of(tmp_path, *rows, members=members).split())
    for shown in (
        "1/10",
        "eval a [b] 0.500 @0",
        "queue: running",
        "generator-0: restarting, 2 restarts",
        "idle learner 0%, generators 45% (40% for leases) who waits for whom generators have 60% to spare",
    ):
        assert shown in table, shown


def test_the_table_keeps_what_goes_wrong_until_the_end(tmp_path: Path):
    append(tmp_path / "metrics.jsonl", *(a_row(n, **COLLAPSED) for n in range(1, 4)))
    table = table_of(tmp_path, a_row(4, **COLLAPSED), members=[ProcessStatus("queue", "running", 0)])
    assert table.count("step 2: the policy has left the samples that it trains on") == 1
    cells = {line.split("  ")[0]: line.rstrip().rpartition("  ")[2] for line in table.splitlines()}
    assert (cells["ESS, KL"], cells["entropy, gradient"]) == ("0.01, 2.5", "0.125, 7.5")


def test_the_table_breaks_no_member_over_two_lines(tmp_path: Path):
    few = [ProcessStatus("queue", "running", 0), *(ProcessStatus(f"generator-{i}", "running", 0) for i in range(5))]
    live = console(60, is_terminal=True)
    LiveView(live, tmp_path / "metrics.jsonl", 10).refresh(few)
    text = live.export_text()
    assert [m.name for m in few if f"{m.name}: running" not in text] == []


def log_message(directory: Path, process: str, *lines: str) -> None:
    (directory / "logs").mkdir(exist_ok=True)
    with (directory / "logs" / f"{process}.log").open("a") as log:
        log.write("".join(f"{line}\n" for line in lines))


LOADING = "2026-01-02 03:04:05,678 INFO async_rl.learner.loop.start: loading the model m"


def test_the_newest_message_of_a_log_is_that_of_the_last_start(tmp_path: Path):
    log = tmp_path / "logs" / "learner-0.log"
    assert newest_message(log) == ""
    log_message(tmp_path, "learner-0", "--- 2026-01-02 03:04:05 python", LOADING, "Traceback (most recent call last):")
    with log.open("a") as file:
        file.write(LOADING + " and more, but the line is not comple")
    assert newest_message(log) == "loading the model m"
    log_message(tmp_path, "learner-0", "", "--- 2026-01-02 03:05:00 python")
    assert newest_message(log) == ""


def test_the_views_say_what_the_processes_do_until_a_step_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("async_rl.launch.live_view.LINE_EVERY_S", 0.0)
    monkeypatch.setattr("async_rl.launch.live_view.REFRESH_S", 0.0)
    processes = [ProcessStatus("learner-0", "running", 0)]
    plain, live, views = both_views(tmp_path)
    log_message(tmp_path, "learner-0", LOADING)
    log_message(tmp_path, "generator-0", LOADING.replace("loading the model m", "joining \x1b[2J"))
    for view in views:
        view.refresh(processes)
    assert plain.export_text() == "0s so far; learner-0: loading the model m; generator-0: joining \\x1b[2J\n"
    shown = live.export_text()
    assert "loading the model m" in shown
    assert "joining \\x1b[2J" in shown
    append(tmp_path / "metrics.jsonl", a_row(1))
    for view in views:
        view.refresh(processes)
        view.refresh(processes)
        view.close()
    assert plain.export_text() == "step 1/10\n"
    assert "loading the model m" not in live.export_text().partition("1/10")[2]


def test_the_live_view_is_calm_when_the_queue_of_a_finished_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    failed = threading.Event()

    def ask(*_: object) -> dict[str, object]:
        if failed.is_set():
            raise QueueError("the queue at tcp://127.0.0.1:7 did not answer")
        failed.set()
        return {"ledger": {"groups": {"in_flight": 0}}, "waits": [{"who": "g", "for": "lease", "since_s": 9.0}]}

    monkeypatch.setattr("async_rl.launch.live_view.ask_status", ask)
    monkeypatch.setattr("async_rl.launch.live_view.POLL_S", 0.001)
    monkeypatch.setattr("async_rl.launch.live_view.REFRESH_S", 0.0)
    live = console(is_terminal=True)
    view = LiveView(live, tmp_path / "metrics.jsonl", 10)
    view.watch_queue("tcp://127.0.0.1:7")
    wait_until("a request that fails", lambda: view._poller is not None and view._poller.error)
    view.refresh([ProcessStatus("queue", "running", 0)])
    assert "no answer: the queue at" in live.export_text()
    view.refresh([ProcessStatus("queue", "done", 0), ProcessStatus("learner-0", "running", 0)])
    view.close()
    text = live.export_text()
    assert "learner-0: running" in text
    assert "no answer" not in text
    assert "waiting" not in text
