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
from async_rl.extensions.agents.outside_programs import OutsidePrograms
from async_rl.net.keys import ClientKeys, ServerKeys, make_keys
from tests.extensions.agents.http import Request, generate
from tests.extensions.agents.programs import a_proxy, a_relay, free_address
from tests.extensions.agents.test_agent_rollouts import Clock, script
from tests.extensions.agents.world import Turns
from tests.generator.leases import make_lease
from tests.generator.scripted import ScriptedBackend

PROGRAM = """
import json, os, sys, time, urllib.error, urllib.request

def post(url, body, key=""):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

def ask(ids, base=os.environ.get("OPENAI_BASE_URL", "")):
    return post(base.removesuffix("/v1") + "/inference/v1/generate", {"token_ids": ids})

given = json.loads(sys.stdin.readline())
task = json.load(open(os.environ["ASYNC_RL_TASK"]))
"""
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
        front = stack.enter_context(closing(Front("tiny", 72)))
        front.join(address, keys)
        super().__init__(ScriptedBackend(script), OutsidePrograms(front), front, settings, clock=clock)

    def submit(self, *, group_size: int = 1, **lease: Any) -> None:
        submitted = make_lease(group_size=group_size, max_new_tokens=20, **lease)
        self.rollouts.submit(submitted, self.rollouts.encode(submitted))

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


