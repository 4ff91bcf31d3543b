"""Offline evaluation: figures of answers that are known beforehand, too-long prompts, files, and a tiny real model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.errors import ConfigError, DataError, ModelError, RunError
from async_rl.eval_records import eval_metrics
from async_rl.evaluation import describe_figures, run_eval, sample_leases
from async_rl.generator.backend import Sampled
from async_rl.records import Lease, Prompt, Sampling
from async_rl.rewards.records import RewardInput, RewardOutput


class ScriptedBackend:
    """Says what ``answers`` has for a row and a sample, one sequence a step, the last submitted first."""

    num_seats = 4
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
        right = float(item.text == item.reward_data["gt_answer"])
        return RewardOutput({"accuracy": right}, right, item.text)

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def lease(row: int, question: str, answer: str, *, samples: int = 2) -> Lease:
    prompt = Prompt(row, row, 0, ({"role": "user", "content": question},), {"gt_answer": answer})
    sampling = Sampling(0.0, 1.0, 0, max_new_tokens=4, max_prompt_tokens=5, stop=())
    return Lease(f"eval-{row}", "eval", prompt, samples, sampling, "", 0, 0, 0, row)


def test_figures_of_known_answers_are_right_and_too_long_prompts_are_counted():
    # Row 0: right, wrong. Row 1: six characters of prompt, limit 5: not asked. Row 2: wrong, and cut at 4 tokens.
    # Accuracy 1/4, one of two rows solved, lengths 1, 2, 1, 4 -> 2, one of four cut.
    backend = ScriptedBackend({0: ["2", "33"], 2: ["9", "8888"]})
    leases = [lease(0, "1+1", "2"), lease(1, "123456", "0"), lease(2, "12345", "7")]
    seen: list[tuple[int, int]] = []
    groups, num_too_long = sample_leases(
        backend, ExactReward(), leases, progress=lambda done, total: seen.append((done, total))
    )
    assert num_too_long == 1
    assert [prompt.row for prompt, _ in groups] == [0, 2]
    assert [[r.extracted for r in group.rollouts] for _, group in groups] == [["2", "33"], ["9", "8888"]]
    figures = eval_metrics("d", groups)
    assert [figures[f"eval/d/{key}"] for key in ("accuracy", "pass_at_k", "length_mean", "truncated", "rows")] == [
        0.25, 0.5, 2.0, 0.25, 2,
    ]  # fmt: skip
    # Row 2 is answered first, and only once both its samples are there.
    assert seen == [(0, 2), (1, 2), (1, 2), (2, 2)]


def test_nothing_is_asked_when_every_prompt_is_too_long():
    groups, num_too_long = sample_leases(ScriptedBackend({}), ExactReward(), [lease(0, "123456", "0")])
    assert (groups, num_too_long) == ([], 1)


def test_printed_figures_line_up_and_say_what_they_mean():
    lines = describe_figures({"accuracy": 0.123456, "rows": 1319, "version_min": 0, "new": 1.0})
    assert lines == [
        "accuracy     0.1235     share of answers that are right",
        "rows         1319       rows answered",
        "new          1",
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


def test_a_tiny_model_answers_every_row_the_same_way_twice(
    model: Path, dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    capfd.readouterr()

    def answer(name: str) -> tuple[dict[str, float], str]:
        figures = run_eval(
            str(model), dataset=dataset, num_samples=2, temperature=1.0, max_new_tokens=6, max_prompt_tokens=10,
            system_prompt="", batch_size=3, seed=4, out=tmp_path / name,
        )  # fmt: skip
        return figures, (tmp_path / name / "answers.jsonl").read_text()

    figures, answers = answer("first")
    assert (figures["rows"], figures["too_long"]) == (2, 1)
    assert 0 < figures["length_mean"] <= 6
    records = [json.loads(line) for line in answers.splitlines()]
    assert [(r["row"], r["expected"]) for r in records] == [(0, "2"), (0, "2"), (1, "2"), (1, "2")]
    assert records[0]["messages"] == [{"role": "user", "content": "1+1"}]
    assert len({r["response"] for r in records}) > 1
    assert answer("second") == (figures, answers)
    assert capfd.readouterr() == ("", "")  # no bar of the libraries


def test_limit_takes_the_first_rows(model: Path, dataset: Path):
    figures = run_eval(str(model), dataset=dataset, max_new_tokens=2, system_prompt="", limit=1)
    assert (figures["rows"], figures["too_long"]) == (1, 0)


def test_what_stands_in_the_way_is_said_before_the_model_is_loaded(model: Path, dataset: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "answers.jsonl").touch()
    with pytest.raises(DataError, match=r"answers\.jsonl exists; choose another --out"):
        run_eval(str(model), dataset=dataset, out=tmp_path / "out")
    with pytest.raises(RunError, match="--out: expected a directory"):
        run_eval(str(model), dataset=dataset, out=dataset / "out")
    with pytest.raises(DataError, match="no dataset"):
        run_eval(str(model), dataset=tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"reward\.type: expected boxed or"):
        run_eval(str(model), dataset=dataset, reward_type="best")
    with pytest.raises(ModelError, match=r"expected a model, a checkpoint or a run directory at .*nowhere"):
        run_eval(str(tmp_path / "nowhere"), dataset=dataset)
    with pytest.raises(RunError, match="expected a checkpoint, or a run directory that has one"):
        run_eval(str(tmp_path / "out"), dataset=dataset)
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "answers.jsonl"]
