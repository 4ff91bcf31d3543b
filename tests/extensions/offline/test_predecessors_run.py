"""The rows of docs/predecessors.md about training on given rows and about data: each is run, not only loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from async_rl.config.loading import load_config
from async_rl.data.dataset import load_rows_of, load_train_rows
from async_rl.extensions.offline.tasks import train
from tests.config.predecessors import ROWS, alternatives, settings_of
from tests.learner.tiny import tiny_model

ASK = {"role": "user", "content": "1+1"}
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("2", "33"))
RL2_ROWS = [{"prompt": "1+1=", "response": "2"}, {"messages": [ASK, GOOD]}]
RL2_PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
    {"messages": [ASK], "chosen": "2", "rejected": "33"},
    {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
]
LABELLED = [{"prompt": "1+1=", "completion": "2", "label": True}, {"prompt": "2+1=", "completion": "9", "label": False}]
MATH = [{"messages": ASK, "gt_answer": "2"}]
"""Colossal-RL's form: one message, not a list."""
OFFLINE = ("sft", "rm", "dpo")


def commands_of(row: str) -> list[str]:
    return [command for command in OFFLINE if any(key.startswith(f"{command}.") for key, _ in settings_of(row))]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def overrides(chosen: Mapping[str, str], **defaults: str) -> list[str]:
    """Options that set what the row names, and ``defaults`` where it names nothing."""
    return [
        f"{key}={value}" for key, value in {**{k.replace("__", "."): v for k, v in defaults.items()}, **chosen}.items()
    ]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", [row for row in ROWS if commands_of(row)], ids=lambda row: row.split(" | ")[0][:40])
def test_a_row_about_training_on_given_rows_trains(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for command, chosen in ((c, a) for c in commands_of(row) for a in alternatives(row)):
        directory = tmp_path / f"{command}-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        monkeypatch.chdir(directory)
        tiny_model(directory / "base")
        pairs = LABELLED if chosen.get("dpo.loss") == '"kto"' else RL2_PAIRS
        write(directory / "rows.jsonl", RL2_ROWS)
        write(directory / "pairs.jsonl", pairs)
        write(directory / "held_out.jsonl", pairs)
        (directory / "config.toml").write_text('[run]\ndir = "run"\n[model]\npath = "base"\n')
        length = {} if f"{command}.epochs" in chosen else {f"{command}__steps": "2"}
        data = "rows.jsonl" if command == "sft" else "pairs.jsonl"
        own = {f"{command}__data": data, f"{command}__out": "model", **length}
        train(command, load_config(directory / "config.toml", overrides(chosen, **own)))
        assert load_file(directory / "model" / "model.safetensors")
        steps = (directory / "run" / command / "metrics.jsonl").read_text().splitlines()
        assert len(steps) == (1 if "sft.epochs" in chosen else 2)  # three epochs of two rows are one step of 64
        if "rm.eval" in chosen:
            assert "eval/held_out/loss" in json.loads(steps[-1])


SOURCES = ("data.train", "data.eval", "data.prompt_format", "data.columns")


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if {key for key, value in settings_of(row) if value} & set(SOURCES)],
    ids=lambda row: row.split(" | ")[0][:40],
)
def test_a_row_about_data_reads_rows(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "1+1", "gt_answer": "2"}, {"problem": "1+1", "gt_answer": "2"}]

    def of_hub(name: str, config: str | None, *, split: str) -> datasets.Dataset:
        assert (name, split) in {
            ("owner/name", "train"),
            ("owner/name", "train[97%:]"),
            ("HuggingFaceH4/MATH-500", "test"),
        }
        return datasets.Dataset.from_list(rows[1:] if "97" in split else rows[:1])

    monkeypatch.setattr(datasets, "load_dataset", of_hub)
    (tmp_path / "my_rewards.py").write_text("def reward(item):\n    return 1.0\n")
    for chosen in alternatives(row):
        is_problem = "data.columns" in chosen
        write(tmp_path / "rows.jsonl", rows[1:] if is_problem else [*MATH, rows[0]])
        write(tmp_path / "math500.jsonl", MATH)
        (tmp_path / "config.toml").write_text('[run]\ndir = "run"\n[model]\npath = "base"\n')
        config = load_config(tmp_path / "config.toml", overrides(chosen, data__train="rows.jsonl"))
        if chosen.get("data.train") == '""':
            assert len(load_train_rows(config).rows) == 1000  # the environment makes them
            continue
        for loaded in (
            load_train_rows(config),
            *(load_rows_of(config, source) for source in config.data.eval.values()),
        ):
            assert loaded.rows
            for one in loaded.rows:
                assert one.messages[-1] == {"role": one.messages[-1]["role"], "content": "1+1"}
                assert one.reward_data == {"gt_answer": "2"}