@pytest.fixture
def programs(tmp_path: Path) -> Callable[[str], list[str]]:
    """Returns a function that writes a program and returns its command."""

    def write(source: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(source)
        return [sys.executable, str(path)]

    return write


def test_a_command_elsewhere_plays_sessions_like_one_of_the_generator(
    address: str, tmp_path: Path, programs: Callable[[str], list[str]]
):
    make_keys(tmp_path / "keys")
    server, client = ServerKeys.load(tmp_path / "keys"), ClientKeys.load(tmp_path / "keys" / "client.key")
    with (
        a_relay(address, server),
        world(address, client) as played,
        a_proxy(address, client, command=programs(TWO_CALLS), num_parallel=2) as proxy,
    ):
        played.submit(group_size=3)
        played.until(lambda: len(played.done) == 3)
        assert proxy.error is None
        counts = played.rollouts.counters()
    rollouts = [graded.rollout for graded in sorted(played.done, key=lambda graded: graded.index)]
    assert [rollout and rollout.reward for rollout in rollouts] == [1.5, 2.5, 3.5]
    assert {name: counts[f"agent/{name}"] for name in ("sessions", "first", "continued", "lost")} == {
        "sessions": 3, "first": 3, "continued": 3, "lost": 0,
    }  # fmt: skip
    for rollout in rollouts:
        assert rollout is not None
        (sequence,) = rollout.sequences
        assert sequence.token_ids.tolist() == [1, 2, *map(ord, "look"), 0, 3, *map(ord, "done"), 0]


def test_a_command_that_fails_fails_its_rollout_with_its_output(address: str, programs: Callable[[str], list[str]]):
    command = programs("import sys\nprint('the tool is away')\nsys.exit(3)\n")
    with a_relay(address), world(address) as played, a_proxy(address, command=command):
        played.submit()
        played.until(lambda: played.done)
    (graded,) = played.done
    assert graded.failure is not None
    assert "exit status 3" in graded.failure.detail
    assert "the tool is away" in graded.failure.detail


def test_sessions_wait_without_a_clock_until_an_agent_is_connected(address: str, programs: Callable[[str], list[str]]):
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
            with a_proxy(address, command=programs(TWO_CALLS)):
                played.until(lambda: len(played.done) == 2)
            assert played.rollouts.trouble == ""
    assert all(graded.failure is None for graded in played.done)


def test_a_program_takes_a_session_calls_and_finishes_with_a_reward(address: str):
    with a_relay(address), world(address) as played, a_proxy(address) as proxy:
        played.submit()
        session = played.take_session(proxy.url)
        assert session["messages"] == [{"role": "user", "content": "go"}] or session["messages"]
        assert session["extra_info"]["index"] == 0
        path = session["base_url"].removeprefix(proxy.url).removesuffix("/v1")
        for given in ({"path": path}, {"key": session["api_key"]}):
            status, answer = played.answer(generate(proxy.url, [1, 2], **given))
            assert (status, len(answer["choices"][0]["token_ids"])) == (200, 5)
        status, answer = played.answer(Request(proxy.url, f"{path}/finish", {"reward": 9.0}, key=session["api_key"]))
        assert (status, answer["error"]["code"]) == (401, "wrong_finish_key")
        status, _ = played.answer(Request(proxy.url, f"{path}/finish", {"reward": 2.0}, key=session["finish_key"]))
        assert status == 200
        played.until(lambda: played.done)
        status, answer = played.answer(generate(proxy.url, [1, 2], path=path))
        assert (status, answer["error"]["code"]) == (410, "session_closed")
    (graded,) = played.done
    assert graded.rollout is not None
    assert graded.rollout.reward == 2.0


@pytest.mark.parametrize(("ends", "reward", "said"), [({}, 4.0, ""), ({"error": "no tool"}, None, "no tool")])
def test_a_program_finishes_without_a_reward_or_with_an_error(address: str, ends: Any, reward: Any, said: str):
    with a_relay(address), world(address) as played, a_proxy(address) as proxy:
        played.submit()
        session = played.take_session(proxy.url)
        path = session["finish_url"].removeprefix(proxy.url)
        played.answer(generate(proxy.url, [1, 2], key=session["api_key"]))
        for key, status in ((session["api_key"], 401), (session["finish_key"], 200)):
            assert played.answer(Request(proxy.url, path, ends, key=key))[0] == status
        played.until(lambda: played.done)
    (graded,) = played.done
    assert (graded.failure.detail if graded.failure else "") == said
    if reward is not None:
        assert graded.rollout is not None
        assert graded.rollout.reward_parts == {"length": reward}  # the reward function's: "look" has 4 characters


def test_a_silent_program_expires_from_the_moment_at_which_it_took_the_session(address: str):
    clock = Clock()
    with a_relay(address), world(address, clock=clock, first_reset_timeout_s=30.0) as played, a_proxy(address) as proxy:
        played.submit()
        clock.now = 100.0
        session = played.take_session(proxy.url)
        clock.now = 129.0
        played.turn()
        assert not played.done
        clock.now = 131.0
        played.until(lambda: played.done)
        status, answer = played.answer(generate(proxy.url, [1], key=session["api_key"]))
        assert (status, answer["error"]["code"]) == (410, "session_closed")
    assert played.done[0].failure is not None
    assert "environment.first_reset_timeout_s = 30 s" in played.done[0].failure.detail


def test_an_agent_machine_that_goes_fails_its_sessions_and_leaves_the_others(address: str):
    with a_relay(address), world(address) as played, a_proxy(address) as stays:
        played.submit(group_size=2)
        with a_proxy(address) as goes:
            played.answer(Request(goes.url, "/sessions", {}))
            session = played.take_session(stays.url)
            running = generate(stays.url, [1], key=session["api_key"])
            played.until(lambda: running.is_done)
        played.until(lambda: played.done)
        (lost,) = played.done
        assert lost.failure is not None
        assert lost.failure.is_transient
        assert "is gone or was out of reach" in lost.failure.detail
        assert played.answer(generate(stays.url, [1], key=session["api_key"]))[0] == 200


def test_a_relay_that_dies_fails_what_had_begun_and_its_successor_hands_out_the_rest(address: str):
    with world(address) as played, a_proxy(address) as proxy:
        with a_relay(address):
            played.submit(group_size=2)
            status, session = played.answer(Request(proxy.url, "/sessions", {}))
            while status == 204:  # the proxy was not connected yet
                status, session = played.answer(Request(proxy.url, "/sessions", {}))
            played.until(lambda: played.rollouts.num_waiting == 1)
        played.until(lambda: played.done)
        assert played.answer(generate(proxy.url, [1], key=session["api_key"]))[0] == 410
        with a_relay(address):
            status = 204
            while status == 204:
                status, session = played.answer(Request(proxy.url, "/sessions", {}))
            assert played.answer(generate(proxy.url, [1], key=session["api_key"]))[0] == 200
    (lost,) = played.done
    assert lost.failure is not None
    assert lost.failure.is_transient


def test_a_front_that_dies_offers_again_what_nobody_had_taken(address: str):
    with a_relay(address), world(address) as played, a_proxy(address) as proxy:
        played.submit(group_size=2)
        played.answer(Request(proxy.url, "/sessions", {}))
        played.until(lambda: played.rollouts.num_waiting == 1)
        os.kill(played.front.pid, signal.SIGKILL)
        played.until(lambda: played.done)
        session = played.take_session(proxy.url)
        assert played.answer(generate(proxy.url, [1], key=session["api_key"]))[0] == 200
    (lost,) = played.done
    assert lost.failure is not None
    assert "front has died" in lost.failure.detail


def test_a_session_that_nobody_waits_for_any_more_is_offered_again(address: str):
    with a_relay(address), world(address) as played, a_proxy(address) as proxy:
        gone = Request(proxy.url, "/sessions", {})
        time.sleep(0.3)  # it may wait at the relay; whenever the session comes, nobody may lose it
        gone.hang_up()
        played.submit()
        session = played.take_session(proxy.url)
        assert played.answer(generate(proxy.url, [1], key=session["api_key"]))[0] == 200


def test_a_lease_that_is_cancelled_ends_its_command(address: str, tmp_path: Path, programs: Callable[[str], list[str]]):
    mark = tmp_path / "pid"
    command = programs(f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)\n")
    with a_relay(address), world(address) as played, a_proxy(address, command=command):
        played.submit()
        played.until(lambda: mark.exists() and mark.read_text())
        played.rollouts.cancel(make_lease().lease_id)
        pid = int(mark.read_text())
        played.until(lambda: not Path(f"/proc/{pid}").exists())
    assert played.done == []


def test_a_client_without_the_keys_gets_no_session(address: str, tmp_path: Path):
    for name in ("run", "other"):
        make_keys(tmp_path / name)
    server, client = ServerKeys.load(tmp_path / "run"), ClientKeys.load(tmp_path / "run" / "client.key")
    stranger = ClientKeys.load(tmp_path / "other" / "client.key").for_server(server.public)
    with a_relay(address, server), world(address, client) as played:
        played.submit()
        for keys in (stranger, None):
            with a_proxy(address, keys, wait_s=3.0) as proxy:
                played.until(lambda proxy=proxy: proxy.is_over)
            assert "no relay answered" in str(proxy.error)
        assert "refuses the key" in str(proxy.error) or "closes the connection" in str(proxy.error)
        assert played.rollouts.num_waiting == 1


def test_the_sessions_of_a_machine_may_need_a_key_and_end_with_the_run(address: str):
    with a_relay(address) as relay, world(address) as played, a_proxy(address, sessions_key="sesame") as proxy:
        played.submit()
        assert played.answer(Request(proxy.url, "/sessions", {}, key="wrong"))[0] == 401
        played.take_session(proxy.url, key="sesame")
        relay.finish()
        played.until(lambda: proxy.is_over)
        assert proxy.error is None
