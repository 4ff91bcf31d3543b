"""``async-rl init``: the first config, from options or from answers in a terminal."""

from __future__ import annotations

import json
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.main import main
from async_rl.config.loading import load_config
from async_rl.extensions.quickstart import init as init_module
from async_rl.rewards.records import RewardInput
from benchmarks.memory_table import MODELS
from tests.end_to_end.tiny import write_tiny_task
from tests.full_disk import file_size_limit
from tests.refusal import refusal


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init_module, "_is_terminal", lambda: False)
    (tmp_path / "sums.csv").write_text("question,answer\nWhat is 1+2?,3\nWhat is 2+2?,4\n")
    return tmp_path


def init(*arguments: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["init", *arguments])
    assert not leaving.value.code


SUMS = ("--model", "m", "--data", "sums.csv", "--gpus", "0")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What is answered to each question of ``init`` in a terminal, by the question's first word, in this order."""
    found: dict[str, list[str]] = {}
    monkeypatch.setattr(init_module, "_is_terminal", lambda: True)
    monkeypatch.setattr(init_module.typer, "prompt", lambda question, **_: found[question.split()[0]].pop(0))
    return found


def test_the_columns_and_the_reward_are_found_in_the_data_and_every_key_has_a_comment(
    capsys: pytest.CaptureFixture[str],
):
    init(*SUMS, "--eval", "sums.csv")
    config = load_config("run.toml")
    assert (config.model.path, config.data.train, config.reward.type) == ("m", "sums.csv", "boxed")
    assert config.data.columns == {"prompt": "question", "gt_answer": "answer"}
    assert config.run.dir == "runs/run"
    said = capsys.readouterr().out
    assert "wrote run.toml" in said
    assert "async-rl doctor run.toml" in said
    lines = Path("run.toml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(keys) > 15
    assert all(lines[number - 1].startswith("# ") for number in keys)


@pytest.mark.parametrize(
    ("gpus", "learner", "generator"),
    [
        (1, {"devices": [0]}, {"count": 1, "devices": [0], "memory_fraction": 0.4}),
        (2, {"nproc": 1}, {"count": 1}),
        (5, {"nproc": 2}, {"count": 3}),
    ],
)
def test_the_gpus_are_divided_between_learner_and_generators(
    gpus: int, learner: dict[str, Any], generator: dict[str, Any]
):
    init("--model", "m", "--data", "sums.csv", "--gpus", str(gpus))
    raw = tomllib.loads(Path("run.toml").read_text())
    assert raw["learner"].items() >= learner.items()
    assert raw["generator"].items() >= generator.items()
    load_config("run.toml")


@pytest.mark.parametrize(("size", "lr"), [(1 << 20, 2e-5), ((40 << 20) + 1, 1e-5), (538 << 20, 1e-5), (1 << 30, 1e-6)])
def test_a_model_gets_a_learning_rate_that_moves_its_weights_and_lengths_that_fit(size: int, lr: float):
    Path("model").mkdir()
    with Path("model/model.safetensors").open("wb") as file:
        file.truncate(size)
    Path("model/config.json").write_text(json.dumps({"max_position_embeddings": 65}))
    init("--model", "model", *SUMS[2:])
    config = load_config("run.toml")
    assert config.optimizer.lr == lr
    assert (config.sampling.max_prompt_tokens, config.sampling.max_new_tokens) == (32, 33), "they fit the context"


@pytest.mark.parametrize(("length", "ranks", "longest"), [(1024, 5, 16384), (16384, 3, 17408)])
def test_the_split_and_the_micro_batch_follow_from_the_length_of_answers(length: int, ranks: int, longest: int):
    # Long answers take more memory while they are sampled, so more of the GPUs go to generators.
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({**MODELS["Qwen2.5 7B"], "max_position_embeddings": 32768}))
    init("--model", "model", *SUMS[2:4], "--gpus", "8xH100", "--max-new-tokens", str(length))
    config = load_config("run.toml")
    assert (config.sampling.max_prompt_tokens, config.sampling.max_new_tokens) == (1024, length)
    assert (config.learner.nproc, config.generator.count, config.learner.max_tokens) == (ranks, 8 - ranks, longest)
    assert config.model.gradient_checkpointing == "attention"


