"""Offline evaluation: answers that are known beforehand, prompts without one, environments, code, a tiny real model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.config.generator import BackendCapabilities, EnvironmentConfig
from async_rl.errors import ConfigError, DataError, ModelError, RewardError, RunError
from async_rl.extensions.insight.evaluation.offline import Evaluated, describe, eval_settings, run_eval
from async_rl.generator.backend import Backend, Sampled
from async_rl.generator.environment_rollouts import EnvironmentRollouts
from async_rl.generator.offline import OfflineSamples, sample_offline
from async_rl.generator.rollouts import SingleTurnRollouts, ThreadGrader
from async_rl.records import Lease, Prompt, Sampling
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.run.records.eval_records import eval_figures
from async_rl.run.records.metric_table import EVAL_FIGURES
from tests.environments.pools import pool_of
from tests.extensions.insight.evaluation.options import eval_options
from tests.generator.scripted import CharacterText
from tests.generator.scripted import ScriptedBackend as TurnBackend

ROOT = Path(__file__).resolve().parents[4]
CODE_ROWS = ROOT / "tests" / "data" / "mbpp_10.jsonl"
GUESS = ROOT / "examples" / "environments" / "guess_number.py"


class ScriptedBackend:
    """Says what ``answers`` has for a row and a sample, one sequence a step, the last submitted first."""

    capabilities = BackendCapabilities()

    max_running = 4
    version = 0
    num_tokens = 0

    def __init__(self, answers: Mapping[int, Sequence[str]]) -> None:
        self._answers = answers
        self._running: list[tuple[Lease, int, np.ndarray]] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """A token a character."""
        return np.frombuffer(messages[-1]["content"].encode(), np.uint8).astype(np.int32)

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        self._running += [(lease, index, prompt_ids) for index in range(lease.group_size)]

    def step(self) -> list[Sampled]:
        lease, index, prompt_ids = self._running.pop()
        text = self._answers[lease.prompt.row][index]
        length = len(text)
        return [
            Sampled(
                lease.lease_id, index, prompt_ids, np.arange(length, dtype=np.int32), np.zeros(length, np.float32),
                np.zeros(length, np.int32), "length" if length >= lease.sampling.max_new_tokens else "stop", text,
            )
        ]  # fmt: skip

    def cancel(self, lease_id: str) -> None: ...
    def progress(self) -> dict[str, int]:
        return {}

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        return 0.0

    def close(self) -> None: ...


class ExactReward:
    """Right is what equals the row's answer."""

    def __call__(self, item: RewardInput) -> RewardOutput:
        if item.reward_data["gt_answer"] == "unknown":
            raise RewardError("nobody knows")
        right = float(item.text == item.reward_data["gt_answer"])
        return RewardOutput({"accuracy": right}, right, item.text)

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def lease(row: int, question: str, answer: str, *, samples: int = 2) -> Lease:
    prompt = Prompt(row, row, 0, ({"role": "user", "content": question},), {"gt_answer": answer})
    sampling = Sampling(0.0, 1.0, 0, max_new_tokens=4, max_prompt_tokens=5, stop=())
    return Lease(f"eval-{row}", "eval", prompt, samples, sampling, "", 0, 0, 0, row)


def answered(backend: Backend, leases: Sequence[Lease], **settings: Any) -> OfflineSamples:
    with closing(ThreadGrader(ExactReward())) as grader:
        return sample_offline(backend, SingleTurnRollouts(backend, grader), leases, **settings)


def test_answers_come_in_the_order_of_the_rows_and_a_prompt_that_is_too_long_has_none():
    # Row 0: right, wrong. Row 1: six characters of prompt, limit 5: not asked. Row 2: wrong, and cut at 4 tokens.
    # Accuracy 1/2, 0, 0 -> 1/6; one of three rows solved; lengths 1, 2, 1, 4 -> 2; one of four cut.
    backend = ScriptedBackend({0: ["2", "33"], 2: ["9", "8888"]})
    leases = [lease(0, "1+1", "2"), lease(1, "123456", "0"), lease(2, "12345", "7")]
    seen: list[tuple[int, int]] = []
    found = answered(backend, leases, progress=lambda done, rows: seen.append((done, rows)))
    assert [prompt.row for prompt, _ in found.groups] == [0, 1, 2]
    assert [[r.extracted for r in group.rollouts] for _, group in found.groups] == [["2", "33"], [], ["9", "8888"]]
    assert found.causes == {"prompt_too_long": 1}
    assert found.first_failure == "row 1: prompt too long: 6 tokens, sampling.max_prompt_tokens = 5"
    figures = eval_figures([group.rollouts for _, group in found.groups])
    keys = ("accuracy", "pass_at_k", "length_mean", "truncated", "rows", "unanswered")
    assert [figures[key] for key in keys] == pytest.approx([1 / 6, 1 / 3, 2.0, 0.25, 3, 1])
    assert (seen[0][0] < seen[-1][0], seen[-1]) == (True, (3, 3))


