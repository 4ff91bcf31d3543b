"""Queue servers in processes of their own, found through ``queue.json``, ended with the test."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.queue.client.learner_client import GeneratorQueue, LearnerQueue
from async_rl.queue.messages import Announcement
from async_rl.run.queue_files import read_record

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


@dataclass
class Server:
    process: subprocess.Popen[str]
    address: str


class Servers:
    """Starts servers and connects clients."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[str]] = []
        self._clients: list[GeneratorQueue | LearnerQueue] = []

    def spawn(self, config: Config, *options: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        path = self._directory / f"config-{len(self._processes)}.toml"
        path.write_text(config_to_toml(config))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.queue.serve", str(path), *options], cwd=ROOT, text=True, pass_fds=pass_fds,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def start(self, config: Config, *options: str, pass_fds: tuple[int, ...] = ()) -> Server:
        process = self.spawn(config, *options, pass_fds=pass_fds)

        def recorded() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"the server ended: {process.communicate()}")
            record = read_record(Path(config.run.dir))
            return record is not None and record.pid == process.pid

        wait_until(recorded, "queue.json")
        record = read_record(Path(config.run.dir))
        assert record is not None
        return Server(process, record.address)

    def learner(self, address: str, *, timeout_s: float = DEADLINE_S) -> LearnerQueue:
        queue = LearnerQueue(address, timeout_s)
        self._clients.append(queue)
        return queue

    def generator(self, address: str, name: str = "g0") -> GeneratorQueue:
        queue = GeneratorQueue(address, name)
        self._clients.append(queue)
        return queue

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    yield made
    made.close()


def attach(queue: LearnerQueue, lineage: str = "line-a", *, snapshot: bytes | None = None, **changes: object) -> None:
    """Attach as the learner of run ``run`` and announce the version that it starts from."""
    plain = {"parent_lineage": "", "fork_version": 0, "step": 0, "num_steps": 3, **changes}
    queue.attach(
        run_id="run", lineage=lineage, config_toml="[run]", files={"b.json": b"{}", "a.txt": b"hello"},
        snapshot=snapshot, **plain,
    )  # type: ignore[arg-type]  # fmt: skip
    queue.announce(Announcement(lineage, int(str(plain["fork_version"])), "digest-0", "tcp://127.0.0.1:1"))
    queue.ping()  # Announced by now, for whoever looks from another connection.
