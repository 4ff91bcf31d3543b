"""Offline evaluation: answers that are known beforehand, prompts without one, environments, code, a tiny real model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.errors import ConfigError, DataError, ModelError, RewardError, RunError
from async_rl.extensions.insight.evaluation.offline import Evaluated, describe, eval_settings, run_eval
from async_rl.extensions.insight.evaluation.sampling import OfflineSamples, sample_offline
from async_rl.generator.backend import Backend, Sampled
from async_rl.generator.rollouts import SingleTurnRollouts, ThreadGrader
from async_rl.records import Lease, Prompt, Sampling
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.run.records.eval_records import eval_figures
from async_rl.run.records.metric_table import EVAL_FIGURES
from tests.extensions.insight.evaluation.options import eval_options
from tests.generator.scripted import ScriptedBackend

ROOT = Path(__file__).resolve().parents[4]
GUESS = ROOT / "examples" / "environments" / "guess_number.py"


class Answering(ScriptedBackend):
    """Says what ``answers`` has for a row and a sample, one sequence a step, the last submitted first."""

    def __init__(self, answers: Mapping[int, Sequence[str]]) -> None:
        super().__init__(lambda index, turn: "", max_running=4)
        self.answers = answers

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """A token a character."""
        return np.frombuffer(messages[-1]["content"].encode(), np.uint8).astype(np.int32)

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        self._running += [(lease, np.array([index, *prompt_ids])) for index in range(lease.group_size)]

    def step(self) -> list[Sampled]:
        lease, (index, *prompt_ids) = self._running.pop()
        text = self.answers[lease.prompt.row][int(index)]
        length = len(text)
        return [
            Sampled(
                lease.lease_id, int(index), np.array(prompt_ids), np.arange(length), np.zeros(length, np.float32),
                np.zeros(length, np.int32), "length" if length >= lease.sampling.max_new_tokens else "stop", text,
            )
        ]  # fmt: skip


def exact(item: RewardInput) -> RewardOutput:
    """Right is what equals the row's answer."""
    if item.reward_data["gt_answer"] == "unknown":
        raise RewardError("nobody knows")
    right = float(item.text == item.reward_data["gt_answer"])
    return RewardOutput({"accuracy": right}, right, item.text)


def lease(row: int, question: str, answer: str, *, samples: int = 2) -> Lease:
    prompt = Prompt(row, row, 0, ({"role": "user", "content": question},), {"gt_answer": answer})
    sampling = Sampling(0.0, 1.0, 0, max_new_tokens=4, max_prompt_tokens=5, stop=())
    return Lease(f"eval-{row}", "eval", prompt, samples, sampling, "", 0, 0, 0, row)


def answered(backend: Backend, leases: Sequence[Lease], **settings: Any) -> OfflineSamples:
    with closing(ThreadGrader(exact)) as grader:
        return sample_offline(backend, SingleTurnRollouts(backend, grader), leases, **settings)


def test_answers_come_in_the_order_of_the_rows_and_one_that_is_missing_costs_its_row_alone():
    # Row 0: right, wrong. Row 1: six characters of prompt, limit 5: not asked. Row 2: wrong, and cut at 4 tokens.
    # Row 3: no score. Accuracy 1/2, 0, 0, 0 -> 1/8; one of four rows solved; lengths 1, 2, 1, 4 -> 2; one of four cut.
    backend = Answering({0: ["2", "33"], 2: ["9", "8888"], 3: ["4", "4"]})
    leases = [lease(0, "1+1", "2"), lease(1, "123456", "0"), lease(2, "12345", "7"), lease(3, "2+2", "unknown")]
    seen: list[tuple[int, int]] = []
    found = answered(backend, leases, progress=lambda done, rows: seen.append((done, rows)))
    assert [prompt.row for prompt, _ in found.groups] == [0, 1, 2, 3]
    assert [[r.extracted for r in group.rollouts] for _, group in found.groups] == [["2", "33"], [], ["9", "8888"], []]
    assert found.causes == {"prompt_too_long": 1, "reward_error": 1}
    assert found.first_failure == "row 1: prompt too long: 6 tokens, sampling.max_prompt_tokens = 5"
    figures = eval_figures([group.rollouts for _, group in found.groups])
    keys = ("accuracy", "pass_at_k", "length_mean", "truncated", "rows", "unanswered")
    assert [figures[key] for key in keys] == pytest.approx([1 / 8, 1 / 4, 2.0, 0.25, 4, 2])
    assert (seen[0][0] < seen[-1][0], seen[-1]) == (True, (4, 4))


