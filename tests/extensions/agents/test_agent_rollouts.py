"""Agents in processes of their own, a real HTTP front, and a backend whose answers are written down."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.errors import ConfigError
from async_rl.process.family import marked_with
from async_rl.process.user_code import check_allowed_command
from async_rl.records import AgentSession
from tests.clock import Clock
from tests.end_to_end.harness import state_of
from tests.extensions.agents.programs import generate
from tests.extensions.agents.world import DEADLINE_S, PROGRAM, World, failure_of, rollout_of
from tests.generator.leases import make_lease
from tests.generator.scripted import END, ScriptedBackend


def script(index: int, turn: int) -> str:
    return ["look", "done", "more"][turn % 3]


@contextmanager
def world(
    directory: Path, source: str, clock: Callable[[], float] = time.monotonic, **config: object
) -> Iterator[World[ScriptedBackend]]:
    with ExitStack() as stack:
        yield World(directory, stack, source, ScriptedBackend(script), clock=clock, **config)  # type: ignore[arg-type]


def command(directory: Path, source: str, *arguments: object) -> tuple[str, ...]:
    """A program as an agent."""
    (directory / "program.py").write_text(source)
    return (sys.executable, str(directory / "program.py"), *map(str, arguments))


TWO_CALLS = """
async def run(task):
    status, first = await ask(task, [1, 2])
    status, second = await ask(task, [1, 2, *first["token_ids"], 3])
    return {"reward": task.extra_info["index"] + 0.5, "score": 1.0, "metrics": {"tools": 2, "absent": None}}
