"""Runs one program on a row's tests and reports which it passed. Outputs are compared here, outside the sandbox.

Called by the code reward and by the verifier's server. Every test runs the program again, in an isolation of its
own; the program never gets the expected output.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from async_rl.config.reward import CodeRewardConfig
from async_rl.rewards.code_compare import outputs_agree, values_agree
from async_rl.rewards.code_tests import CodeTest, CodeTests
from async_rl.sandbox.limits import UNUSABLE_EXIT, Limits, Program, Ran

Verdict = Literal["passed", "wrong", "failed", "timed_out", "unusable", "not_run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""``failed``: it ended with an error. ``unusable``: it does not compile, or lacks the function."""

_OUTPUT_BYTES = 16 << 20
"""Of standard output, and of any file that a program writes."""
_SCRATCH_BYTES = 64 << 20
"""Of all files of a program together."""
_MAX_THREADS = 32


@dataclass(frozen=True, slots=True)
class Judgement:
    """One verdict a test, in the row's order; ``notes`` has the end of each one's standard error."""

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def share_passed(self) -> float:
        return self.verdicts.count("passed") / len(self.verdicts)

    @property
    def all_passed(self) -> bool:
        return all(verdict == "passed" for verdict in self.verdicts)


def judgement_of(verdicts: Sequence[Verdict], notes: Sequence[str], num_tests: int) -> Judgement:
    """Of ``num_tests`` tests, of which the first few were run."""
    not_run: list[Verdict] = ["not_run"] * (num_tests - len(verdicts))
    return Judgement((*verdicts, *not_run), (*notes, *[""] * (num_tests - len(notes))))


class Judge(Protocol):
    """Judges programs, from any thread; close it once."""

    def judge(self, source: str, tests: CodeTests) -> Judgement:
        """Raises ``RewardError`` if the program can't be judged; never for a bad program."""
        ...

    def counters(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Runner(Protocol):
    """What runs programs: ``sandbox.Sandbox``, or a fake in tests."""

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
        self._counts: Counter[str] = Counter()

    def with_settings(self, code: CodeRewardConfig) -> LocalJudge:
        """One that shares this one's runner; close only one of them."""
        return LocalJudge(self._runner, code, clock=self._clock)

    def judge(self, source: str, tests: CodeTests) -> Judgement:
        deadline_s = self._clock() + self._code.total_time_limit_s
        verdicts: list[Verdict] = []
        notes: list[str] = []
        for test in tests.tests:
            verdict, note = self._judge_one(source, tests.function, test, deadline_s - self._clock())
            verdicts.append(verdict)
            notes.append(note)
            if verdict == "unusable" or (verdict != "passed" and not self._code.partial_credit):
                break
        judgement = judgement_of(verdicts, notes, len(tests.tests))
        for verdict in judgement.verdicts:
            self._counts[verdict] += 1
        return judgement

    def counters(self) -> dict[str, int]:
        """``code_tests_{verdict}``: tests by verdict."""
        return {f"code_tests_{verdict}": self._counts[verdict] for verdict in VERDICTS}

    def close(self) -> None:
        self._runner.close()

    def _judge_one(self, source: str, function: str | None, test: CodeTest, left_s: float) -> tuple[Verdict, str]:
        if left_s <= 0:
            return "timed_out", "no time was left for this test"
        limits = self._limits(left_s)
        if function is None:
            prelude = self._code.prelude == "always"
            program = Program(source, stdin=test.given.encode(errors="surrogateescape"), prelude=prelude)
        else:
            program = Program(source, function=function, arguments=test.given, prelude=self._code.prelude != "never")
        ran = self._runner.run(program, limits)
        return self._verdict(ran, function, test), ran.stderr_tail

    def _limits(self, left_s: float) -> Limits:
        code = self._code
        return Limits(
            time_s=min(code.time_limit_s, left_s),
            memory_bytes=code.memory_bytes,
            output_bytes=_OUTPUT_BYTES,
            scratch_bytes=_SCRATCH_BYTES,
            max_processes=code.max_processes,
            max_threads=_MAX_THREADS,
        )

    def _verdict(self, ran: Ran, function: str | None, test: CodeTest) -> Verdict:
        if ran.outcome == "timed_out":
            return "timed_out"
        if ran.exit_code != 0:
            return "unusable" if ran.exit_code == UNUSABLE_EXIT else "failed"
        if function is not None:
            agrees = values_agree(test.expected, ran.output, compare=self._code.compare)
        else:
            agrees = outputs_agree(test.expected, ran.output.decode(errors="replace"), compare=self._code.compare)
        return "passed" if agrees else "wrong"
