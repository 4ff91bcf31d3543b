"""The workers: ended at the limit of processor time, replaced after a crash, and never outliving their parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.errors import RewardError
from async_rl.process import helper
from async_rl.rewards.math import verifier as verifier_module
from async_rl.rewards.math.verifier import MAX_WORKERS, SLOW_WORKERS, MathVerifier
from tests.end_to_end.harness import wait_until
from tests.processes import parent_of, wait_until_ended

HANGS = "9^{9^{9^9}}"
"""Python computes it in one C call that never returns to Python."""

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier()
    yield verifier
    verifier.close()


def test_a_hanging_answer_is_ended_at_the_limit_and_the_next_one_is_answered(verifier: MathVerifier):
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    (pid,) = verifier.idle_pids
    pidfd = os.pidfd_open(pid)
    assert verifier.ask("5", HANGS, 0.5) == "timed_out"
    assert wait_until_ended(pidfd, 0)
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    assert verifier.idle_pids != (pid,)
    assert verifier.counts == {"requests": 3, "not_computed": 0, "timed_out": 1, "crashed": 0, "started": 3}


def test_an_honest_answer_does_not_wait_for_hanging_ones(verifier: MathVerifier):
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    ended: list[str] = []

    def ask(name: str, prediction: str, limit_s: float) -> None:
        verifier.ask("5", prediction, limit_s)
        ended.append(name)

    # Each bomb has 20 seconds of a processor that all of them share, so the honest answers end first on any machine,
    # although there are more bombs than workers of either queue.
    num_bombs = MAX_WORKERS + SLOW_WORKERS + 4
    bombs = [threading.Thread(target=ask, args=("bomb", HANGS, 20.0)) for _ in range(num_bombs)]
    for bomb in bombs:
        bomb.start()
    # All have begun; the slow ones are started again.
    wait_until("all bombs", lambda: verifier.counts["started"] >= num_bombs)
    for _ in range(3):
        ask("honest", "x+5", 20.0)
    assert ended == ["honest"] * 3
    verifier.close()
    for bomb in bombs:
        bomb.join()


def test_a_right_answer_that_takes_longer_than_the_first_limit_is_right(
    verifier: MathVerifier, monkeypatch: pytest.MonkeyPatch
):
    # It takes 50 ms or more. A worker is ended at the first limit, and another one has the whole limit.
    monkeypatch.setattr(verifier_module, "FIRST_LIMIT_S", 0.001)
    gold = "+".join(rf"\sin({x})^2+\cos({x})^2+{x}^{{20}}" for x in "abcdfgh")
    assert verifier.ask(gold, "7+" + "+".join(f"{x}^{{20}}" for x in "abcdfgh"), 30.0) == "equal"
    assert verifier.counts == {"requests": 1, "not_computed": 0, "timed_out": 0, "crashed": 0, "started": 2}


def test_time_in_which_a_worker_does_not_run_is_not_counted(verifier: MathVerifier):
    # As on a machine so busy that the worker gets no processor for two seconds.
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    (pid,) = verifier.idle_pids
    os.kill(pid, signal.SIGSTOP)
    verdicts: list[str] = []
    thread = threading.Thread(target=lambda: verdicts.append(verifier.ask("x+1", "1+x", 1.0)))
    thread.start()
    time.sleep(2.0)  # twice the limit
    os.kill(pid, signal.SIGCONT)
    thread.join()
    assert verdicts == ["equal"]
    assert verifier.idle_pids == (pid,)


def test_a_worker_killed_between_questions_is_replaced_unnoticed(verifier: MathVerifier):
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    (pid,) = verifier.idle_pids
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert wait_until_ended(pidfd, 30)
    assert verifier.ask("x+1", "2+x", 30.0) == "different"
    assert verifier.counts == {"requests": 2, "not_computed": 0, "timed_out": 0, "crashed": 0, "started": 2}


def test_a_server_killed_between_questions_is_replaced_with_its_workers(verifier: MathVerifier):
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    (pid,) = verifier.idle_pids
    pidfds = [os.pidfd_open(number) for number in (pid, parent_of(pid))]
    os.kill(parent_of(pid), signal.SIGKILL)
    assert all(wait_until_ended(pidfd, 30) for pidfd in pidfds)
    assert verifier.ask("x+1", "2+x", 30.0) == "different"
    assert verifier.counts == {"requests": 2, "not_computed": 0, "timed_out": 0, "crashed": 0, "started": 2}


def test_close_ends_the_processes_and_can_be_repeated():
    verifier = MathVerifier()
    verifier.ask("x", "y", 30.0)
    (pid,) = verifier.idle_pids
    pidfds = [os.pidfd_open(number) for number in (pid, parent_of(pid))]
    verifier.close()
    verifier.close()
    assert all(wait_until_ended(pidfd, 30) for pidfd in pidfds)
    assert verifier.idle_pids == ()


@pytest.mark.parametrize("answer", ["x", HANGS])
def test_the_processes_end_when_their_parent_is_killed_idle_or_busy(answer: str):
    program = (
        "import sys, threading; from async_rl.rewards.math.verifier import MathVerifier\n"
        "verifier = MathVerifier(); verifier.ask('x', 'y', 30.0)\n"
        "print(*verifier.idle_pids, flush=True); sys.stdin.read(1)\n"
        f"threading.Thread(target=verifier.ask, args=('5', {answer!r}, 300.0), daemon=True).start()\n"
        "print('asked', flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    pidfds = [os.pidfd_open(number) for number in (pid, parent_of(pid))]
    parent.stdin.write("g")
    parent.stdin.flush()
    assert parent.stdout.readline() == "asked\n"
    parent.kill()
    parent.wait()
    assert all(wait_until_ended(pidfd, 60) for pidfd in pidfds)
    parent.stdin.close()
    parent.stdout.close()


def test_processes_that_can_not_start_are_an_error_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(helper, "module_command", lambda *_, **__: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RewardError, match="did not start"):
        MathVerifier().ask("x", "y", 5.0)


def test_the_child_needs_no_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    verifier = MathVerifier()
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    verifier.close()
