"""The reward for programs. It extracts the program from the model's text and runs the program on the row's tests.

The input is one finished rollout, and the output is its reward parts and accuracy. ``builder`` builds the reward. A
judge runs the program: ``LocalJudge`` in this machine's sandbox, or ``verifier.RemoteJudge`` on another machine. Every
test runs the program again in a new, isolated process. Outputs are compared outside the sandbox, so the program
never gets the expected output.
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
from async_rl.extensions.code_rewards.check_function import CheckTests, judge_check
from async_rl.extensions.code_rewards.fences import extract_program
from async_rl.extensions.code_rewards.program import UNUSABLE_EXIT
from async_rl.extensions.code_rewards.row_tests import CodeTest, CodeTests, outputs_agree, parse_tests, values_agree
from async_rl.extensions.code_rewards.sandbox import Program, Sandbox
from async_rl.process.sandbox.client import Ran
from async_rl.process.sandbox.limits import Limits
from async_rl.rewards.records import RewardInput, RewardOutput

MAX_EXTRACTED_CHARS = 1000
"""Maximum number of characters of the program that are stored with the rollout, for logs. The rest is cut off."""

Verdict = Literal["passed", "wrong", "failed", "timed_out", "unusable", "not_run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""The possible results of one test. ``failed`` means that the program ended with an error. ``unusable`` means that the
program does not compile or lacks the function. ``not_run`` means that an earlier test decided the result."""

_OUTPUT_BYTES = 16 << 20
"""Maximum size in bytes of a program's standard output, and of each file that the program writes."""
_SCRATCH_BYTES = 64 << 20
"""Maximum size in bytes of all files of a program together."""
_MAX_THREADS = 32


class CodeReward:
    """Scores the program in the model's text by the row's tests.

    The reward part ``correct`` is ``scale`` if the program passes all tests, else 0. It is always 0 if the program is
    not in a code fence. The accuracy is 1 if the program passes all tests, else 0, with or without a fence. With
    ``partial_credit`` both use the share of tests that the program passes. For the penalty on over-long answers, only a
    program that passes all tests counts as an answer.
    """

    def __init__(self, judge: Judge, *, scale: float, partial_credit: bool, num_workers: int = 1) -> None:
        """Store the settings. ``judge`` runs programs, and at most ``num_workers`` programs are judged at a time."""
        self._judge = judge
        self._workers = threading.BoundedSemaphore(num_workers)
        self._scale = scale
        self._partial_credit = partial_credit
        self._counts: Counter[str] = Counter()

    def __call__(self, item: RewardInput) -> RewardOutput:
        try:
            tests = parse_tests(item.reward_data)
        except ValueError as error:
            raise RewardError(
                f"can't score a program, because the tests of its row are malformed: {error}; correct the row"
            ) from None
        program, format_valid = extract_program(item.text, tests.function)
        with self._workers:
            judgement = self._judge.judge(program or "", tests)
        self._counts.update(judgement.verdicts)
        passed = judgement.all_passed
        accuracy = judgement.share_passed if self._partial_credit else float(passed)
        parts = {"correct": self._scale * accuracy if format_valid else 0.0}
        return RewardOutput(parts, accuracy, (program or "")[:MAX_EXTRACTED_CHARS], has_answer=passed)

    def counters(self) -> dict[str, int]:
        """Return the number of tests with each verdict since the start, with keys such as ``code_tests_passed``."""
        return {f"code_tests_{verdict}": self._counts[verdict] for verdict in VERDICTS}

    def close(self) -> None:
        self._judge.close()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of running one program on the tests of a row.

    ``verdicts`` has one verdict for each test, in the row's order. ``notes`` has the end of the program's standard
    error for each test, or a reason why the test was not run.
    """

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def share_passed(self) -> float:
        return self.verdicts.count("passed") / len(self.verdicts)

    @property
    def all_passed(self) -> bool:
        return all(verdict == "passed" for verdict in self.verdicts)


def judgement_of(verdicts: Sequence[Verdict], notes: Sequence[str], num_tests: int) -> Judgement:
    """Return the judgement of ``num_tests`` tests. Tests beyond those in ``verdicts`` get the verdict ``not_run``."""
    not_run: list[Verdict] = ["not_run"] * (num_tests - len(verdicts))
    return Judgement((*verdicts, *not_run), (*notes, *[""] * (num_tests - len(notes))))


class Judge(Protocol):
    """Runs programs on tests. Any thread may call ``judge``. ``close`` is called once, at the end."""

    def judge(self, source: str, tests: CodeTests) -> Judgement:
        """Run the program ``source`` on ``tests`` and return the verdicts.

        Raises:
            RewardError: the judge itself failed. A wrong program does not cause this error.
        """
        ...

    def close(self) -> None: ...


class LocalJudge:
    """Runs programs on tests in this machine's sandbox and compares their outputs.

    Args:
        sandbox: runs the programs. It is closed with this judge.
        code: the limits, and the rules for comparing. After ``total_time_limit_s`` seconds, all tests that were not run
            count as timed out. Without ``partial_credit``, no test is run after one that the program did not pass.
        clock: returns the time in seconds.
    """

    def __init__(
        self, sandbox: Sandbox, code: CodeRewardConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sandbox = sandbox
        self._code = code
        self._clock = clock

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
        self._sandbox.close()

    def _judge_one(self, source: str, tests: CodeTests, test: CodeTest, left_s: float) -> tuple[Verdict, str]:
        if left_s <= 0:
            return "timed_out", "the tests before this one used up reward.code.total_time_limit_s"
        limits = self._limits(left_s)
        if tests.check is not None and tests.function is not None:
            return self._judge_check(source, tests.function, tests.check, left_s)
        if tests.function is None:
            prelude = self._code.prelude == "always"
            program = Program(source, stdin=test.given.encode(errors="surrogateescape"), prelude=prelude)
        else:
            program = Program(
                source, function=tests.function, arguments=test.given, prelude=self._code.prelude != "never"
            )
        ran = self._sandbox.run(program, limits)
        return self._verdict(ran, tests, test), ran.stderr_tail

    def _judge_check(self, source: str, function: str, check: CheckTests, left_s: float) -> tuple[Verdict, str]:
        deadline_s = self._clock() + left_s

        def run(program: Program) -> Ran | None:
            left_s = deadline_s - self._clock()
            return self._sandbox.run(program, self._limits(left_s)) if left_s > 0 else None

        return judge_check(source, function, check, run, prelude=self._code.prelude != "never")

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


def sandbox_of(code: CodeRewardConfig) -> Sandbox:
    """Start this machine's sandbox.

    Raises:
        SandboxError: this machine can't isolate programs, and ``code.allow_unsafe`` is False.
    """
    return Sandbox(packages=code.packages, allow_unsafe=code.allow_unsafe)