def test_an_answer_that_can_not_be_scored_costs_its_row_alone():
    leases = [lease(0, "1+1", "2"), lease(1, "2+2", "unknown"), lease(2, "3+3", "6")]
    found = answered(ScriptedBackend({0: ["2", "2"], 1: ["4", "4"], 2: ["6", "5"]}), leases)
    assert [[r.accuracy for r in group.rollouts] for _, group in found.groups] == [[1.0, 1.0], [], [1.0, 0.0]]
    assert found.causes == {"reward_error": 1}
    assert found.first_failure.startswith("row 1: reward error: RewardError: nobody knows (")  # then file and line


def test_no_more_rollouts_are_open_than_there_are_slots_but_for_one_lease():
    # Four slots, three samples a lease: with three of them taken there is room for another lease.
    running: list[int] = []

    class Watched(ScriptedBackend):
        def step(self) -> list[Sampled]:
            running.append(self.num_running)
            return super().step()

    answered(Watched({row: ["1"] * 3 for row in range(8)}), [lease(row, "1", "1", samples=3) for row in range(8)])
    assert (max(running), len(running)) == (6, 24)


def test_games_of_several_turns_are_played_with_their_environment():
    # The number is 3. Rollout 0 guesses 2, then 3: score 1. Rollout 1 guesses 9 in all of its turns: 0.
    # A row whose number is no number breaks its environment: no answer.
    def script(index: int, turn: int) -> str:
        return ["2", "3"][turn] if index == 0 else "9"

    config = EnvironmentConfig(name=str(GUESS), max_turns=3, extra={"largest": 9})
    sampling = Sampling(1.0, 1.0, 0, max_new_tokens=16, max_prompt_tokens=64, stop=())
    asked = ({"role": "user", "content": "?"},)
    rows = [Prompt(i, i, 0, asked, {"extra_info": {"number": number}}) for i, number in enumerate((3, "x"))]
    leases = [Lease(f"games-{p.row}", "eval", p, 2, sampling, "", 0, 0, 1, p.row) for p in rows]
    backend = TurnBackend(script, max_running=2)
    with closing(pool_of(config)) as pool:
        rollouts = EnvironmentRollouts(backend, pool, CharacterText(), config)
        found = sample_offline(backend, rollouts, leases)
    scored = [[(r.score, len(r.turns)) for r in group.rollouts] for _, group in found.groups]
    assert scored == [[(1.0, 2), (0.0, 3)], []]
    assert found.causes == {"environment_error": 1}
    assert "TypeError" in found.first_failure


FIGURES = {"accuracy": 0.123456, "rows": 1319, "new": 1.0}


def test_printed_figures_line_up_and_say_what_they_mean(dataset: Path, model: Path):
    config = settings_of(
        str(model), dataset, eval__num_samples=4, eval__temperature=0.6, eval__top_p=0.95, eval__max_new_tokens=10
    ).config
    lines = describe([Evaluated("m", "rows", FIGURES, {}, "")], config, width=200)
    assert lines == [
        "rows: 1319 rows, 4 answers a row, temperature 0.6, top-p 0.95, at most 10 tokens",
        f"accuracy          0.1235     {EVAL_FIGURES['accuracy']}",
        f"rows              1319       {EVAL_FIGURES['rows']}",
        "new               1",
    ]
    narrow = describe([Evaluated("m", "rows", FIGURES, {}, "")], config, width=80)
    assert max(map(len, narrow)) <= 80
    assert narrow[2].startswith(" " * 29 + "without")


