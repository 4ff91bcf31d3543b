"""The reward for programs: takes the program out of the answer, runs it on the row's tests and counts those it passes.

One finished rollout enters, its reward parts and accuracy leave. ``registry`` builds it. A judge runs the program:
``LocalJudge`` in this machine's sandbox, also for the verifier's server, or ``code_remote.RemoteJudge``. Every test
runs the program again in a new, isolated process. The program never gets the expected output: outputs are compared
outside the sandbox.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from async_rl.config.reward import CodeRewardConfig
from async_rl.errors import RewardError
from async_rl.rewards.code_tests import CodeTest, CodeTests, outputs_agree, parse_tests, values_agree
from async_rl.rewards.extraction import Extraction
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.sandbox.child import UNUSABLE_EXIT, Limits
from async_rl.sandbox.sandbox import Program, Ran, Sandbox

MAX_EXTRACTED_CHARS = 1000
"""Longest extracted program that is sent back with the rollout, for logs."""

_FENCE = "```python"

Verdict = Literal["passed", "wrong", "failed", "timed_out", "unusable", "not_run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""``failed``: the program ended with an error. ``unusable``: it does not compile, or lacks the function."""

_OUTPUT_BYTES = 16 << 20
"""Limit on standard output, and on each file that a program writes."""
_SCRATCH_BYTES = 64 << 20
"""Limit on all files of a program together."""
_MAX_THREADS = 32


class CodeReward:
    """The part ``correct`` is ``scale`` if the program passes all tests and is in a code fence, else 0.

    With ``partial_credit`` it is ``scale`` times the share of tests passed; accuracy is that share too, because groups
    are filtered by it. Otherwise accuracy is 1 if all tests pass, with or without a fence. For the penalty on long
    answers, only a program that passes all tests counts as an answer.
    """

    def __init__(self, judge: Judge, *, scale: float, partial_credit: bool, num_workers: int = 1) -> None:
        """At most ``num_workers`` programs are judged at a time, however many threads call."""
        self._judge = judge
        self._workers = threading.BoundedSemaphore(num_workers)
        self._scale = scale
        self._partial_credit = partial_credit
        self._counts: Counter[str] = Counter()

    def __call__(self, item: RewardInput) -> RewardOutput:
        try:
            tests = parse_tests(item.reward_data)
        except ValueError as error:
            raise RewardError(f"can't grade an answer, because the tests of its row are malformed: {error}") from None
        program, format_valid = extract_program(item.text)
        with self._workers:
            judgement = self._judge.judge(program or "", tests)
        self._counts.update(judgement.verdicts)
        passed = judgement.all_passed
        accuracy = judgement.share_passed if self._partial_credit else float(passed)
        parts = {"correct": self._scale * accuracy if format_valid else 0.0}
        return RewardOutput(parts, accuracy, (program or "")[:MAX_EXTRACTED_CHARS], has_answer=passed)

    def counters(self) -> dict[str, int]:
        """Tests by verdict, as ``code_tests_{verdict}``."""
        return {f"code_tests_{verdict}": self._counts[verdict] for verdict in VERDICTS}

    def close(self) -> None:
        self._judge.close()


