"""Sessions that programs elsewhere play: a real front, a relay, and ``async-rl agent``, on one machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.generator import EnvironmentConfig
from async_rl.extensions.agents.front.process import Front
from async_rl.extensions.agents.front.requests import RequestRules
from async_rl.extensions.agents.outside_programs import OutsidePrograms
from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from async_rl.process.family import marked_with
from tests.clock import Clock
from tests.extensions.agents.programs import Request, RunningProxy, a_proxy, a_relay, generate
from tests.extensions.agents.test_agent_rollouts import script
from tests.extensions.agents.world import PROGRAM, Turns, failure_of, rollout_of
from tests.generator.leases import make_lease
from tests.generator.scripted import ScriptedBackend
from tests.ports import free_address

TWO_CALLS = (
    PROGRAM
    + """
status, first = ask([1, 2])
status, second = ask([1, 2, *first["choices"][0]["token_ids"], 3])
assert status == 200, second
print(post(given["finish_url"], {"reward": 1.5 + task["extra_info"]["index"]}, given["finish_key"]))
"""
)


class World(Turns[ScriptedBackend]):
    """A generator whose sessions are offered at a relay."""

    def __init__(
        self, stack: ExitStack, address: str, keys: ClientKeys | None, clock: Callable[[], float], **config: Any
    ) -> None:
        settings = EnvironmentConfig(relay=address, **config)
        front = stack.enter_context(closing(Front(RequestRules("tiny"), 72)))
        front.join(address, keys)
        super().__init__(ScriptedBackend(script), OutsidePrograms(front), front, settings, clock=clock)

    def answer(self, request: Request) -> tuple[int, dict[str, Any]]:
        """The answer to a request, which the generator may have to give."""
        self.until(lambda: request.is_done)
        return request.answer()[:2]

    def take_session(self, url: str, **options: Any) -> dict[str, Any]:
        status, session = self.answer(Request(url, "/sessions", {}, **options))
        assert status == 200
        self.until(lambda: self.rollouts.num_waiting == 0)
        return session


@contextmanager
def world(
    address: str, keys: ClientKeys | None = None, clock: Callable[[], float] = time.monotonic, **config: Any
) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, address, keys, clock, **config)


@pytest.fixture
def address() -> str:
    return free_address()


@contextmanager
def remote(
    address: str, clock: Callable[[], float] = time.monotonic, **options: Any
) -> Iterator[tuple[World, RunningProxy]]:
    """A generator, a relay, and ``async-rl agent`` with ``options``."""
    with (
        a_relay(address),
        world(address, clock=clock, first_reset_timeout_s=30.0) as played,
        a_proxy(address, **options) as proxy,
    ):
        yield played, proxy


def program(directory: Path, source: str) -> list[str]:
    """Write a program and return its command."""
    path = directory / "program.py"
    path.write_text(source)
    return [sys.executable, str(path)]


def test_a_command_elsewhere_plays_sessions_like_one_of_the_generator(address: str, tmp_path: Path):
    make_keys(tmp_path / "keys")
    server, client = ServerKeys.load(tmp_path / "keys"), ClientKeys.load(tmp_path / "keys" / "client.key")
    with (
        a_relay(address, server),
        world(address, client) as played,
        a_proxy(address, client, command=program(tmp_path, TWO_CALLS), num_parallel=2) as proxy,
    ):
        played.submit(group_size=3)
        played.until(lambda: len(played.done) == 3)
        assert proxy.error is None
        counts = played.rollouts.counters()
    rollouts = [rollout_of(graded) for graded in sorted(played.done, key=lambda graded: graded.index)]
    assert [rollout.reward for rollout in rollouts] == [1.5, 2.5, 3.5]
    assert [counts[f"agent/{name}"] for name in ("sessions", "first", "continued", "lost")] == [3, 3, 3, 0]
    for rollout in rollouts:
        (sequence,) = rollout.sequences
        assert sequence.token_ids.tolist() == [1, 2, *map(ord, "look"), 0, 3, *map(ord, "done"), 0]


def test_a_command_that_fails_fails_its_rollout_with_its_output(address: str, tmp_path: Path):
    command = program(tmp_path, "import sys\nprint('the tool is away')\nsys.exit(3)\n")
    with remote(address, command=command) as (played, _):
        played.submit()
        played.until(lambda: played.done)
    (graded,) = played.done
    assert "exit status 3" in failure_of(graded).detail
    assert "the tool is away" in failure_of(graded).detail


def test_sessions_wait_without_a_clock_until_an_agent_is_connected(address: str, tmp_path: Path):
    clock = Clock()
    with world(address, clock=clock) as played:
        played.submit(group_size=2)
        played.until(lambda: "connection to the relay" in played.rollouts.trouble)
        with a_relay(address):
            played.until(lambda: "no `async-rl agent` is connected" in played.rollouts.trouble)
            assert played.rollouts.trouble.startswith("2 sessions wait for programs: ")
            before = played.rollouts.progress()
            clock.now = 1e6
            played.turn()
            after = played.rollouts.progress()
            assert (played.done, played.rollouts.num_waiting) == ([], 2)
            assert all(after[lease] > before[lease] for lease in before)  # so the lease does not expire
            with a_proxy(address, command=program(tmp_path, TWO_CALLS)):
                played.until(lambda: len(played.done) == 2)
            assert played.rollouts.trouble == ""
    assert all(graded.failure is None for graded in played.done)


@pytest.mark.parametrize(
    ("ends", "parts", "said"),
    [
        ({"reward": 2.0}, {"environment": 2.0}, ""),
        ({}, {"length": 4.0}, ""),  # the reward function's: "done" has 4 characters
        ({"error": "no tool"}, None, "no tool"),
    ],
)
def test_a_program_takes_a_session_calls_and_finishes(address: str, ends: Any, parts: Any, said: str):
    with remote(address) as (played, proxy):
        played.submit()
        session = played.take_session(proxy.url)
        assert [message["role"] for message in session["messages"]] == ["user"]
        assert session["extra_info"]["index"] == 0
        path = session["base_url"].removeprefix(proxy.url).removesuffix("/v1")
        for given in ({"key": session["api_key"]}, {"path": path}):
            status, answer = played.answer(generate(proxy.url, [1, 2], **given))
            assert (status, len(answer["choices"][0]["token_ids"])) == (200, 5)
        finish = session["finish_url"].removeprefix(proxy.url)
        for end in ({"reward": 9.0}, ends):
            status, answer = played.answer(Request(proxy.url, finish, end, key=session["api_key"]))
            assert (status, answer["error"]["code"]) == (401, "wrong_finish_key")
        assert played.answer(Request(proxy.url, finish, ends, key=session["finish_key"]))[0] == 200
        played.until(lambda: played.done)
        assert played.answer(generate(proxy.url, [1, 2], path=path))[0] == 410
    (graded,) = played.done
    if parts is None:
        assert failure_of(graded).detail == said
    else:
        assert rollout_of(graded).reward_parts == parts


def test_a_silent_program_expires_from_the_moment_at_which_it_took_the_session(address: str):
    clock = Clock()
    with remote(address, clock) as (played, proxy):
        played.submit()
        clock.now = 100.0
        session = played.take_session(proxy.url)
        clock.now = 129.0
        played.turn()
        assert not played.done
        clock.now = 131.0
        played.until(lambda: played.done)
        assert played.answer(generate(proxy.url, [1], key=session["api_key"]))[0] == 410
    assert "environment.first_reset_timeout_s = 30 s" in failure_of(played.done[0]).detail


def check_lost(played: World, said: str) -> None:
    """One session has failed, and comes again."""
    (lost,) = played.done
    assert failure_of(lost).is_transient
    assert said in failure_of(lost).detail


def test_an_agent_machine_that_goes_fails_its_sessions_and_leaves_the_others(address: str):
    with remote(address) as (played, stays):
        played.submit(group_size=2)
        with a_proxy(address) as goes:
            played.answer(Request(goes.url, "/sessions", {}))
            session = played.take_session(stays.url)
        played.until(lambda: played.done)
        check_lost(played, "is gone or was out of reach")
        assert played.answer(generate(stays.url, [1], key=session["api_key"]))[0] == 200


def test_a_relay_that_dies_fails_what_had_begun_and_its_successor_hands_out_the_rest(address: str):
    def taken() -> dict[str, Any]:
        while (found := played.answer(Request(proxy.url, "/sessions", {})))[0] == 204:
            pass  # the proxy is not connected yet
        return found[1]

    with world(address) as played, a_proxy(address) as proxy:
        with a_relay(address):
            played.submit(group_size=2)
            session = taken()
            played.until(lambda: played.rollouts.num_waiting == 1)
        played.until(lambda: played.done)
        assert played.answer(generate(proxy.url, [1], key=session["api_key"]))[0] == 410
        with a_relay(address):
            assert played.answer(generate(proxy.url, [1], key=taken()["api_key"]))[0] == 200
    check_lost(played, "")


def test_a_front_that_dies_offers_again_what_nobody_had_taken(address: str):
    with remote(address) as (played, proxy):
        played.submit(group_size=2)
        played.answer(Request(proxy.url, "/sessions", {}))
        played.until(lambda: played.rollouts.num_waiting == 1)
        os.kill(played.front.pid, signal.SIGKILL)
        played.until(lambda: played.done)
        session = played.take_session(proxy.url)
        assert played.answer(generate(proxy.url, [1], key=session["api_key"]))[0] == 200
    check_lost(played, "front has died")


def test_a_session_that_nobody_waits_for_any_more_is_offered_again(address: str):
    with remote(address) as (played, proxy):
        gone = Request(proxy.url, "/sessions", {})
        time.sleep(0.3)  # it may wait at the relay; whenever the session comes, nobody may lose it
        gone.hang_up()
        played.submit()
        session = played.take_session(proxy.url)
        assert played.answer(generate(proxy.url, [1], key=session["api_key"]))[0] == 200


def test_a_lease_that_is_cancelled_ends_its_command(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEST", str(tmp_path))
    begun = tmp_path / "begun"
    source = f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(1000)\n"
    with remote(address, command=program(tmp_path, source)) as (played, _):
        idle = marked_with("TEST", str(tmp_path))
        played.submit()
        played.until(begun.exists)
        played.rollouts.cancel(make_lease().lease_id)
        played.until(lambda: marked_with("TEST", str(tmp_path)) == idle)
    assert played.done == []


def test_a_client_without_the_keys_gets_no_session(address: str, tmp_path: Path):
    for name in ("run", "other"):
        make_keys(tmp_path / name)
    server, client = ServerKeys.load(tmp_path / "run"), ClientKeys.load(tmp_path / "run" / "client.key")
    stranger = ClientKeys.load(tmp_path / "other" / "client.key").for_server(server.public)
    with a_relay(address, server), world(address, client) as played:
        played.submit()
        for keys in (stranger, None):
            with a_proxy(address, keys, wait_s=1.0) as proxy:
                played.until(lambda proxy=proxy: proxy.is_over)
            assert "no relay answered" in str(proxy.error)
        assert played.rollouts.num_waiting == 1


def test_the_sessions_of_a_machine_may_need_a_key_and_end_with_the_run(address: str):
    with a_relay(address) as has_finished, world(address) as played, a_proxy(address, sessions_key="sesame") as proxy:
        played.submit()
        assert played.answer(Request(proxy.url, "/sessions", {}, key="wrong"))[0] == 401
        played.take_session(proxy.url, key="sesame")
        has_finished.set()
        played.until(lambda: proxy.is_over)
        assert proxy.error is None
