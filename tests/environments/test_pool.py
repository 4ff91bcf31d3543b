"""Environments in real processes: what a rollout is asked and told; its faults cost it alone."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.pool import EnvironmentPool, Event
from async_rl.errors import ConfigError
from async_rl.process.fork_client import FORK_LIMIT_S
from async_rl.process.user_code import code_digests
from tests.end_to_end.harness import processes_of, state_of, wait_until
from tests.environments.pools import pool_of

TIMEOUT_S = 1.0
SAMPLES = str(Path(__file__).with_name("samples.py"))


def config(name: str = SAMPLES, **settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig(name=name, **settings)


STEP = "async def step(state, action, extra_info): ...\n"


class Driver:
    """A pool whose rollouts are told what to do, one order after another. Only ``pass_time`` makes its time pass."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._now_s = 0.0
        self.pool = pool_of(config, clock=lambda: self._now_s)
        self.waiting: list[Event] = []

    def pass_time(self, seconds: float = 2 * TIMEOUT_S) -> None:
        """Let more than ``environment.timeout_s`` pass."""
        self._now_s += seconds

    def start(self, *keys: str, **extra_info: Any) -> None:
        for index, key in enumerate(keys):
            info = {"idx": index, **extra_info}
            self.pool.start(
                key, {"prompt": "the row", "state": "the row", "extra_info": info, "seed": 5, "max_turns": 4}
            )

    def await_process(self) -> None:
        """Wait until a process plays a rollout."""
        wait_until("a process", lambda: self.waiting.extend(self.pool.poll()) or self.pool.pids)

    def next(self, key: str) -> Any:
        """The next message of ``key``."""

        def probe() -> Event | None:
            self.waiting += self.pool.poll()
            return next((event for event in self.waiting if event.key == key), None)

        event = wait_until(f"rollout {key}", probe, deadline_s=30.0)
        self.waiting.remove(event)
        return event.message

    def say(self, key: str, text: str) -> None:
        self.pool.answer(key, {"type": "sampled", "text": text, "finish_reason": "stop", "num_tokens": len(text)})

    def order(self, key: str, text: str) -> Any:
        self.say(key, text)
        return self.next(key)


@contextlib.contextmanager
def driving(*arguments: Any, **settings: Any) -> Iterator[Driver]:
    driver = Driver(config(*arguments, timeout_s=TIMEOUT_S, **settings))
    with contextlib.closing(driver.pool):
        yield driver


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> str:
    """What marks this test's processes in their environment, for ``processes_of``."""
    value = str(time.monotonic_ns())
    monkeypatch.setenv("ASYNC_RL_TEST_MARKER", value)
    return f"ASYNC_RL_TEST_MARKER={value}"


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """Shared: a pool that outlives whatever its rollouts did is what is promised."""
    with driving() as made:
        yield made


def test_a_rollout_is_reset_and_stepped_until_it_is_done_or_has_had_its_turns(driver):
    driver.start("a", "b", "c")
    assert driver.next("a") == {"type": "sample", "state": "start 0;", "max_tokens": None, "stop": []}
    assert driver.order("a", "go")["state"] == "start 0;go;"
    # "go" earned 2 (its score is the reward then), "stop" 4 with a score of its own.
    assert driver.order("a", "stop") == {"type": "ended", "turns": [[2.0, 2.0], [4.0, 1.0]]}
    # The last of four turns is the end. So is the lack of room for a turn.
    driver.next("b")
    assert [driver.order("b", "x")["type"] for _ in range(4)] == ["sample"] * 3 + ["ended"]
    driver.next("c")
    driver.order("c", "go")
    driver.pool.answer("c", {"type": "over"})
    assert driver.next("c") == {"type": "ended", "turns": [[2.0, 2.0]]}


def test_rollouts_of_one_seed_draw_the_same_random_numbers_in_their_own_processes(driver):
    driver.start("a", "b")
    states = [(driver.next(key), driver.order(key, "draw"))[1]["state"] for key in ("a", "b")]
    assert states[0].split(";")[1] == states[1].split(";")[1]
    pids = [driver.order(key, "pid")["state"] for key in ("a", "b")]
    assert pids[0].split("pid")[1] != pids[1].split("pid")[1]
    for key in ("a", "b"):
        driver.pool.cancel(key)


