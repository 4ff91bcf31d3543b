"""What weights could travel by at best, for ``benchmarks.weights``: a raw socket, a bare gloo broadcast, a memory copy.

Each side is an object with ``once()``: seconds of one transfer of ``size`` bytes. Both ends of it are processes of
their own.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from async_rl.weights.collective.libraries import make_library
from async_rl.weights.collective.library import Communicator, Endpoint

BUCKET_BYTES = 64 << 20
DEADLINE_S = 300.0
_LOOPBACK = Endpoint("127.0.0.1", "127.0.0.1")


def goal(text: str, value: float, limit: float, *, at_most: bool = False) -> None:
    """Print whether ``value`` is on the right side of ``limit``."""
    reached = value <= limit if at_most else value >= limit
    bound = "at most" if at_most else "at least"
    print(f"  goal: {text} {bound} {limit:g}, measured {value:.4g}: {'reached' if reached else 'MISSED'}", flush=True)


class Child:
    """A process of ``target(connection, *arguments)`` and the pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        self.pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


class RawSocket:
    """``sendall`` to ``recv_into`` over loopback; the receiver confirms with a byte."""

    def __init__(self, size: int) -> None:
        self._data = np.ones(size, np.uint8).data
        listener = socket.create_server(("127.0.0.1", 0))
        self._child = Child(_raw_receiver, listener.getsockname()[1], size)
        self._connection, _ = listener.accept()
        listener.close()

    def once(self) -> float:
        start = time.perf_counter()
        self._connection.sendall(self._data)
        self._connection.recv(1)
        return time.perf_counter() - start

    def close(self) -> None:
        self._connection.close()
        self._child.close()


def _raw_receiver(pipe: Connection, port: int, size: int) -> None:
    # On a page of its own: 16 bytes behind one, where a bytearray lies, copies were a tenth slower.
    view = memoryview(mmap.mmap(-1, size))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while True:
            filled = 0
            while filled < size:
                count = connection.recv_into(view[filled : filled + (1 << 20)])
                if count == 0:
                    return
                filled += count
            connection.sendall(b"\0")


class BareGloo:
    """Broadcasts of the product's chunks from this process to others, and nothing else."""

    def __init__(self, size: int, num_peers: int = 1) -> None:
        self._bucket = torch.ones(size, dtype=torch.uint8)
        library = make_library("gloo", _LOOPBACK)
        unique_id = library.unique_id()
        self._children = [Child(_gloo_peer, unique_id, size, peer, num_peers) for peer in range(1, num_peers + 1)]
        self._group = Communicator.connect(library, unique_id, rank=0, size=num_peers + 1, stall_s=DEADLINE_S)

    def once(self) -> float:
        for child in self._children:
            child.pipe.send(True)
        for child in self._children:
            child.pipe.recv()
        start = time.perf_counter()
        self._group.broadcast([self._bucket], chunk_bytes=BUCKET_BYTES, deadline=time.monotonic() + DEADLINE_S)
        for child in self._children:
            child.pipe.recv()
        return time.perf_counter() - start

    def close(self) -> None:
        self._group.close()
        for child in self._children:
            child.close()


def _gloo_peer(pipe: Connection, unique_id: bytes, size: int, rank: int, num_peers: int) -> None:
    torch.set_num_threads(1)
    library, bucket = make_library("gloo", _LOOPBACK), torch.zeros(size, dtype=torch.uint8)
    group = Communicator.connect(library, unique_id, rank=rank, size=num_peers + 1, stall_s=DEADLINE_S)
    try:
        while pipe.recv():
            pipe.send("ready")
            group.broadcast([bucket], chunk_bytes=BUCKET_BYTES, deadline=time.monotonic() + DEADLINE_S)
            pipe.send("done")
    except EOFError:
        group.close()


class MemoryCopy:
    def __init__(self, size: int) -> None:
        self._from, self._to = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def once(self) -> float:
        start = time.perf_counter()
        self._to.copy_(self._from)
        return time.perf_counter() - start

    def close(self) -> None:
        pass
