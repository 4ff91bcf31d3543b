"""The instructions of the second quickstart: what counts as followed, and which rows there are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from async_rl.extensions.quickstart.instructions import SUBJECTS, TEXTS, WORDS, is_followed, score, write_rows
from async_rl.rewards.records import RewardInput


@pytest.mark.parametrize(
    ("kind", "value", "answer", "expected"),
    [
        ("count", "three", "The sea sings.", True),
        ("count", "three", "The sea sings today.", False),
        ("count", "three", "", False),
        ("list", "four", "waves, salt, blue water, sand.", True),
        ("list", "three", "waves, salt, sand and shells on it", False),
        ("contains", "cold", "The cold sea sings.", True),
        ("contains", "cold", "The colder sea sings.", False),
        ("first", "cold", "Cold is the sea.", True),
        ("first", "cold", "The sea is cold.", False),
        ("last", "cold", " The sea is cold. ", True),
        ("last", "cold", "Cold is the sea.", False),
        ("question", "cold", "Is the sea cold?", True),
        ("question", "cold", "Is it? Is it cold?", False),
    ],
)
def test_an_answer_that_keeps_to_its_instruction_is_right(kind: str, value: str, answer: str, expected: bool):
    assert is_followed(kind, value, answer) is expected


def test_an_answer_that_was_cut_is_wrong():
    row = {"kind": "contains", "value": "cold"}
    assert score(RewardInput("The sea is cold", row, 5, 24, "stop")) == 1.0
    assert score(RewardInput("The sea is cold", row, 24, 24, "length")) == 0.0


def test_rows_are_of_all_kinds_alike_and_the_held_out_ones_have_other_subjects_and_words(tmp_path: Path):
    write_rows(tmp_path, seed=3)
    parts = {}
    for part, count in (("train", 150), ("held_out", 20)):
        rows = [json.loads(line) for line in (tmp_path / f"{part}.jsonl").read_text().splitlines()]
        assert Counter(row["kind"] for row in rows) == dict.fromkeys(TEXTS, count)
        parts[part] = {row["messages"][0]["content"] for row in rows}
        assert len(parts[part]) == len(rows)
    assert not parts["train"] & parts["held_out"]
    assert not set(SUBJECTS["train"]) & set(SUBJECTS["held_out"])
    assert not set(WORDS["train"]) & set(WORDS["held_out"])
