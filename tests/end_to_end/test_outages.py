"""Whole runs in an ordinary world: a tool that is away at times, a broken generator, slow, raising and endless rows."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.end_to_end.harness import check_ledger, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

NUM_ROWS, NUM_TRIED = 300, 3
"""The first three rows are tried before a run starts, so they don't misbehave."""
RAISING, SLOW = {57, 143, 251}, {31, 199, 288}
"""One in a hundred each."""
SLOW_S, LEASE_TIMEOUT_S = 3.0, 2.0

TOOL = '''
import os, time, urllib.request

URL, BROKEN, CLAIM = {url!r}, {broken}, {claim!r}
_OWNER = []


def is_trial():
    return not os.path.isdir({logs!r})


def is_broken_machine():
    """The first generator that asks can't reach the tool, for ever."""
    if is_trial() or not BROKEN:
        return False
    owner = os.getppid() if {forked} else os.getpid()
    if not _OWNER:
        try:
            with open(CLAIM, "x") as file:
                file.write(str(owner))
        except FileExistsError:
            pass
        while not (text := open(CLAIM).read()):
            time.sleep(0.01)
        _OWNER.append(text)
    return _OWNER[0] == str(owner)


def ask(row):
    if is_broken_machine():
        raise ConnectionRefusedError("no route from this machine")
    with urllib.request.urlopen(URL + str(row), timeout=5) as reply:
        return reply.read().decode()


def visit(row):
    if row in {raising!r} and not is_trial():
        raise KeyError(f"row {{row}}")
    if row in {slow!r} and not is_trial():
        end = time.monotonic() + {slow_s}
        while time.monotonic() < end:
            time.sleep({slow_s}) if row % 2 else sum(range(100_000))  # even rows keep the interpreter busy
    return ask(row)
'''
REWARD = """

def score(item):
    visit(item.reward_data["row"])
    return float(len(item.text) % 2)
"""
GAME = """

async def reset(extra_info):
    extra_info["turn"] = 0
    return "1+1:"


async def step(state, action, extra_info):
    said = visit(extra_info["idx"])
    return {{"next_state": state + action + said, "reward": float(len(action) % 2), "score": 0.0}}
"""


class Tool:
    """A real HTTP server. After every ``every`` replies it is away for the next of ``outages_s``: nothing listens."""

    def __init__(self, every: int, outages_s: list[float], long_share: float) -> None:
        self.every, self.outages_s, self.long_share = every, outages_s, long_share
        self.num_outages, self.num_replies, self.is_closing = 0, 0, False
        self._away = threading.Event()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.server = self._serve()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _serve(self) -> ThreadingHTTPServer:
        tool = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                tool.num_replies += 1
                if tool.num_replies % tool.every == 0:
                    tool._away.set()
                is_long = random.Random(tool.num_replies).random() < tool.long_share
                body = b"=7" * (200 if is_long else 1)
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def _live(self) -> None:
        for outage_s in self.outages_s:
            self._away.wait()
            if self.is_closing:
                return
            self.server.shutdown()
            self.server.server_close()
            self.num_outages += 1
            end = time.monotonic() + outage_s
            while time.monotonic() < end and not self.is_closing:
                time.sleep(0.05)
            self._away.clear()
            self.server = self._serve()

    def close(self) -> None:
        self.is_closing = True
        self._away.set()
        self._thread.join()
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def tool(every: int, outages_s: list[float], long_share: float = 0.0) -> Iterator[Tool]:
    served = Tool(every, outages_s, long_share)
    try:
        yield served
    finally:
        served.close()


@dataclass(frozen=True)
class Run:
    kind: Literal["reward", "environment"]
    num_steps: int
    num_generators: int
    seed: int


def write_run(directory: Path, run: Run, served: Tool) -> Path:
    task = write_tiny_task(directory)
    source = directory / "world.py"
    text = TOOL + (REWARD if run.kind == "reward" else GAME)
    source.write_text(
        text.format(
            url=f"http://127.0.0.1:{served.port}/", broken=run.num_generators > 1, claim=str(directory / "claim"),
            logs=str(directory / "run" / "logs"),
            forked=run.kind == "environment", raising=RAISING, slow=SLOW, slow_s=SLOW_S,
        )
    )  # fmt: skip
    rows = [{"messages": [{"role": "user", "content": "1+1:"}], "gt_answer": "2", "row": n} for n in range(NUM_ROWS)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes: dict[str, dict[str, Any]] = {
        "data": {"train": str(directory / "rows.jsonl"), "eval": {}, "epochs": 100},
        "run": {"seed": run.seed},
        "learner": {"steps": run.num_steps, "groups_per_step": 4},
        "queue": {"lease_timeout_s": LEASE_TIMEOUT_S, "max_staleness": 4, "on_stale": "wait"},
        "generator": {
            "backend": "fake", "batch_size": 8, "allow_code": [str(source)], "count": run.num_generators,
        },
        "experimental": {"fake": {"mean_tokens": 4.0, "vocab_size": 20}},
        "eval": {"every": 0},
        "checkpoint": {"every": 100},
    }  # fmt: skip
    if run.kind == "reward":
        changes["reward"] = {"type": f"{source}:score", "soft_overlong": False}
    else:
        changes["environment"] = {"name": str(source), "max_turns": 3, "max_turn_tokens": 4}
        changes["sampling"] = {"group_size": 2, "max_new_tokens": 12, "max_prompt_tokens": 48}
    config = tiny_config(directory, task, **changes)
    return write_config(directory / "config.toml", config)


def check_run(directory: Path, run: Run, log: str) -> None:
    run_dir = directory / "run"
    assert steps(run_dir) == list(range(1, run.num_steps + 1))
    ledger = check_ledger(run_dir)
    assert ledger["groups"]["trained"] == 4 * run.num_steps
    excluded = {entry["row"] for entry in ledger["excluded"]}
    assert excluded <= RAISING, ledger["excluded"]
    raised = [place for place in ledger["failures"] if "KeyError" in place["detail"]]
    if run.num_steps * 4 >= NUM_ROWS:
        assert set(raised[0]["rows"]) == RAISING
        assert "KeyError: 'row " in log


@pytest.mark.slow
def test_a_tool_that_is_away_a_broken_generator_and_bad_rows_end_no_run(tmp_path: Path):
    run = Run("environment", num_steps=30, num_generators=2, seed=0)
    with tool(60, [4.0, 1.0], long_share=0.05) as served, roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(write_run(tmp_path, run, served)))
        launch.succeed()
        assert served.num_outages >= 1
    check_run(tmp_path, run, launch.log)
    assert "is quarantined, while others succeed" in launch.log or "the run is paused" in launch.log


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["reward", "environment"])
def test_four_hundred_steps_in_a_world_that_misbehaves(
    tmp_path: Path, kind: Literal["reward", "environment"], seed: int
):
    run = Run(kind, num_steps=400, num_generators=4, seed=seed)
    draw = random.Random(seed)
    outages = [draw.choice((1.0, 1.5, 2.0, 3.0, 5.0)) for _ in range(10)]
    outages[seed] = 60.0 if seed == 0 else 20.0
    with tool(250, outages, long_share=0.05) as served, roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(write_run(tmp_path, run, served)))
        launch.succeed(deadline_s=1700.0)
        assert served.num_outages == 10
    check_run(tmp_path, run, launch.log)
