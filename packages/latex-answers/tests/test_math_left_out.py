"""Verdicts on the cases of math-verify's tests that ``collect_math_pairs`` leaves out of the pairs, each with a reason.

``theirs`` is the verdict of math-verify's test, ``equal`` ours on the same case. ``answer`` is the prediction; of prose
it is only the mathematics that is its answer. ``joined`` is our verdict on all boxes of a prediction as one list.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from latex_answers import boxed_answer, equal

CASES = [
    json.loads(line)
    for line in (Path(__file__).resolve().parent / "data" / "math_pairs_left_out.jsonl").read_text("utf-8").split("\n")
    if line
]


def boxes(text: str) -> list[str]:
    """The contents of all boxes of ``text``."""
    return [boxed_answer("\\boxed{" + part) or "" for part in text.split("\\boxed{")[1:]]


@pytest.mark.parametrize("case", CASES, ids=[str(number) for number in range(len(CASES))])
def test_a_case_that_is_left_out_has_its_verdict(case: dict[str, object]):
    gold, text = str(case["gold"]), str(case["answer"])
    answer = boxed_answer(text) if "\\boxed{" in text else text
    assert answer is not None
    assert equal(answer, gold) == case["equal"], case["reason"]
    if "joined" in case:
        joined = ", ".join(boxes(text))
        assert equal(joined, gold) == case["joined"], case["reason"]


def test_every_case_has_a_reason_and_few_verdicts_differ():
    assert Counter(case["left_out"] for case in CASES) == {
        "an answer in prose": 47,
        "several boxes": 20,
        "sets an option": 5,
        "a box that is not closed": 1,
    }
    assert all(case["reason"] for case in CASES)
    # (theirs, ours). Refused: 5 times the last of several boxes, 4 times an option that we don't have, a decimal
    # comma, m2 without a space (twice), 1/2 = 10/9, and 1orW. Accepted: mathematics over line breaks, joined boxes.
    assert Counter((case["theirs"], case["equal"]) for case in CASES) == {
        (True, True): 51,
        (True, False): 14,
        (False, False): 5,
        (False, True): 3,
    }
    several = [case for case in CASES if case["left_out"] == "several boxes" and case["theirs"] and not case["equal"]]
    assert sum(case["joined"] for case in several) == 1