def test_several_models_are_a_table_and_what_has_no_answer_is_told(dataset: Path, model: Path):
    config = settings_of(
        str(model), dataset, eval__num_samples=2, eval__temperature=1.0, eval__max_new_tokens=10
    ).config
    figures = {"accuracy": 0.5, "accuracy_se": 0.1, "pass_at_1": 0.5, "pass_at_2": 0.75, "samples": 2, "rows": 4}
    others = {**figures, "accuracy": 0.25, "pass_at_1": 0.25, "unanswered": 1}
    found = [
        Evaluated("base", "rows", figures, {}, ""),
        Evaluated("runs/mine", "rows", others, {"prompt_too_long": 1}, "row 3: 9 tokens"),
    ]
    assert describe(found, config, width=200) == [
        "rows: 4 rows, 2 answers a row, temperature 1, at most 10 tokens",
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


def test_top_p_and_top_k_narrow_what_is_answered(model: Path, dataset: Path, tmp_path: Path):
    def answers(name: str, **options: Any) -> list[str]:
        limits = {"eval__max_new_tokens": 4, "sampling__max_prompt_tokens": 10, "eval__max_rows": 2}
        evaluate(model, dataset, out=tmp_path / name, **limits, **options)
        return [line["response"] for line in lines_of(tmp_path / name / "rows.jsonl")]

    # One token of the vocabulary, whatever the temperature, is greedy decoding.
    greedy = [answer for answer in answers("greedy") for _ in range(3)]
    assert answers("top_k", eval__num_samples=3, eval__temperature=5.0, eval__top_k=1) == greedy
    assert answers("top_p", eval__num_samples=3, eval__temperature=5.0, eval__top_p=1e-6) == greedy
    assert answers("all", eval__num_samples=3, eval__temperature=5.0) != greedy


def test_models_are_asked_the_same_one_after_the_other(model: Path, dataset: Path, tmp_path: Path):
    from tests.generator.tiny_model import write_model

    other = tmp_path / "other"
    write_model(other)
    models = [str(model), str(other)]
    options = eval_options(
        datasets=(str(dataset), f"again={dataset}"),
        data__system_prompt="",
        eval__max_rows=2,
        eval__max_new_tokens=3,
        generator__batch_size=4,
    )
    found = run_eval(models, eval_settings(models, options), out=tmp_path / "out")
    assert [(one.model, one.dataset) for one in found] == [(m, d) for m in models for d in ("rows", "again")]
    records = lines_of(tmp_path / "out" / "again.jsonl")
    assert [(r["model"], r["row"]) for r in records] == [(m, row) for m in models for row in (0, 1)]
    assert len(json.loads((tmp_path / "out" / "figures.json").read_text())) == 4
    with pytest.raises(ConfigError, match="expected each model only once"):
        run_eval([models[0], models[0]], eval_settings(models, options))


def test_programs_are_judged_offline(model: Path, tmp_path: Path):
    # The fake says what passes the tests of half of the rows, more or less, and prints nonsense for the others.
    config = tmp_path / "code.toml"
    config.write_text(
        f"run.dir = 'r'\nmodel.path = '{model}'\nreward = {{ type = 'code', code.packages = [] }}\n"
        "generator.backend = 'fake'\nexperimental.fake.accuracy = 0.5\nsampling.max_new_tokens = 64\n"
    )
    figures = evaluate(
        model, CODE_ROWS, config=config, eval__num_samples=4, out=tmp_path / "out", sampling__max_prompt_tokens=4000
    )
    records = lines_of(tmp_path / "out" / "mbpp_10.jsonl")
    assert 0 < figures["accuracy"] < 1
    assert figures["accuracy"] == np.mean([r["accuracy"] for r in records])
    assert "majority_at_n" not in figures
    assert {r["num_tests"] for r in records} == {len(json.loads(line)["test_cases"]["inputs"])
        for line in CODE_ROWS.read_text().splitlines()}  # fmt: skip
    assert all("expected" not in r for r in records)


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


def test_limit_takes_the_first_rows(model: Path, dataset: Path):
    figures = evaluate(model, dataset, eval__max_new_tokens=2, eval__max_rows=1)
    assert (figures["rows"], figures["unanswered"]) == (1, 0)


def test_no_answer_at_all_is_an_error_and_no_accuracy(model: Path, dataset: Path):
    with pytest.raises(DataError, match=r"could not answer any of the 3 rows of rows: 3 prompt too long; row 0: "):
        evaluate(model, dataset, eval__max_new_tokens=2, sampling__max_prompt_tokens=1)


def test_what_stands_in_the_way_is_said_before_the_model_is_loaded(model: Path, dataset: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rows.jsonl").touch()
    with pytest.raises(DataError, match=r"rows\.jsonl exists; choose another directory"):
        evaluate(model, dataset, out=tmp_path / "out")
    with pytest.raises(RunError, match="--out: expected a directory"):
        evaluate(model, dataset, out=dataset / "out")
    with pytest.raises(DataError, match="no dataset"):
        evaluate(model, tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"reward\.type: expected boxed, think_answer_tags"):
        evaluate(model, dataset, reward__type="best")
    with pytest.raises(ModelError, match=r"expected a model, a checkpoint or a run directory at .*nowhere"):
        evaluate(tmp_path / "nowhere", dataset)
    with pytest.raises(RunError, match="expected a checkpoint, or a run directory with checkpoints"):
        evaluate(tmp_path / "out", dataset)
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
