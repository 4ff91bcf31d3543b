"""The process that talks to one tool of ``log.to``, so that nothing there can stop or delay a run.

It reads lines of JSON from standard input: first ``[NAME, SETTINGS]``, then messages ``["row", ROW]``,
``["table", [STEP, COLUMNS, ROWS]]``, ``["rewind", STEP]`` and at the end ``["end", null]``. It answers on standard
output, also in lines of JSON:

- ``{"state": "loaded"}``: the package is imported, and the start begins;
- ``{"state": "started", "place": ...}``: rows are logged now, and can be seen at this place;
- ``{"state": "failed", "error": ..., "is_away": ...}``: the tool did not start. If it is away, its server did not
  answer. The process ends;
- ``true`` or ``false`` for each message but the last: the tool took it, or raised. Before the first ``false`` of an
  error comes ``{"state": "refused", "error": ...}``.

The run is finished when standard input ends, as a failed one if the message ``end`` is missing, because the parent
died. If the server does not take the last rows in time, the exit code is ``UNSENT``. The command is
``python -m async_rl.run.logger_child PARENT_PID``.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import IO, Any

from async_rl.run.logger_tools import OPENERS, Logger

END = ("end", None)
STATES = ("loaded", "started", "failed", "refused")
UNSENT = 3
"""Exit code of a process that wrote all rows to the tool's files, but could not send them all."""
ORPHAN_LIMIT_S = 20.0
"""Seconds in which a process whose parent has died may finish."""
_LOOK_S = 1.0
_MAX_ERRORS = 8
"""Number of different errors that the parent is told."""
_ENVIRONMENT = {
    # wandb's reports about itself go to the same server, and wait for it at the end, also in offline mode.
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # By default MLflow tries for many minutes, while later rows find no room.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Variables for the tools, unless the user has set them."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # signals to stop are for the parent, which still has rows to send
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_without_parent, args=(int(sys.argv[1]),), name="parent", daemon=True).start()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the tool prints goes to the log
    serve(sys.stdin, replies)


def serve(lines: IO[str], replies: IO[str]) -> None:
    """Log the messages in ``lines`` until they end. Answer on ``replies``."""
    name, settings = json.loads(lines.readline())

    def reply(answer: Any) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    importlib.import_module(name)
    reply({"state": "loaded"})
    began = time.monotonic()
    try:
        logger = OPENERS[name](settings)
    except Exception as error:  # of the tool or of the network: the parent tells the user
        traceback.print_exc()
        is_away = _is_of_network(error) or time.monotonic() - began >= 0.9 * settings["limit_s"]
        reply({"state": "failed", "error": _describe(error), "is_away": is_away})
        os._exit(1)  # wandb's own exit would wait for the server once more
    reply({"state": "started", "place": logger.place})
    is_complete = _log_all(logger, lines, reply)
    try:
        logger.finish(is_failed=not is_complete)
    except TimeoutError:
        os._exit(UNSENT)


def _log_all(logger: Logger, lines: Iterable[str], reply: Callable[[Any], None]) -> bool:
    """Log the messages until they end. Return whether they were complete."""
    told: set[str] = set()
    for line in lines:
        kind, content = json.loads(line)
        if kind == END[0]:
            return True
        try:
            if kind == "row":
                logger.write(content)
            elif kind == "table":
                logger.table(*content)
            else:
                logger.rewind(content)
        except Exception as error:  # of the tool: the parent names the row, and the next may succeed
            cause = _describe(error)
            if cause not in told and len(told) < _MAX_ERRORS:
                traceback.print_exc()
                told.add(cause)
                reply({"state": "refused", "error": cause})
            reply(False)
        else:
            reply(True)
    return False


def _is_of_network(error: BaseException | None) -> bool:
    """Return whether a server could not be reached, which tools hide behind errors of their own."""
    while error is not None:
        packages = {one.__module__.partition(".")[0] for one in type(error).__mro__}
        if isinstance(error, ConnectionError | TimeoutError) or packages & {"requests", "urllib3", "httpx"}:
            return True
        error = error.__cause__ or error.__context__
    return False


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _end_without_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    time.sleep(ORPHAN_LIMIT_S)
    os._exit(1)


if __name__ == "__main__":
    main()
