"""Tests in the form check(candidate), in the real sandbox: right programs pass, and hostile ones prove nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from async_rl.config.reward import CodeRewardConfig
from async_rl.data.dataset import RowRules, parse_row
from async_rl.errors import DataError, RewardError
from async_rl.extensions.code_rewards.reward import LocalJudge
from async_rl.extensions.code_rewards.row_tests import CodeTests, parse_tests
from async_rl.extensions.code_rewards.sandbox import Sandbox

PROMPT = '''from typing import List, Tuple
import math

def halve(x: float) -> float:
    return x / 2

def bounds(values: List[int]) -> Tuple[int, int]:
    """Return the smallest and the largest value."""
'''
TEST = """
METADATA = {"author": "tests"}

def check(candidate):
    assert candidate([3, 1, 2]) == (1, 3)
    assert candidate([5]) == (5, 5), "one value"
    for size in range(2, 9):
        low, high = candidate(list(range(size)))
        assert math.isclose(halve(high), (size - 1) / 2)
    again = candidate([9, 8])
    assert candidate(list(again)) == again
"""
RIGHT = "def bounds(values: List[int]) -> Tuple[int, int]:\n    return min(values), max(values)\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with closing(Sandbox()) as one:
        yield one


@pytest.fixture
def judge(sandbox: Sandbox) -> LocalJudge:
    return LocalJudge(sandbox, CodeRewardConfig(packages=(), time_limit_s=20.0))


def given(test: str = TEST, prompt: str = PROMPT, name: str = "bounds") -> CodeTests:
    row = {"prompt": prompt, "test": test, "entry_point": name, "canonical_solution": "kept"}
    data = parse_row(row, "f:1", RowRules(needs=("test_cases",))).reward_data
    assert data["canonical_solution"] == "kept"
    return parse_tests(data)


def verdict(judge: LocalJudge, program: str, tests: CodeTests | None = None) -> str:
    return judge.judge(program, tests or given()).verdicts[0]


@pytest.mark.parametrize(
    "program",
    [
        RIGHT,
        f"from __future__ import annotations\nfrom typing import List, Tuple\n{RIGHT}",
        f"{RIGHT}\ndef check(candidate):\n    assert False\nprint('noise')\n",
        "class Solution:\n    def bounds(self, values):\n        return min(values), max(values)\ndel bounds\n",
    ],
)
def test_right_programs_pass(judge: LocalJudge, program: str):
    assert verdict(judge, program) == "passed"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def bounds(values):\n    return [min(values), max(values)]\n", "wrong"),  # a list is no tuple
        ("def bounds(values):\n    return (0, 0)\n", "wrong"),
        ("def bounds(values)\n    return 1\n", "unusable"),
        ("import sys\nprint('passed')\nsys.exit(0)\n", "failed"),
        ("def bounds(values):\n    import os\n    os._exit(0)\n", "failed"),
        ("def bounds(values):\n    raise SystemExit(0)\n", "failed"),
        ("def check(candidate):\n    pass\ndef bounds(values):\n    return None\n", "wrong"),
        ("import builtins\nclass AssertionError(BaseException): pass\nbuiltins.AssertionError = Exception\n"
         "builtins.compile = builtins.exec = builtins.isinstance = lambda *a, **k: True\n"
         "def bounds(values):\n    return 0\n", "failed"),
        ("class Anything(tuple):\n    def __eq__(self, other): return True\n"
         "    def __iter__(self): return iter((0, 0))\ndef bounds(values):\n    return Anything((0, 0))\n", "wrong"),
        ("import atexit, os\natexit.register(lambda: os.write(3, b'[\"passed\"]'))\ndef bounds(values):\n"
         "    return 0\n", "failed"),
        ("import os\nos.write(3, b'[\"passed\"]')\nos._exit(0)\n", "failed"),
        ("def bounds(values):\n    return 0\ndef _async_rl_check(*a): return ['passed']\n"
         "import atexit, sys\natexit.register(sys.exit, 0)\n", "wrong"),
        # It looks for the tests in all frames of its process, and would pass if it found them.
        ("def bounds(values):\n    import sys\n    frame = sys._getframe()\n    while frame:\n"
         "        if 'one' + ' value' in str(frame.f_locals) + str(frame.f_globals):\n"
         "            return min(values), max(values)\n        frame = frame.f_back\n    return 0\n", "wrong"),
    ],
)  # fmt: skip
def test_wrong_and_hostile_programs_do_not_pass(judge: LocalJudge, program: str, expected: str):
    assert verdict(judge, program) == expected


def test_values_of_all_plain_types_arrive_as_they_are(judge: LocalJudge):
    values = [None, True, 1, 2.5, float("inf"), "é", (1, (2,)), [3], {1: "a", (2, 3): {4}}, frozenset({5}), b"\x00", 1j]
    test = f"inf = float('inf')\ndef check(candidate):\n    assert candidate({{1: (2,)}}, last={{6}}) == {values!r}\n"
    body = f"    assert first == {{1: (2,)}} and last == {{6}}\n    return {values!r}\n"
    program = f"inf = float('inf')\ndef f(first, *, last):\n{body}"
    assert verdict(judge, program, given(test, "Write f.", "f")) == "passed"


def test_a_test_may_expect_an_exception(judge: LocalJudge):
    test = "def check(candidate):\n    try:\n        candidate(0)\n    except Exception: return\n    assert False\n"
    assert verdict(judge, "def f(x):\n    return 1 // x\n", given(test, "Write f.", "f")) == "passed"
    assert verdict(judge, "def f(x):\n    return 1\n", given(test, "Write f.", "f")) == "wrong"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("def check(candidate):\n    candidate(open)\n", "an argument of the candidate: expected plain data"),
        ("def check(candidate):\n    pass\n", "the tests never call the candidate"),
        ("import nothing\ndef check(candidate):\n    candidate()\n", "ModuleNotFoundError"),
    ],
)
def test_tests_that_can_not_be_run_are_an_error_of_the_row(judge: LocalJudge, test: str, message: str):
    with pytest.raises(RewardError, match=message):
        verdict(judge, "def f(*a):\n    return 1\n", given(test, "Write f.", "f"))


def test_a_slow_program_times_out(sandbox: Sandbox):
    hasty = LocalJudge(sandbox, CodeRewardConfig(packages=(), time_limit_s=1.0))
    assert verdict(hasty, "def bounds(values):\n    while True: pass\n") == "timed_out"


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ({"check": "def chek(c): pass", "fn_name": "f"}, r"test_cases\.check: expected Python text with def check"),
        ({"check": 3, "fn_name": "f"}, r"test_cases\.check: expected Python text, got 3"),
        ({"check": "def check(c): pass"}, "fn_name: expected the name of the function that check gets, got None"),
        ({"check": "def check(c): pass", "fn_name": "f", "setup": "1 +"}, r"test_cases\.setup: expected Python text"),
    ],
)
def test_malformed_rows_are_refused(cases: dict[str, Any], message: str):
    with pytest.raises(DataError, match=rf"f:1: {message}"):
        parse_row({"prompt": "q", "test_cases": cases}, "f:1", RowRules(needs=("test_cases",)))


THIRD = """
def check(candidate):
    assert tuple(candidate([1, 2, 3])) == tuple(sort_third([1, 2, 3]))
    assert candidate([5, 6, 3, 4, 8, 9, 2]) == [2, 6, 3, 4, 8, 9, 5]
"""


SORTS = "def sort_third(l):\n    l = list(l)\n    l[::3] = sorted(l[::3])\n    return l\n"


@pytest.mark.parametrize(
    ("program", "own", "expected"),
    [
        (SORTS, "", "passed"),
        ("def sort_third(l):\n    return list(l)\n", "", "wrong"),
        # A function that the tests define themselves stays theirs.
        (SORTS, "def sort_third(l):\n    return [0]\n", "wrong"),
    ],
)
def test_tests_may_name_the_function_beside_the_candidate(judge: LocalJudge, program: str, own: str, expected: str):
    # HumanEval/33 does; in its prompt the function has no body.
    prompt = 'def sort_third(l: list):\n    """Sort every third item."""\n'
    assert verdict(judge, program, given(own + THIRD, prompt, "sort_third")) == expected
