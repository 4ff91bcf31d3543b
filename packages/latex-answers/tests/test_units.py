"""Which words may follow a number, and which units are the same."""

import pytest

from latex_answers.units import unit_name

NAMES = {
    "inch^2": ("square inches", "in^2", "Inches^2"),
    "ft^2": ("sq. ft.",),
    "m s^-1": ("m s^{-1}", "m/s", "meters per second"),
    "m s^-2": ("meters per second squared",),
    "h^-1 mi": ("miles an hour", "mph"),
    "J K^-1 g^-1": ("J/(g*K)",),
    "kJ": ("kilojoules",),
    "k\u03a9": ("k\u03a9",),
    "Mg": ("Mg",),
    "mg": ("mg",),
    "km": ("KM",),
    "cm^2": ("\u5e73\u65b9\u5398\u7c73",),
    "h": ("Stunden",),
    "dollar": ("dollars each",),
    # What was counted, in the plural.
    "people": ("people at the party",),
    "zorble": ("zorbles",),
    "green quib": ("green quibs with spots",),
    "year": ("years old",),
    "ticket": ("tickets sold",),
    "time": ("times as many",),
    "": ("each", "left over", "in total", "of them"),
    "day^-1": ("per day",),
    "\u4e2a\u82f9\u679c": ("\u4e2a\u82f9\u679c",),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NAMES.items() for text in texts])
def test_the_same_units_have_the_same_name(name: str, text: str):
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
