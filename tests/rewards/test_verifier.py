"""The child process: it is killed at the limit, replaced after a crash, and never outlives its parent."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from async_rl.errors import RewardError
from async_rl.rewards import verifier as verifier_module
from async_rl.rewards.verifier import MathVerifier

HANGS = "9^{9^{9^9}}"
"""math_verify computes it in one C call that never returns to Python."""

ROOT = Path(__file__).resolve().parents[2]


def wait_until_ended(pidfd: int, timeout_s: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def test_a_hanging_answer_is_killed_at_the_limit_and_the_next_one_is_answered():
    verifier = MathVerifier()
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    pid = verifier.child_pid
    assert pid is not None
    pidfd = os.pidfd_open(pid)
    start = time.monotonic()
    assert verifier.ask("5", HANGS, 0.5) == "timed_out"
    assert time.monotonic() - start < 10
    assert wait_until_ended(pidfd, 0)
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    assert verifier.child_pid != pid
    assert verifier.counts == {"requests": 3, "timed_out": 1, "crashed": 0, "started": 2}
    verifier.close()


def test_a_child_killed_between_questions_is_replaced_unnoticed():
    verifier = MathVerifier()
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    assert verifier.child_pid is not None
    pidfd = os.pidfd_open(verifier.child_pid)
    os.kill(verifier.child_pid, signal.SIGKILL)
    assert wait_until_ended(pidfd, 30)
    assert verifier.ask("x+1", "2+x", 30.0) == "different"
    assert verifier.counts == {"requests": 2, "timed_out": 0, "crashed": 0, "started": 2}
    verifier.close()


def test_close_ends_the_child_and_can_be_repeated():
    verifier = MathVerifier()
    verifier.ask("x", "y", 30.0)
    assert verifier.child_pid is not None
    pidfd = os.pidfd_open(verifier.child_pid)
    verifier.close()
    verifier.close()
    assert wait_until_ended(pidfd, 0)
    assert verifier.child_pid is None


def test_no_child_runs_before_the_first_question():
    assert MathVerifier().child_pid is None


@pytest.mark.parametrize("answer", ["x", HANGS])
def test_the_child_ends_when_its_parent_is_killed_idle_or_busy(answer: str):
    # The busy child is ended by its own alarm, the limit plus a second; the idle one by the end of its stdin.
    program = (
        "import sys; from async_rl.rewards import verifier as v\n"
        "verifier = v.MathVerifier(); verifier.ask('x', 'y', 30.0)\n"
        "print(verifier.child_pid, flush=True); sys.stdin.read(1)\n"
        f"v._send(verifier._child, {{'gold': '5', 'prediction': {answer!r}, 'time_limit_s': 1.0}})\n"
        "print('asked', flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    parent.stdin.write("g")
    parent.stdin.flush()
    assert parent.stdout.readline() == "asked\n"
    parent.kill()
    parent.wait()
    assert wait_until_ended(pidfd, 60)
    parent.stdin.close()
    parent.stdout.close()


def test_threads_get_their_own_answers():
    verifier = MathVerifier()
    verdicts: dict[int, str] = {}

    def ask(number: int) -> None:
        verdicts[number] = verifier.ask(f"x+{number}", f"{number % 4}+x", 60.0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Number 0 to 3 equal themselves modulo 4; 4 to 7 don't.
    assert verdicts == {n: "equal" if n < 4 else "different" for n in range(8)}
    verifier.close()


def test_a_child_that_can_not_start_is_an_error_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    real = subprocess.Popen

    def start(arguments: list[str], **options: object):
        return real([arguments[0], "-c", "raise SystemExit(3)"], **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(verifier_module.subprocess, "Popen", start)
    with pytest.raises(RewardError, match=r"did not start; run 'python -m async_rl\.rewards\.equality_child"):
        MathVerifier().ask("x", "y", 5.0)


def test_the_child_needs_no_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    verifier = MathVerifier()
    assert verifier.ask("x+1", "1+x", 30.0) == "equal"
    verifier.close()
