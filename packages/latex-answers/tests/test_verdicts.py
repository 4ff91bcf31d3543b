"""Equality on the files of pairs in ``data/``: what others publish as equal, what was written here, and past defects.

``data/SOURCES.md`` says where each file comes from.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from latex_answers import boxed_answer, equal


def rows(name: str) -> list[dict[str, Any]]:
    text = (Path(__file__).resolve().parent / "data" / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def misjudged(name: str, answer: str, right: str) -> set[tuple[str, str]]:
    """The (gold, answer) of a file whose verdict is not the one that stands there, in the column ``right``."""
    return {(row["gold"], row[answer]) for row in rows(name) if equal(row[answer], row["gold"]) != row[right]}


@pytest.mark.parametrize("row", rows("past_defects"), ids=lambda row: f"{row['gold']} or {row['answer']}")
def test_a_verdict_that_was_wrong_once_or_its_like_is_right(row: dict[str, Any]):
    boxed = boxed_answer(f"So it is \\boxed{{{row['answer']}}}.")
    assert (boxed is not None and equal(boxed, row["gold"])) == row["right"]
    assert equal(row["gold"], row["gold"])


def test_verdicts_agree_with_published_pairs_but_for_these():
    # Refused: a decimal comma (here 1000,99 is a list of two numbers), and x!!!, which sympy reads as factorials
    # of factorials. In print it is the triple factorial, which has no name in sympy.
    refused = {("1000.99", "1000,99"), ("1,22", "1.22"), ("\\left(\\left(x!\\right)!\\right)!", "x!!!")}
    assert misjudged("math_pairs", "prediction", "equal") == refused


def test_no_wrong_rewriting_earns_and_nearly_all_right_ones_do():
    assert misjudged("math_rewritings", "answer", "right") == {
        ("t\\in[1,6)", "1\\le t<6"),  # refused as in math-verify: an inequality may be the question itself
        ("(1,\\infty)", "]1,\\infty["),
        ("12\\text{ inches}", "12''"),
        ("3\\times 10^4", "3e4"),
        ("5", "5\\text{ women and men}"),  # as in "5 and 6"
        ("9", "9\\qquad\\blacksquare"),
    }


LEFT_OUT = rows("math_pairs_left_out")
"""Cases of math-verify's tests that are none of our pairs. ``theirs`` is its verdict, ``equal`` ours, ``joined`` that
on all boxes of the answer as one list. ``answer`` is the prediction; of prose it is only the mathematics."""


@pytest.mark.parametrize("case", LEFT_OUT, ids=[str(number) for number in range(len(LEFT_OUT))])
def test_a_case_that_is_left_out_has_its_verdict(case: dict[str, Any]):
    gold, text = case["gold"], case["answer"]
    answer = boxed_answer(text) if "\\boxed{" in text else text
    assert answer is not None
    assert equal(answer, gold) == case["equal"], case["reason"]
    if "joined" in case:
        boxes = [boxed_answer("\\boxed{" + part) or "" for part in text.split("\\boxed{")[1:]]
        assert equal(", ".join(boxes), gold) == case["joined"], case["reason"]


def test_few_verdicts_on_what_is_left_out_differ_from_math_verify_s():
    # (theirs, ours). Refused: 5 times the last of several boxes, 4 times an option that we don't have, a decimal
    # comma, m2 without a space (twice), 1/2 = 10/9, and 1orW. Accepted: mathematics over line breaks, joined boxes.
    verdicts = {(True, True): 51, (True, False): 14, (False, False): 5, (False, True): 3}
    assert Counter((case["theirs"], case["equal"]) for case in LEFT_OUT) == verdicts
    assert all(case["reason"] for case in LEFT_OUT)