def extract_program(text: str) -> Extraction:
    """Return the text between the last "```python" and the next fence; without one all of it, of invalid format."""
    start = text.rfind(_FENCE)
    if start < 0:
        return Extraction(text, False)
    program = text[start + len(_FENCE) :]
    end = program.find("```")
    return Extraction(program if end < 0 else program[:end], True)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One verdict for each test, in the row's order; ``notes`` has the end of each run's standard error."""

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def share_passed(self) -> float:
        return self.verdicts.count("passed") / len(self.verdicts)

    @property
    def all_passed(self) -> bool:
        return all(verdict == "passed" for verdict in self.verdicts)


def judgement_of(verdicts: Sequence[Verdict], notes: Sequence[str], num_tests: int) -> Judgement:
    """The judgement of ``num_tests`` tests, of which only the first may have been run."""
    not_run: list[Verdict] = ["not_run"] * (num_tests - len(verdicts))
    return Judgement((*verdicts, *not_run), (*notes, *[""] * (num_tests - len(notes))))


class Judge(Protocol):
    """Judges programs, from any thread; close it once."""

    def judge(self, source: str, tests: CodeTests) -> Judgement:
        """Judge one program. Raises ``RewardError`` if the judge fails, never because the program is wrong."""
        ...

    def close(self) -> None: ...


class Runner(Protocol):
    """Runs programs: ``sandbox.Sandbox``, or a fake in tests."""

    def run(self, program: Program, limits: Limits) -> Ran: ...

    def close(self) -> None: ...


class LocalJudge:
    """Judges in this machine's sandbox.

    Args:
        runner: closed with this.
        code: limits, and how to judge. Tests that ``total_time_limit_s`` leaves no time for count as timed out; without
            ``partial_credit`` the first that fails is the last to be run.
        clock: seconds.
    """

    def __init__(self, runner: Runner, code: CodeRewardConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._runner = runner
        self._code = code
        self._clock = clock

    def with_settings(self, code: CodeRewardConfig) -> LocalJudge:
        """Return a judge with other settings and the same runner; close only one of the two."""
        return LocalJudge(self._runner, code, clock=self._clock)

    def judge(self, source: str, tests: CodeTests) -> Judgement:
        deadline_s = self._clock() + self._code.total_time_limit_s
        verdicts: list[Verdict] = []
        notes: list[str] = []
        for test in tests.tests:
            verdict, note = self._judge_one(source, tests, test, deadline_s - self._clock())
            verdicts.append(verdict)
            notes.append(note)
            if verdict == "unusable" or (verdict != "passed" and not self._code.partial_credit):
                break
        return judgement_of(verdicts, notes, len(tests.tests))

    def close(self) -> None:
        self._runner.close()

    def _judge_one(self, source: str, tests: CodeTests, test: CodeTest, left_s: float) -> tuple[Verdict, str]:
        if left_s <= 0:
            return "timed_out", "no time of reward.code.total_time_limit_s was left for this test"
        limits = self._limits(left_s)
        if tests.function is None:
            prelude = self._code.prelude == "always"
            program = Program(source, stdin=test.given.encode(errors="surrogateescape"), prelude=prelude)
        else:
            program = Program(
                source, function=tests.function, arguments=test.given, prelude=self._code.prelude != "never"
            )
        ran = self._runner.run(program, limits)
        return self._verdict(ran, tests, test), ran.stderr_tail

    def _limits(self, left_s: float) -> Limits:
        code = self._code
        return Limits(
            time_s=min(code.time_limit_s, left_s),
            memory_bytes=code.memory_bytes,
            output_bytes=_OUTPUT_BYTES,
            scratch_bytes=_SCRATCH_BYTES,
            max_threads=_MAX_THREADS,
        )

    def _verdict(self, ran: Ran, tests: CodeTests, test: CodeTest) -> Verdict:
        if ran.outcome == "timed_out":
            return "timed_out"
        if ran.exit_code != 0:
            return "unusable" if ran.exit_code == UNUSABLE_EXIT else "failed"
        compare, tolerance = self._code.compare, tests.tolerance
        if tests.function is not None:
            agrees = values_agree(test.expected, ran.output, compare=compare, tolerance=tolerance)
        else:
            output = ran.output.decode(errors="replace")
            agrees = outputs_agree(test.expected, output, compare=compare, tolerance=tolerance)
        return "passed" if agrees else "wrong"


def local_judge(code: CodeRewardConfig) -> LocalJudge:
    """Return a judge that runs programs in this machine's sandbox.

    Raises:
        SandboxError: this machine can't isolate programs, and ``code.allow_unsafe`` is off.
    """
    return LocalJudge(Sandbox(packages=code.packages, allow_unsafe=code.allow_unsafe), code)
