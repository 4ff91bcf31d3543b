"""What a row may look like: prompts, code rows, rows of environments, column names."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.data import RowField
from async_rl.data.dataset import Row, RowRules, load_rows, parse_row, rules_of
from async_rl.errors import DataError
from tests.config.made import a_config

CHAT = [{"role": "user", "content": "q"}]
CASES = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}
OF_CODE = {"needs": ("test_cases",)}


def parse(raw: object, **rules: Any) -> Row:
    return parse_row(raw, "f:1", RowRules(**rules))


NAMES = {"prompt": "question", "gt_answer": "solution"}
NESTED = {"gt_answer": "reward_model.ground_truth"}
TOLD = {"role": "system", "content": "Think."}
ASKED = {"role": "user", "content": "1+1?"}
ARGUMENTS = {"inputs": [[1, [2]], "[1]"], "outputs": [3, "1"]}
MODEL = {"ground_truth": "2", "style": "rule"}


@pytest.mark.parametrize(
    ("raw", "rules", "messages", "reward_data"),
    [
        # A prompt is a user message behind the system prompt, text to be continued, or messages, which win.
        ({"prompt": "1+1?", "gt_answer": 2}, {"system_prompt": "Think."}, [TOLD, ASKED], {"gt_answer": "2"}),
        (
            {"prompt": "1+1=", "gt_answer": 2}, {"system_prompt": "Think.", "prompt_format": "text"},
            [{"role": "text", "content": "1+1="}], {"gt_answer": "2"},
        ),
        ({"prompt": CHAT, "gt_answer": 2}, {}, CHAT, {"gt_answer": "2"}),
        ({"prompt": "other", "messages": CHAT, "gt_answer": 2}, {}, CHAT, {"gt_answer": "2"}),
        # Rows of environments need no answer; of programs, tests, which may be JSON text, with a function's name.
        ({"messages": CHAT, "extra_info": {"target": 24}}, {"needs": ()}, CHAT, {"extra_info": {"target": 24}}),
        ({"messages": CHAT, "test_cases": json.dumps(CASES)}, OF_CODE, CHAT, {"test_cases": CASES}),
        (
            {"messages": CHAT, "test_cases": {**CASES, "fn_name": "add"}}, OF_CODE,
            CHAT, {"test_cases": CASES, "fn_name": "add"},
        ),
        (
            {"messages": CHAT, "test_cases": ARGUMENTS, "fn_name": "add"}, OF_CODE,
            CHAT, {"test_cases": ARGUMENTS, "fn_name": "add"},
        ),
        # Columns go by the names that the data has; one that only happens to have our name is not ours.
        (
            {"question": "1+1?", "solution": 2, "level": 5}, {"columns": NAMES},
            [ASKED], {"gt_answer": "2", "level": 5},
        ),
        (
            {"chat": CHAT, "solution": 2, "gt_answer": 7, "prompt": "x"}, {"columns": {**NAMES, "messages": "chat"}},
            CHAT, {"gt_answer": "2"},
        ),
        # A column may be a value inside an object, which stays; one with the whole dotted name wins.
        (
            {"prompt": CHAT, "gt_answer": "not this", "reward_model": MODEL}, {"columns": NESTED},
            CHAT, {"gt_answer": "2", "reward_model": MODEL},
        ),
        (
            {"prompt": CHAT, "reward_model": json.dumps(MODEL)}, {"columns": NESTED},
            CHAT, {"gt_answer": "2", "reward_model": json.dumps(MODEL)},
        ),
        (
            {"prompt": CHAT, "reward_model.ground_truth": "1", "reward_model": MODEL}, {"columns": NESTED},
            CHAT, {"gt_answer": "1", "reward_model": MODEL},
        ),
        (
            {"prompt": CHAT, "a.b": {"c": 3}, "a": {"b": {"c": 4}}}, {"columns": {"gt_answer": "a.b.c"}},
            CHAT, {"gt_answer": "3", "a.b": {"c": 3}, "a": {"b": {"c": 4}}},
        ),
    ],
)  # fmt: skip
def test_a_row_of_any_form_has_messages_and_what_the_reward_reads(
    raw: object, rules: dict[str, Any], messages: list[Any], reward_data: dict[str, Any]
):
    assert parse(raw, **rules) == Row(tuple(messages), reward_data)


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ({"inputs": [], "outputs": []}, "f:1: cases: .* that are not empty, got 0 inputs and 0 outputs"),
        ({"inputs": "1", "outputs": "2"}, "got no list of inputs and no list of outputs"),
        (["1"], r'cases: expected {"inputs": \[...\], "outputs": \[...\]}, got \[\'1\'\]'),
        ("{1", "cases: expected JSON"),
        ({"inputs": [1], "outputs": ["2"]}, r"cases\.inputs\[0\]: expected text or a list of lines, got 1"),
        ({"inputs": ["1"], "outputs": [[2]]}, r"cases\.outputs\[0\]: expected text or a list of lines, got \[2\]"),
        ({**CASES, "fn_name": "a b"}, "fn_name: expected the name of a function"),
    ],
)
def test_test_cases_that_could_not_be_run_are_refused(cases: object, message: str):
    with pytest.raises(DataError, match=message):
        parse({"messages": CHAT, "cases": cases}, needs=("test_cases",), columns={"test_cases": "cases"})


@pytest.mark.parametrize(
    ("raw", "columns", "told"),
    [
        ({"question": "1+1?"}, NAMES, r'with "messages" and "solution", got no solution among the keys'),
        ({"question": " ", "solution": 2}, NAMES, "question: expected text that is not blank"),
        ({"question": "1+1?", "answer": "2"}, {}, r"got no messages among .*; name its columns in"),
        *(
            ({"prompt": "q", **raw}, NESTED, r'"messages" and "reward_model\.ground_truth", got no reward_model')
            for raw in ({"reward_model": {"style": "rule"}}, {"reward_model": "{a"}, {"reward_model": [1]}, {})
        ),
    ],
)
def test_errors_name_the_data_s_own_columns(raw: dict[str, Any], columns: dict[RowField, str], told: str):
    with pytest.raises(DataError, match=told):
        parse(raw, columns=columns)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, "\\boxed{}"),
        ({"reward": {"type": "think_answer_tags"}}, "</answer>"),
        ({"reward": {"type": "my_rewards:length"}}, None),
        ({"data": {"system_prompt": "Hi."}}, "Hi."),
        ({"data": {"system_prompt": ""}}, None),
        ({"environment": {"name": "mine.py"}, "reward": {"type": "boxed"}}, None),
    ],
)
def test_the_reward_says_what_the_model_is_told_and_an_environment_does_for_itself(sections: Any, told: str | None):
    config = a_config(**sections)
    assert config.system_prompt == "" if told is None else told in config.system_prompt
    assert "environment" not in sections or config.row_needs == ()


@pytest.mark.parametrize(
    ("reward", "gold"),
    [({"type": "boxed"}, "5"), ({"type": "mine.py:f"}, 5), ({"type": "boxed", "extra": {"mine.py:f": 1.0}}, 5)],
)
def test_a_number_stays_one_for_a_function_of_the_user(reward: dict[str, Any], gold: int | str):
    rules = rules_of(a_config(reward=reward))
    assert parse_row({"prompt": "?", "gt_answer": 5}, "f:1", rules).reward_data == {"gt_answer": gold}
    assert parse_row({"prompt": "?", "gt_answer": 0.5}, "f:1", rules).reward_data["gt_answer"] in (0.5, "0.5")
    # What can't be sent as a number is text.
    assert parse_row({"prompt": "?", "gt_answer": 2**80}, "f:1", rules).reward_data == {"gt_answer": str(2**80)}


def test_an_answer_that_says_nothing_is_a_bad_row_where_mathematics_is_compared(tmp_path: Path):
    golds = ["proof", "5", "#### 72", "notfound", "3,5"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "?", "gt_answer": gold}) + "\n" for gold in golds))
    rules = RowRules(is_mathematics=True)
    complaint = r"rows\.jsonl:1: gt_answer: .* got the text 'proof'; .* \(2 of 5 rows have errors\)"
    with pytest.raises(DataError, match=complaint):
        load_rows(str(path), rules=rules)
    loaded = load_rows(str(path), rules=rules, on_bad_row="skip")
    # The rows keep what their author wrote.
    assert ([row.reward_data["gt_answer"] for row in loaded.rows], loaded.num_skipped) == (["5", "#### 72", "3,5"], 2)
    assert len(load_rows(str(path)).rows) == 5
