"""Programs that play two sessions at once: none finds the other's key or files, nor ports unless the config says so."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from async_rl.extensions.agents.programs import isolation
from tests.extensions.agents.test_agent_rollouts import command, world
from tests.extensions.agents.world import PROGRAM, rollout_of
from tests.generator.scripted import END

VICTIM_AND_THIEF = """
import glob, re, socket

ready, done, notes, port = sys.argv[1:]
own, folder = os.environ["OPENAI_API_KEY"], os.path.dirname(os.environ["ASYNC_RL_TASK"])


def play():
    ask([1])
    open(ready, "w").close()
    open(done).close()
    ask([2])


def steal():
    ask([3])
    open(ready).close()
    found = {}
    for place in ("/proc/*/environ", "/proc/*/cmdline", "/proc/*/cwd/task.json", f"{folder}/../*/task.json"):
        for path in glob.glob(place):
            try:
                found[path] = open(path, errors="replace").read()
            except OSError:
                pass
    urls = {url for text in found.values() for url in re.findall("http://[0-9.:]+/s/[^/]+/v1", text)}
    calls = [ask([9], url)[0] for url in urls if own not in url]
    tasks = [path for path in found if path.endswith(".json") and not os.path.samefile(path, f"{folder}/task.json")]
    with socket.socket() as other:
        can_reach = other.connect_ex(("127.0.0.1", int(port))) == 0
    with open(notes, "w") as file:
        print(calls, len(tasks), can_reach, file=file)
    open(done, "w").close()


(steal if task["extra_info"]["index"] else play)()
"""


@pytest.mark.parametrize(
    ("sandbox", "level", "stolen"),
    [
        ("loopback", "all", "[] 0 False"), ("network", "all", "[] 0 True"), ("loopback", "keys", "[] 1 False"),
        ("off", "all", "[200] 1 True"),
    ],
)  # fmt: skip
def test_no_program_plays_the_session_of_another_unless_the_sandbox_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str, level: isolation.Level, stolen: str
):
    if level == "keys":  # as where mounts are forbidden
        monkeypatch.setattr(isolation, "reach", lambda: (level, ""))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where others have no folders
    ready, done = tmp_path / "ready", tmp_path / "done"
    os.mkfifo(ready)
    os.mkfifo(done)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = command(tmp_path, PROGRAM + VICTIM_AND_THIEF, ready, done, tmp_path / "said", port)
        with world(tmp_path, "", command=words, sandbox=sandbox) as played:
            victim, thief = map(rollout_of, played.play(group_size=2))
            assert played.notes == [stolen]
    texts = [sequence.token_ids.tolist() for sequence in victim.sequences]
    foreign = [[9, *map(ord, "done"), END]] if sandbox == "off" else []
    own = [[1, *map(ord, "look"), END], *foreign, [2, *map(ord, "more" if foreign else "done"), END]]
    assert texts == own
    assert [sequence.token_ids.tolist() for sequence in thief.sequences] == [[3, *map(ord, "look"), END]]


HANGS_UP = """
import socket
from urllib.parse import urlsplit

url, body = urlsplit(os.environ["OPENAI_BASE_URL"]), json.dumps({"token_ids": [1], "sampling_params": {}})
path = url.path.replace("/v1", "/inference/v1/generate")
with socket.create_connection((url.hostname, url.port)) as call:
    head = f"POST {path} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    call.sendall(f"{head}{body}".encode())
    open(sys.argv[1]).close()
ask([2])
"""


def test_a_call_that_an_isolated_program_gives_up_is_stopped_and_lost(tmp_path: Path):
    os.mkfifo(tmp_path / "begun")
    with world(tmp_path, "", command=command(tmp_path, PROGRAM + HANGS_UP, tmp_path / "begun")) as played:
        played.backend.step = list  # type: ignore[method-assign]  # nothing is answered
        played.submit()
        played.until(lambda: played.backend.num_running == 1)
        (tmp_path / "begun").open("w").close()
        played.until(lambda: len(played.backend.requests) == 2 and played.backend.num_running == 1)
        del played.backend.step
        played.until(lambda: played.done)
        assert played.rollouts.counters()["agent/lost"] == 1
    (sequence,) = rollout_of(played.done[0]).sequences
    assert sequence.token_ids.tolist() == [2, *map(ord, "done"), END]
