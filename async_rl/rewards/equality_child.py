"""The process that runs math_verify, so that no answer can hang or crash a generator. Started by ``verifier``.

Frames of ``net.streams`` on stdin and stdout hold JSON. It sends ``{"ready": true}`` once, then answers
``{"gold", "prediction", "time_limit_s"}`` with ``{"equal": bool}``, until stdin ends or its parent is gone.
Run as ``python -m async_rl.rewards.equality_child PARENT_PID``.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
import warnings
from functools import partial
from typing import Any

from async_rl.net.streams import pack_frame, read_frame

MAX_FRAME_BYTES = 1 << 20
MEMORY_LIMIT_BYTES = 4 << 30
_ORPHAN_CHECK_S = 5.0
_GRACE_S = 1.0


def main() -> None:
    parent_pid = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this process ends when stdin does
    output = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not look like an answer
    _limit_memory()
    equal = _load_math_verify()
    _write(output, {"ready": True})
    while (request := _read(parent_pid)) is not None:
        # The parent kills at the limit. If it died, the kernel does: SIGALRM's default action needs no Python, while
        # 9**9**9 holds the interpreter lock for good.
        signal.setitimer(signal.ITIMER_REAL, request["time_limit_s"] + _GRACE_S)
        answer = {"equal": equal(request["gold"], request["prediction"])}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(output, answer)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux" and (hard == resource.RLIM_INFINITY or hard > MEMORY_LIMIT_BYTES):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, hard))


def _load_math_verify() -> Any:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # math_verify warns that we disable its time limits; ours is outside
    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    normalization = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all", equations=False
    )
    targets = [
        LatexExtractionConfig(normalization_config=normalization, boxed_match_priority=0),
        ExprExtractionConfig(),
    ]

    def equal(gold: str, prediction: str) -> bool:
        sides = [t if "\\boxed{" in t else f"\\boxed{{{t}}}" for t in (gold, prediction)]
        parsed = [parse(side, targets, parsing_timeout=None) for side in sides]  # pyright: ignore[reportArgumentType]
        return bool(verify(parsed[0], parsed[1], timeout_seconds=None))

    equal("x+1", "1+x")  # builds the regular expressions and the grammar now, not within the first answer's limit
    return equal


def _read(parent_pid: int) -> dict[str, Any] | None:
    body = read_frame(partial(_read_some, parent_pid), max_bytes=MAX_FRAME_BYTES)
    return None if body is None else json.loads(body)


def _read_some(parent_pid: int, size: int) -> bytes:
    """Up to ``size`` bytes of standard input; none once the parent is gone."""
    # A process forked from the parent may hold our stdin open, so its end alone is no sign.
    while not select.select([0], [], [], _ORPHAN_CHECK_S)[0]:
        if os.getppid() != parent_pid:
            return b""
    return os.read(0, size)


def _write(output: int, message: dict[str, Any]) -> None:
    os.write(output, pack_frame(json.dumps(message).encode()))


if __name__ == "__main__":
    main()
