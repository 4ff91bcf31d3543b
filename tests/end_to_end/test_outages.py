"""A run in an ordinary world: a tool that is away at times, a broken generator, slow, raising and endless rows."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harness import check_ledger, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.ports import free_port

NUM_ROWS, NUM_STEPS = 120, 30
"""An epoch: each row is played at least once."""
RAISING, SLOW = {57, 103}, {31, 88}
SLOW_S, LEASE_TIMEOUT_S = 3.0, 2.0
EVERY, OUTAGES_S, LONG_SHARE = 60, (4.0, 1.0), 0.05
"""The tool is away after so many replies, for so long; that share of its replies is too long for a rollout."""

GAME = '''
import os, time, urllib.request

_OWNER = []


def is_trial():
    return not os.path.isdir({logs!r})


def is_broken_machine():
    """The first generator that asks can't reach the tool, for ever."""
    owner = str(os.getppid())
    if not _OWNER:
        try:
            with open({claim!r}, "x") as file:
                file.write(owner)
        except FileExistsError:
            pass
        while not (text := open({claim!r}).read()):
            time.sleep(0.01)
        _OWNER.append(text)
    return _OWNER[0] == owner


async def reset(extra_info):
    return "1+1:"


async def step(state, action, extra_info):
    row = extra_info["idx"]
    if not is_trial():
        if row in {raising!r}:
            raise KeyError(f"row {{row}}")
        if is_broken_machine():
            raise ConnectionRefusedError("no route from this machine")
        end = time.monotonic() + ({slow_s} if row in {slow!r} else 0.0)
        while time.monotonic() < end:
            time.sleep({slow_s}) if row % 2 else sum(range(100_000))  # even rows keep the interpreter busy
    with urllib.request.urlopen({url!r}, timeout=5) as reply:
        said = reply.read().decode()
    return {{"next_state": state + action + said, "reward": float(len(action) % 2), "score": 0.0}}
'''


class Tool:
    """A real HTTP server. After every ``EVERY`` replies it is away for the next of ``OUTAGES_S``: nothing listens."""

    def __init__(self) -> None:
        self.num_outages, self.num_replies, self.is_closing = 0, 0, False
        self._away = threading.Event()
        self.port = free_port()
        self.server = self._serve()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _serve(self) -> ThreadingHTTPServer:
        tool = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                tool.num_replies += 1
                if tool.num_replies % EVERY == 0:
                    tool._away.set()
                is_long = random.Random(tool.num_replies).random() < LONG_SHARE
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
        for outage_s in OUTAGES_S:
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
def tool() -> Iterator[Tool]:
    served = Tool()
    try:
        yield served
    finally:
        served.close()


def write_run(directory: Path, served: Tool) -> Path:
    source = directory / "world.py"
    source.write_text(
        GAME.format(
            url=f"http://127.0.0.1:{served.port}/", claim=str(directory / "claim"),
            logs=str(directory / "run" / "logs"), raising=RAISING, slow=SLOW, slow_s=SLOW_S,
        )
    )  # fmt: skip
    rows = [{"messages": [{"role": "user", "content": "1+1:"}], "gt_answer": "2"}] * NUM_ROWS
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(
        directory,
        write_tiny_task(directory),
        data={"train": str(directory / "rows.jsonl"), "eval": {}, "epochs": 100},
        sampling={"group_size": 2, "max_new_tokens": 12, "max_prompt_tokens": 48},
        environment={"name": str(source), "max_turns": 3, "max_turn_tokens": 4},
        learner={"steps": NUM_STEPS, "groups_per_step": 4},
        queue={"lease_timeout_s": LEASE_TIMEOUT_S, "max_staleness": 4, "on_stale": "wait"},
        generator={"backend": "fake", "batch_size": 8, "allow_code": [str(source)], "count": 2},
        experimental={"fake": {"mean_tokens": 4.0, "vocab_size": 20}},
        eval={"every": 0},
        checkpoint={"every": 100},
    )
    return write_config(directory / "config.toml", config)


@pytest.mark.slow
def test_a_tool_that_is_away_a_broken_generator_and_bad_rows_end_no_run(tmp_path: Path):
    with tool() as served, roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(write_run(tmp_path, served)))
        launch.succeed()
        assert served.num_outages >= 1
    run_dir = tmp_path / "run"
    assert steps(run_dir) == list(range(1, NUM_STEPS + 1))
    ledger = check_ledger(run_dir)
    assert ledger["groups"]["trained"] == 4 * NUM_STEPS
    assert {entry["row"] for entry in ledger["excluded"]} <= RAISING, ledger["excluded"]
    (raised,) = [place for place in ledger["failures"] if "KeyError" in place["detail"]]
    assert set(raised["rows"]) == RAISING
    assert "KeyError: 'row " in launch.log
    assert "is quarantined, while others succeed" in launch.log or "the run is paused" in launch.log
