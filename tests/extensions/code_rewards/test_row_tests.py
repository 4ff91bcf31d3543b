"""The tests of a row: what shapes they may have, and when an output counts as right."""

import json
import time
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.data.dataset import RowRules, load_rows
from async_rl.errors import DataError
from async_rl.extensions.code_rewards.row_tests import CodeTest, CodeTests, outputs_agree, parse_tests, values_agree


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("1 2\n", "1 2"), ("", "\n"), ("2 3\n1\n", "2\n3 1\n"),  # white space
        ("0.5\n", "0.5000009\n"), ("1000000.0\n", "1000000.9\n"), ("1.0 2\n", "1.0000001 2.0\n"),  # tolerance
        ("7\n", "7.0\n"), ("0.5\n", ".5\n"), ("1e-3\n", "0.001\n"), ("100000\n", "1e5\n"),  # other forms
        ("x 0.333333333\n", "x 0.33333333333333\n"),
    ],
)  # fmt: skip
def test_outputs_that_agree(expected: str, output: str):
    assert outputs_agree(expected, output, compare="tokens")
    assert outputs_agree(expected, output, compare="cascade")


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("1 2\n", "12\n"), ("1\n2\n", "2 1\n"), ("12\n", "1 2\n"), ("7\n", ""), ("", "7\n"),  # other tokens
        ("7\n", "8\n"), ("7\n", "007\n"), ("YES\n", "yes\n"), ("1\n", "True\n"),
        ("1000000007\n", "1000000008\n"), ("1000000007\n", "1.00001e9\n"), ("1 2\n", "1 2.0000001\n"),  # integers
        ("0.5\n", "0.500002\n"), ("1000000.0\n", "1000001.1\n"),  # beyond the tolerance
        ("0.5\n", "nan\n"), ("inf\n", "nan\n"), ("0.1\n", "1e99999\n"),  # no numbers
        ("1_0.0\n", "10.0\n"), ("1.0\n", "\u0661.0\n"),
    ],
)  # fmt: skip
def test_outputs_that_do_not(expected: str, output: str):
    assert not outputs_agree(expected, output, compare="tokens")
    assert not outputs_agree(expected, output, compare="cascade")


@pytest.mark.parametrize(
    ("expected", "output"),
    [("1 2\n", "2 1\n"), ("a\nb\n", "b\na\n"), ("YES\nNO\nYES\n", "NO\nYES\n"), ("1.5\n", "1.5 1.5\n")],
)
def test_only_the_cascade_takes_lines_and_tokens_in_any_order(expected: str, output: str):
    assert not outputs_agree(expected, output, compare="tokens")
    assert outputs_agree(expected, output, compare="cascade")


LINES = st.lists(st.lists(st.text("ab01.-", min_size=1, max_size=5), min_size=1, max_size=4), max_size=6)


@given(LINES, st.data())
def test_white_space_between_tokens_never_matters(lines: list[list[str]], data: st.DataObject):
    expected = "\n".join(" ".join(line) for line in lines)
    blank = st.sampled_from(["", "\n", " \n", "\r\n\n"])
    space = st.sampled_from([" ", "\n", " \t", "\r\n"])
    output = "".join(data.draw(blank) + data.draw(space).join(line) + data.draw(space) for line in lines)
    assert outputs_agree(expected, output, compare="tokens")


@given(LINES, LINES)
def test_texts_without_decimal_points_agree_exactly_if_their_tokens_do(one: list[list[str]], other: list[list[str]]):
    one, other = ([[token.replace(".", "x") for token in line] for line in lines] for lines in (one, other))
    texts = ["\n".join(" ".join(line) for line in lines) for lines in (one, other)]
    assert outputs_agree(texts[0], texts[1], compare="tokens") == ([*chain(*one)] == [*chain(*other)])


@pytest.mark.parametrize(
    ("tolerance", "output", "agrees"),
    [(1e-2, "0.509", True), (1e-2, "0.511", False), (0.0, "0.50", True), (0.0, "0.5000001", False)],
)
def test_a_problem_states_its_own_tolerance(tolerance: float, output: str, agrees: bool):
    tests = parse_tests({"test_cases": {"inputs": [""], "outputs": ["0.5"], "tolerance": tolerance}})
    (test,) = tests.tests
    assert outputs_agree(test.expected, output, compare="tokens", tolerance=tests.tolerance) == agrees


@pytest.mark.parametrize("tolerance", [-1e-6, 1, True, "1e-6", float("nan")])
def test_a_tolerance_that_is_none_is_refused(tolerance: object):
    with pytest.raises(ValueError, match="tolerance: expected a number from 0 to below 1"):
        parse_tests({"test_cases": {"inputs": [""], "outputs": ["0.5"], "tolerance": tolerance}})


@pytest.mark.parametrize("output", ["1 " * 8_000_000, "\n" * 16_000_000, "9" * 16_000_000, "1.5\n" * 4_000_000])
def test_megabytes_of_output_are_refused_at_once(output: str):
    started_s = time.monotonic()
    assert not outputs_agree("1.5\n", output + "x", compare="cascade")
    assert time.monotonic() - started_s < 1.0


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (3, "3"), (3.0, "3"), ([1, 2], "[1, 2]"), ([[1, 2]], "[1, 2]"), ({"a": None}, '{"a": null}'), (["x"], '"x"'),
        (True, "true"), (0.1, "0.10000000000000002"), ([0.5, [1]], "[0.5000001, [1]]"), (3, "3.0"), (2.0, "2"),
        (1 << 70, str(1 << 70)), ([[1 << 70]], f"[{1 << 70}]"),
    ],
)  # fmt: skip
def test_returned_values_that_agree(expected: object, answer: str):
    assert values_agree(expected, answer.encode(), compare="tokens")


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (3, "4"), (3, '"3"'), ([1, 2], "[2, 1]"), ([1, 2], "[1]"), ([], "null"), (None, ""), (1, "[" * 10_000),
        (1, "1" * 60_000), (1, json.dumps([1] * 100_000)), (float("nan"), "NaN"), ("x", "\udcff"), (1, "1 1"),
        (1, "true"), (True, "1"), (False, "0"), ([1], "[true]"), ({"a": 1}, '{"a": true}'), (0.5, "0.51"),
        (1000000007, "1000000000.0"), (1.0, "true"), (1.5, "1" + "0" * 400), (1 << 70, str((1 << 70) + 1)),
    ],
)  # fmt: skip
def test_returned_values_that_do_not(expected: object, answer: str):
    assert not values_agree(expected, answer.encode(errors="surrogateescape"), compare="tokens")
    assert not values_agree(expected, answer.encode(errors="surrogateescape"), compare="cascade")


def test_only_the_cascade_takes_the_first_of_several_expected_values():
    assert not values_agree([1, 2], b"1", compare="tokens")
    assert values_agree([1, 2], b"1", compare="cascade")


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
        ({}, "got no list of inputs and no list of outputs"),
        ({"inputs": [], "outputs": []}, "two lists of equal length that are not empty, got 0 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, r"test_cases.inputs\[0\]: expected text or a list of lines, got 1"),
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
