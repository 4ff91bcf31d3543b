"""The shapes that ``test_cases`` may have, and what is said of others."""

import json
from pathlib import Path

import pytest

from async_rl.data.dataset import RowRules, load_rows
from async_rl.errors import DataError
from async_rl.extensions.code_rewards.row_tests import CodeTest, CodeTests, parse_tests

SCRIPT = {"inputs": ["1\n", ["2", "3"]], "outputs": ["1\n", ["4", "5"]]}


def test_scripts_have_text_or_lines():
    expected = CodeTests((CodeTest("1\n", "1\n"), CodeTest("2\n3", "4\n5")), None)
    assert parse_tests({"test_cases": SCRIPT}) == expected
    assert parse_tests({"test_cases": json.dumps(SCRIPT)}) == expected


@pytest.mark.parametrize("inputs", [['1\n[2, "x"]'], [[1, [2, "x"]]]])
@pytest.mark.parametrize("outputs", [["[3]"], [[3]]])
def test_functions_have_arguments_and_a_value(inputs: list[object], outputs: list[object]):
    cases = {"inputs": inputs, "outputs": outputs}
    expected = CodeTests((CodeTest('[1, [2, "x"]]', [3]),), "solve")
    assert parse_tests({"test_cases": {**cases, "fn_name": "solve"}}) == expected
    assert parse_tests({"test_cases": cases, "fn_name": "solve"}) == expected


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        (None, "test_cases: expected"),
        ("{", "test_cases: expected an object or JSON text"),
        ([], "test_cases: expected"),
        ({}, "got no list of inputs and no list of outputs"),
        ({"inputs": [], "outputs": []}, "two lists of equal length that are not empty, got 0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": []}, "got 1 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, r"test_cases.inputs\[0\]: expected text or a list of lines, got 1"),
        ({"inputs": ["1"], "outputs": [None]}, r"test_cases.outputs\[0\]: expected text or a list of lines, got None"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "a b"}, "fn_name: expected the name of a function, got 'a b'"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "expected one JSON value per line"),
        ({"inputs": [1], "outputs": ["1"], "fn_name": "f"}, "expected a list of arguments, got 1"),
        ({"inputs": ["1"], "outputs": ["x"], "fn_name": "f"}, "expected JSON, got 'x' .* write text in double quotes"),
    ],
)
def test_other_shapes_are_refused_with_what_was_expected(cases: object, message: str):
    with pytest.raises(ValueError, match=message):
        parse_tests({"test_cases": cases})


def test_a_row_with_bad_tests_is_refused_with_its_line(tmp_path: Path):
    good = {"messages": [{"role": "user", "content": "q"}], "test_cases": SCRIPT}
    file, rules = tmp_path / "rows.jsonl", RowRules(needs=("test_cases",))
    file.write_text(json.dumps(good) + "\n" + json.dumps({**good, "test_cases": {"inputs": ["1"]}}) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: test_cases: expected inputs and outputs"):
        load_rows(str(file), rules=rules)
    loaded = load_rows(str(file), on_bad_row="skip", rules=rules)
    assert (len(loaded.rows), loaded.num_skipped) == (1, 1)
    assert loaded.rows[0].reward_data == {"test_cases": SCRIPT}
