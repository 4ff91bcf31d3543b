"""The script that makes the data of the mathematics recipes, from local copies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gsm8k
import pytest

from async_rl.data.dataset import load_rows
from async_rl.errors import DataError

SOLUTION = "He has 2 * 600 = <<2*600=1200>>1200.\n#### 1,200"


def test_the_files_of_the_recipes_are_made_from_local_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "How many?", "answer": SOLUTION}) + "\n")
    (tmp_path / "test.csv").write_text('question,answer\nHow old?,"Old. #### 7"\n')
    (tmp_path / "math.jsonl").write_text(json.dumps({"problem": "$1+1$?", "answer": "2", "level": 1}) + "\n")
    arguments = ["--gsm8k-train", "train.jsonl", "--gsm8k-test", "test.csv", "--math500", "math.jsonl"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gsm8k.py", *arguments])
    gsm8k.main()
    found = {name: load_rows(f"data/{name}.jsonl").rows for name in ("gsm8k_train", "gsm8k_test", "math500")}
    assert {name: [row.reward_data["gt_answer"] for row in rows] for name, rows in found.items()} == {
        "gsm8k_train": ["1200"], "gsm8k_test": ["7"], "math500": ["2"],
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
        gsm8k.write_rows(tmp_path / "out.jsonl", gsm8k.rows_of(str(source), gsm8k.gsm8k_row))
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
