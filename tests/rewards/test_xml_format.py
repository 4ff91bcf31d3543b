"""Points for the form of a reply, counted by hand."""

import re
import time

import pytest
from hypothesis import example, given, strategies

from async_rl.rewards.answers import xml_format_points

WHOLE = "<think>\none\ntwo\n</think>\n<answer>\n42\n</answer>"


@pytest.mark.parametrize(
    ("text", "points"),
    [
        (WHOLE, 0.3),  # 0.1 + 4 * 0.05
        (WHOLE + "\n", 0.3),
        (WHOLE + "\nabc", 0.294),  # three characters, for each of the last two tags
        ("<think>a</think><answer>b</answer>", 0.1),  # in order, but no tag has its line breaks
        ("<think>\na</think><answer>b</answer>", 0.15),
        ("so <think>\na\n</think>\n<answer>\n42\n</answer>", 0.2),  # it does not begin with its thoughts
        ("<think>\na\n</think>\n", 0.1),  # two tags
        (WHOLE + WHOLE, 0.1),  # every tag twice: the structure's points alone, and nothing to charge the tail to
        ("", 0.0),
    ],
)
def test_points(text: str, points: float):
    assert xml_format_points(text) == pytest.approx(points)


@pytest.mark.parametrize(
    "text",
    [
        "<think>" + "</think>" * 100_000,
        "<think>" + ("</think>" + " " * 1000) * 1000,
        "<think>" + "</answer>" * 100_000 + "</think><answer>",
    ],
)
def test_a_hostile_text_takes_linear_time(text: str):
    start_s = time.process_time()
    xml_format_points(text)
    assert time.process_time() - start_s < 5  # quadratic time would be a minute or more


PATTERN = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
"""The structure as a pattern, whose time is quadratic."""


@given(strategies.lists(strategies.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " \n", "x"])))
@example(["<think>", "</think>", "<answer>", "</think>", " \n", "<answer>", "</answer>"])
def test_the_structure_is_that_of_its_pattern(pieces: list[str]):
    text = "".join(pieces)
    # With a letter before it, a text earns the same points but those of the structure.
    structure = xml_format_points(text) - xml_format_points(f"x{text}")
    assert structure == pytest.approx(0.1 if PATTERN.match(text) else 0.0)
