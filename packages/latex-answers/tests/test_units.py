"""Which words may follow a number, and which units are the same."""

import pytest

from latex_answers.units import unit_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("square inches", "inch^2"),
        ("in^2", "inch^2"),
        ("Inches^2", "inch^2"),
        ("sq. ft.", "ft^2"),
        ("m s^{-1}", "m s^-1"),
        ("m/s", "m s^-1"),
        ("meters per second", "m s^-1"),
        ("meters per second squared", "m s^-2"),
        ("miles an hour", "h^-1 mi"),
        ("mph", "h^-1 mi"),
        ("J/(g*K)", "J K^-1 g^-1"),
        ("kilojoules", "kJ"),
        ("k\u03a9", "k\u03a9"),
        ("Mg", "Mg"),
        ("mg", "mg"),
        ("KM", "km"),
        ("\u5e73\u65b9\u5398\u7c73", "cm^2"),
        ("Stunden", "h"),
        ("dollars each", "dollar"),
    ],
)
def test_the_same_units_have_the_same_name(text: str, name: str):
    assert unit_name(text) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("people at the party", "people"),
        ("zorbles", "zorble"),
        ("green quibs with spots", "green quib"),
        ("years old", "year"),
        ("tickets sold", "ticket"),
        ("times as many", "time"),
        ("each", ""),
        ("left over", ""),
        ("in total", ""),
        ("of them", ""),
        ("per day", "day^-1"),
        ("\u4e2a\u82f9\u679c", "\u4e2a\u82f9\u679c"),
    ],
)
def test_what_was_counted_may_follow_in_the_plural(text: str, name: str):
    assert unit_name(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "zorble", "kilo", "tripled", "k", "under", "at most", "over nine", "to one", "plus", "or more", "and six",
        "million", "dozens", "twenty-fifths", "fails", "cannot be", "isn't it", "times the radius", "squared",
        "zorbles lack proof", "zorbles or so", "of nine", "upwards", "\u4e07", "\u4e2a\u4ee5\u4e0a", "1", "",
    ],
)  # fmt: skip
def test_other_words_may_not_follow_a_number(text: str):
    assert unit_name(text) is None


def test_one_thing_stands_in_the_singular():
    assert unit_name("real zorble", is_single=True) == "real zorble"
    assert unit_name("kilo", is_single=True) is None
    assert unit_name("zorbles", is_single=True) == unit_name("zorble", is_single=True)
