"""Judges programs by a verifier on another machine, over HTTP. The other end is ``code_server``, or one like it.

The protocol is Colossal-RL's: POST ``/check_correctness`` with ``{"in_outs", "generation", "timeout", "debug"}``;
the answer's ``result`` has a code for each test (true, false, -1 failed or timed out, -2 unusable), up to the first
that fails. We add ``settings``, which other verifiers ignore.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

from async_rl.config.reward import CodeRewardConfig
from async_rl.errors import SandboxError, SandboxFailedError
from async_rl.rewards.code_judge import VERDICTS, Judgement, Verdict, judgement_of
from async_rl.rewards.code_tests import CodeTest, CodeTests

PATH = "/check_correctness"
CODES: dict[str, bool | int] = {"passed": True, "wrong": False, "failed": -1, "timed_out": -1, "unusable": -2}

TOTAL_LIMIT_S = 600.0
"""For one program, all its tests and the wait for a free worker; Colossal-RL's."""

_ATTEMPTS = 3
_PAUSE_S = 1.0
_LARGEST_ANSWER_BYTES = 16 << 20


class RemoteJudge:
    """Asks ``reward.code.endpoint``; checked with two programs when built.

    Raises:
        SandboxError: it can't be reached, or judges two trivial programs wrongly.
    """

    def __init__(
        self, code: CodeRewardConfig, *, total_limit_s: float = TOTAL_LIMIT_S, pause_s: float = _PAUSE_S
    ) -> None:
        assert code.endpoint is not None
        self._url = code.endpoint.rstrip("/") + ("" if code.endpoint.rstrip("/").endswith(PATH) else PATH)
        self._timeout_s = code.time_limit_s
        self._settings = {
            "total_timeout": code.total_time_limit_s, "all_tests": code.partial_credit, "compare": code.compare,
            "prelude": code.prelude,
        }  # fmt: skip
        self._total_limit_s = total_limit_s
        self._pause_s = pause_s
        self._counts: Counter[str] = Counter()
        self._check()

    def judge(self, source: str, tests: CodeTests) -> Judgement:
        in_outs: dict[str, Any] = {
            "inputs": [test.given if tests.function is None else json.loads(test.given) for test in tests.tests],
            "outputs": [test.expected if tests.function is None else json.dumps(test.expected) for test in tests.tests],
        }
        if tests.function is not None:
            in_outs["fn_name"] = tests.function
        request = {"in_outs": in_outs, "generation": source, "timeout": self._timeout_s, "debug": False}
        answer = self._ask({**request, "settings": self._settings})
        judgement = _judgement(answer, len(tests.tests), self._url)
        for verdict in judgement.verdicts:
            self._counts[verdict] += 1
        return judgement

    def counters(self) -> dict[str, int]:
        return {f"code_tests_{verdict}": self._counts[verdict] for verdict in VERDICTS}

    def close(self) -> None:
        """Nothing is held open."""

    def _check(self) -> None:
        tests = CodeTests((CodeTest("", "1\n"),), None)
        try:
            found = [self.judge(source, tests).all_passed for source in ("print(1)", "print(2)")]
        except SandboxFailedError as error:
            raise SandboxError(f"reward.code.endpoint: {error}; is `async-rl verifier` running there?") from error
        if found != [True, False]:
            raise SandboxError(
                f"reward.code.endpoint: expected {self._url} to pass print(1) and not print(2) where 1 is the answer, "
                f"got {found}"
            )
        self._counts.clear()

    def _ask(self, request: dict[str, Any]) -> Any:
        """The verifier's answer. A verifier that fails is no verdict on the program: raises SandboxFailedError."""
        body = json.dumps(request).encode()
        deadline_s = time.monotonic() + self._total_limit_s
        trouble = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(self._pause_s)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            post = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
            try:
                with urllib.request.urlopen(post, timeout=left_s) as answer:
                    return json.loads(answer.read(_LARGEST_ANSWER_BYTES))
            except urllib.error.HTTPError as error:
                trouble = f"HTTP {error.code} {error.reason}: {error.read(500).decode(errors='replace')}"
                if error.code < 500:
                    break
            except (OSError, ValueError) as error:
                trouble = str(error)
        raise SandboxFailedError(f"the verifier at {self._url} does not answer: {trouble or 'no time left'}")


def _judgement(answer: Any, num_tests: int, url: str) -> Judgement:
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or not 1 <= len(result) <= num_tests or not all(_is_code(code) for code in result):
        raise SandboxFailedError(
            f'expected {{"result": [1 to {num_tests} of true, false, -1, -2]}} from the verifier at {url}, got '
            f"{json.dumps(answer)[:200]}"
        )
    codes: list[Verdict] = ["passed" if code in (True, 1) else _VERDICT_OF[int(code)] for code in result]
    missing = num_tests - len(codes)
    if missing and all(verdict == "passed" for verdict in codes):
        raise SandboxFailedError(
            f"the verifier at {url} passed {len(codes)} tests and left out {missing} without a cause"
        )
    return judgement_of(codes, [], num_tests)


_VERDICT_OF: dict[int, Verdict] = {0: "wrong", -1: "failed", -2: "unusable"}


def _is_code(code: Any) -> bool:
    return isinstance(code, int) and code in (1, 0, -1, -2)
