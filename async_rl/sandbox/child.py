"""One program's process: it confines itself further, then becomes the program. The launcher forks it for every run.

It begins as process 1 of a process namespace of its own, in the launcher's other namespaces and root. After ``confine``
nothing here is trusted: the program shares this process and can change all of it.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import json
import linecache
import math
import os
import resource
import signal
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from async_rl.sandbox import system


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one run of one program.

    Attributes:
        time_s: wall-clock seconds; the limit on processor seconds is about the same.
        memory_bytes: address space.
        output_bytes: size of standard output, and of any file that it writes.
        scratch_bytes: size of all files in its private directory together.
        max_threads: number of threads, the main one included. A program can't start processes.
    """

    time_s: float
    memory_bytes: int
    output_bytes: int
    scratch_bytes: int
    max_threads: int

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Limits:
        return cls(**record)


FAILED_EXIT = 1
"""The program raised an exception; the same code as Python's."""

UNUSABLE_EXIT = 121
"""The program does not compile, or lacks the function."""

UNWRITABLE_EXIT = 120
"""The program's output could not be flushed at exit; the same code as Python's."""

ENVIRONMENT = {
    "HOME": system.SCRATCH,
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "PATH": "",
    "PYTHONHASHSEED": "0",  # the same program gives the same output
    "TMPDIR": system.SCRATCH,
    "TZ": "UTC",
    # Numerical libraries start one thread per core when imported; a forked child would lack these threads.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The complete environment of a program."""

FILE_NAME = "program.py"

_STAR_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io json "
    "typing"
)
"""Modules whose public names are in the prelude, except names of builtins (``math.pow``). Later modules win."""

_NAMED_MODULES = (
    "sys os time string re datetime collections heapq bisect copy math random statistics itertools functools operator "
    "io json typing fractions decimal array queue"
)
"""Modules that are in the prelude under their names."""

_RECURSION_LIMIT = 600_000
_STACK_BYTES = 112 << 20
"""Stack limit. Linux keeps 128 MiB free below the main thread's stack; a larger stack could hit other memory."""

_ANSWER_FD, _REPLY_FD = 3, 4
_ASIDE_FD = 100
_MAX_OPEN_FILES = 64
_SHOWN_FRAMES = 8
_CHUNK_BYTES = 1 << 20


def load_prelude(packages: Iterable[str]) -> dict[str, Any]:
    """Import the modules that programs often use, and ``packages``.

    Return the names that every program can use without an import, each with its value.

    Raises:
        ImportError: one of ``packages`` is not installed.
    """
    names: dict[str, Any] = {}
    for module_name in _STAR_MODULES.split():
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names |= {name: getattr(module, name) for name in public if not hasattr(builtins, name)}
    names |= {name: importlib.import_module(name) for name in (*_NAMED_MODULES.split(), *packages)}
    # "from datetime import *" and "import datetime" disagree about one name; programs mean the class more often.
    names["datetime"] = importlib.import_module("datetime").datetime
    return names


def run(descriptors: Sequence[int], confine_here: Callable[[], None], prelude: dict[str, Any]) -> NoReturn:
    """Become the program. ``descriptors``: program, standard input, output, standard error, reply.

    ``confine_here`` is called just before the program's code, when all other descriptors are closed. Earlier errors are
    reported on the reply's pipe, which the program never sees.
    """
    reply = descriptors[-1]
    try:
        request = _take_descriptors(descriptors)
        reply = _REPLY_FD
        confine_here()
    except BaseException as error:
        cause = f"can't confine a program: {type(error).__name__}: {error}"
        os.write(reply, json.dumps({"failed": cause}).encode() + b"\n")
        os._exit(FAILED_EXIT)
    os.close(_REPLY_FD)  # now only 0, 1, 2 and, for calls, the answer's descriptor are open
    os._exit(_execute(request, prelude))


def _take_descriptors(descriptors: Sequence[int]) -> dict[str, Any]:
    """Put the request's descriptors in their places and read the program.

    0, 1 and 2 are standard; the answer of a call goes to 3, and its standard output nowhere; 4 is the reply.
    """
    program, stdin, output, errors, reply = descriptors
    size = os.fstat(program).st_size
    request = json.loads(os.pread(program, size, 0))
    is_call = request["function"] is not None
    # First move all to free numbers, because a descriptor may have the target number of another.
    places = [os.dup2(fd, _ASIDE_FD + index) for index, fd in enumerate((stdin, output, errors, reply))]
    os.dup2(places[0], 0)
    os.dup2(os.open("/dev/null", os.O_WRONLY) if is_call else places[1], 1)
    os.dup2(places[2], 2)
    os.dup2(places[1], _ANSWER_FD)
    os.dup2(places[3], _REPLY_FD)
    system.close_from(_REPLY_FD + 1)
    if not is_call:
        os.close(_ANSWER_FD)
    return request


