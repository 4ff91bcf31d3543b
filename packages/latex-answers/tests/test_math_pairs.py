"""Equality against what other projects publish as equal and not equal; see ``collect_math_pairs`` for the rule."""

import json
from pathlib import Path

import pytest

from latex_answers import equal

PAIRS = Path(__file__).resolve().parent / "data" / "math_pairs.jsonl"

FALSE_ACCEPTS: set[tuple[str, str]] = set()
"""Pairs (gold, prediction) that are called equal and are not. A new one needs a reason here."""
FALSE_REJECTS = {
    # A decimal comma: here 1000,99 is a list of two numbers.
    ("1000.99", "1000,99"),
    ("1,22", "1.22"),
    # sympy reads x!!! as factorials of factorials. In print it is the triple factorial, which has no name in sympy.
    ("\\left(\\left(x!\\right)!\\right)!", "x!!!"),
}


def test_grading_agrees_with_published_pairs():
    pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    accepted: set[tuple[str, str]] = set()
    rejected: set[tuple[str, str]] = set()
    for pair in pairs:
        gold, prediction = pair["gold"], pair["prediction"]
        is_equal = equal(prediction, gold)
        if is_equal != pair["equal"]:
            (accepted if is_equal else rejected).add((gold, prediction))
    assert len(pairs) >= 300
    assert sum(not pair["equal"] for pair in pairs) >= 100
    assert (accepted, rejected) == (FALSE_ACCEPTS, FALSE_REJECTS)
    assert len(FALSE_ACCEPTS | FALSE_REJECTS) <= 0.01 * len(pairs)


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        # The last two digits of 12_5 are no unit, and 12 to the base 5 is 7.
        ("12_5", "12_7"),
        ("5\\text{ m}", "5\\text{ cm}"),
        ("5\\text{ cm}", "5\\text{ cm}^2"),
        ("x+y=3", "3"),
        ("x^2 - y = 0", "0"),
        ("1,2", "12"),
        ("12", "1,2"),
        ("\\frac{1}{23}", "\\frac{12}{3}"),
        ("0.083333333333", "0.083333333334"),
        ("\\frac{1}{12}", "0.0833333"),
        # What stands with a number is looked at.
        ("5", "5\\text{ is wrong}"),
        ("5", "5\\text{ or so}"),
        ("5", "5 \\text{ and } 6"),
        ("5", "5 cm or 6 cm"),
        ("5", "5 \\text{ cm or } 6 \\text{ cm}"),
        ("5", "6\\\\ 5"),
        ("5", "\\le 5"),
        ("5", "x \\geq 5"),
        ("5", "<5"),
        ("5", "\\neq 5"),
        ("\\frac{1}{3}", "10:30"),
        ("123456789", "1.23456788\\times 10^8"),
    ],
)
def test_what_looks_alike_to_a_lenient_grader_is_not_equal(gold: str, prediction: str):
    assert not equal(prediction, gold)


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("12_5", "12_{5}"),
        ("15\\mbox{ cm}^2", "15\\text{ cm}^{2}"),
        ("5\\text{ cm}", "5"),
        ("3\\text{ miles}", "3 \\text{ mile}"),
        ("x+y=3", "y+x=3"),
        ("3", "x=3"),
        ("\\frac{1}{12}", "0.0833333333333333"),
        ("123456789", "1.23456789\\times 10^8"),
        ("123456789", "1.23456789 \\cdot 10^{8}"),
        ("0.00012", "1.2\\times10^{-4}"),
        ("5", "5\\text{ apples}"),
        ("5", "5\\text{ square feet}"),
        ("5", "5\\text{ miles per hour}"),
        ("5", "5 \\, \\mathrm{cm}^2"),
        ("x \\le 5", "x\\leq 5"),
        ("x=1 \\text{ or } x=2", "x=1\\text{ or }x=2"),
        ("1:3", "1:3"),
    ],
)
def test_what_only_looks_different_is_equal(gold: str, prediction: str):
    assert equal(prediction, gold)


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("72", "72\\%"),
        ("0.72", "72\\%"),
        ("12_5", "12"),
        ("(1,2)", "\\{1,2\\}"),
        ("1,2", "2,1"),
        ("5", "x+y=5"),
        ("no", "on"),
        ("2", "n \\equiv 2 \\pmod 3"),
    ],
)
def test_the_leniencies_that_the_docs_list(gold: str, prediction: str):
    assert equal(prediction, gold)
