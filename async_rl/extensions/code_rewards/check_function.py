"""Judges a program by tests in the form ``def check(candidate)``, as in HumanEval.

The tests can't run beside the program: a hostile one would read expected values, patch builtins, or exit. So the tests
run in a sandbox process of their own, in which ``candidate`` only looks up return values, and the verdict is that
process's. The program runs in other processes, which get arguments and give return values back as data. Most tests need
three processes: one finds the calls that the tests make, one runs the program on them, one runs the tests. If later
calls depend on results, there are two more for each such call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from async_rl.errors import RewardError
from async_rl.extensions.code_rewards import check_harness
from async_rl.extensions.code_rewards.program import UNUSABLE_EXIT
from async_rl.extensions.code_rewards.sandbox import Program
from async_rl.process.sandbox.client import Ran

_MAX_ANSWER_BYTES = 1 << 20
"""Maximum size of the return values of one run as JSON. Reading megabytes would block other threads."""

Verdict = Literal["passed", "wrong", "failed", "timed_out", "unusable"]


@dataclass(frozen=True, slots=True)
class CheckTests:
    """Tests of a function.

    Attributes:
        tests: Python text that defines ``check(candidate)``.
        setup: Python text that is run before the tests, and before the program: imports and helpers of the prompt.
    """

    tests: str
    setup: str = ""


@cache
def _harness() -> str:
    return Path(check_harness.__file__).read_text(encoding="utf-8")


def judge_check(
    source: str, function: str, check: CheckTests, run: Callable[[Program], Ran | None], *, prelude: bool
) -> tuple[Verdict, str]:
    """Return the verdict on the program ``source``, whose function ``function`` is the candidate, and a note.

    ``run`` runs one program in the sandbox. It returns None if there is no time left.

    Raises:
        RewardError: the tests themselves can't be run.
    """
    pending = _trusted(run, "_async_rl_calls", [check.setup, check.tests, function])
    # A program that begins with an import from __future__ can't have anything before it.
    before = "" if "from __future__" in source else f"{check.setup}\n\n"
    program = f"{before}{source}\n\n{_harness()}"
    known: list[list[Any]] = []
    while pending is not None:
        if pending:
            arguments = json.dumps([function, pending])
            ran = run(Program(program, function="_async_rl_call_all", arguments=arguments, prelude=prelude))
            if ran is None or ran.outcome == "timed_out":
                return "timed_out", "" if ran is None else ran.stderr_tail
            if ran.exit_code != 0:
                return "unusable" if ran.exit_code == UNUSABLE_EXIT else "failed", ran.stderr_tail
            results = _results(ran.output, len(pending))
            if results is None:
                return "failed", f"expected {len(pending)} return values, got something else; {ran.stderr_tail}"
            known += [[call, result] for call, result in zip(pending, results, strict=True)]
        verdict = _trusted(run, "_async_rl_check", [check.setup, check.tests, function, known])
        if verdict is None:
            break
        match verdict:
            case ["passed"]:
                return "passed", ""
            case ["wrong", str(reason)]:
                return "wrong", reason
            case ["unknown", int(num_used), call]:
                known, pending = known[:num_used], [call]
            case _:
                raise RewardError(
                    f"can't score a program, because the tests of its row fail: {verdict[-1]}; correct it"
                )
    return "timed_out", "the tests took too long"


def _trusted(run: Callable[[Program], Ran | None], name: str, arguments: list[Any]) -> Any:
    """Run a function of the harness without the program, and return its value. None if it took too long.

    Raises:
        RewardError: it failed, as it does if a test passes something else than plain data.
    """
    ran = run(Program(_harness(), function=name, arguments=json.dumps(arguments)))
    # A signal: the program's return values made the tests need too much memory or processor time.
    if ran is None or ran.outcome == "timed_out" or ran.exit_code < 0:
        return None
    if ran.exit_code != 0:
        raise RewardError(
            f"can't score a program, because the tests of its row end with exit code {ran.exit_code}: "
            f"{ran.stderr_tail[-500:]}; correct the row"
        )
    return json.loads(ran.output)


def _results(output: bytes, count: int) -> list[Any] | None:
    """Return the results that a program's process wrote. None if they do not have the form of ``count`` results."""
    if len(output) > _MAX_ANSWER_BYTES:
        return None
    try:
        results = json.loads(output)
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(results, list) and len(results) == count
    if not is_list or not all(isinstance(one, list) and one[:1] in (["returned"], ["raised"]) for one in results):
        return None
    if not all(len(one) == (2 if one[0] == "returned" else 1) for one in results):
        return None
    return results