@pytest.mark.parametrize("misdeed", ["spin", "sleep", "exit", "recurse", "raise", "ignore", "leave"])
def test_an_environment_that_hangs_or_crashes_costs_its_own_rollout_alone(driver, misdeed):
    driver.start("good", "bad")
    driver.next("good")
    driver.next("bad")
    driver.say("bad", misdeed)
    assert driver.order("good", "go")["state"] == "start 0;go;"
    if misdeed in ("spin", "sleep", "ignore"):
        driver.pass_time()
    message = driver.next("bad")
    assert message["type"] == "failed"
    reasons = {"raise": "no such key", "exit": "ended", "recurse": "ended", "leave": "ended"}
    assert reasons.get(misdeed, "timeout_s = 1 s") in message["error"]
    assert driver.order("good", "stop")["type"] == "ended"


MESSAGE = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("reset", "action", "told"),
    [
        ({}, "none", "step: expected a dict, got NoneType"),
        ({}, "nan", "reward: expected a finite number, got nan"),
        ({}, "typo", "got also ['dnoe']"),
        ({}, "no state", "next_state: expected text or a list of messages, got NoneType"),
        ({"first": [MESSAGE]}, "print", "got text that begins with Python's print of them"),
        ({"first": 7}, "", "reset: expected text or a list of messages, got int"),
        ({"first": [MESSAGE, "more"]}, "", "a list whose item 1 is 'more' (str)"),
        ({"first": [[MESSAGE]]}, "", f"item 0 is [{MESSAGE}] (list)"),
        ({"first": [{**MESSAGE, "content": 7}]}, "", "item 0 has 7 (int) as its content"),
        ({"first": []}, "", "got an empty list"),
    ],
)
def test_a_malformed_state_or_result_is_told_in_its_authors_words(driver, reset, action, told):
    driver.start("a", **reset)
    message = driver.next("a")
    if action:
        message = driver.order("a", action)
    assert message["type"] == "failed"
    assert told in message["error"]


PREPARED = """
import os
prepared = []

def prepare(extra):
    prepared.append((extra["size"], os.getpid()))

def reset(extra_info):
    ((size, pid),) = prepared
    return f"{size} {pid == os.getppid()}"
"""


def test_an_environment_prepares_once_in_the_process_that_is_forked(tmp_path):
    path = tmp_path / "prepared.py"
    path.write_text(PREPARED + STEP)
    with driving(str(path), extra={"size": 3}) as driver:
        driver.start("a", "b")
        assert [driver.next(key)["state"] for key in "ab"] == ["3 True", "3 True"]


def test_the_first_reset_of_a_process_has_a_limit_of_its_own():
    with driving(first_reset_timeout_s=3 * TIMEOUT_S) as driver:
        driver.start("a", reset="sleep")
        assert driver.pool.is_working("a")
        driver.await_process()  # the limit begins with the process
        driver.pass_time()
        assert driver.pool.poll() == []
        driver.pass_time()
        assert (
            "the environment's first reset took longer than environment.first_reset_timeout_s = 3 s"
            in (driver.next("a")["error"])
        )
        driver.start("b")
        driver.next("b")
        assert not driver.pool.is_working("b")  # it waits for the model
        driver.order("b", "stop")
        driver.start("c", reset="sleep")  # in the process that has played b, where everything is imported
        driver.pass_time()
        assert "reset or step took longer than environment.timeout_s = 1 s" in driver.next("c")["error"]


def test_a_process_plays_again_without_what_a_rollout_left_in_its_background(driver):
    driver.start("a")
    driver.next("a")
    (pid,) = driver.pool.pids
    assert driver.order("a", "tasks")["state"] == "start 0;2 tasks;"  # the one that reads messages, and this one
    driver.order("a", "linger")
    assert driver.order("a", "tasks")["state"] == "start 0;2 tasks;linger;3 tasks;"
    assert driver.order("a", "stop")["type"] == "ended"
    driver.start("b")
    driver.next("b")
    assert driver.pool.pids == [pid]
    assert driver.order("b", "tasks")["state"] == "start 0;2 tasks;"
    driver.pool.cancel("b")


def test_generate_plays_the_whole_rollout_itself_and_names_when_its_answers_end():
    with driving(f"{SAMPLES}:Player") as driver:
        driver.start("a", stop=["!"])
        assert driver.next("a") == {"type": "sample", "state": "first:", "max_tokens": 3, "stop": ["!"]}
        assert driver.order("a", "hm!")["state"] == [{"role": "user", "content": "hm!"}]
        assert driver.order("a", "four") == {"type": "ended", "turns": [[0.5, 0.5], [3.0, 1.0]]}
        # These would end every answer.
        driver.start("b", stop="###")
        assert "expected a list of texts, got the text '###'" in driver.next("b")["error"]
        driver.start("c", stop=["#", ""])
        assert "expected texts that are not empty" in driver.next("c")["error"]


