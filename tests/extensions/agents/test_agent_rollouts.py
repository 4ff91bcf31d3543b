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
from async_rl.process.user_code import check_allowed_command
from async_rl.records import AgentSession
from tests.end_to_end.harness import state_of
from tests.extensions.agents.http import generate
from tests.extensions.agents.world import DEADLINE_S, World
from tests.generator.leases import make_lease
from tests.generator.scripted import END, ScriptedBackend


def script(index: int, turn: int) -> str:
    return ["look", "done", "more"][turn % 3]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def world(
    directory: Path, source: str, clock: Callable[[], float] = time.monotonic, **config: object
) -> Iterator[World[ScriptedBackend]]:
    with ExitStack() as stack:
        yield World(directory, stack, source, ScriptedBackend(script), clock=clock, **config)  # type: ignore[arg-type]


TWO_CALLS = """
async def run(task):
    status, first = await ask(task, [1, 2])
    status, second = await ask(task, [1, 2, *first["token_ids"], 3])
    return {"reward": task.extra_info["index"] + 0.5, "score": 1.0}
"""


def test_the_ids_that_were_sampled_are_the_ids_that_are_trained(tmp_path: Path):
    with world(tmp_path, TWO_CALLS) as played:
        first, second = played.play(group_size=2, max_new_tokens=20)
        counts = dict(played.rollouts.counters())
        del counts["agent/sampling_s"], counts["agent/own_s"]
        assert counts == {
            "agent/sessions": 2, "agent/first": 2, "agent/continued": 2, "agent/branched": 0, "agent/rewritten": 0,
            "agent/lost": 0, "agent/tool_calls": 0,
        }  # fmt: skip
        assert (played.rollouts.num_open, played.rollouts.num_pending) == (0, 0)
    assert first.rollout is not None
    assert second.rollout is not None
    (sequence,) = first.rollout.sequences
    look, done = [*map(ord, "look"), END], [*map(ord, "done"), END]
    assert sequence.token_ids.tolist() == [1, 2, *look, 3, *done]
    assert sequence.behavior_logprobs[sequence.loss_mask].tolist() == [-1.0] * 5 + [-2.0] * 5
    assert set(sequence.versions[sequence.loss_mask].tolist()) == {3}
    assert (first.rollout.reward, second.rollout.reward, first.rollout.accuracy) == (0.5, 1.5, 1.0)
    assert [(turn.num_tokens, turn.reward, turn.score) for turn in first.rollout.turns] == [
        (5, 0.0, 0.0),
        (5, 0.5, 1.0),
    ]


def test_the_metrics_of_an_agent_are_kept(tmp_path: Path):
    source = TWO_CALLS.replace("return {", "return {'metrics': {'tools': 2, 'absent': None}, ")
    with world(tmp_path, source) as played:
        (graded,) = played.play(max_new_tokens=20)
    assert graded.rollout is not None
    assert graded.rollout.metrics == {"tools": 2.0}


def test_an_agent_without_a_reward_is_judged_by_the_reward_functions(tmp_path: Path):
    with world(tmp_path, TWO_CALLS.replace("return {", "return None and {")) as played:
        (graded,) = played.play(max_new_tokens=20)
    assert graded.rollout is not None
    assert (graded.rollout.reward_parts, graded.rollout.accuracy) == ({"length": 4.0}, 1.0)
    assert graded.rollout.turns[-1].reward == 4.0


def test_calls_of_a_rollout_have_different_seeds_and_those_of_a_lease_too(tmp_path: Path):
    with world(tmp_path, TWO_CALLS) as played:
        played.play(group_size=2, max_new_tokens=20)
        assert len({lease.seed for lease, _ in played.backend.requests}) == 4


def test_an_agent_that_raises_fails_its_rollout_with_its_line(tmp_path: Path):
    with world(tmp_path, "\nasync def run(task):\n    raise KeyError('tool')\n") as played:
        (graded,) = played.play()
        assert played.rollouts.counters()["agent/failed_KeyError"] == 1
    assert graded.failure is not None
    assert graded.failure.cause == "environment_error"
    assert "KeyError: 'tool'" in graded.failure.detail
    assert "agent.py" in graded.failure.detail


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("return 1.0", "made no call that was answered"),
        ("return 'much'", "a dict with reward, score and metrics, or None, got reward = 'much'"),
        ("return {'rewards': 1}", "got rewards = 1"),
        ("return {'reward': 1, 'metrics': {'turns': float('inf')}}", "got metrics.turns = inf"),
        ("return {'reward': 1, 'metrics': [1]}", "metrics: expected a dict of numbers, got [1]"),
        ("return {'metrics': {str(n): n for n in range(65)}}", "expected at most 64 metrics"),
    ],
)
def test_an_agent_that_ends_wrongly_fails_with_a_word_about_it(tmp_path: Path, ends: str, said: str):
    with world(tmp_path, f"\nasync def run(task):\n    {ends}\n") as played:
        (graded,) = played.play()
    assert graded.failure is not None
    assert said in graded.failure.detail


