"""Signals as a request to save and end: once, twice, too late, and while the main thread can't see them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import pytest

from async_rl.process import stop as stop_module
from async_rl.process.stop import StopRequest
from tests.forked import Forked, preload

preload("async_rl.process.stop")
DEADLINE_S = 30.0


class Exits:
    """What would have ended the process."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.happened.set()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_is_passed_on_once(signum: signal.Signals):
    exits, passed_on, told = Exits(), [], threading.Event()
    before = [signal.getsignal(s) for s in stop_module.SIGNALS]

    def tell(got: int) -> None:
        passed_on.append(got)
        told.set()

    with StopRequest(3600.0, on_request=tell, exit_now=exits) as stop:
        assert stop.signum == 0
        signal.raise_signal(signum)
        assert told.wait(DEADLINE_S)
        assert stop.signum == signum
        signal.raise_signal(signum)  # at once: the same request, by way of a parent
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert (passed_on, exits.codes) == ([signum], [])
    assert all(timer.finished.is_set() for timer in timers)  # nothing ends the process after the block
    assert [signal.getsignal(s) for s in stop_module.SIGNALS] == before


def test_a_second_signal_ends_the_process_with_the_code_of_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stop_module, "SAME_REQUEST_S", 0.0)
    exits = Exits()
    with StopRequest(3600.0, exit_now=exits) as stop:
        stop.request(signal.SIGTERM, " at another rank")
        signal.raise_signal(signal.SIGINT)
        assert exits.happened.wait(DEADLINE_S)
    assert exits.codes == [143]


def test_a_request_that_is_not_served_in_time_ends_the_process(caplog: pytest.LogCaptureFixture):
    exits = Exits()
    StopRequest(0.01, exit_now=exits).request(signal.SIGTERM)
    assert exits.happened.wait(DEADLINE_S)
    assert exits.codes == [143]
    assert "the same command resumes from the last whole checkpoint" in caplog.text


def block_in_a_call() -> None:
    """Never return to Python: lock a mutex of the C library twice. No signal interrupts that."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    with StopRequest(0.2):
        os.write(1, b"ready\n")
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)


def test_a_process_whose_main_thread_is_stuck_ends_in_time():
    child = Forked(block_in_a_call)
    try:
        path = f"/proc/{child.pid}/fd/1"
        deadline = threading.Event()
        while not os.path.exists(path) or b"ready" not in open(path, "rb").read():  # noqa: SIM115
            assert child.poll() is None
            deadline.wait(0.01)
        child.terminate()
        assert child.wait(DEADLINE_S) == 143
    finally:
        child.kill()