def kill_server(driver: Driver) -> None:
    """Kill the fork server, and wait until the pool has started another one or refuses to."""
    server = driver.pool._server.pid
    os.kill(server, signal.SIGKILL)
    wait_until(
        "another fork server", lambda: driver.waiting.extend(driver.pool.poll()) or driver.pool._server.pid != server
    )


def test_a_fork_server_killed_while_it_imports_is_replaced_a_few_times_if_one_before_did_import():
    with driving() as driver:
        for _ in range(2):
            kill_server(driver)
            assert not driver.pool._server.is_ready
            kill_server(driver)
            driver.start("a")
            driver.next("a")  # and so they are counted anew
            assert driver.order("a", "stop")["type"] == "ended"
        for _ in range(3):
            kill_server(driver)
        with pytest.raises(ConfigError, match="ended with exit code -9"):
            kill_server(driver)


FATES = ("x", "stop", "exit", "raise", "nan", "killed", "cancelled", "killed and cancelled", "ended, then answered")


@pytest.mark.parametrize("fates", list(itertools.combinations_with_replacement(FATES, 2)))
def test_of_two_events_in_one_poll_neither_is_lost_or_twice_there(driver: Driver, fates: tuple[str, str]):
    keys = ("a", "b")
    driver.start(*keys)
    for key in keys:
        driver.next(key)
    processes = {key: driver.pool._processes[key] for key in keys}
    for key, fate in zip(keys, fates, strict=True):
        if fate not in ("killed", "cancelled", "killed and cancelled"):
            driver.say(key, "stop" if fate.startswith("ended") else fate)
        if fate.startswith("killed"):
            os.kill(processes[key].pid, signal.SIGKILL)
        if fate.endswith("cancelled"):
            driver.pool.cancel(key)
    for process in processes.values():  # both are there before the pool looks
        assert select.select([process.channel.socket], [], [], 30.0)[0]
    events = driver.pool.poll()
    wanted = {"x": "sample", "stop": "ended", "ended, then answered": "ended"}
    told = {key: wanted.get(fate, "failed") for key, fate in zip(keys, fates, strict=True)}
    told = {key: kind for key, kind in told.items() if not fates[keys.index(key)].endswith("cancelled")}
    wait_until("all events", lambda: events.extend(driver.pool.poll()) or len(events) >= len(told))
    assert {event.key: event.type for event in events} == told
    assert len(events) == len(told)
    for key in keys:  # late answers and cancellations of those that have ended are ignored
        driver.pool.answer(key, {"type": "over"})
        driver.pool.cancel(key)
    driver.start("c")
    assert driver.next("c")["type"] == "sample"
    assert driver.order("c", "stop")["type"] == "ended"
    assert driver.waiting == []


def test_a_stopped_fork_server_blocks_no_call_and_is_replaced(caplog: pytest.LogCaptureFixture):
    with driving() as driver:
        driver.start("a")
        driver.next("a")
        server = driver.pool._server.pid
        os.kill(server, signal.SIGSTOP)
        began_s = time.monotonic()
        driver.start("b", "c")
        driver.pool.cancel("c")
        assert driver.pool.poll() == []
        assert time.monotonic() - began_s < 5.0  # no call waits
        assert driver.order("a", "on")["type"] == "sample"  # the others go on
        driver.pass_time(5.0)
        assert driver.pool.poll() == []
        assert f"fork server (process {server}) has not answered for 5 s" in caplog.text
        driver.pass_time(FORK_LIMIT_S)
        driver.waiting += driver.pool.poll()
        assert "ended" in driver.next("a")["error"]  # its process ended with the server
        driver.next("b")
        assert driver.order("b", "stop")["type"] == "ended"
        assert state_of(server) is None


GATED_FORK = """
import asyncio, os
os.register_at_fork(before=lambda: os.read(gate, 1))
gate = os.open(os.path.join(os.path.dirname(__file__), "gate"), os.O_RDWR)
async def reset(extra_info):
    return "begun"
async def step(state, action, extra_info):
    await asyncio.sleep(3600)
"""


@contextlib.contextmanager
def gated(directory: Path, **settings: Any) -> Iterator[tuple[Driver, int]]:
    """Rollouts each of whose forks takes until a byte is written to the descriptor."""
    os.mkfifo(directory / "gate")
    (directory / "gated.py").write_text(GATED_FORK)
    with driving(str(directory / "gated.py"), **settings) as driver:
        gate = os.open(directory / "gate", os.O_RDWR)
        yield driver, gate
        os.close(gate)