def test_a_silent_agent_is_ended_and_its_key_expires(tmp_path: Path):
    clock = Clock()
    source = "\nasync def run(task):\n    note(task.api_key)\n    await ask(task, [1])\n    await asyncio.sleep(1000)\n"
    with world(tmp_path, source, clock, timeout_s=30.0) as played:
        lease = make_lease(group_size=1)
        played.rollouts.submit(lease, played.rollouts.encode(lease))
        played.until(lambda: played.rollouts.counters().get("agent/first") is None and played.backend.requests)
        for _ in range(100):
            played.turn()
        assert played.done == []
        clock.now = 31.0
        played.until(lambda: played.done)
        (graded,) = played.done
        assert graded.failure is not None
        assert "made no further call for environment.timeout_s = 30 s" in graded.failure.detail
        request = generate(played.front.url, [1], key=played.notes[0])
        assert request.answer()[:2] == (410, request.answer()[1])


def test_the_time_of_an_agent_begins_when_its_process_is_forked(tmp_path: Path):
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    clock = Clock()
    source = (
        f"os.register_at_fork(before=lambda: os.read(gate, 1))\ngate = os.open({str(tmp_path / 'gate')!r}, os.O_RDWR)\n"
    )
    with world(tmp_path, f"{source}{TWO_CALLS}", clock, first_reset_timeout_s=30.0) as played:
        played.submit()
        played.turn()
        for _ in range(3):
            clock.now += 20.0
            played.turn()
        os.write(gate, b"x")
        played.until(lambda: played.done)
    os.close(gate)
    (graded,) = played.done
    assert graded.failure is None
    assert graded.rollout is not None
    assert graded.rollout.session is not None
    assert graded.rollout.session.agent_s == 0.0


def test_a_lease_that_is_taken_back_ends_its_sessions(tmp_path: Path):
    source = """
async def run(task):
    await ask(task, [1])
    note(task.api_key)
    await asyncio.sleep(1000)
"""
    with world(tmp_path, source) as played:
        lease = make_lease(group_size=2)
        played.rollouts.submit(lease, played.rollouts.encode(lease))
        played.until(lambda: len(played.notes) == 2)
        played.rollouts.cancel(lease.lease_id)
        request = generate(played.front.url, [1], key=played.notes[0])
        played.until(lambda: request.is_done)
        status, body, headers = request.answer()
        assert (status, body["error"]["code"], headers["x-should-retry"]) == (410, "session_closed", "false")
        assert played.done == []
        assert (played.rollouts.num_open, played.backend.num_running) == (0, 0)


CONTRADICTS = """
async def run(task):
    for params in ({"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}):
        note(await ask(task, [1], **params))
    note(await ask(task, [500]))
    note(await ask(task, [1], stop_token_ids=[5, 200]))
    status, answer = await ask(task, [1], temperature=1.0, top_p=1.0, top_k=-1)
    return 1.0
"""


def test_a_request_may_not_contradict_the_lease(tmp_path: Path):
    with world(tmp_path, CONTRADICTS) as played:
        (graded,) = played.play()
        assert [line.partition(":")[0] for line in played.notes] == ["(400, {'message'"] * 5
        assert "temperature: expected the run's sampling.temperature = 1 or none, got 0.5" in played.notes[0]
        assert "'token_ids: expected ids from 0 to 200" in played.notes[3]
        assert "'stop_token_ids: expected ids from 0 to 200" in played.notes[4]  # vLLM would end with an error
        assert len(played.backend.requests) == 1
    assert graded.rollout is not None


IN_EVALUATIONS = """
async def run(task):
    for temperature in (1.0, 0.0, 1.0, 0.5):
        note(await ask(task, [1], temperature=temperature))
    return 1.0
"""