def confine(limits: Limits, seccomp_filter: bytes) -> None:
    """Give the process its own directory, network and user namespace, limits, no capabilities and few system calls.

    Raises:
        OSError: the kernel refuses one of them.
    """
    os.setsid()
    system.unshare(system.CLONE_NEWNS | system.CLONE_NEWNET)
    system.mount_scratch(limits.scratch_bytes)
    # A separate user namespace, with no user mapped into it, counts the program's threads separately.
    system.unshare(system.CLONE_NEWUSER)
    set_limits(limits)
    resource.setrlimit(resource.RLIMIT_NPROC, (limits.max_threads, limits.max_threads))
    system.prctl(system.PR_SET_NO_NEW_PRIVS, 1)
    system.drop_capabilities()
    system.load_filter(seccomp_filter)


def set_limits(limits: Limits) -> None:
    """Set all limits but that on threads, for this process and all that it starts."""
    cpu_s = math.ceil(limits.time_s) + 1
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits.output_bytes),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_AS, limits.memory_bytes),
    ):
        resource.setrlimit(kind, (value, value))
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))


def _execute(request: dict[str, Any], prelude: dict[str, Any]) -> int:
    """Run the program and return its exit code. The verdict is reached outside this process, which it may change."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    importlib.import_module("random").seed(0)
    sys.argv[:] = [FILE_NAME]
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        stream = os.fdopen(fd, mode, encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if request["prelude"]:
        vars(module).update(prelude)
    source: str = request["source"]
    linecache.cache[FILE_NAME] = (len(source), None, source.splitlines(keepends=True), FILE_NAME)
    code = _guarded(_call if request["function"] is not None else _run_script, module, request)
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return code or UNWRITABLE_EXIT
    return code


def _guarded(body: Any, module: types.ModuleType, request: dict[str, Any]) -> int:
    try:
        body(module, request)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        sys.stderr.write(f"{leaving.code}\n")
        return FAILED_EXIT
    except _UnusableError as error:
        sys.stderr.write(f"{error}\n")
        return UNUSABLE_EXIT
    except BaseException as error:
        _print_end_of_trace(error)
        return FAILED_EXIT
    return 0


def _print_end_of_trace(error: BaseException) -> None:
    """Print the innermost frames. Formatting all 600,000 frames of an endless recursion would take seconds."""
    last: deque[types.TracebackType] = deque(maxlen=_SHOWN_FRAMES)
    trace = error.__traceback__
    while trace is not None:
        last.append(trace)
        trace = trace.tb_next
    traceback.print_exception(type(error), error, last[0] if last else None, chain=False)


class _UnusableError(Exception):
    """The program does not compile, or lacks the function."""


def _compiled(request: dict[str, Any]) -> types.CodeType:
    try:
        return compile(request["source"], FILE_NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _UnusableError(f"{type(error).__name__}: {error}") from None


def _run_script(module: types.ModuleType, request: dict[str, Any]) -> None:
    exec(_compiled(request), vars(module))


def _call(module: types.ModuleType, request: dict[str, Any]) -> None:
    """Define the program's functions, call the one that is asked for, write what it returns."""
    arguments = json.loads(request["arguments"])
    # Like other judges: code under `if __name__ == "__main__"` does not run.
    module.__name__ = "program"
    exec(_compiled(request), vars(module))
    name: str = request["function"]
    function = getattr(module, name, None)
    if function is None and hasattr(module, "Solution"):
        function = getattr(module.Solution(), name, None)
    if function is None:
        raise _UnusableError(f"expected the program to define a function {name}, got none")
    answer = json.dumps(_plain(function(*arguments))).encode()
    for start in range(0, len(answer), _CHUNK_BYTES):
        _write_all(_ANSWER_FD, answer[start : start + _CHUNK_BYTES])


def _plain(value: Any) -> Any:
    """Convert ``value`` to the types of JSON, tuples to lists. Objects of other types are refused."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    if type(value) is dict:
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        return _plain(value.tolist())
    raise TypeError(f"expected a returned value that JSON can represent, got {type(value).__name__}")


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