def test_printed_figures_line_up_and_say_what_they_mean(dataset: Path, model: Path):
    config = settings_of(str(model), dataset, eval__num_samples=4, eval__temperature=0.6, eval__top_p=0.95).config
    found = [Evaluated("m", "rows", {"accuracy": 0.123456, "rows": 1319, "new": 1.0}, {}, "")]
    lines = describe(found, config, width=200)
    assert lines[0].startswith("rows: 1319 rows, 4 answers a row, temperature 0.6, top-p 0.95, at most ")
    assert lines[1] == f"accuracy          0.1235     {EVAL_FIGURES['accuracy']}"
    assert lines[3] == "new               1"
    narrow = describe(found, config, width=80)
    assert max(map(len, narrow[1:])) <= 80
    assert narrow[2].startswith(" " * 29 + "without")


def test_several_models_are_a_table_and_what_has_no_answer_is_told(dataset: Path, model: Path):
    config = settings_of(str(model), dataset, eval__num_samples=2, eval__temperature=1.0).config
    figures = {"accuracy": 0.5, "accuracy_se": 0.1, "pass_at_1": 0.5, "pass_at_2": 0.75, "samples": 2, "rows": 4}
    others = {**figures, "accuracy": 0.25, "pass_at_1": 0.25, "unanswered": 1}
    found = [
        Evaluated("base", "rows", figures, {}, ""),
        Evaluated("runs/mine", "rows", others, {"prompt_too_long": 1}, "row 3: 9 tokens"),
    ]
    assert describe(found, config, width=200)[1:] == [
        "model           accuracy  pass@2  unanswered",
        "base       0.500 ± 0.100   0.750",
        "runs/mine  0.250 ± 0.100   0.750           1",
        "runs/mine has no answer to 1 rows of rows, which count as wrong: 1 prompt too long; row 3: 9 tokens",
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.generator.tiny_model import write_model

    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    questions = ("1+1", "2+2", "a question that is much too long")
    rows = [{"messages": [{"role": "user", "content": q}], "gt_answer": "2"} for q in questions]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings_of(model: str, dataset: object, **options: Any):
    given = eval_options(datasets=(str(dataset),), **{"data__system_prompt": "", **options})
    return eval_settings([model], given)


def evaluate(model: Path, dataset: object, *, out: Path | None = None, **options: Any) -> dict[str, float]:
    (found,) = run_eval([str(model)], settings_of(str(model), dataset, **options), out=out)
    return dict(found.figures)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tiny_model_answers_every_row_the_same_way_twice(
    model: Path, dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    capfd.readouterr()

    def answer(name: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        figures = evaluate(
            model, dataset, eval__num_samples=2, eval__temperature=1.0, eval__max_new_tokens=6,
            sampling__max_prompt_tokens=10, generator__batch_size=3, run__seed=4, out=tmp_path / name,
        )  # fmt: skip
        return figures, lines_of(tmp_path / name / "rows.jsonl")

    figures, records = answer("first")
    assert (figures["rows"], figures["unanswered"], figures["samples"]) == (3, 1, 2)
    assert 0 < figures["length_mean"] <= 6
    assert [(r["row"], r.get("index"), r["expected"]) for r in records] == [
        (0, 0, "2"), (0, 1, "2"), (1, 0, "2"), (1, 1, "2"), (2, None, "2"),
    ]  # fmt: skip
    assert (records[-1]["finish_reason"], records[-1]["accuracy"]) == ("unanswered", 0.0)
    assert (records[0]["messages"], records[0]["model"]) == ([{"role": "user", "content": "1+1"}], str(model))
    assert len({r["response"] for r in records}) > 1
    assert answer("second") == (figures, records)
    assert capfd.readouterr() == ("", "")  # no bar of the libraries
    (written,) = json.loads((tmp_path / "first" / "figures.json").read_text())
    assert (written["dataset"], written["figures"], written["causes"]) == ("rows", figures, {"prompt_too_long": 1})


def test_models_are_asked_the_same_one_after_the_other(model: Path, dataset: Path, tmp_path: Path):
    from tests.generator.tiny_model import write_model

    other = tmp_path / "other"
    write_model(other)
    models = [str(model), str(other)]
    few = {"data__system_prompt": "", "eval__max_rows": 2, "eval__max_new_tokens": 3, "generator__batch_size": 4}
    options = eval_options(datasets=(str(dataset), f"again={dataset}"), **few)
    found = run_eval(models, eval_settings(models, options), out=tmp_path / "out")
    assert [(one.model, one.dataset) for one in found] == [(m, d) for m in models for d in ("rows", "again")]
    records = lines_of(tmp_path / "out" / "again.jsonl")
    assert [(r["model"], r["row"]) for r in records] == [(m, row) for m in models for row in (0, 1)]
    assert len(json.loads((tmp_path / "out" / "figures.json").read_text())) == 4
    with pytest.raises(ConfigError, match="expected each model only once"):
        run_eval([models[0], models[0]], eval_settings(models, options))


def test_environments_are_played_offline_by_a_config(model: Path, tmp_path: Path):
    config, games = tmp_path / "games.toml", tmp_path / "games.jsonl"
    config.write_text(
        f"run.dir = 'r'\nmodel.path = '{model}'\neval.num_samples = 3\neval.temperature = 1.0\n"
        f"environment = {{ name = '{GUESS}', max_turns = 2, max_turn_tokens = 3, extra = {{ largest = 9 }} }}\n"
        f"generator = {{ allow_code = ['{GUESS}'] }}\nsampling = {{ max_new_tokens = 8, max_prompt_tokens = 64 }}\n"
        f"data.eval.games = '{games}'\n"
    )
    rows = [{"prompt": "Guess.", "extra_info": {"number": number}} for number in (3, 5)]
    games.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = eval_settings([str(model)], eval_options(config=config))
    (found,) = run_eval([str(model)], settings, out=tmp_path / "out")
    assert (found.dataset, found.figures["rows"], found.figures["samples"]) == ("games", 2, 3)
    assert 1 <= found.figures["turns"] <= 2
    assert all(len(r["turns"]) <= 2 and r["sequences"] for r in lines_of(tmp_path / "out" / "games.jsonl"))


def test_no_answer_at_all_is_an_error_and_no_accuracy(model: Path, dataset: Path):
    with pytest.raises(DataError, match=r"could not answer any of the 3 rows of rows: 3 prompt too long; row 0: "):
        evaluate(model, dataset, eval__max_new_tokens=2, sampling__max_prompt_tokens=1)


def test_what_stands_in_the_way_is_said_before_the_model_is_loaded(model: Path, dataset: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rows.jsonl").touch()
    nowhere = tmp_path / "nowhere"
    cases: list[tuple[type[Exception], str, Path, Path, dict[str, Any]]] = [
        (DataError, r"rows\.jsonl exists; choose another directory", model, dataset, {"out": tmp_path / "out"}),
        (RunError, "--out: expected a directory", model, dataset, {"out": dataset / "out"}),
        (DataError, "no dataset", model, nowhere, {}),
        (ConfigError, r"reward\.type: expected boxed, think_answer_tags", model, dataset, {"reward__type": "best"}),
        (ModelError, "expected a model, a checkpoint or a run directory at .*nowhere", nowhere, dataset, {}),
        (RunError, "expected a checkpoint, or a run directory with checkpoints", tmp_path / "out", dataset, {}),
    ]
    for error, message, asked, rows, options in cases:
        with pytest.raises(error, match=message):
            evaluate(asked, rows, **options)
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "rows.jsonl"]


def test_each_model_is_a_run_in_the_tools_of_log_to(model: Path, dataset: Path, tmp_path: Path):
    from tests.run.read_loggers import tensorboard_rows

    checkpoint = tmp_path / "step-000040"
    checkpoint.symlink_to(model)
    settings = {"eval__max_rows": 2, "eval__max_new_tokens": 3, "log__to": ["tensorboard"]}
    with pytest.raises(ConfigError, match="pass --out"):
        evaluate(checkpoint, dataset, **settings)
    figures = evaluate(checkpoint, dataset, out=tmp_path / "out", **settings)
    (run,) = (tmp_path / "out" / "loggers").iterdir()
    rows = tensorboard_rows(run)
    assert rows[40] == {f"eval/rows/{key}": pytest.approx(value) for key, value in figures.items()}
