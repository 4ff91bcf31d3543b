"""Right and wrong answers in other units, names, words, functions and languages than other projects' tests have."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.rewards.math.verifier import MathVerifier
from latex_answers.equality import answers_equal

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).resolve().parents[2] / "data" / "math_rewritings.jsonl").read_text("utf-8").splitlines()
]
FALSE_REJECTS = {
    ("t\\in[1,6)", "1\\le t<6"),  # refused as in math-verify: an inequality may be the question itself
    ("(1,\\infty)", "]1,\\infty["),
    ("12\\text{ inches}", "12''"),
    ("3\\times 10^4", "3e4"),
    ("5", "5\\text{ women and men}"),  # as in "5 and 6"
    ("9", "9\\qquad\\blacksquare"),
}


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier()
    yield verifier
    verifier.close()


def test_no_wrong_rewriting_earns_and_nearly_all_right_ones_do(verifier: MathVerifier):
    misjudged = {
        (pair["gold"], pair["answer"])
        for pair in PAIRS
        if answers_equal(pair["gold"], pair["answer"], verifier=verifier, time_limit_s=60.0) != pair["right"]
    }
    assert misjudged == FALSE_REJECTS
    assert len(FALSE_REJECTS) < 0.1 * sum(pair["right"] for pair in PAIRS)
    assert sum(not pair["right"] for pair in PAIRS) > 90
    assert verifier.counts["timed_out"] == verifier.counts["crashed"] == verifier.counts["not_computed"] == 0
