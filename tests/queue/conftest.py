"""Queue servers in processes of their own, found through ``queue.json``, ended with the test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.net.keys import ClientKeys
from async_rl.process.child import PARENT_WATCH_FD, watch_parent
from async_rl.queue.client.clients import GeneratorQueue, LearnerQueue
from async_rl.queue.messages import Announcement
from async_rl.run.queue_files import read_record
from tests.end_to_end.harness import wait_until
from tests.forked import Forked, preload
from tests.queue import serve
from tests.queue.direct import Run

preload("tests.queue.serve")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0


@dataclass
class Server:
    process: Forked
    address: str


def run_server(arguments: list[str], parent_watch: Connection | None) -> None:
    """The server's process. It ends with the other side of ``parent_watch``."""
    if parent_watch is not None:
        os.environ[PARENT_WATCH_FD] = str(parent_watch.fileno())
        watch_parent()
    sys.exit(serve.main(arguments))


class Servers:
    """Starts servers and connects clients."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[Forked] = []
        self._clients: list[GeneratorQueue | LearnerQueue] = []

    def spawn(self, config: Config, *options: str, parent_watch: Connection | None = None) -> Forked:
        path = self._directory / f"config-{len(self._processes)}.toml"
        path.write_text(config_to_toml(config))
        process = Forked(run_server, [str(path), *options], parent_watch)
        self._processes.append(process)
        return process

    def start(self, config: Config, *options: str, parent_watch: Connection | None = None) -> Server:
        process = self.spawn(config, *options, parent_watch=parent_watch)

        def recorded() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"the server ended: {process.communicate()}")
            record = read_record(Path(config.run.dir))
            return record is not None and record.pid == process.pid

        wait_until("queue.json", recorded)
        record = read_record(Path(config.run.dir))
        assert record is not None
        return Server(process, record.address)

    def run(self, config: Config, *options: str) -> tuple[Server, LearnerQueue, GeneratorQueue]:
        """A server, a learner that has attached, and a generator that has said hello."""
        server = self.start(config, *options)
        learner, generator = self.learner(server.address), self.generator(server.address)
        attach(learner)
        generator.hello(DEADLINE_S, "fake")
        return server, learner, generator

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
            process.wait()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    yield made
    made.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A server without sockets, whose learner has attached and announced version 0."""
    with closing(Run(tmp_path, monkeypatch)) as made:
        made.attach()
        made.announce(0)
        yield made


@contextmanager
def dealer(address: str, keys: ClientKeys | None) -> Iterator[zmq.Socket[bytes]]:
    """A bare client, to say what no client of ours would."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if keys is not None:
            keys.identify(socket)
        socket.connect(address)
        yield socket


def attach(queue: LearnerQueue, lineage: str = "line-a", *, snapshot: bytes | None = None, **changes: object) -> None:
    """Attach as the learner of run ``run`` and announce the version that it starts from."""
    plain = {"parent_lineage": "", "fork_version": 0, "step": 0, "num_steps": 3, **changes}
    queue.attach(
        run_id="run", lineage=lineage, config_toml="[run]", files={"b.json": b"{}", "a.txt": b"hello"},
        snapshot=snapshot, **plain,
    )  # type: ignore[arg-type]  # fmt: skip
    version = int(str(plain["fork_version"]))
    queue.announce(Announcement(lineage, version, f"digest-{version}", "tcp://127.0.0.1:1", ports=(5556, 5557)))
    queue.ping()  # Announced by now, for whoever looks from another connection.
