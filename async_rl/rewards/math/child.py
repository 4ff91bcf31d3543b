"""The processes that compare answers, so that no answer can hang or crash a generator. ``verifier`` starts them.

A *server* process imports sympy once, which takes a second, and forks *worker* processes, which takes
milliseconds. The server gets requests on a socket, as records of 5 bytes. The request ``F`` comes with a descriptor. It
forks a worker that gets its work on this descriptor, and the reply is the worker's process id, or 0 if the fork failed.
The request ``W`` waits for the end of a worker, and the reply is the signal that ended the worker, or 0. When the
socket closes or the server dies, all workers end.

A worker reads frames of ``net.streams`` with JSON ``{"gold", "prediction", "time_limit_s"}`` and answers each with
``{"finding": "equal"}``, or another ``Finding`` of ``comparison``. The limit is on processor time, so that a right
answer is not scored as wrong on a busy machine. The command is
``python -m async_rl.rewards.math.child DESCRIPTOR PARENT_PID``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
import warnings
from typing import Any

from async_rl.net.streams import pack_frame, read_frame

MAX_FRAME_BYTES = 1 << 20
MEMORY_LIMIT_BYTES = 2 << 30
"""Maximum size in bytes of the address space of one worker."""
RECORD = struct.Struct("<cI")
READY, FORK, WAIT = b"R", b"F", b"W"
_ORPHAN_CHECK_S = 5.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    control, parent_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this process ends with its socket
    control.set_inheritable(False)
    _limit_memory()
    compare = _load_sympy()
    gc.freeze()  # workers share what is loaded
    control.sendall(RECORD.pack(READY, 0))
    workers: set[int] = set()
    while (request := _receive(control, parent_pid)) is not None:
        kind, pid, descriptor = request
        if kind == FORK:
            reply = _fork_worker(control, descriptor, compare)
            workers.add(reply)
        else:
            reply = _wait(pid)
            workers.discard(pid)
        control.sendall(RECORD.pack(kind, reply))
    for pid in workers - {0}:
        os.kill(pid, signal.SIGKILL)
        _wait(pid)


def _receive(control: socket.socket, parent_pid: int) -> tuple[bytes, int, int] | None:
    """Wait for the parent's next request. Return None if the parent has ended.

    The result is the kind of the request (``FORK`` or ``WAIT``), a process id, and a file descriptor, which is -1 if
    the request has none.
    """
    # A process forked from the parent may hold the other end open, so a closed socket is not the only sign.
    while not select.select([control], [], [], _ORPHAN_CHECK_S)[0]:
        if os.getppid() != parent_pid:
            return None
    data, descriptors, _, _ = socket.recv_fds(control, RECORD.size, 1)
    if not data:
        return None
    kind, pid = RECORD.unpack(data)
    return kind, pid, descriptors[0] if descriptors else -1


def _wait(pid: int) -> int:
    """Wait until the worker ``pid`` has ended. Return the number of the signal that ended the worker, or 0."""
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _fork_worker(control: socket.socket, descriptor: int, compare: Any) -> int:
    """Fork a worker that gets its work on the socket ``descriptor``. Return its process id, or 0 if the fork failed."""
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        pid = 0
    else:
        if pid == 0:
            _be_worker(control, descriptor, compare, server)
    os.close(descriptor)
    return pid


def _be_worker(control: socket.socket, descriptor: int, compare: Any, server: int) -> None:
    code = 1
    try:
        control.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == server:
            _serve(socket.socket(fileno=descriptor), compare)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # The forked child must never return into the server's loop.
        os._exit(code)


def _serve(connection: socket.socket, compare: Any) -> None:
    while (body := read_frame(connection.recv, max_bytes=MAX_FRAME_BYTES)) is not None:
        request = json.loads(body)
        # The default action of SIGPROF ends the process. It needs no Python, while 9**9**9 holds the interpreter lock.
        signal.setitimer(signal.ITIMER_PROF, request["time_limit_s"])
        answer = {"finding": compare(request["gold"], request["prediction"])}
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(pack_frame(json.dumps(answer).encode()))


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux" and (hard == resource.RLIM_INFINITY or hard > MEMORY_LIMIT_BYTES):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, hard))


def _load_sympy() -> Any:
    warnings.simplefilter("ignore")
    from async_rl.rewards.math.comparison import same_answers

    same_answers("x+1=\\sqrt{2}", "1+x=\\frac{2}{\\sqrt{2}}")  # what is built once is not built within a limit
    return same_answers


if __name__ == "__main__":
    main()
