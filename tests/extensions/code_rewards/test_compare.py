"""When an output counts as right, step by step, and what never does."""

import json
import time
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.extensions.code_rewards.row_tests import outputs_agree, parse_tests, values_agree


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("1 2\n", "1 2"),
        ("1 2\n", "  1 2 \n\n"),
        ("1 2\n3\n", "1 2 \r\n3\n"),
        ("1\n\n2\n", "1\n2\n"),
        ("1  2\n", "1 2\n"),
        ("", "\n"),
        ("0.5\n", "0.5000009\n"),
        ("1000000.0\n", "1000000.9\n"),
        ("2 3\n1\n", "2\n3 1\n"),
        ("7\n", "7.0\n"),
        ("0.5\n", ".5\n"),
        ("1.0 2\n", "1.0000001 2.0\n"),
        ("1e-3\n", "0.001\n"),
        ("x 0.333333333\n", "x 0.33333333333333\n"),
        ("100000\n", "1e5\n"),
    ],
)
def test_outputs_that_agree(expected: str, output: str):
    assert outputs_agree(expected, output, compare="tokens")
    assert outputs_agree(expected, output, compare="cascade")


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("1 2\n", "12\n"),
        ("1\n2\n", "2 1\n"),
        ("12\n", "1 2\n"),
        ("7\n", "8\n"),
        ("7\n", "007\n"),
        ("7\n", ""),
        ("", "7\n"),
        ("YES\n", "yes\n"),
        ("0.5\n", "0.5001\n"),
        ("1000000007\n", "1000000008\n"),
        ("1000000007\n", "1000000000.0\n"),
        ("1000000007\n", "1.00001e9\n"),
        ("1 2\n", "1 2.0000001\n"),
        ("0.5\n", "0.500002\n"),
        ("1000000.0\n", "1000001.1\n"),
        ("1\n", "True\n"),
        ("0.5\n", "nan\n"),
        ("inf\n", "nan\n"),
        ("1_0.0\n", "10.0\n"),
        ("1.0\n", "\u0661.0\n"),
        ("0.1\n", "1e99999\n"),
    ],
)
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
        (1, "1" * 60_000), (float("nan"), "NaN"), ("x", "\udcff"), (1, "1 1"),
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


def test_an_answer_much_longer_than_expected_is_not_even_parsed():
    assert not values_agree(1, json.dumps([1] * 100_000).encode(), compare="cascade")
