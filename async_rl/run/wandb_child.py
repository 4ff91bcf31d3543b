"""The process that talks to Weights & Biases, so that nothing there can stop or delay a run. ``wandb_log`` starts it.

It reads lines of JSON from standard input: first the arguments of ``wandb.init``, then rows of metrics, then the line
``END``. It answers on standard output, also in lines of JSON:

- ``{"state": "loaded"}``: wandb is imported, and the start begins;
- ``{"state": "started", "directory": ...}``: rows are logged now, and are in this directory too;
- ``{"state": "failed", "error": ..., "is_timeout": ...}``: wandb did not start. The process ends.

The run in wandb is finished when standard input ends, as a failed one if the line ``END`` is missing, because the
parent died. If the server does not take the last rows in time, the exit code is ``UNSENT``. The command is
``python -m async_rl.run.wandb_child PARENT_PID``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import IO, Any

END = "end"
UNSENT = 3
"""Exit code of a process that wrote all rows to wandb's files, but could not send them all."""
ORPHAN_LIMIT_S = 20.0
"""Seconds in which a process whose parent has died may finish."""
_LOOK_S = 1.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # signals to stop are for the parent, which still has rows to send
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_without_parent, args=(int(sys.argv[1]),), name="parent", daemon=True).start()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what wandb prints goes to the log
    serve(sys.stdin, replies)


def serve(lines: IO[str], replies: IO[str]) -> None:
    """Log the rows in ``lines`` to wandb until they end. Answer on ``replies``."""
    settings: dict[str, Any] = json.loads(lines.readline())
    limit_s, finish_s, stats_pid = (settings.pop(key) for key in ("limit_s", "finish_s", "stats_pid"))

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    # wandb's reports about itself go to the same server, and wait for it at the end, also in offline mode.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    reply(state="loaded")
    began = time.monotonic()
    private: dict[str, Any] = {"console": "off", "silent": True, "init_timeout": limit_s, "x_stats_pid": stats_pid}
    if (
        "finish_timeout" in wandb.Settings.model_fields
    ):  # else the parent kills this process, and the last rows are lost
        private |= {"finish_timeout": finish_s, "finish_timeout_raises": True}
    try:
        run = wandb.init(**settings, settings=wandb.Settings(**private))
        # Rows carry their own step: wandb's own counter rejects the smaller steps that follow a rollback.
        run.define_metric("*", step_metric="step")
    except Exception as error:  # of wandb or of the network: the parent tells the user
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        reply(state="failed", error=cause, is_timeout=time.monotonic() - began >= 0.9 * limit_s)
        os._exit(1)  # wandb's own exit would wait for the server once more
    reply(state="started", directory=os.path.dirname(run.dir))
    is_complete = _log_all(run, lines)
    try:
        run.finish(exit_code=0 if is_complete else 1)
    except TimeoutError:
        os._exit(UNSENT)


def _log_all(run: Any, lines: Iterable[str]) -> bool:
    """Log the rows until the lines end. Return whether they were complete."""
    for line in lines:
        row = json.loads(line)
        if row == END:
            return True
        run.log(row)
    return False


def _end_without_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    time.sleep(ORPHAN_LIMIT_S)
    os._exit(1)


if __name__ == "__main__":
    main()
