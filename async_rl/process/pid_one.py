"""The first process of a container, PID 1: pass on signals, reap orphans, exit as the command does.

The kernel drops every signal to PID 1 for which it has no handler, so SIGTERM would not end most commands. It also
makes PID 1 the parent of every process whose own parent has ended, and such a process stays a zombie until PID 1 reaps
it. A command that starts as PID 1 therefore continues in a child of a process that does only this.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

_FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH
)  # fmt: skip


def leave_pid_one() -> None:
    """If this process is PID 1, continue in a child of it, and never return in PID 1 itself. Otherwise do nothing.

    PID 1 exits with the child's code, or with 128 + N if signal N killed it. The kernel then kills all that is left.
    Call it before threads are started, because a child has only the thread that forks it.
    """
    if os.getpid() != 1:
        return
    awaited = {*_FORWARDED, signal.SIGCHLD}
    # Blocked signals stay pending until sigwait takes them, also those that PID 1 would otherwise never get.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child:
        _serve(child, awaited)
    _own_terminal()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _own_terminal() -> None:
    """Make this process a process group of its own, in the terminal's foreground.

    So Ctrl-C reaches the command once. With PID 1 in the group, which passes it on, it would arrive twice, and to
    ``launch`` a second signal means to end at once.
    """
    os.setpgid(0, 0)
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a process in the background would be stopped
    with contextlib.suppress(OSError):  # standard input is no terminal, or that of others
        os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, before)


def _serve(child: int, awaited: set[signal.Signals]) -> NoReturn:
    """Pass on signals to ``child`` and reap processes until it ends, then exit as it did."""
    while True:
        received = signal.sigwait(awaited)
        if received != signal.SIGCHLD:
            os.kill(child, received)  # it is at most a zombie, as only this function reaps it
            continue
        # One signal may stand for several ended processes.
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                os._exit(code if code >= 0 else 128 - code)