def test_an_agent_may_name_the_temperature_of_training_in_an_evaluation_that_has_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with world(tmp_path, IN_EVALUATIONS) as played:  # the run trains at temperature 1
        (graded,) = played.play(kind="eval", temperature=0.0, max_new_tokens=20)
        assert [line.partition(",")[0] for line in played.notes] == ["(200", "(200", "(200", "(400"]
        assert "expected the run's eval.temperature = 0 or sampling.temperature = 1 or none, got 0.5" in played.notes[3]
        assert [lease.sampling.temperature for lease, _ in played.backend.requests] == [0.0] * 3
    assert graded.rollout is not None
    (said,) = [record.message for record in caplog.records if "temperature" in record.message]
    assert said.startswith("an agent names the temperature of training; evaluations have eval.temperature all the same")


def test_a_request_may_not_name_the_temperature_of_evaluations_in_training(tmp_path: Path):
    with world(tmp_path, IN_EVALUATIONS) as played:
        played.play(max_new_tokens=20)
        assert [line.partition(",")[0] for line in played.notes] == ["(200", "(400", "(200", "(400"]


def test_a_request_may_shorten_its_answer(tmp_path: Path):
    source = (
        "\nasync def run(task):\n    await ask(task, [1], max_tokens=2, stop=['x'], stop_token_ids=[9])\n    return 1\n"
    )
    with world(tmp_path, source) as played:
        (graded,) = played.play()
        (lease, _), *_ = played.backend.requests
        assert (lease.sampling.max_new_tokens, lease.sampling.stop) == (2, ("x",))
        assert lease.sampling.stop_token_ids == (9,)
    assert graded.rollout is not None
    assert (graded.rollout.num_sampled, graded.rollout.finish_reason) == (2, "length")


def test_a_first_prompt_that_is_too_long_fails_the_lease(tmp_path: Path):
    with world(tmp_path, "\nasync def run(task):\n    await ask(task, [1] * 65)\n    return 1.0\n") as played:
        (graded,) = played.play()
    assert graded.rollout is None
    assert graded.failure is not None
    assert graded.failure.cause == "prompt_too_long"


def test_an_agent_without_room_is_refused_and_its_rollout_is_cut(tmp_path: Path):
    source = """
async def run(task):
    status, first = await ask(task, [1])
    status, error = await ask(task, [1, *first["token_ids"], 2])
    note(error["code"])
    note(error["message"])
    return 1.0
"""
    with world(tmp_path, source) as played:
        (graded,) = played.play(max_new_tokens=5)
        assert played.notes[0] == "context_length_exceeded"
        assert "This model's maximum context length is" in played.notes[1]  # by which litellm knows it
    assert graded.rollout is not None
    assert (graded.rollout.finish_reason, graded.rollout.num_sampled) == ("length", 5)


@pytest.mark.parametrize(("answer", "parts"), [("2", {"length": 4.0}), (None, {"environment": 0.0})])
def test_an_agent_that_raises_for_lack_of_room_is_judged_if_its_row_can_be(
    tmp_path: Path, answer: str | None, parts: dict[str, float]
):
    source = """
async def run(task):
    status, first = await ask(task, [1])
    status, error = await ask(task, [1, *first["token_ids"], 2])
    raise RuntimeError(error["code"])
"""
    with world(tmp_path, source) as played:
        lease = make_lease(group_size=1, max_new_tokens=5)
        data = {} if answer is None else {"gt_answer": answer}
        lease = replace(lease, prompt=replace(lease.prompt, reward_data=data))
        played.rollouts.submit(lease, played.rollouts.encode(lease))
        played.until(lambda: played.done)
    (graded,) = played.done
    assert graded.rollout is not None
    assert (graded.rollout.reward_parts, graded.rollout.finish_reason) == (parts, "length")


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
        lease = make_lease(group_size=1)
        played.rollouts.submit(lease, played.rollouts.encode(lease))
        deadline = time.monotonic() + DEADLINE_S
        while not played.backend.requests:
            played.rollouts.collect()
            assert time.monotonic() < deadline
        os.kill(played.front.pid, signal.SIGKILL)
        played.until(lambda: played.notes)
        played.until(lambda: played.done)
        assert played.rollouts.counters()["agent/lost"] == 1
    (graded,) = played.done
    assert graded.rollout is not None
    (sequence,) = graded.rollout.sequences
    assert sequence.token_ids.tolist() == [1, *map(ord, "done"), END]