def test_prompts_get_what_the_stated_length_of_answers_leaves_of_the_context(capsys: pytest.CaptureFixture[str]):
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"max_position_embeddings": 1000}))
    asked = ("--model", "model", *SUMS[2:], "--max-new-tokens")
    assert "expected less than the context of 1000 tokens of model" in refusal(capsys, "init", *asked, "1000")
    init(*asked, "900")
    config = load_config("run.toml")
    assert (config.sampling.max_prompt_tokens, config.sampling.max_new_tokens) == (100, 900)


@pytest.mark.parametrize(
    ("row", "reward"),
    [
        ({"prompt": "Add.", "test_cases": {"inputs": ["1 2"], "outputs": ["3"]}}, "code"),
        ({"question": "q", "answer": "2 + 2 = 4\n#### 4"}, "reward.py:score"),
        ({"question": "q", "answer": "so it is \\boxed{4}"}, "reward.py:score"),
        ({"question": "q", "answer": "two lines:\n4"}, "reward.py:score"),
        ({"prompt": "q", "response": "a"}, "reward.py:score"),
        ({"prompt": "q", "response": "a", "gt_answer": "a"}, "boxed"),
    ],
)
def test_the_reward_follows_from_the_rows(row: dict[str, object], reward: str, capsys: pytest.CaptureFixture[str]):
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = ("--model", "m", "--data", "rows.jsonl", "--gpus", "0")
    init(*rows)
    assert load_config("run.toml").reward.type == reward
    if "answer" in row:  # whole solutions
        init("two.toml", *rows, "--reward", "boxed")
        assert "seems to have whole solutions" in capsys.readouterr().err


def test_an_own_reward_is_allowed_and_files_are_never_replaced(capsys: pytest.CaptureFixture[str]):
    Path("reward.py").write_text("mine")
    init(*SUMS, "--reward", "own")
    assert load_config("run.toml").generator.allow_code == ("reward.py",)
    assert Path("reward.py").read_text() == "mine"
    assert "reward.py exists and stays as it is" in capsys.readouterr().out
    Path("run.toml").write_text("mine")
    assert "run.toml exists" in refusal(capsys, "init", *SUMS)
    assert Path("run.toml").read_text() == "mine"


def own_score(text: str, reward_data: dict[str, Any]) -> float:
    """The score of the written reward.py."""
    return runpy.run_path("reward.py")["score"](RewardInput(text, reward_data, 8, 128, "stop"))


def test_the_own_reward_finds_the_right_answer_in_the_text_and_says_that_long_ones_lose(
    capsys: pytest.CaptureFixture[str],
):
    init(*SUMS, "--reward", "own")
    for known, right, wrong in (
        (" 3 ", ("it is 3", "2 + 1 = 3.0.", "8-3"), ("it is 4", "13", "3 or 4", "0.3", "it is -3", "")),
        (1000, ("it is 1,000", "$1000"), ("1", "11,000")),
        ("so 5 * 2 = 10 #### 10", ("10",), ("5", "110")),
        ("Paris", ("It is **paris**.",), ("Paris or Rome", "Comparis")),
        (" ", (), ("it is 4", "")),
    ):
        row = {"gt_answer": known}
        assert [own_score(text, row) for text in (*right, *wrong)] == [1.0] * len(right) + [0.0] * len(wrong), known
    assert "With reward.soft_overlong = true, long answers lose up to 1" in Path("reward.py").read_text()
    assert load_config("run.toml").reward.soft_overlong
    # Without an answer column it scores nothing until it is written.
    Path("reward.py").unlink()
    Path("poems.jsonl").write_text(json.dumps({"prompt": "Write a short poem."}) + "\n")
    init("poems.toml", "--model", "m", "--data", "poems.jsonl", "--gpus", "0")
    with pytest.raises(NotImplementedError, match=r"write here how good item\.text is"):
        own_score("any text", {})
    assert "reward.py: write its function score" in capsys.readouterr().out


