"""Answers that would take for ever to compute, or to read: what each costs is bounded."""

import gc
import time

import pytest

from async_rl.rewards.records import RewardInput
from async_rl.rewards.registry import build_reward
from tests.config.made import a_config
from tests.examples import some

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
    "a long sum": "+".join(["\\sin(x)^2+\\cos(x)^2"] * 45),
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
    reward = build_reward(a_config(reward={"type": kind, "time_limit_s": 0.5}))
    gc.freeze()  # what other tests left in memory is searched for garbage at no cost of this one
    try:
        for name in some(what) if len(what) > 3 else what:
            text = HOSTILE[name]
            answer = f"\\boxed{{{text}}}" if kind == "boxed" else f"<think>a</think><answer>{text}</answer> x"
            start = time.process_time()
            output = reward(RewardInput(answer, {"gt_answer": "2x+71"}, 1, 9, "stop"))
            assert (name, output.accuracy) == (name, 0.0)
            assert time.process_time() - start < 1.0, name
    finally:
        gc.unfreeze()
        reward.close()