"""


def test_the_ids_that_were_sampled_are_the_ids_that_are_trained(tmp_path: Path):
    with world(tmp_path, TWO_CALLS) as played:
        first, second = played.play(group_size=2)
        counts = dict(played.rollouts.counters())
        del counts["agent/sampling_s"], counts["agent/own_s"]
        assert counts == {
            "agent/sessions": 2, "agent/first": 2, "agent/continued": 2, "agent/branched": 0, "agent/rewritten": 0,
            "agent/lost": 0, "agent/tool_calls": 0, "agent/untrained": 0,
        }  # fmt: skip
        assert (played.rollouts.num_open, played.rollouts.num_pending) == (0, 0)
        assert len({lease.seed for lease, _ in played.backend.requests}) == 4  # each call has one of its own
    one, other = rollout_of(first), rollout_of(second)
    (sequence,) = one.sequences
    look, done = [*map(ord, "look"), END], [*map(ord, "done"), END]
    assert sequence.token_ids.tolist() == [1, 2, *look, 3, *done]
    assert sequence.behavior_logprobs[sequence.loss_mask].tolist() == [-1.0] * 5 + [-2.0] * 5
    assert set(sequence.versions[sequence.loss_mask].tolist()) == {3}
    assert (one.reward, other.reward, one.accuracy, one.metrics) == (0.5, 1.5, 1.0, {"tools": 2.0})
    assert [(turn.num_tokens, turn.reward, turn.score) for turn in one.turns] == [(5, 0.0, 0.0), (5, 0.5, 1.0)]


def test_an_agent_reaches_its_endpoint_where_the_environment_has_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    with world(tmp_path, TWO_CALLS) as played:
        assert rollout_of(played.play()[0]).reward == 0.5


def test_an_agent_that_raises_fails_its_rollout_with_its_line(tmp_path: Path):
    with world(tmp_path, "\nasync def run(task):\n    raise KeyError('tool')\n") as played:
        (graded,) = played.play()
        assert played.rollouts.counters()["agent/failed_KeyError"] == 1
    assert failure_of(graded).cause == "environment_error"
    assert "KeyError: 'tool'" in failure_of(graded).detail
    assert "agent.py" in failure_of(graded).detail


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("return 1.0", "made no call that was answered; a cache of its own"),
        ("return 'much'", "a dict with reward, score and metrics, or None, got reward = 'much'"),
        ("return {'rewards': 1}", "got rewards = 1"),
        ("return {'reward': 1, 'metrics': {'turns': float('inf')}}", "got metrics.turns = inf"),
        ("return {'metrics': {str(n): n for n in range(65)}}", "expected at most 64 metrics"),
        ("return (await ask(task, [1])) and 101.0", "at most reward.max_abs = 100, got 101"),
        ("await ask(task, [1] * 65)\n    return 1.0", "sampling.max_prompt_tokens"),
    ],
)
def test_an_agent_that_plays_or_ends_wrongly_fails_with_a_word_about_it(tmp_path: Path, ends: str, said: str):
    with world(tmp_path, f"\nasync def run(task):\n    {ends}\n") as played:
        (graded,) = played.play()
    assert said in failure_of(graded).detail
    # A row whose prompt is too long is excluded.
    assert (failure_of(graded).cause == "prompt_too_long") == ("max_prompt" in said)


def test_a_silent_agent_is_ended_and_its_key_expires(tmp_path: Path):
    clock = Clock()
    source = "\nasync def run(task):\n    note(task.api_key)\n    await ask(task, [1])\n    await asyncio.sleep(1000)\n"
    with world(tmp_path, source, clock, timeout_s=30.0) as played:
        played.submit()
        played.until(lambda: played.backend.requests)
        for _ in range(100):
            played.turn()
        assert played.done == []
        clock.now = 31.0
        played.until(lambda: played.done)
        (graded,) = played.done
        assert "environment.timeout_s = 30 s" in failure_of(graded).detail
        assert generate(played.front.url, [1], key=played.notes[0]).answer()[0] == 410


def test_the_time_of_an_agent_begins_when_its_process_is_forked(tmp_path: Path):
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    clock = Clock()
    source = (
        f"os.register_at_fork(before=lambda: os.read(gate, 1))\ngate = os.open({str(tmp_path / 'gate')!r}, os.O_RDWR)\n"
    )
    with world(tmp_path, f"{source}{TWO_CALLS}", clock, first_reset_timeout_s=30.0) as played:
        played.submit()
        for _ in range(4):
            clock.now += 20.0
            played.turn()
        os.write(gate, b"x")
        played.until(lambda: played.done)
    os.close(gate)
    (graded,) = played.done
    session = rollout_of(graded).session
    assert session is not None
    assert session.agent_s == 0.0


def test_a_lease_that_is_taken_back_ends_its_sessions(tmp_path: Path):
    source = "\nasync def run(task):\n    await ask(task, [1])\n    note(task.api_key)\n    await asyncio.sleep(1000)\n"
    with world(tmp_path, source) as played:
        played.submit(group_size=2)
        played.until(lambda: len(played.notes) == 2)
        played.rollouts.cancel(make_lease().lease_id)
        request = generate(played.front.url, [1], key=played.notes[0])
        played.until(lambda: request.is_done)
        status, body, headers = request.answer()
        assert (status, body["error"]["code"], headers["x-should-retry"]) == (410, "session_closed", "false")
        assert played.done == []
        assert (played.rollouts.num_open, played.backend.num_running) == (0, 0)


CONTRADICTS = """
async def run(task):
    same = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    for params in ({**same, "max_tokens": 2, "stop": ["x"], "stop_token_ids": [9]}, {"temperature": 0.0},
                   {"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}, {"stop_token_ids": [5, 200]}):
        note(await ask(task, [1], **params))
    note(await ask(task, [500]))
    return 1.0
"""


@pytest.mark.parametrize(
    ("kind", "temperature", "expected", "said"),
    [
        ("train", 1.0, [200] + [400] * 6, "the run's sampling.temperature = 1 or none, got 0.5"),
        ("eval", 0.0, [200] * 2 + [400] * 5, "eval.temperature = 0 or sampling.temperature = 1 or none, got 0.5"),
    ],
)
def test_a_request_may_name_no_other_sampling_than_its_leases_or_in_evaluations_that_of_training(
    tmp_path: Path, kind: str, temperature: float, expected: list[int], said: str, caplog: pytest.LogCaptureFixture
):
    with world(tmp_path, CONTRADICTS, other_settings="refuse") as played:  # the run trains at temperature 1
        (graded,) = played.play(kind=kind, temperature=temperature)
        assert [int(line[1:4]) for line in played.notes] == expected
        assert said in played.notes[2]
        for line in played.notes[-2:]:
            assert "expected ids from 0 to 200" in line  # vLLM would end with an error
        asked = [lease.sampling for lease, _ in played.backend.requests]
        assert [sampling.temperature for sampling in asked] == [temperature] * expected.count(200)
        # It may shorten its answer.
        assert (asked[0].max_new_tokens, asked[0].stop, asked[0].stop_token_ids) == (2, ("x",), (9,))
    assert rollout_of(graded).finish_reason == ("length" if kind == "train" else "stop")
    assert "(environment.other_settings)" not in caplog.text


OTHERS = """
async def run(task):
    _, first = await ask(task, [1, 2])
    await ask(task, [1, 2, *first["token_ids"], 3], temperature=0.5)
    await ask(task, [1, 2, *first["token_ids"], 3], top_k=-1)
    url, body = task.base_url.removesuffix("/v1") + "/inference/v1/generate", {"token_ids": [7]}
    note(post(url, {**body, "model": "judge", "sampling_params": {"top_k": 5, "temperature": 0}})[0])
    note(post(url, {**body, "untrained": True, "sampling_params": {"temperature": -1}})[1]["error"]["message"])
"""


@pytest.mark.parametrize(("settings", "others", "trained"), [("replace", 1.0, 3), ("untrained", 0.5, 2)])
def test_a_call_with_other_settings_has_the_run_s_or_is_not_trained_and_a_judge_s_never_is(
    tmp_path: Path, settings: str, others: float, trained: int, caplog: pytest.LogCaptureFixture
):
    with world(tmp_path, OTHERS, other_settings=settings) as played:
        (graded,) = played.play()
        asked = [(lease.sampling.temperature, lease.sampling.top_k) for lease, _ in played.backend.requests]
        assert asked == [(1.0, 0), (others, 0), (1.0, 0), (0.0, 5)]
        assert played.notes == ["200", "temperature: expected a number from 0 to 100, got -1"]
    rollout = rollout_of(graded)
    assert sum(turn.num_tokens for turn in rollout.turns) == 5 * trained
    assert rollout.session is not None
    assert rollout.session.calls["untrained"] == 4 - trained
    assert rollout.session.without_effect == ("temperature",) * (settings == "replace")
    assert all(7 not in sequence.token_ids for sequence in rollout.sequences)
    assert caplog.text.count("temperature: expected the run's sampling.temperature = 1 or none, got 0.5") == 1


@pytest.mark.parametrize(("mark", "judged"), [("", "done"), ('"is_answer": True', "look")])
def test_the_last_trained_answer_is_judged_or_the_one_that_the_agent_names(tmp_path: Path, mark: str, judged: str):
    source = f"""
async def run(task):
    url = task.base_url.removesuffix("/v1") + "/inference/v1/generate"
    for number, more in enumerate([{{{mark}}}, {{}}, {{"untrained": True}}]):
        post(url, {{"token_ids": [number], **more}})
"""
    with world(tmp_path, source) as played:
        (graded,) = played.play()
    assert (graded.text, rollout_of(graded).reward_parts) == (judged, {"length": 4.0})


@pytest.mark.parametrize(
    ("ends", "row", "parts"),
    [
        ("return 1.0", {"gt_answer": "2"}, {"environment": 1.0}),
        ("raise RuntimeError(error['code'])", {"gt_answer": "2"}, {"length": 4.0}),  # its last answer is judged
        ("raise RuntimeError(error['code'])", {}, {"environment": 0.0}),
    ],
)
def test_an_agent_without_room_is_cut(tmp_path: Path, ends: str, row: dict[str, str], parts: dict[str, float]):
    source = f"""
async def run(task):
    status, first = await ask(task, [1])
    status, error = await ask(task, [1, *first["token_ids"], 2])
    note(error["code"])
    note(error["message"])
    {ends}
"""
    with world(tmp_path, source) as played:
        lease = make_lease(group_size=1, max_new_tokens=5)
        lease = replace(lease, prompt=replace(lease.prompt, reward_data=row))
        played.rollouts.submit(lease, played.rollouts.encode(lease))
        played.until(lambda: played.done)
        assert played.notes[0] == "context_length_exceeded"
        assert "This model's maximum context length is" in played.notes[1]  # by which litellm knows it
    (graded,) = played.done
    rollout = rollout_of(graded)
    assert (rollout.finish_reason, rollout.num_sampled, rollout.reward_parts) == ("length", 5, parts)


RETRIES = """
async def run(task):
    while True:
        try:
            status, answer = await ask(task, [1])
            return 1.0
        except OSError:
            note("again")
"""


def test_a_call_whose_connection_breaks_is_lost_and_its_repetition_is_trained(tmp_path: Path):
    with world(tmp_path, RETRIES) as played:
        played.submit()
        deadline = time.monotonic() + DEADLINE_S
        while not played.backend.requests:
            played.rollouts.collect()
            assert time.monotonic() < deadline
        os.kill(played.front.pid, signal.SIGKILL)
        played.until(lambda: played.notes)
        played.until(lambda: played.done)
        assert played.rollouts.counters()["agent/lost"] == 1
    (graded,) = played.done
    (sequence,) = rollout_of(graded).sequences
    assert sequence.token_ids.tolist() == [1, *map(ord, "done"), END]


def test_no_session_is_played_twice_when_its_fork_server_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASYNC_RL_FAULTS", str(tmp_path))
    source = "\nasync def run(task):\n    note((await ask(task, [1]))[0])\n    await asyncio.sleep(0.1)\n"
    with world(tmp_path, source) as played:
        (tmp_path / "fork_server.forked").touch()
        played.submit()
        played.until(lambda: played.notes)  # it is stopped there, and the agent plays
        (held,) = tmp_path.glob("fork_server.forked.*")
        os.kill(int(held.suffix[1:]), signal.SIGKILL)
        played.until(lambda: played.done)
        assert len(played.notes) == 1
        (graded,) = played.done
        assert failure_of(graded).is_transient
        assert "fork server" in failure_of(graded).detail
        played.done.clear()
        (again,) = played.play()
        assert again.failure is None


FLOODS = """
async def run(task):
    if task.extra_info["index"] == 0:
        await asyncio.gather(*(ask(task, [1], max_tokens=1) for _ in range(30)))
        return 1.0
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
        await asyncio.sleep(0.01)
    await ask(task, [2])
    return 1.0
"""


def test_a_rollout_with_many_calls_at_once_takes_no_slot_that_another_needs(tmp_path: Path):
    with world(tmp_path, FLOODS, max_rollout_tokens=10_000) as played:
        played.backend.max_running = 2
        played.submit(group_size=2, max_new_tokens=40)

        def collect_until_waiting(index: int, number: int) -> None:
            deadline = time.monotonic() + DEADLINE_S
            while len(played.rollouts._sessions[f"{make_lease().lease_id}/{index}"].waiting) < number:
                played.rollouts.collect()
                assert time.monotonic() < deadline

        collect_until_waiting(0, 3)
        (tmp_path / "go").touch()
        collect_until_waiting(1, 1)
        assert len(played.backend.requests) == 2
        played.turn()  # one step of the engine frees the slots
        assert [2] in [prompt for _, prompt in played.backend.requests[2:4]]
        played.until(lambda: len(played.done) == 2)
    assert all(graded.rollout is not None for graded in played.done)


WAITS_BETWEEN_CALLS = """
async def run(task):
    await ask(task, [1])
    note("works")
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
        await asyncio.sleep(0.01)
    await ask(task, [2])
    return 1.0
"""


def test_the_time_of_tools_is_told_apart_from_that_of_answers(tmp_path: Path):
    clock = Clock()

    def answered_after(seconds: float) -> None:
        while not played.backend.num_running:
            played.done += played.rollouts.collect()
        clock.now += seconds
        played.turn()

    with world(tmp_path, WAITS_BETWEEN_CALLS, clock) as played:
        played.submit()
        answered_after(4.0)
        played.until(lambda: played.notes)
        clock.now += 10.0
        (tmp_path / "go").touch()
        answered_after(0.5)
        played.until(lambda: played.done)
    (graded,) = played.done
    calls = {"first": 1, "continued": 0, "branched": 0, "rewritten": 1, "untrained": 0, "lost": 0}
    assert rollout_of(graded).session == AgentSession(calls, {}, sampling_s=4.5, agent_s=10.0)
    counts = played.rollouts.counters()
    assert (counts["agent/sampling_s"], counts["agent/own_s"]) == (4, 10)


LEAVES_A_PROCESS = """
import subprocess

async def run(task):
    left = LEFT
    note(f"{left} {os.getpid()}")
    await ask(task, [1])
    return 1.0
"""
A_CHILD = 'subprocess.Popen(["sleep", "1000"], start_new_session=True).pid'
AN_ORPHAN = 'int(subprocess.check_output(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"]))'
PROGRAM_LEAVES_A_CHILD = f"""
import os, subprocess, sys
{A_CHILD}
open(sys.argv[1], "w").write("begun")
os.execvp("sleep", ["sleep", "1000"])
"""


@pytest.mark.parametrize("left", ["os.getpid()", A_CHILD, AN_ORPHAN])
def test_each_rollout_of_an_agent_has_a_process_which_ends_with_all_that_it_has_started(tmp_path: Path, left: str):
    with world(tmp_path, LEAVES_A_PROCESS.replace("LEFT", left)) as played:
        for _ in range(2):
            played.done.clear()
            (graded,) = played.play()
            rollout_of(graded)
        pids = {int(word) for line in played.notes for word in line.split()}
        assert len(pids) == (2 if left == "os.getpid()" else 4)
        for pid in pids:
            played.until(lambda pid=pid: state_of(pid) in (None, "Z"))


@pytest.mark.parametrize("sandbox", ["loopback", "off"])
def test_what_a_program_starts_ends_with_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str):
    monkeypatch.setenv("TEST", str(tmp_path))
    words = command(tmp_path, PROGRAM_LEAVES_A_CHILD, tmp_path / "said")
    with world(tmp_path, "", command=words, sandbox=sandbox) as played:
        idle = marked_with("TEST", str(tmp_path))
        played.submit()
        played.until(lambda: played.notes)
        assert len(marked_with("TEST", str(tmp_path)) - idle) > 2
        played.rollouts.cancel(make_lease().lease_id)
        played.until(lambda: marked_with("TEST", str(tmp_path)) == idle)


def test_an_engine_without_log_probabilities_fails_the_rollout(tmp_path: Path):
    with world(tmp_path, TWO_CALLS) as played:
        whole = played.backend._sampled

        def broken(lease: object, prompt_ids: object) -> object:
            found = whole(lease, prompt_ids)  # type: ignore[arg-type]
            found.logprobs[-1] = np.float32(-9999.0)
            return found

        played.backend._sampled = broken  # type: ignore[method-assign, assignment]
        (graded,) = played.play()
    assert "log-probability that is missing" in failure_of(graded).detail


CALLS_TWICE = """
assert os.environ["OPENAI_API_KEY"] in os.environ["OPENAI_BASE_URL"]
assert os.environ["OPENAI_BASE_URL"] == os.environ["ANTHROPIC_BASE_URL"] + "/v1"
answers = [ask([token])[0] for token in (1, 2)]
print("the row is", task["messages"][0]["content"], task["extra_info"]["index"], answers)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_program_is_an_agent_whose_last_answer_is_judged_or_whose_output_is_told(tmp_path: Path, status: int):
    with world(tmp_path, "", command=command(tmp_path, PROGRAM + CALLS_TWICE, status)) as played:
        (graded,) = played.play()
    if status:
        assert "exit status 3; the end of its output: the row is 1+1 0 [200, 200]" in failure_of(graded).detail
        return
    rollout = rollout_of(graded)
    assert (rollout.reward_parts, rollout.accuracy, len(rollout.sequences)) == ({"length": 4.0}, 1.0, 2)


def test_a_command_must_be_allowed_and_exist():
    words = ("no-such-program", "two words")
    with pytest.raises(ConfigError, match=r"generator.allow_code"):
        check_allowed_command(words, ["no-such-program"], key="environment.command")
    with pytest.raises(ConfigError, match="expected a program, got no-such-program"):
        check_allowed_command(words, ["no-such-program 'two words'"], key="environment.command")


HARNESS = """
import subprocess

thief = "import os, sys; print(sys.stdin.read() + repr(dict(os.environ)))"
seen = subprocess.run([sys.executable, "-c", thief], capture_output=True, text=True).stdout


def report(key=given["finish_key"], **body):
    return post(given["finish_url"], body, key)[0]


ask([1])
statuses = [
    given["finish_key"] in seen, report(os.environ["OPENAI_API_KEY"], reward=9.0), report("", reward=9.0),
    report(reward="much"), report(reward=0.25, score=1.0), report(reward=9.0), report(reward=0.25, score=1.0),
]
with open(sys.argv[1], "w") as file:
    file.write(json.dumps(statuses))
"""


def test_a_harness_reports_the_reward_with_a_key_that_its_agent_does_not_get(tmp_path: Path):
    with world(tmp_path, "", command=command(tmp_path, PROGRAM + HARNESS, tmp_path / "said")) as played:
        (graded,) = played.play()
        assert played.notes == ["[false, 401, 401, 400, 200, 409, 200]"]
    rollout = rollout_of(graded)
    assert (rollout.reward_parts, rollout.accuracy) == ({"environment": 0.25}, 1.0)