BEGINS = """
async def run(task):
    status, answer = await ask(task, [1])
    note(f"{os.getpid()} {status}")
    await asyncio.sleep(0.1)
"""


def test_an_agent_whose_fork_server_dies_with_its_process_id_does_not_play_its_session_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ASYNC_RL_FAULTS", str(tmp_path))
    with world(tmp_path, BEGINS) as played:
        (tmp_path / "fork_server.forked").touch()
        lease = make_lease(group_size=1)
        played.rollouts.submit(lease, played.rollouts.encode(lease))
        played.until(lambda: played.notes)  # it is stopped there, and the agent plays
        (held,) = tmp_path.glob("fork_server.forked.*")
        os.kill(int(held.suffix[1:]), signal.SIGKILL)
        played.until(lambda: played.done)
        assert len(played.notes) == 1
        (graded,) = played.done
        assert graded.failure is not None
        assert graded.failure.is_transient
        assert "fork server" in graded.failure.detail
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
        lease = make_lease(group_size=2, max_new_tokens=40)
        played.rollouts.submit(lease, played.rollouts.encode(lease))
        deadline = time.monotonic() + DEADLINE_S
        while len(played.rollouts._sessions[f"{lease.lease_id}/0"].waiting) < 3:
            played.rollouts.collect()
            assert time.monotonic() < deadline
        (tmp_path / "go").touch()
        while not played.rollouts._sessions[f"{lease.lease_id}/1"].waiting:
            played.rollouts.collect()
            assert time.monotonic() < deadline
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
        lease = make_lease(group_size=1)
        played.rollouts.submit(lease, played.rollouts.encode(lease))
        answered_after(4.0)
        played.until(lambda: played.notes)
        clock.now += 10.0
        (tmp_path / "go").touch()
        answered_after(0.5)
        played.until(lambda: played.done)
    (graded,) = played.done
    assert graded.rollout is not None
    calls = {"first": 1, "continued": 0, "branched": 0, "rewritten": 1, "lost": 0}
    assert graded.rollout.session == AgentSession(calls, {}, sampling_s=4.5, agent_s=10.0)
    counts = played.rollouts.counters()
    assert (counts["agent/sampling_s"], counts["agent/own_s"]) == (4, 10)


LEAVES_A_PROCESS = """
import subprocess

async def run(task):
    note(PROCESS)
    await ask(task, [1])
    return 1.0
"""
LEFT = {
    "a child": 'subprocess.Popen(["sleep", "1000"], start_new_session=True).pid',
    "an orphan": 'int(subprocess.check_output(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"]))',
}


@pytest.mark.parametrize("left", LEFT)
def test_what_an_agent_leaves_behind_ends_with_its_rollout(tmp_path: Path, left: str):
    with world(tmp_path, LEAVES_A_PROCESS.replace("PROCESS", LEFT[left])) as played:
        graded = played.play(group_size=2)
        assert all(one.rollout is not None for one in graded)
        assert len(played.notes) == 2
        for pid in map(int, played.notes):
            played.until(lambda pid=pid: state_of(pid) in (None, "Z"))


@pytest.mark.parametrize(
    ("process", "plays_again"), [("os.getpid()", True), (f"{LEFT['a child']} * 0 + os.getpid()", False)]
)
def test_the_process_of_an_agent_that_leaves_nothing_plays_again(tmp_path: Path, process: str, plays_again: bool):
    with world(tmp_path, LEAVES_A_PROCESS.replace("PROCESS", process)) as played:
        for _ in range(2):
            played.done.clear()
            played.play()
        first, second = played.notes
    assert (first == second) == plays_again


def test_an_engine_without_log_probabilities_fails_the_rollout(tmp_path: Path):
    with world(tmp_path, TWO_CALLS) as played:
        whole = played.backend._sampled

        def broken(lease: object, prompt_ids: object) -> object:
            found = whole(lease, prompt_ids)  # type: ignore[arg-type]
            found.logprobs[-1] = np.float32(-9999.0)
            return found

        played.backend._sampled = broken  # type: ignore[method-assign, assignment]
        (graded,) = played.play(max_new_tokens=20)
    assert graded.failure is not None
    assert "log-probability that is missing" in graded.failure.detail


