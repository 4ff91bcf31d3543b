r"""Right answers as public rows have them: what is read, what stays, and what says nothing."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from async_rl.rewards.gold import gold_readings
from async_rl.rewards.records import RewardInput
from async_rl.rewards.registry import build_reward
from tests.config.made import a_config

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72"
MATH = r"We have $x=2$, so the answer is $\boxed{\frac{1}{2}}$."
PROSE = "Suppose that there were finitely many primes and take the product of all of them and add one. " * 3


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        (GSM8K, ("72",)),
        ("#### 1,200", ("1,200",)),
        (MATH, (r"\frac{1}{2}",)),
        (f"{GSM8K}\nThe answer is: 72", ("72",)),  # MetaMathQA
        ("Final Answer: The final answer is $x+1$. I hope it is correct.", ("$x+1$",)),
        ("So the answer is **(B) 15**.", ("B", "15", "(B) 15")),
        ("答案是5。", ("5",)),
        ('["34"]', ("34", '["34"]')),
        (r'["\\boxed{34}"]', ("34", r'["\\boxed{34}"]')),
        ("B) 15", ("B", "15", "B) 15")),
        (r"(C) \frac{1}{2}", ("C", r"\frac{1}{2}", r"(C) \frac{1}{2}")),
        (r"\textbf{(B)}\ 15", ("B", "15", r"\textbf{(B)}\ 15")),
        ("1.5 million", ("1500000", "1.5 million")),
        (r"\$2 billion", ("2000000000", r"\$2 billion")),
        ("1,234.5 thousand people", ("1234500 people", "1,234.5 thousand people")),
    ],
)
def test_a_form_that_is_unambiguous_is_read(gold: str, answers: tuple[str, ...]):
    assert gold_readings({"gt_answer": gold}, is_mathematics=True) == answers


@pytest.mark.parametrize(
    "gold",
    [
        "72", "72.", "3,5", "1; 2", "3:30", "[0,1]", '["1", "2"]', "[0, 1)", "B", "(B)", "A) 3, B) 4", "A:B", "A) B",
        "(A)(B)", r"(A) \cup B", "(A) - 3", r"x \in \{1, 2\}", r"$5 \mathrm{~cm}$", "1,5 million",
        "1 million to 2 million", "Paris", "yes",
        "no answer is known", "The answer is that it depends", r"\boxed{", "#### a\nand more",
        "The answer is 5 because three and two are five",
    ],
)  # fmt: skip
def test_all_else_is_read_as_it_stands(gold: str):
    assert gold_readings({"gt_answer": gold}, is_mathematics=True) == (gold,)


@pytest.mark.parametrize("gold", ["proof", "notfound", "nan", " ", PROSE, None, True, ["72"], float("inf")])
def test_what_says_nothing_is_not_read(gold: Any):
    assert gold_readings({"gt_answer": gold}, is_mathematics=True) == ()


OPTIONS = ["1", "7", "9", "3"]


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"gt_answer": 2, "choices": OPTIONS}, ("C", "9", "2")),  # MMLU
        ({"gt_answer": 2, "options": {"text": OPTIONS, "label": list("ABCD")}}, ("C", "9", "2")),
        ({"gt_answer": 1, "choices": OPTIONS}, ("1",)),  # it may be the first option, or the second
        ({"gt_answer": 1, "choices": ["0", "1"]}, ("B", "1", "1")),
        ({"gt_answer": "2", "choices": OPTIONS}, ("2",)),
        ({"gt_answer": 2}, ("2",)),
        ({"gt_answer": 1e-7}, ("0.0000001",)),
    ],
)
def test_a_number_is_an_index_only_where_the_row_has_its_options(row: dict[str, Any], answers: tuple[str, ...]):
    assert gold_readings(row, is_mathematics=True) == answers


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        (GSM8K, ("72", GSM8K)),
        (r"\boxed{5}", ("5", r"\boxed{5}")),
        ('["34"]', ("34", '["34"]')),
        *((gold, (gold,)) for gold in ("proof", "The answer is 5.", "B) 15", "1.5 million", "72.")),
        (PROSE, (PROSE.strip(),)),
    ],
)
def test_text_that_is_compared_as_text_is_an_answer_as_it_stands(gold: str, answers: tuple[str, ...]):
    assert gold_readings({"gt_answer": gold}, is_mathematics=False) == answers


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (GSM8K, ["72", "72.0", r"72\text{ clips}"], ["24", "48", "7272"]),
        (MATH, ["0.5"], ["2"]),
        ("B) 15", ["B", "15", r"\text{B}"], ["A", "16"]),
        ("1.5 million", ["1500000", "1,500,000", r"1.5 \times 10^6"], ["1.5", "15"]),
        ("3,5", ["3,5", "5,3"], ["3.5", "35"]),
        ("proof", [], ["proof"]),
    ],
)
def test_boxed_pays_what_is_read_and_nothing_else(gold: str, right: list[str], wrong: list[str]):
    with closing(build_reward(a_config(reward={"soft_overlong": False}))) as reward:
        for answer in (*right, *wrong):
            item = RewardInput(f"so \\boxed{{{answer}}}", {"gt_answer": gold}, 10, 100, "stop")
            assert reward(item).accuracy == float(answer in right), answer
