"""TeX's shorthands, worked by hand after the rules of TeX."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latex_answers.arguments import spelled_out
from latex_answers.numbers import based_integer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\frac12y", "\\frac{1}{2}y"),
        ("\\tfrac94\\pi", "\\frac{9}{4}\\pi"),
        ("\\frac{\\sin{x}}2", "\\frac{\\sin{x}}{2}"),
        ("\\frac\\pi2", "\\frac{\\pi}{2}"),
        ("\\frac1234", "\\frac{1}{2}34"),
        ("\\frac{\\frac12}3", "\\frac{\\frac{1}{2}}{3}"),
        ("x^\\frac12+1", "x^{\\frac{1}{2}}+1"),
        ("x^\\binom{n}{k}", "x^{\\binom{n}{k}}"),
        ("\\sqrt 2+\\sqrt 5", "\\sqrt{2}+\\sqrt{5}"),
        ("\\sqrt[3]8", "\\sqrt[3]{8}"),
        ("\\sqrt10", "\\sqrt10"),
        ("\\left( x\\right ) z", "\\left( x\\right) z"),
        ("\\frac", "\\frac"),
        ("\\frac{1", "\\frac{1"),
    ],
)
def test_shorthands_are_spelled_out(text: str, expected: str):
    assert spelled_out(text) == expected


@settings(deadline=None)
@given(st.text(alphabet="\\frac{}sqt123[]^ \\binomlerg()", max_size=60))
def test_any_text_can_be_spelled_out_and_no_digit_moves(text: str):
    digits = [character for character in text if character.isdigit()]
    assert [character for character in spelled_out(text) if character.isdigit()] == digits


@pytest.mark.parametrize(
    ("text", "value"),
    [("204_5", 54), ("ff_{16}", 255), ("A1_{16}", 161), ("12_{10}", 12), ("9_5", None), ("a_33", None), ("12", None),
     ("x_1", None), ("1_1", None)],
)  # fmt: skip
def test_integers_with_a_base(text: str, value: int | None):
    # 2 * 25 + 0 * 5 + 4 = 54.
    assert based_integer(text) == value
