"""The product's side of ``benchmarks.weights``: publisher and staging here, a receiver in its own process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.generator.hf.causal_model import WeightTable
from async_rl.net.keys import ClientKeys, ServerKeys
from async_rl.queue.messages import Announcement
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.staging import Staging
from benchmarks.weights_raw import BUCKET_BYTES, DEADLINE_S, Child


@dataclass(slots=True)
class Runs:
    """Seconds of one side, round by round; ``pause`` and ``stage`` where it has them."""

    seconds: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    stage: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)


class Product:
    """One transport, with its keys and deltas; ``once`` publishes a version and waits until it is active."""

    def __init__(self, transport: Any, weights: Mapping[str, Tensor], *, keys: Path | None, has_deltas: bool) -> None:
        self._weights = dict(weights)
        self._version = 0
        # About one element in fifty moves from version to version, anywhere.
        most = max(len(tensor) for tensor in weights.values())
        self._moved = torch.randint(0, most, (most // 50 + 1,))
        self._staging = Staging(None, BUCKET_BYTES, deadline_s=DEADLINE_S, is_pulled=transport == "tcp")
        self._publisher = Publisher(
            "127.0.0.1", deadline_s=DEADLINE_S, insecure=False, transport=transport, has_deltas=has_deltas,
            keys=None if keys is None else ServerKeys.ephemeral(keys), is_encrypted=keys is not None,
        )  # fmt: skip
        if transport != "tcp":
            assert self._publisher.wait_for_collective(DEADLINE_S), "the process that broadcasts weights did not start"
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._child = Child(receive, shapes, keys)
        self._publish()
        self._finish(Runs())
        for _ in range(2):  # the epoch is built, every buffer is touched
            self.once(Runs())

    def _publish(self) -> float:
        staged = self._staging.stage("benchmark", self._version, iter(self._weights.items()))
        manifest = staged.manifest
        self._start = time.perf_counter()
        self._publisher.publish(staged)
        if self._version == 0:
            announcement = Announcement("benchmark", 0, manifest.digest, self._publisher.address)
            self._child.pipe.send(announcement)
        self._version += 1
        return staged.gather_s + staged.digest_s

    def _finish(self, runs: Runs) -> None:
        assert self._publisher.wait(self._version - 1, DEADLINE_S, num_members=1), self._publisher.stats()
        runs.seconds.append(time.perf_counter() - self._start)
        version, pause_s = self._child.pipe.recv()
        assert version == self._version - 1
        runs.pause.append(pause_s)

    def once(self, runs: Runs) -> None:
        """One version: changed as an optimizer step would, staged, published, activated."""
        for tensor in self._weights.values():
            tensor[self._moved[: len(tensor) // 50] % len(tensor)] *= 1.01
        before = self._publisher.stats().pulled_bytes
        runs.stage.append(self._publish())
        self._finish(runs)
        runs.wire_bytes.append(self._publisher.stats().pulled_bytes - before)

    def close(self) -> None:
        self._child.close()
        self._publisher.close()


def receive(pipe: Connection, shapes: Mapping[str, tuple[int, ...]], keys: Path | None) -> None:
    torch.set_num_threads(1)
    names = {name.replace(".", "_"): name for name in shapes}
    model: Any = nn.ParameterDict(
        {key: nn.Parameter(torch.zeros(shapes[name], dtype=torch.bfloat16)) for key, name in names.items()}
    )
    table = WeightTable(model)
    mine = None if keys is None else ClientKeys.load(keys / "client.key")
    with closing(Receiver("benchmark", insecure=False, keys=mine)) as receiver:
        try:
            receiver.follow(pipe.recv())
            while not pipe.poll():
                receiver.wait(0.2)
                staged = receiver.poll()
                if staged is None:
                    continue
                tensors = {key: staged.tensors[name] for key, name in names.items()}
                start = time.perf_counter()
                table.check(tensors)
                table.replace(tensors)
                receiver.activated(staged)
                pipe.send((staged.version, time.perf_counter() - start))
        except (EOFError, OSError):
            pass  # the other side is done
