"""The scripts that make the data of the recipes, from local copies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gsm8k
import hub_rows
import mbpp
import pytest

from async_rl.data.dataset import load_rows, load_rows_of
from async_rl.errors import DataError
from tests.config.made import a_config

SOLUTION = "He has 2 * 600 = <<2*600=1200>>1200.\n#### 1,200"


def test_the_files_of_the_recipes_are_made_from_local_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "How many?", "answer": SOLUTION}) + "\n")
    (tmp_path / "test.csv").write_text('question,answer\nHow old?,"Old. #### 7"\n')
    (tmp_path / "math.jsonl").write_text(json.dumps({"problem": "$1+1$?", "answer": "2", "level": 1}) + "\n")
    solution = {"problem": "$2+3$?", "solution": "It is $\\boxed{\\frac{10}{2}}$.", "level": "Level 1"}
    (tmp_path / "math_train.jsonl").write_text(json.dumps(solution) + "\n")
    arguments = ["--gsm8k-train", "train.jsonl", "--gsm8k-test", "test.csv", "--math500", "math.jsonl"]
    arguments += ["--math-train", "math_train.jsonl"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gsm8k.py", *arguments])
    gsm8k.main()
    found = {name: load_rows(f"data/{name}.jsonl").rows for name in gsm8k.FILES}
    assert {name: [row.reward_data["gt_answer"] for row in rows] for name, rows in found.items()} == {
        "gsm8k_train": ["1200"], "gsm8k_test": ["7"], "math_train": ["\\frac{10}{2}"], "math500": ["2"],
    }  # fmt: skip
    assert found["gsm8k_train"][0].messages[0]["content"] == f"How many?\n\n{gsm8k.INSTRUCTION}"


@pytest.mark.parametrize(
    ("row", "expected"),
    [({"question": "q", "answer": "no mark"}, "after ####"), ({"q": 1}, "no column 'answer'"), ([1], "expected rows")],
)
def test_other_rows_are_refused_with_their_place_and_nothing_is_written(tmp_path: Path, row: object, expected: str):
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"train\.jsonl:1: .*{expected}"):
        hub_rows.write_rows(tmp_path / "out.jsonl", gsm8k.rows_of(str(source), gsm8k.gsm8k_row))
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


MBPP_ROW = {
    "text": "Write a function to double the numbers of a list.",
    "code": "import math\ndef one(x):\n    return 2 * x\ndef doubled(xs):\n    return [one(x) for x in xs]",
    "test_setup_code": "empty = []",
    "test_list": ["assert set(doubled([1, 2])) == {2, 4}", "assert doubled(empty) == []"],
}


def test_the_asserts_of_mbpp_become_a_check_of_the_function_that_they_call(tmp_path: Path):
    row = mbpp.mbpp_row(MBPP_ROW)
    assert row["entry_point"] == "doubled"
    assert MBPP_ROW["test_list"][0] in row["messages"][0]["content"]
    scope: dict[str, Any] = {}
    exec(row["test"], scope)
    scope["check"](lambda xs: [2 * x for x in xs])
    with pytest.raises(AssertionError):
        scope["check"](lambda xs: xs)
    hub_rows.write_rows(tmp_path / "rows.jsonl", [row])
    assert len(load_rows_of(a_config(reward={"type": "code"}), str(tmp_path / "rows.jsonl")).rows) == 1
