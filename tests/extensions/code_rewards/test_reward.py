"""The code reward with a scripted runner: extraction, credit, limits over all tests, counters. No process."""

import json
from collections.abc import Callable
from contextlib import closing

import pytest

from async_rl.config.loading import parse_config
from async_rl.config.reward import CodeRewardConfig
from async_rl.errors import ConfigError, RewardError
from async_rl.extensions.code_rewards.program import UNUSABLE_EXIT
from async_rl.extensions.code_rewards.reward import CodeReward, LocalJudge
from async_rl.extensions.code_rewards.sandbox import Program
from async_rl.process.sandbox.client import Ran
from async_rl.process.sandbox.limits import Limits
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import RewardSum


class Script:
    """Runs nothing: a program is a JSON list, one output (or exit code, or "time") a run. Each run takes a second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[tuple[Program, Limits]] = []

    def clock(self) -> float:
        return self.now_s

    def run(self, program: Program, limits: Limits) -> Ran:
        self.asked.append((program, limits))
        self.now_s += 1.0
        outputs = json.loads(program.source)
        said = outputs[int(program.stdin)]
        if said == "time":
            return Ran("timed_out", -9, b"", "")
        if isinstance(said, int):
            return Ran("ended", said, b"0", "")
        return Ran("ended", 0, said.encode(), "")

    def close(self) -> None:
        pass


def graded(text: str, *, script: Script | None = None, num_tests: int = 3, overlong: Callable[..., float] | None = None,
           scale: float = 1.0, **keys: object) -> tuple[RewardOutput, dict[str, int]]:  # fmt: skip
    """Test number n has n for its input and expects n."""
    script = script or Script()
    settings = CodeRewardConfig.model_validate(keys)
    judge = LocalJudge(script, settings, clock=script.clock)
    code = CodeReward(judge, scale=scale, partial_credit=settings.partial_credit)
    reward = RewardSum(code, scale=scale, overlong=overlong)
    numbers = [str(number) for number in range(num_tests)]
    with closing(reward):
        output = reward(RewardInput(text, {"test_cases": {"inputs": numbers, "outputs": numbers}}, 10, 100, "stop"))
        return output, {name.removeprefix("code_tests_"): n for name, n in reward.counters().items() if n}


def fenced(*outputs: object) -> str:
    return f"```python\n{json.dumps(outputs)}\n```"


def test_all_tests_passed_earn_the_scale():
    output, counts = graded(fenced("0", "1", "2"), scale=10.0)
    assert (output.parts, output.accuracy) == ({"correct": 10.0}, 1.0)
    assert counts == {"passed": 3}


@pytest.mark.parametrize(
    ("second", "verdict"),
    [("9", "wrong"), (1, "failed"), (-9, "failed"), ("time", "timed_out"), (UNUSABLE_EXIT, "unusable")],
)
def test_the_first_test_that_fails_is_the_last_to_run(second: object, verdict: str):
    output, counts = graded(fenced("0", second, "2"))
    assert (output.parts, output.accuracy) == ({"correct": 0.0}, 0.0)
    assert counts == {"passed": 1, verdict: 1, "not_run": 1}


def test_partial_credit_is_the_share_of_tests_passed():
    output, counts = graded(fenced("0", "9", "2", "time"), num_tests=4, partial_credit=True, scale=2.0)
    assert (output.parts, output.accuracy) == ({"correct": 1.0}, 0.5)
    assert counts == {"passed": 2, "wrong": 1, "timed_out": 1}


def test_what_does_not_compile_is_run_once_even_for_partial_credit():
    _, counts = graded(fenced(UNUSABLE_EXIT, "1", "2"), partial_credit=True)
    assert counts == {"unusable": 1, "not_run": 2}


def test_a_right_program_without_a_fence_is_accurate_and_earns_nothing():
    output, _ = graded(json.dumps(["0", "1", "2"]))
    assert (output.parts, output.accuracy) == ({"correct": 0.0}, 1.0)


def test_an_error_exit_is_a_failure_whatever_was_printed():
    _, counts = graded(fenced(3), num_tests=1)  # its output is the 0 that was expected
    assert counts == {"failed": 1}


def test_the_time_of_all_tests_is_limited_together():
    # Each run takes one second; of two and a half, the third has half a second and the fourth nothing.
    script = Script()
    _, counts = graded(
        fenced(*"0123"), script=script, num_tests=4, total_time_limit_s=2.5, time_limit_s=2.0, partial_credit=True
    )
    assert [limits.time_s for _, limits in script.asked] == [2.0, 1.5, 0.5]
    assert counts == {"passed": 3, "timed_out": 1}


def test_the_punishment_of_long_answers_is_told_whether_all_tests_passed():
    told: list[tuple[float, bool]] = []

    def overlong(_: RewardInput, earned: float, has_answer: bool) -> float:
        told.append((earned, has_answer))
        return -0.5

    assert graded(fenced("0", "1", "2"), overlong=overlong, scale=2.0)[0].parts == {"correct": 2.0, "overlong": -1.0}
    graded(fenced("0", "9", "2"), overlong=overlong, partial_credit=True)
    assert told == [(1.0, True), (pytest.approx(2 / 3), False)]


def test_a_row_without_tests_is_an_error_not_a_wrong_answer():
    judge = LocalJudge(Script(), CodeRewardConfig())
    with pytest.raises(RewardError, match="test_cases: expected"):
        CodeReward(judge, scale=1.0, partial_credit=False)(RewardInput("x", {}, 1, 10, "stop"))


def test_answers_must_be_graded_before_their_lease_expires():
    raw = {
        "run": {"dir": "r"},
        "model": {"path": "m"},
        "reward": {"type": "code", "code": {"total_time_limit_s": 600.0}},
    }
    with pytest.raises(ConfigError, match=r"reward\.code\.total_time_limit_s: expected less than reward\.max_call_s"):
        parse_config(raw, "the test")
