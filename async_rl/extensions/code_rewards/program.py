"""The process of one Python program. The launcher forks it for every run. It gives up its rights, and runs the program.

This module is what the launcher's process (``process/sandbox/launcher.py``) runs. The process of a program begins as
process 1 of a new process namespace. It shares the launcher's other namespaces and root directory until it is confined.
When the program runs, it can change everything in this process, so nothing here is trusted then.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from async_rl.process.sandbox import launcher, system

FAILED_EXIT = 1
"""Exit code of a program that raised an exception. Python uses the same code."""

UNUSABLE_EXIT = 121
"""Exit code of a program that does not compile, or lacks the function that should be called."""

UNWRITABLE_EXIT = 120
"""Exit code of a program whose output could not be written at exit. Python uses the same code."""

FILE_NAME = "program.py"

_STAR_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io json "
    "typing"
)
"""Modules whose public names a program can use without an import. Names of builtins, such as ``pow``, are left out. If
two modules have a name in common, the later module's value is used."""

_NAMED_MODULES = (
    "sys os time string re datetime collections heapq bisect copy math random statistics itertools functools operator "
    "io json typing fractions decimal array queue"
)
"""Modules that a program can use by their names without an import."""

_RECURSION_LIMIT = 600_000

_ANSWER_FD, _REPLY_FD = 3, 4
_ASIDE_FD = 100
_SHOWN_FRAMES = 8
_CHUNK_BYTES = 1 << 20


def load_prelude(packages: Iterable[str]) -> dict[str, Any]:
    """Import the modules that programs often use, and the installed packages named in ``packages``.

    Return the names that a program with a prelude can use without an import, each with its value.

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
    """Turn this process into the program, and exit when the program ends.

    ``descriptors`` are five: the file with the program, standard input, output, standard error, and the pipe for the
    reply. ``confine_here`` is called after all other descriptors were closed, just before the program's code runs. An
    error until then is reported on the reply's pipe, which the program can't use. ``prelude`` has the names that the
    program can use without an import.
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
    """Give the five ``descriptors`` their numbers, close all others, and return the request with the program.

    Standard input, output and error get the numbers 0, 1 and 2, and the pipe for the reply gets 4. If a function is
    called, the file for output gets the number 3 for the return value, and what the program prints is discarded.
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


def _execute(request: dict[str, Any], prelude: dict[str, Any]) -> int:
    """Run the program in ``request`` and return its exit code.

    The program may change anything in this process, so whether its output is right is decided in another process.
    """
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
    """Print the last frames of a traceback. An endless recursion has 600,000 frames, which would take seconds."""
    last: deque[types.TracebackType] = deque(maxlen=_SHOWN_FRAMES)
    trace = error.__traceback__
    while trace is not None:
        last.append(trace)
        trace = trace.tb_next
    traceback.print_exception(type(error), error, last[0] if last else None, chain=False)


class _UnusableError(Exception):
    """The program does not compile, or lacks the function that should be called."""


def _compiled(request: dict[str, Any]) -> types.CodeType:
    try:
        return compile(request["source"], FILE_NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _UnusableError(f"the program does not compile: {type(error).__name__}: {error}") from None


def _run_script(module: types.ModuleType, request: dict[str, Any]) -> None:
    exec(_compiled(request), vars(module))


def _call(module: types.ModuleType, request: dict[str, Any]) -> None:
    """Run the program as a module, call the function that ``request`` names, and write the return value as JSON."""
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
    """Convert ``value`` to types that JSON has: tuples and numpy arrays to lists, keys to text.

    Raises:
        TypeError: ``value`` contains an object of another type.
    """
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


if __name__ == "__main__":
    launcher.main(load_prelude, run)
