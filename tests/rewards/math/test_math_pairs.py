"""Equality against what other projects publish as equal and not equal; see ``collect_math_pairs`` for the rule."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.rewards.math.verifier import MathVerifier
from async_rl.rewards.records import RewardInput
from async_rl.rewards.registry import build_reward
from latex_answers.equality import answers_equal
from tests.examples import some

PAIRS = Path(__file__).resolve().parents[2] / "data" / "math_pairs.jsonl"

FALSE_ACCEPTS: set[tuple[str, str]] = set()
"""Pairs (gold, prediction) that are called equal and are not. A new one needs a reason here and in docs/rewards.md."""
FALSE_REJECTS = {
    # A decimal comma: here 1000,99 is a list of two numbers.
    ("1000.99", "1000,99"),
    ("1,22", "1.22"),
    # sympy reads x!!! as factorials of factorials. In print it is the triple factorial, which has no name in sympy.
    ("\\left(\\left(x!\\right)!\\right)!", "x!!!"),
}


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier()
    yield verifier
    verifier.close()


def test_grading_agrees_with_published_pairs(verifier: MathVerifier):
    everything = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    pairs = some(everything)
    accepted: set[tuple[str, str]] = set()
    rejected: set[tuple[str, str]] = set()
    for pair in pairs:
        gold, prediction = pair["gold"], pair["prediction"]
        equal = answers_equal(gold, prediction, verifier=verifier, time_limit_s=60.0)
        if equal != pair["equal"]:
            (accepted if equal else rejected).add((gold, prediction))
    assert len(everything) >= 300
    assert sum(not pair["equal"] for pair in everything) >= 100
    asked = {(pair["gold"], pair["prediction"]) for pair in pairs}
    assert (accepted, rejected) == (FALSE_ACCEPTS & asked, FALSE_REJECTS & asked)
    assert len(FALSE_ACCEPTS | FALSE_REJECTS) <= 0.01 * len(everything)
    assert verifier.counts["timed_out"] == verifier.counts["crashed"] == 0


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
def test_what_looks_alike_to_a_lenient_grader_is_not_equal(verifier: MathVerifier, gold: str, prediction: str):
    assert not answers_equal(gold, prediction, verifier=verifier, time_limit_s=60.0)


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
def test_what_only_looks_different_is_equal(verifier: MathVerifier, gold: str, prediction: str):
    assert answers_equal(gold, prediction, verifier=verifier, time_limit_s=60.0)


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
def test_the_leniencies_that_the_docs_list(verifier: MathVerifier, gold: str, prediction: str):
    assert answers_equal(gold, prediction, verifier=verifier, time_limit_s=60.0)


HOSTILE = {
    "a tower": "9**9**9",
    "a tower in TeX": "9^{9^{9^9}}",
    "a factorial of factorials": "((9!)!)!",
    "a large binomial": "\\binom{10^9}{5\\cdot 10^8}",
    "nested braces": "{" * 500_000 + "1" + "}" * 500_000,
    "nested fractions": "\\frac{1}{" * 15 + "1" + "}" * 15,
    "roots without end": "\\sqrt" * 190,
    "a megabyte of digits": "9" * 1_000_000,
    "a megabyte of text": "so \\$" * 200_000,
    "a megabyte of boxes": "\\boxed{" * 140_000,
    "a long sum": "+".join(["\\sin(x)^2+\\cos(x)^2"] * 45),
    "an integral": "\\int_0^1 " * 20 + "e^{x^x}" + " dx" * 20,
}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("boxed", list(HOSTILE)),
        ("think_answer_tags", ["a tower", "a megabyte of text", "nested braces"]),
        ("exact", ["a tower", "a megabyte of text", "nested braces"]),
        ("xml_format", ["a tower", "a megabyte of text", "nested braces"]),
    ],
)
def test_no_answer_costs_more_than_its_limit(kind: str, what: list[str]):
    # The kernel ends a worker at its limit of processor time. What is left to bound is this process's own part.
    config = Config.model_validate(
        {"run": {"dir": "r"}, "model": {"path": "m"}, "reward": {"type": kind, "time_limit_s": 0.5}}
    )
    reward = build_reward(config)
    try:
        for name in some(what) if len(what) > 3 else what:
            text = HOSTILE[name]
            answer = f"\\boxed{{{text}}}" if kind == "boxed" else f"<think>a</think><answer>{text}</answer> x"
            start = time.process_time()
            output = reward(RewardInput(answer, {"gt_answer": "2x+71"}, 1, 9, "stop"))
            assert (name, output.accuracy) == (name, 0.0)
            assert time.process_time() - start < 1.0, name
    finally:
        reward.close()
