"""The code reward with a scripted sandbox, without a process: extraction, credit, limits; what the doctor says."""

import json
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.reward import CodeRewardConfig
from async_rl.errors import ConfigError, RewardError, SandboxError
from async_rl.extensions.code_rewards import checks
from async_rl.extensions.code_rewards.program import UNUSABLE_EXIT
from async_rl.extensions.code_rewards.reward import CodeReward, LocalJudge
from async_rl.extensions.code_rewards.sandbox import Program, Sandbox
from async_rl.process.sandbox.client import Ran
from async_rl.process.sandbox.limits import Limits
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import RewardSum
from tests.config.made import a_config
from tests.launch.checks.made import made


class Script(Sandbox):
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


@pytest.mark.parametrize(
    ("outputs", "keys", "correct", "accuracy", "counts"),
    [
        # All passed.
        (["0", "1", "2"], {"scale": 10.0}, 10.0, 1.0, {"passed": 3}),
        # The first test that fails is the last to run. The output of a program that exits with 1 is the right one.
        (["0", "9", "2"], {}, 0.0, 0.0, {"passed": 1, "wrong": 1, "not_run": 1}),
        ([1, "1", "2"], {}, 0.0, 0.0, {"failed": 1, "not_run": 2}),
        (["0", -9, "2"], {}, 0.0, 0.0, {"passed": 1, "failed": 1, "not_run": 1}),
        (["0", "time", "2"], {}, 0.0, 0.0, {"passed": 1, "timed_out": 1, "not_run": 1}),
        # Two of three passed.
        (["0", "9", "2"], {"partial_credit": True, "scale": 3.0}, 2.0, 2 / 3, {"passed": 2, "wrong": 1}),
        (["0", "1", "time"], {"partial_credit": True, "scale": 3.0}, 2.0, 2 / 3, {"passed": 2, "timed_out": 1}),
        # What does not compile is run once.
        ([UNUSABLE_EXIT, "1", "2"], {"partial_credit": True}, 0.0, 0.0, {"unusable": 1, "not_run": 2}),
    ],
)
def test_the_tests_of_a_row_make_its_reward(
    outputs: list[object], keys: dict[str, Any], correct: float, accuracy: float, counts: dict[str, int]
):
    output, found = graded(fenced(*outputs), **keys)
    assert output.parts == {"correct": pytest.approx(correct)}
    assert output.accuracy == pytest.approx(accuracy)
    assert found == counts


def test_a_right_program_without_a_fence_is_accurate_and_earns_nothing():
    output, _ = graded(json.dumps(["0", "1", "2"]))
    assert (output.parts, output.accuracy) == ({"correct": 0.0}, 1.0)


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


def of_code(**code: Any) -> Config:
    return a_config(reward={"type": "code", "code": code})


def test_answers_must_be_graded_before_their_lease_expires():
    with pytest.raises(ConfigError, match=r"reward\.code\.total_time_limit_s: expected less than reward\.max_call_s"):
        of_code(total_time_limit_s=600.0)


def test_the_sandbox_is_said_to_isolate_programs_only_where_it_must(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "code_reward", lambda config, scale: SimpleNamespace(close=lambda: None))
    for code, state, words in (
        ({}, "OK", "isolated"),
        ({"allow_unsafe": True}, "WARN", "without a sandbox"),
        ({"endpoint": "http://127.0.0.1:1"}, "OK", "the verifier at http://127.0.0.1:1"),
    ):
        (row,) = made(of_code(**code), "sandbox")
        assert (row.state, words in row.found, bool(row.fix)) == (state, True, state == "WARN")


def test_programs_that_cant_be_isolated(monkeypatch: pytest.MonkeyPatch):
    def refuse(config: Config, scale: float) -> Any:
        raise SandboxError("no user namespaces here; run generators elsewhere")

    monkeypatch.setattr(checks, "code_reward", refuse)
    (row,) = made(of_code(), "sandbox", "reward")  # without a sandbox, no row is graded
    assert (row.check, row.state, "namespaces" in row.found) == ("sandbox", "FAIL", True)