def test_a_reward_beyond_the_limit_fails_the_rollout(tmp_path: Path):
    with world(tmp_path, TWO_CALLS.replace('+ 0.5, "score": 1.0', '+ 101.0, "score": 1.0')) as played:
        (graded,) = played.play(max_new_tokens=20)
    assert graded.failure is not None
    assert "at most reward.max_abs = 100, got 101" in graded.failure.detail


PROGRAM = """
import json, os, sys, urllib.request

task = json.load(open(os.environ["ASYNC_RL_TASK"]))
assert os.environ["OPENAI_API_KEY"] in os.environ["OPENAI_BASE_URL"]
url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/inference/v1/generate"
for token in range(1, 3):
    urllib.request.urlopen(urllib.request.Request(url, json.dumps({"token_ids": [token]}).encode())).read()
print("the row is", task["messages"][0]["content"], task["extra_info"]["index"])
sys.exit(int(sys.argv[1]))
"""


def command(directory: Path, status: int) -> tuple[str, ...]:
    (directory / "program.py").write_text(PROGRAM)
    return (sys.executable, str(directory / "program.py"), str(status))


def test_a_program_is_an_agent_whose_last_answer_is_judged(tmp_path: Path):
    with world(tmp_path, "", command=command(tmp_path, 0)) as played:
        (graded,) = played.play(max_new_tokens=20)
    assert graded.rollout is not None
    assert (graded.rollout.reward_parts, graded.rollout.accuracy) == ({"length": 4.0}, 1.0)
    assert len(graded.rollout.sequences) == 2


def test_a_program_that_fails_says_the_end_of_its_output(tmp_path: Path):
    with world(tmp_path, "", command=command(tmp_path, 3)) as played:
        (graded,) = played.play(max_new_tokens=20)
    assert graded.failure is not None
    assert "the command ended with exit status 3; the end of its output: the row is 1+1 0" in graded.failure.detail


def test_what_a_program_starts_ends_with_it(tmp_path: Path):
    source = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(str(child.pid))
time.sleep(1000)
"""
    (tmp_path / "program.py").write_text(source)
    words = (sys.executable, str(tmp_path / "program.py"), str(tmp_path / "said"))
    with world(tmp_path, "", command=words) as played:
        lease = make_lease(group_size=1)
        played.rollouts.submit(lease, played.rollouts.encode(lease))
        played.until(lambda: played.notes)
        pid = int(played.notes[0])
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_must_be_allowed_and_exist():
    words = ("no-such-program", "two words")
    with pytest.raises(ConfigError, match=r"does not allow it; if you trust it, set\n? ?generator.allow_code"):
        check_allowed_command(words, ["no-such-program"], key="environment.command")
    with pytest.raises(ConfigError, match="expected a program, got no-such-program"):
        check_allowed_command(words, ["no-such-program 'two words'"], key="environment.command")
    check_allowed_command((), [], key="environment.command")


HARNESS = """
import json, os, subprocess, sys, urllib.error, urllib.request

finish = json.loads(sys.stdin.readline())


def post(url, body, key):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": "Bearer " + key})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def report(key, **body):
    return post(finish["finish_url"], body, key)


post(os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/inference/v1/generate", {"token_ids": [1]}, "any")
thief = "import os, sys; print(sys.stdin.read() + repr(dict(os.environ)))"
seen = subprocess.run([sys.executable, "-c", thief], capture_output=True, text=True).stdout
statuses = [
    finish["finish_key"] in seen, report(os.environ["OPENAI_API_KEY"], reward=9.0), report("", reward=9.0),
    report(finish["finish_key"], reward="much"), report(finish["finish_key"], reward=0.25, score=1.0),
    report(finish["finish_key"], reward=9.0), report(finish["finish_key"], reward=0.25, score=1.0),
]
with open(sys.argv[1], "w") as file:
    file.write(json.dumps(statuses))
"""


def test_a_harness_reports_the_reward_with_a_key_that_its_agent_does_not_get(tmp_path: Path):
    (tmp_path / "program.py").write_text(HARNESS)
    words = (sys.executable, str(tmp_path / "program.py"), str(tmp_path / "said"))
    with world(tmp_path, "", command=words) as played:
        (graded,) = played.play(max_new_tokens=20)
        assert played.notes == ["[false, 401, 401, 400, 200, 409, 200]"]
    assert graded.rollout is not None
    assert (graded.rollout.reward_parts, graded.rollout.accuracy) == ({"environment": 0.25}, 1.0)
