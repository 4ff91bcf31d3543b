"""The reward for programs: take the program out of the answer, run it on the row's tests, give credit.

Enters one finished rollout, leaves its reward parts and accuracy. Built by ``registry``; where and how programs run is
the judge's matter (``code_judge``, ``code_remote``).
"""

from __future__ import annotations

import threading

from async_rl.config.config import Config
from async_rl.config.reward import CodeRewardConfig
from async_rl.errors import RewardError
from async_rl.rewards.code_judge import Judge, LocalJudge
from async_rl.rewards.code_remote import RemoteJudge
from async_rl.rewards.code_tests import parse_tests
from async_rl.rewards.extraction import Extraction
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.sandbox.sandbox import Sandbox

MAX_EXTRACTED_CHARS = 1000
"""Of a program that travel back beside the answer's tokens, for logs."""

_FENCE = "```python"


class CodeReward:
    """``correct``: ``scale`` if the program passes all tests and stands in a fence, else 0.

    With ``partial_credit``, ``scale`` times the share of tests passed; accuracy is that share too, for groups are
    filtered by it. Else accuracy is 1 if all pass, in a fence or not. An answer is a program that passes all tests.
    """

    def __init__(self, judge: Judge, *, scale: float, partial_credit: bool, num_workers: int = 1) -> None:
        """``num_workers`` programs are judged at a time, however many threads ask."""
        self._judge = judge
        self._workers = threading.BoundedSemaphore(num_workers)
        self._scale = scale
        self._partial_credit = partial_credit

    def __call__(self, item: RewardInput) -> RewardOutput:
        try:
            tests = parse_tests(item.reward_data)
        except ValueError as error:
            raise RewardError(f"a code row can't be graded: {error}") from None
        program, format_valid = extract_program(item.text)
        with self._workers:
            judgement = self._judge.judge(program or "", tests)
        passed = judgement.all_passed
        accuracy = judgement.share_passed if self._partial_credit else float(passed)
        parts = {"correct": self._scale * accuracy if format_valid else 0.0}
        return RewardOutput(parts, accuracy, (program or "")[:MAX_EXTRACTED_CHARS], has_answer=passed)

    def counters(self) -> dict[str, int]:
        """``code_tests_{verdict}``: tests by how they went."""
        return self._judge.counters()

    def close(self) -> None:
        self._judge.close()


def extract_program(text: str) -> Extraction:
    """The text after the last "```python", up to the next fence; without such a fence all of it, the format invalid."""
    start = text.rfind(_FENCE)
    if start < 0:
        return Extraction(text, False)
    program = text[start + len(_FENCE) :]
    end = program.find("```")
    return Extraction(program if end < 0 else program[:end], True)


def build_code_reward(config: Config, scale: float) -> CodeReward:
    """The reward that ``config`` asks for, its sandbox running, or its verifier found to work.

    Raises:
        SandboxError: neither works; the message says what to do.
    """
    code = config.reward.code
    return CodeReward(
        RemoteJudge(code) if code.endpoint is not None else local_judge(code),
        scale=scale,
        partial_credit=code.partial_credit,
        num_workers=code.num_workers,
    )


def local_judge(code: CodeRewardConfig) -> LocalJudge:
    """The judge of this machine.

    Raises:
        SandboxError: it can't isolate programs, and ``code.allow_unsafe`` does not insist.
    """
    return LocalJudge(Sandbox(packages=code.packages, allow_unsafe=code.allow_unsafe), code)
