"""Answer equality: the exact fast path, typeset identity, the reader."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latex_answers import MAX_ANSWER_CHARS, UnreadableError, compare, compare_by, parse
from latex_answers.numbers import plain_number
from latex_answers.typesetting import typeset_form


def refuse(answer: str, gold: str) -> str:
    """Fails the test if a pair is not decided without the reader."""
    raise AssertionError(f"{gold!r} and {answer!r} should be decided without the reader")


def equal_unread(gold: str, prediction: str) -> bool:
    return compare_by(refuse, prediction, gold) == "equal"


NUMBERS = {
    "72": ("72", " +72. ", "0072"),
    "-72": ("-72", "\u221272"),
    "-3": ("- 3",),
    "145/2": ("72.50",),
    "1/2": (".5", "1/2", "\\frac{1}{2}", "\\frac12"),
    "0": ("-0",),
    "5": ("5.", "$5", "\\$5.00", "$5$", "\\(5\\)", "$\\boxed{5}$.", "\\text{5}"),
    "-5": ("-$5", "$-5"),
    "1234": ("1,234", "1{,}234"),
    "1234567.8": ("$1,234,567.80",),
    "10236": ("10,\\!236",),
    "10000": ("10\\,000", "10 000"),
    "-2/3": ("-4 / 6",),
    "-3/4": ("-\\dfrac{ 3 }{4}", "\\frac{-3}{4}"),
    "3/2": ("1 1/2",),
    "-3/2": ("-1\\frac{1}{2}",),
}


@pytest.mark.parametrize(("value", "text"), [(value, text) for value, texts in NUMBERS.items() for text in texts])
def test_plain_numbers_have_their_exact_value(value: str, text: str):
    assert plain_number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "-", "$", "x", "1,2", "12,34", "1,2345", "0,123", ",123", "1,234 567", "1e3", "50%", "1/0", "0/0",
        "1/2/3", "--5", "5-", "5 5", "5 apples", "\\frac123", "-\\frac{-1}{2}", "3/\\frac12", "\u0665", "1_000",
        "inf", "nan", "(5)", "1.2.3", "0x10", "5 .5", "\\frac{1}{0}",
    ],
)  # fmt: skip
def test_other_texts_are_no_plain_numbers(text: str):
    assert plain_number(text) is None


def grouped(digits: str, separator: str) -> str:
    return f"{int(digits):,}".replace(",", separator)


@st.composite
def renderings(draw: st.DrawFn, value: Fraction) -> str:
    """One of the many ways to write ``value``."""
    top, bottom = abs(value.numerator), value.denominator
    factor = draw(st.integers(1, 9))
    shapes = [f"{top * factor}/{bottom * factor}", f"\\frac{{{top * factor}}}{{{bottom * factor}}}"]
    if top > bottom:
        shapes.append(f"{top // bottom} {top % bottom}/{bottom}")
    scaled = bottom
    while scaled % 2 == 0:
        scaled //= 2
    while scaled % 5 == 0:
        scaled //= 5
    if scaled == 1:
        whole, _, part = format(Decimal(top) / Decimal(bottom), "f").partition(".")
        zeros = "0" * draw(st.integers(0, 3))
        decimals = f".{part}{zeros}" if part or zeros else ""
        shapes += [
            f"{w}{decimals}" for w in (whole, "00" + whole, *(grouped(whole, s) for s in (",", "{,}", "\\,", ",\\!")))
        ]
    text = draw(st.sampled_from(shapes))
    sign = "-" if value < 0 else draw(st.sampled_from(["", "+"]))
    text = draw(st.sampled_from(["", "$", "\\$"])) + sign + text
    left, right = draw(st.sampled_from([("", ""), ("\\(", "\\)"), ("\\boxed{", "}"), (" ", " "), ("", ".")]))
    return left + text + right


plain_values = st.one_of(
    st.fractions(max_denominator=50),
    st.builds(lambda n, d: Fraction(n, 10**d), st.integers(-(10**9), 10**9), st.integers(0, 6)),
)


@settings(deadline=None)
@given(plain_values.flatmap(lambda v: st.tuples(st.just(v), renderings(v), renderings(v))))
def test_all_ways_to_write_a_number_are_equal(case: tuple[Fraction, str, str]):
    value, gold, prediction = case
    assert plain_number(gold) == value
    assert equal_unread(gold, prediction)


@settings(deadline=None)
@given(
    st.tuples(plain_values, plain_values).flatmap(lambda v: st.tuples(st.just(v), renderings(v[0]), renderings(v[1])))
)
def test_two_plain_numbers_are_equal_exactly_if_their_values_are(case: tuple[tuple[Fraction, Fraction], str, str]):
    (gold_value, value), gold, prediction = case
    assert equal_unread(gold, prediction) == (gold_value == value)


@settings(deadline=None)
@given(st.text(max_size=60), st.text(alphabet="0123456789.,/{}$\\ -+frac", max_size=40))
def test_the_fast_path_survives_any_text(anything: str, numberlike: str):
    for text in (anything, numberlike):
        plain_number(text)
        typeset_form(text)


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("x^2", "x^{2}"),
        ("(\\frac{1}{2},3)", "\\left( \\dfrac{1}{2}, 3 \\right)"),
        ("\\text{Evelyn}", "Evelyn"),
        ("Evelyn", "evelyn."),
        ("\\text{(A)}", "(A)"),
        ("1,2", "1, 2"),
    ],
)
def test_answers_that_print_alike_are_equal_without_the_reader(gold: str, prediction: str):
    assert equal_unread(gold, prediction)


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("10", "5 5"),
        ("5", "5}{6"),
        ("listen", "silent"),  # as products, the same letters
        ("\\text{no}", "on"),
        ("5", "{" * 400 + "5" + "}" * 400 + "x"),
        ("5", "(" * 400 + "5" + ")" * 400),
        ("5", ""),
        ("", ""),
        ("5", "5" * (MAX_ANSWER_CHARS + 1)),
        ("5", "x" * 1_000_000),
        ("5", "\\frac" * 200_000),
    ],
)
def test_what_has_no_meaning_or_is_too_much_to_read_is_refused_without_the_reader(gold: str, prediction: str):
    assert not equal_unread(gold, prediction)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("\\frac12x+1", "x/2 + 1"), ("\\text{5 cm}", "5"), ("x>3", "('>',)"), ("(1,2]", "(1, 2)")],
)
def test_one_answer_is_parsed(text: str, expected: str):
    value = parse(text).value
    parts = (getattr(value, name, None) for name in ("number", "operators", "items"))
    assert str(next(filter(None, parts), value)) == expected


@pytest.mark.parametrize("text", ["", "5 5", "(5", "\\foo{5}", "\\sin" * 300 + " 1", "5" * 1001])
def test_what_can_not_be_read_is_an_error_and_a_finding(text: str):
    with pytest.raises(UnreadableError):
        parse(text)
    assert compare(text, "x+1") in ("unreadable", "not_computed")
