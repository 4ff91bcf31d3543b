"""``async-rl compare`` and ``async-rl sweep``, as their user sees them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import async_rl
from async_rl.cli.main import app
from async_rl.errors import ConfigError, RunError
from async_rl.extensions.insight.comparison.picture import by_setting, draw
from async_rl.extensions.insight.comparison.summary import summarise
from async_rl.extensions.insight.comparison.sweep import plan_sweep
from async_rl.extensions.insight.evaluation.table import cell
from async_rl.extensions.insight.report.figures import read_run
from async_rl.launch.status import status_of_run
from async_rl.run.directory import RunDir
from tests.refusal import refusal

from .runs import eval_row, step_row, write_run

PNG = b"\x89PNG\r\n\x1a\n"


def two_runs(tmp_path: Path) -> list[str]:
    """Ten steps of 2 s at bound 0, and of 1 s at bound 4. Both reach 0.9 at their last step."""
    paths: list[str] = []
    for bound, step_s in ((0, 2.0), (4, 1.0)):
        rows = [step_row(step, time_s=step_s * step, time__step_s=step_s) for step in range(1, 11)]
        rows[9] |= {"mismatch_kl/lag_0": 1e-5, "lag_0/tokens": 9, "overlap/efficiency": 0.9}
        rows += [eval_row(step, accuracy, time_s=step * step_s) for step, accuracy in ((0, 0.2), (5, 0.8), (10, 0.9))]
        paths.append(str(write_run(tmp_path / f"b{bound}", rows, bound=bound)))
    return paths


def test_runs_are_shown_side_by_side_with_advice_and_a_picture(tmp_path: Path):
    picture = tmp_path / "c.png"
    done = CliRunner().invoke(app, ["compare", *two_runs(tmp_path), "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "Speed",
        "  run  bound  steps  steps/s  overlap  learner idle  generators idle",
        "  b0       0     10  0.5 ± 0     0.90            0%                -",
    ]
    learning = lines[lines.index("Learning: accuracy on math; every run reached 0.900") :]
    assert learning[3].split() == ["b4", "0.500", "0.900", "±", "0.010", "10", "10.0"]
    assert "Set queue.max_staleness = 4." in lines
    assert max(map(len, lines[:15])) <= 80
    assert picture.read_bytes().startswith(PNG)


def test_report_compare_and_status_of_a_finished_run_say_the_same_of_the_learner(tmp_path: Path):
    # Without the 3 first steps and step 20, the first of a start: 7 steps with 30 % and 19 with 50 %, so 44.6 %.
    idle = [0.9 if step in (1, 2, 3, 20) else 0.3 if step <= 10 else 0.5 for step in range(1, 31)]
    rows = [step_row(step, idle__learner=share) for step, share in enumerate(idle, start=1)]
    run = write_run(tmp_path / "r", [*rows, eval_row(30, 0.75)], ledger={"step": 30, "groups": {}}, starts=(1, 20))
    RunDir(run).mark_finished({"step": 30})
    sentence = "the learner is idle 45% of the time and waits for generators: more of them make the run faster"
    assert cell(summarise(run).means["idle/learner"], ".0%") == "45%"
    page, status = read_run(run), status_of_run(run, 1.0, None)
    assert {figure["label"]: figure["value"] for figure in page["headline"]}["learner idle"] == "45%"
    assert page["who_waits"] == status["who_waits"] == sentence
    assert (status["step"], status["num_steps"], status["accuracy"]) == (30, 30, {"math": 0.75})


def test_python_compares_runs_and_writes_one_page_about_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = two_runs(tmp_path)
    found = async_rl.compare(first, async_rl.Run(second), report=tmp_path / "page.html")
    printed = CliRunner().invoke(app, ["compare", first, second, "--picture", str(tmp_path / "p.png")]).stdout
    assert printed.startswith(capsys.readouterr().out)
    assert [run["bound"] for run in found["runs"]] == [0, 4]
    assert "<title>b0 and b4" in (tmp_path / "page.html").read_text()
    with pytest.raises(RunError, match="expected at most 6 runs in one report, got 7"):
        async_rl.compare(*[first] * 7, report=tmp_path / "page.html")


def test_the_picture_hides_no_run_and_marks_the_recommended_bound(tmp_path: Path):
    lags = {4: {"mismatch_kl/lag_0": 1e-9, "lag_0/tokens": 9}, 16: {"mismatch_kl/lag_1": 1e-5, "lag_1/tokens": 9}}
    rows = [[eval_row(0, 0.2), step_row(1) | lags.get(bound, {}), eval_row(1, 0.9)] for bound in (0, 4, 16)]
    paths = [write_run(tmp_path / f"b{bound}", own, bound=bound) for bound, own in zip((0, 4, 16), rows, strict=True)]
    figure = draw([summarise(path) for path in paths], recommended=4)
    # Runs of a sweep that differ in their seed are drawn under one name.
    seeds = [tmp_path / f"max_staleness={bound}-seed={seed}" for seed in (0, 1) for bound in (0, 4)]
    of_sweep = [summarise(write_run(path, rows[0], bound=int(path.name[14]))) for path in seeds]
    found = by_setting([*of_sweep, summarise(paths[1])])
    assert {name: len(runs) for name, runs in found.items()} == {
        "max_staleness=0": 2, "max_staleness=4": 2, "b4 (bound 4)": 1,
    }  # fmt: skip
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "b0 (bound 0)",
        "b4 (bound 4), recommended",
        "b16 (bound 16)",
    ]
    mismatch = figure.axes[3]
    assert "no line" in mismatch.get_title("left")  # as b4 differs by rounding alone
    assert len({str(line.get_marker()) for line in mismatch.lines}) == 3


def test_scripts_get_the_figures_as_json_and_readers_a_picture_at_a_place_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    runs = two_runs(tmp_path)
    done = CliRunner().invoke(app, ["compare", *runs, "--json"])
    found = json.loads(done.stdout)
    assert (found["bound"], found["is_certain"]) == (4, True)
    assert [run["bound"] for run in found["runs"]] == [0, 4]
    assert found["runs"][1]["evaluations"]["math"][-1] == {"step": 10, "time_s": 10.0, "accuracy": 0.9, "error": 0.01}
    assert not (tmp_path / "compare.png").exists()
    said = [CliRunner().invoke(app, ["compare", *runs]).stdout.splitlines()[-1] for _ in range(2)]
    place = f"picture: {tmp_path / 'compare.png'}"
    assert said == [place, f"{place} (in place of an older one)"]


def a_config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(f'run.dir = "{tmp_path}/r"\nmodel.path = "m"\ndata.train = "d.jsonl"\nrun.seed = 5\n')
    return path


def test_a_sweep_has_a_run_for_each_value_and_seed(tmp_path: Path):
    plan = plan_sweep(a_config(tmp_path), ["learner.steps=3"], "queue.max_staleness=0,4", 2)
    assert [variant.run_dir.name for variant in plan] == [
        "max_staleness=0-seed=5", "max_staleness=4-seed=5", "max_staleness=0-seed=6", "max_staleness=4-seed=6",
    ]  # fmt: skip
    folder = tmp_path / "r-sweep"
    assert plan[1].overrides == (
        "learner.steps=3", "queue.max_staleness=4", "run.seed=5", f'run.dir="{folder}/max_staleness=4-seed=5"',
    )  # fmt: skip
    assert not folder.exists()


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("queue.max_staleness=1,,2", r"--over: expected KEY=VALUE,VALUE"),
        ("queue.max_staleness=1,1", r"no value occurs twice"),
        ("run.seed=1,2", r"--over: expected a key other than run\.seed"),
        ("queue.max_staleness=1,-1", r"queue\.max_staleness"),
    ],
)
def test_a_wrong_sweep_is_refused_before_its_first_run(tmp_path: Path, over: str, message: str):
    with pytest.raises(ConfigError, match=message):
        plan_sweep(a_config(tmp_path), [], over, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_launch_that_fails_stops_the_sweep_with_its_exit_code(tmp_path: Path):
    done = CliRunner().invoke(app, ["sweep", str(a_config(tmp_path)), "--over", "queue.max_staleness=0,1"])
    assert done.exit_code == 2
    assert "run 1 of 2: queue.max_staleness=0 in " in done.output
    assert "ended with exit code 2; see the messages above, then run the same sweep command" in done.output
    assert "run 2 of 2" not in done.output


def test_files_that_cannot_be_read_or_written_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = two_runs(tmp_path)
    nowhere = str(tmp_path / "nowhere" / "c.png")
    said = refusal(capsys, "compare", *runs, "--picture", nowhere)
    assert f"can't write the picture {nowhere}: No such file or directory" in said
    (tmp_path / "b0" / "ledger.json").write_text("{")
    assert f"expected a JSON object in {runs[0]}/ledger.json, got" in refusal(capsys, "compare", *runs)
    (tmp_path / "b4" / "metrics.jsonl").write_text("?\n")
    assert "expected a run that has made a step, got none yet" in refusal(capsys, "compare", runs[1])