@pytest.mark.parametrize("num_bytes", [100, 1000])
def test_a_full_disk_leaves_no_half_written_pair(num_bytes: int, folder: Path, capsys: pytest.CaptureFixture[str]):
    # 100 bytes cut reward.py. 1000 bytes hold it and cut the config.
    arguments = (*SUMS, "--reward", "own")
    with file_size_limit(num_bytes):
        assert "can't write" in refusal(capsys, "init", *arguments)
    assert [path.name for path in folder.iterdir()] == ["sums.csv"]
    init(*arguments)
    assert len(Path("reward.py").read_text()) < 1000 < len(Path("run.toml").read_text())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "sums.csv"], "--model: expected a value, got none; pass it, or run"),
        (["--model", "m"], "--data: expected a value"),
        (["--model", "m", "--data", "nothing.csv"], "no dataset at nothing.csv"),
        ([*SUMS, "--eval", "nothing.csv"], "no dataset at nothing.csv"),
        (["--model", "./no/model", *SUMS[2:]], "there is no ./no/model; correct the path"),
        ([*SUMS, "--answer-column", "x"], "--answer-column: expected a column of sums.csv"),
        ([*SUMS, "--reward", "code"], "expected a column test_cases in sums.csv"),
        ([*SUMS, "--reward", "boxing"], "--reward: expected one of"),
        (["no/such/run.toml", *SUMS], "expected a directory for no/such/run.toml"),
        (["--model", "m", "--data", "empty.jsonl"], "expected at least one row in empty.jsonl"),
    ],
)
def test_a_wrong_answer_is_one_message_and_nothing_is_written(
    arguments: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "empty.jsonl").touch()
    assert expected in refusal(capsys, "init", *arguments)
    assert not (folder / "run.toml").exists()
    assert not (folder / "reward.py").exists()


def test_a_terminal_is_asked_for_what_the_options_leave_open(
    answers: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
):
    answers |= {"Training": ["sums.csv"], "Reward": ["exact"], "Evaluation": [""], "GPUs": ["2"]}
    init("--model", "m")
    assert not any(answers.values())
    assert load_config("run.toml").reward.type == "exact"
    assert '  question: "What is 1+2?"' in capsys.readouterr().err
    init("two.toml", "--model", "m", "--data", "sums.csv")  # model and data are enough: it asks nothing
    assert load_config("two.toml").reward.type == "boxed"


def test_a_wrong_answer_in_a_terminal_is_asked_for_again(
    folder: Path, answers: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
):
    (folder / "models").mkdir()
    (folder / "rows.jsonl").write_text('{"puzzle": "1+1", "solution_number": 2}\n')
    answers |= {
        "Model": ["models/none", "models", "some/model"],
        "Training": ["nothing.csv", "rows.jsonl"],
        "Column": ["question", "puzzle"],
        "Reward": ["boxing", "boxed", "own"],
        "Evaluation": ["nothing.csv", "rows.jsonl"],
        "GPUs": ["two", "0"],
    }
    init()
    assert not any(answers.values())
    said = capsys.readouterr().err
    messages = (
        "there is no models/none", "a directory without config.json", "no dataset at nothing.csv", "got 'two'",
        "expected a column of rows.jsonl", "got 'boxing'", "expected a column with the right answers",
    )  # fmt: skip
    assert [message for message in messages if message not in said] == []
    config = load_config("run.toml")
    assert (config.model.path, config.reward.type, config.generator.count) == ("some/model", "reward.py:score", 1)
    assert config.data.columns == {"prompt": "puzzle"}


def test_the_first_prompt_of_a_local_model_fits(folder: Path, capsys: pytest.CaptureFixture[str]):
    task = write_tiny_task(folder)
    # The tiny model's characters spell out the default system message of boxed in more tokens than there is room for.
    init("--model", task["model"], "--data", task["train"], "--reward", "boxed", "--gpus", "0")
    assert load_config("run.toml").data.system_prompt == ""
    assert "so data.system_prompt is empty" in capsys.readouterr().err
    described = Path(task["model"], "config.json")
    described.write_text(json.dumps(json.loads(described.read_text()) | {"max_position_embeddings": 4096}))
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "1+" * 150, "gt_answer": "150"}) + "\n")
    init("long.toml", "--model", task["model"], "--data", "long.jsonl", "--reward", "own", "--gpus", "0")
    config = load_config("long.toml")
    assert (config.data.system_prompt, config.sampling.max_prompt_tokens) == (None, 600)


@pytest.mark.slow
def test_doctor_passes_what_init_writes(folder: Path, capsys: pytest.CaptureFixture[str]):
    task = write_tiny_task(folder)
    rows = ("--data", task["train"], "--eval", task["held_out"])
    init("--model", task["model"], *rows, "--reward", "own", "--gpus", "0")
    with pytest.raises(SystemExit) as leaving:
        main(["doctor", "run.toml"])
    assert not leaving.value.code, capsys.readouterr().out