def test_a_fork_server_that_answers_steadily_is_alive_however_long_its_queue_is(tmp_path: Path):
    with gated(tmp_path) as (driver, gate):
        driver.start("a", "b", "c")  # the last one waits for 40 s
        server = driver.pool._server
        for key in ("a", "b", "c"):
            assert driver.pool.awaits_fork(key)
            os.write(gate, b"x")
            assert driver.next(key)["type"] == "sample"
            assert not driver.pool.awaits_fork(key)
            driver.pass_time(20.0)
            assert driver.pool.poll() == []
        # That it has killed a process is a sign of life, too.
        driver.say("a", "sleep")
        driver.pass_time()
        assert driver.next("a")["type"] == "failed"
        driver.start("d")
        driver.pass_time(20.0)
        select.select([server.control], [], [], 30.0)
        assert driver.pool.poll() == []
        driver.pass_time(20.0)
        assert driver.pool.poll() == []
        # "d" has waited for 40 s, and nothing was answered in the last 20 s.
        assert (server.silent_s, driver.pool._server) == (20.0, server)
        driver.pass_time(FORK_LIMIT_S)
        driver.waiting += driver.pool.poll()
        assert driver.pool._server is not server
        assert "ended" in driver.next("b")["error"]


@pytest.mark.parametrize("ends", ["the process", "the pool", "the fork server", "by many signals"])
def test_grandchildren_in_sessions_of_their_own_end_too(marker: str, ends: str):
    with driving() as driver:
        driver.start("a")
        driver.next("a")
        server = driver.pool._server.pid
        assert driver.order("a", "daemon")["type"] == "sample"
        wait_until("the grandchildren", lambda: len(processes_of(marker)) == 4)
        if ends == "the process":
            driver.say("a", "sleep")
            driver.pass_time()
            assert driver.next("a")["type"] == "failed"
            wait_until("only the fork server to be left", lambda: len(processes_of(marker)) == 1)
        elif ends == "the fork server":
            os.kill(server, signal.SIGKILL)
            assert driver.next("a")["type"] == "failed"
            wait_until("only a new fork server", lambda: driver.pool.poll() or len(processes_of(marker)) == 1)
        elif ends == "by many signals":
            # A generator that dies gives two reasons to end: its socket closes, and then the kernel sends the signal.
            while state_of(server) not in (None, "Z"):
                os.kill(server, signal.SIGTERM)
            wait_until("all its processes to end", lambda: not processes_of(marker), deadline_s=20.0)
    assert processes_of(marker) == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("while True: pass", "not imported and prepared within 1 s"),
        (f"{STEP}def prepare(extra):\n    extra['index']", r"its function prepare failed: KeyError: 'index' .*line 3"),
        (f"{STEP}def prepare():\n    pass", r"got another one; write prepare\(extra\), in a class as a static method"),
        (f"{STEP}prepare = 3", "or give it another name"),
        ("x = 1", "to have a function step"),
    ],
)
def test_code_that_can_not_be_imported_is_refused_at_the_start(tmp_path, monkeypatch, source, told):
    monkeypatch.setattr("async_rl.process.fork_client.START_TIMEOUT_S", 1.0 if "while" in source else 60.0)
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=told):
        pool_of(config(str(path)))


def test_settings_that_are_no_json_and_code_that_is_not_allowed_or_another_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"environment\.extra: .*use only text, numbers"):
        pool_of(config(extra={"day": date(2026, 1, 1)}))
    path = tmp_path / "mine.py"
    path.write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')\n{STEP}")
    name = str(path)
    with pytest.raises(ConfigError, match=r"does not allow it; .* generator\.allow_code = \["):
        EnvironmentPool(config(name), allowed=["other.py"], digest=None)
    with pytest.raises(ConfigError, match=r"environment\.name: .*expected the learner's source"):
        pool_of(config(name), digest="0" * 64)
    assert not (tmp_path / "was_here").exists()
    pool_of(config(name), digest=code_digests([name])[name]).close()


def test_nothing_outlives_a_generator_that_is_killed(tmp_path):
    program = textwrap.dedent(f"""
        import sys, time
        from tests.environments.test_pool import Driver, config
        driver = Driver(config())
        driver.start("a", "b")
        driver.next("a"), driver.next("b")
        driver.order("b", "daemon")
        driver.say("a", "spin")
        print("ready", flush=True)
        time.sleep({3600})
    """)
    marker = f"ASYNC_RL_TEST_MARKER={time.monotonic_ns()}"
    name, value = marker.split("=")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, name: value}, text=True
    ) as generator:
        assert generator.stdout is not None
        assert generator.stdout.readline() == "ready\n"
        wait_until("the grandchildren", lambda: len(processes_of(marker)) == 6)
        generator.kill()
    wait_until("all its processes to end", lambda: not processes_of(marker))
    assert state_of(generator.pid) in (None, "Z")
