"""The processes that compare answers, so that no answer can hang or crash a generator. ``verifier`` starts them.

A fork server (``process.fork_server``) imports sympy once, which takes a second, and forks *worker* processes. A worker
reads frames of ``net.streams`` with JSON ``{"gold", "prediction", "time_limit_s"}`` and answers each with
``{"finding": "equal"}``, or another ``Finding`` of ``latex_answers``. The limit is on processor time, so that a right
answer is not scored as wrong on a busy machine. The command is ``python -m async_rl.rewards.math.child DESCRIPTOR``.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
import socket
import sys
import warnings
from functools import partial
from typing import Any

from async_rl.net.streams import pack_frame, read_frame
from async_rl.process.fork_server import Forker

MAX_FRAME_BYTES = 1 << 20
MEMORY_LIMIT_BYTES = 2 << 30
"""Maximum size in bytes of the address space of one worker."""


def main() -> None:
    forker = Forker(sys.argv[1])
    _limit_memory()
    compare = _load_sympy()
    gc.freeze()  # workers share what is loaded
    forker.serve(partial(_serve, compare=compare))


def _serve(connection: socket.socket, compare: Any) -> None:
    while (body := read_frame(connection.recv, max_bytes=MAX_FRAME_BYTES)) is not None:
        request = json.loads(body)
        # The default action of SIGPROF ends the process. It needs no Python, while 9**9**9 holds the interpreter lock.
        signal.setitimer(signal.ITIMER_PROF, request["time_limit_s"])
        answer = {"finding": compare(request["prediction"], request["gold"])}
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(pack_frame(json.dumps(answer).encode()))


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux" and (hard == resource.RLIM_INFINITY or hard > MEMORY_LIMIT_BYTES):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, hard))


def _load_sympy() -> Any:
    warnings.simplefilter("ignore")
    from latex_answers.comparison import same_answers

    same_answers("x+1=\\sqrt{2}", "1+x=\\frac{2}{\\sqrt{2}}")  # what is built once is not built within a limit
    return same_answers


if __name__ == "__main__":
    main()
