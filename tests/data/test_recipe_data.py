"""The scripts that make the data of the recipes, from local copies."""

from __future__ import annotations

import json
import random
import sys
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import countdown
import gsm8k
import hub_rows
import limo
import mbpp
import preferences
import pytest

from async_rl.config.loading import parse_config
from async_rl.data.dataset import load_rows, load_rows_of
from async_rl.errors import DataError

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


def test_a_box_without_braces_is_read_too():
    assert gsm8k.math_row({"problem": "p", "solution": "so $x = \\boxed 7$."}) == ("p", "7")
    with pytest.raises(ValueError, match="boxed"):
        gsm8k.math_row({"problem": "p", "solution": "no answer"})


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
    config = parse_config(
        {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"type": "code"}, "run": {"dir": "r"}}, "test"
    )
    assert len(load_rows_of(config, str(tmp_path / "rows.jsonl")).rows) == 1


def test_pairs_are_whole_conversations_without_other_columns():
    chosen = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "score": 1}]
    rejected = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]
    row = preferences.pair({"prompt": "q", "chosen": chosen, "rejected": rejected, "score_chosen": 8.0})
    assert row == {
        "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "rejected": rejected,
    }
    with pytest.raises(ValueError, match="expected rejected as messages"):
        preferences.pair({"chosen": chosen, "rejected": chosen[:1]})


def test_pairs_that_compare_nothing_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]):
    def conversation(prompt: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    good = {"chosen": conversation("q", "a"), "rejected": conversation("q", "b")}
    same = {"chosen": conversation("q", "a"), "rejected": conversation("q", "a")}
    other = {"chosen": conversation("q", "a"), "rejected": conversation("r", "b")}
    assert list(preferences.comparable([same, good, other])) == [good]
    assert "2 pairs are left out" in capsys.readouterr().out


def test_a_row_of_limo_becomes_a_chat():
    messages = limo.limo_row({"question": "q", "solution": "s", "answer": "1"})["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["content"] == "s"


def test_every_target_of_countdown_can_be_reached():
    rng = random.Random(3)
    for row in countdown.full_rows(30, rng):
        numbers, target = row["extra_info"]["numbers"], row["extra_info"]["target"]
        assert target in reachable([Fraction(number) for number in numbers])
        assert str(target) in row["messages"][0]["content"]


def reachable(numbers: list[Fraction]) -> set[Fraction]:
    """All values of equations that use each number once."""
    if len(numbers) == 1:
        return set(numbers)
    found: set[Fraction] = set()
    for first, second in permutations(range(len(numbers)), 2):
        rest = [number for index, number in enumerate(numbers) if index not in (first, second)]
        a, b = numbers[first], numbers[second]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            found |= reachable([*rest, value])
    return found
