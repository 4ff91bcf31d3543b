"""Columns that change a conversation, in the rows of reinforcement learning and by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.data.context_columns import check_columns, split_context
from async_rl.data.dataset import RowRules, load_train_rows, parse_row
from async_rl.errors import DataError
from tests.config.made import a_config

SYSTEM = {"role": "system", "content": "be brief"}
ASK = {"role": "user", "content": "1+1"}
OLD = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PAIRS = [["q", "a"]]


@pytest.mark.parametrize(
    ("row", "messages", "context", "rest"),
    [
        ({"system": "be brief"}, [ASK], [SYSTEM], [ASK]),
        ({"system": "be brief"}, [SYSTEM, ASK], [SYSTEM], [ASK]),
        ({"history": PAIRS}, [SYSTEM, ASK], [SYSTEM, *OLD], [ASK]),
        ({"history": json.dumps(PAIRS)}, [ASK], OLD, [ASK]),  # as in CSV
        ({"history": PAIRS}, [*OLD, ASK], [], [*OLD, ASK]),  # the messages have it already
        ({"system": "be brief", "history": PAIRS}, [ASK], [SYSTEM, *OLD], [ASK]),
        ({"system": None, "history": "[]"}, [ASK], [], [ASK]),
    ],
)
def test_system_and_history_stand_before_the_messages(
    row: dict[str, Any], messages: list[Any], context: list[Any], rest: list[Any]
):
    assert split_context(row, messages, "row") == (context, rest)


@pytest.mark.parametrize(
    "row", [{"system": "be long"}, {"system": 3}, {"history": "q"}, {"history": [["q"]]}, {"history": [["q", 1]]}]
)
def test_another_system_message_and_another_form_are_refused_by_name(row: dict[str, Any]):
    (name,) = row
    with pytest.raises(DataError, match=rf"^row: {name}: expected"):
        split_context(row, [SYSTEM, ASK], "row")


MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "response_mask")


@pytest.mark.parametrize("name", ["documents", "images", *MASKS])
def test_a_column_that_would_be_lost_is_refused_by_name(name: str):
    for absent in (None, "", [], "[]"):
        check_columns({name: absent}, "row")
    with pytest.raises(DataError, match=rf"^row: {name}: .*got a list of 2; .*put '{name}' into data.ignore"):
        check_columns({name: [0, 1]}, "row")


def test_built_in_rewards_leave_system_and_history_to_the_prompt():
    row = {"prompt": "1+1", "system": "be brief", "history": PAIRS, "gt_answer": "2"}
    found = parse_row(row, "row", RowRules(system_prompt="not this"))
    assert found.messages == (SYSTEM, *OLD, ASK)
    with pytest.raises(DataError, match="row: system: no template renders it"):
        parse_row(row, "row", RowRules(prompt_format="text"))
    with pytest.raises(DataError, match="row: system: expected text, equal to the system message 'be brief'"):
        parse_row({**row, "messages": [SYSTEM, ASK], "system": "x"}, "row", RowRules())
    shown = {**row, "prompt": "be brief. 1+1", "history": None}
    assert parse_row(shown, "row", RowRules(prompt_format="text")).messages[0]["content"] == "be brief. 1+1"
    ignored = parse_row(row, "row", RowRules(ignore=("system", "history")))
    assert (ignored.messages, ignored.reward_data) == ((ASK,), {"gt_answer": "2"})


@pytest.mark.parametrize(
    ("sections", "is_read"),
    [
        ({}, True),
        ({"reward": {"type": "own.py:score"}}, False),
        ({"reward": {"extra": {"own.py:score": 0.5}}}, False),
        ({"data": {"ignore": ["system"]}}, False),
    ],
)
def test_a_function_of_the_user_s_own_gets_the_columns_instead(tmp_path: Path, sections: dict[str, Any], is_read: bool):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1", "system": "be brief", "gt_answer": "2"}))
    data = {"train": str(path), "system_prompt": "", **sections.get("data", {})}
    (found,) = load_train_rows(a_config(**{"generator": {"allow_code": ["own.py"]}, **sections, "data": data})).rows
    assert found.messages == ((SYSTEM, ASK) if is_read else (ASK,))
    assert ("system" in found.reward_data) is ("data" not in sections)
