"""What a row may look like: prompts, code rows, rows of environments, column names."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.data import RowField
from async_rl.config.loading import parse_config
from async_rl.data.dataset import Row, RowRules, load_rows, parse_row, rules_of
from async_rl.errors import DataError

CHAT = [{"role": "user", "content": "q"}]
CASES = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}


def parse(raw: object, **rules: Any) -> Row:
    return parse_row(raw, "f:1", RowRules(**rules))


def test_a_prompt_is_a_user_message_behind_the_system_prompt():
    row = parse({"prompt": "1+1?", "gt_answer": 2}, system_prompt="Think.")
    assert row.messages == ({"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"})
    assert row.reward_data == {"gt_answer": "2"}


def test_a_prompt_may_be_text_to_be_continued():
    row = parse({"prompt": "1+1=", "gt_answer": 2}, system_prompt="Think.", prompt_format="text")
    assert row.messages == ({"role": "text", "content": "1+1="},)


def test_a_prompt_may_hold_messages():
    assert parse({"prompt": CHAT, "gt_answer": 2}).messages == tuple(CHAT)


def test_messages_win_over_a_prompt():
    assert parse({"prompt": "other", "messages": CHAT, "gt_answer": 2}).messages == tuple(CHAT)


def test_a_row_for_an_environment_needs_no_answer():
    row = parse({"messages": CHAT, "extra_info": {"target": 24, "numbers": [1, 2]}}, needs=())
    assert row.reward_data == {"extra_info": {"target": 24, "numbers": [1, 2]}}


@pytest.mark.parametrize("cases", [CASES, json.dumps(CASES)])
def test_test_cases_may_be_json_text(cases: object):
    assert parse({"messages": CHAT, "test_cases": cases}, needs=("test_cases",)).reward_data == {"test_cases": CASES}


@pytest.mark.parametrize(
    "fields", [{"test_cases": {**CASES, "fn_name": "add"}}, {"test_cases": CASES, "fn_name": "add"}]
)
def test_a_function_name_may_stand_in_the_cases_or_beside_them(fields: dict[str, Any]):
    row = parse({"messages": CHAT, **fields}, needs=("test_cases",))
    assert row.reward_data == {"test_cases": CASES, "fn_name": "add"}


def test_arguments_of_a_function_are_values_or_text():
    cases = {"inputs": [[1, [2]], "[1]"], "outputs": [3, "1"]}
    row = parse({"messages": CHAT, "test_cases": cases, "fn_name": "add"}, needs=("test_cases",))
    assert row.reward_data["test_cases"] == cases


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        (
            {"inputs": [], "outputs": []},
            "f:1: cases: .* two lists of equal length that are not empty, got 0 inputs and 0 outputs",
        ),
        ({"inputs": ["1"], "outputs": []}, "got 1 inputs and 0 outputs"),
        ({"inputs": "1", "outputs": "2"}, "got no list of inputs and no list of outputs"),
        ({"inputs": ["1"]}, "got 1 inputs and no list of outputs"),
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


def test_columns_go_by_the_names_that_the_data_has():
    columns: dict[RowField, str] = {"prompt": "question", "gt_answer": "solution"}
    row = parse({"question": "1+1?", "solution": 2, "level": 5}, columns=columns)
    assert row == Row(({"role": "user", "content": "1+1?"},), {"gt_answer": "2", "level": 5})


def test_a_column_that_only_happens_to_have_our_name_is_not_ours():
    # The answer is in "solution"; what this data calls gt_answer and prompt is something else.
    columns: dict[RowField, str] = {"messages": "chat", "prompt": "question", "gt_answer": "solution"}
    row = parse({"chat": CHAT, "gt_answer": 7, "solution": 2, "prompt": "x"}, columns=columns)
    assert row == Row(tuple(CHAT), {"gt_answer": "2"})


def test_errors_name_the_data_s_own_columns():
    columns: dict[RowField, str] = {"prompt": "question", "gt_answer": "solution"}
    with pytest.raises(
        DataError, match=r'with "messages" and "solution", got no solution among the keys \[\'question\'\]'
    ):
        parse({"question": "1+1?"}, columns=columns)
    with pytest.raises(DataError, match="question: expected text that is not blank"):
        parse({"question": " ", "solution": 2}, columns=columns)


def test_data_of_unknown_columns_is_told_where_to_name_them():
    with pytest.raises(
        DataError, match=r"got no messages among the keys \['answer', 'question'\]; name its columns in"
    ):
        parse({"question": "1+1?", "answer": "2"})


def config(**sections: Any) -> Config:
    return Config.model_validate({"run": {"dir": "r"}, "model": {"path": "m"}, **sections})


@pytest.mark.parametrize(
    ("reward", "needs"),
    [
        ({"type": "boxed"}, ("gt_answer",)),
        ({"type": "xml_format", "extra": {"exact": 1.0}}, ("gt_answer",)),
        ({"type": "my_rewards:length"}, ()),
    ],
)
def test_the_reward_says_what_a_row_needs(reward: dict[str, Any], needs: tuple[str, ...]):
    assert config(reward=reward).row_needs == needs


def test_an_environment_says_for_itself_what_a_row_needs_and_what_the_model_is_told():
    played = config(environment={"name": "mine.py"}, reward={"type": "boxed"})
    assert (played.row_needs, played.system_prompt) == ((), "")


def test_the_reward_says_what_the_model_is_told():
    assert "\\boxed{}" in config().system_prompt
    assert "</answer>" in config(reward={"type": "think_answer_tags"}).system_prompt
    assert config(reward={"type": "my_rewards:length"}).system_prompt == ""
    assert config(data={"system_prompt": "Hi."}).system_prompt == "Hi."


NESTED: dict[RowField, str] = {"gt_answer": "reward_model.ground_truth"}


@pytest.mark.parametrize("model", [{"ground_truth": "2", "style": "rule"}, '{"ground_truth": "2"}'])
def test_a_column_may_name_a_value_inside_an_object_which_stays(model: object):
    row = parse({"prompt": CHAT, "gt_answer": "not this", "reward_model": model}, columns=NESTED)
    assert row.reward_data == {"gt_answer": "2", "reward_model": model}


def test_a_column_with_the_whole_dotted_name_wins():
    raw = {"prompt": "q", "reward_model.ground_truth": "1", "reward_model": {"ground_truth": "2"}}
    assert parse(raw, columns=NESTED).reward_data["gt_answer"] == "1"


def test_names_with_dots_may_be_nested_too():
    raw = {"prompt": "q", "a.b": {"c.d": {"e": 3}}, "a": {"b": 4}}
    assert parse(raw, columns={"gt_answer": "a.b.c.d.e"}).reward_data["gt_answer"] == "3"


@pytest.mark.parametrize(
    "raw", [{"reward_model": {"style": "rule"}}, {"reward_model": "{a"}, {"reward_model": [1]}, {}]
)
def test_a_missing_value_inside_an_object_is_named(raw: dict[str, Any]):
    with pytest.raises(
        DataError, match=r'expected a row with "messages" and "reward_model\.ground_truth", got no rewa'
    ):
        parse({"prompt": "q", **raw}, columns=NESTED)


@pytest.mark.parametrize(
    ("reward", "gold"),
    [({"type": "boxed"}, "5"), ({"type": "mine.py:f"}, 5), ({"type": "boxed", "extra": {"mine.py:f": 1.0}}, 5)],
)
def test_a_number_stays_one_for_a_function_of_the_user(reward: dict[str, Any], gold: int | str):
    rules = rules_of(parse_config({"run": {"dir": "r"}, "model": {"path": "m"}, "reward": reward}, "test"))
    assert parse_row({"prompt": "?", "gt_answer": 5}, "f:1", rules).reward_data == {"gt_answer": gold}
    assert parse_row({"prompt": "?", "gt_answer": 0.5}, "f:1", rules).reward_data["gt_answer"] in (0.5, "0.5")
    # What can't be sent as a number is text.
    assert parse_row({"prompt": "?", "gt_answer": 2**80}, "f:1", rules).reward_data == {"gt_answer": str(2**80)}


def test_an_answer_that_says_nothing_is_a_bad_row_where_mathematics_is_compared(tmp_path: Path):
    golds = ["proof", "5", "#### 72", "notfound", "3,5"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "?", "gt_answer": gold}) + "\n" for gold in golds))
    rules = RowRules(is_mathematics=True)
    complaint = (
        r"rows\.jsonl:1: gt_answer: expected an answer that can be compared, got the text 'proof'; correct the row, or "
        r'set data\.on_bad_row = "skip" \(2 of 5 rows have errors\)'
    )
    with pytest.raises(DataError, match=complaint):
        load_rows(str(path), rules=rules)
    loaded = load_rows(str(path), rules=rules, on_bad_row="skip")
    # The rows keep what their author wrote.
    assert ([row.reward_data["gt_answer"] for row in loaded.rows], loaded.num_skipped) == (["5", "#### 72", "3,5"], 2)
    assert len(load_rows(str(path)).rows) == 5
