"""What a call through the agents' HTTP front costs, beside a bare starlette and uvicorn server.

    python -m benchmarks.agents [--calls 200] [--rounds 5]

Both servers are processes of their own and answer the same bytes to the same requests of ``/inference/v1/generate``.
Ours passes each call to a generator, here a process that answers at once, and back. The bare one reads the body, parses
nothing, and sends stored bytes. Clients keep their connections. Rounds alternate between both sides; a figure is the
median of its rounds.

``ours - bare - parsing`` is our work for a call beyond reading its body. ``collect`` is called in each turn of a
generator's loop; the last table says what that costs while nothing happens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from async_rl.config.generator import EnvironmentConfig, GeneratorConfig
from async_rl.environments.pool import EnvironmentPool
from async_rl.generator.agents.front_process import Front
from async_rl.generator.agents.messages import Call, Reply
from async_rl.generator.agents.requests import read_generate
from async_rl.generator.agents.rollouts import AgentRollouts
from async_rl.generator.fake import FakeBackend
from async_rl.generator.rollouts import ThreadGrader
from async_rl.rewards.records import RewardOutput
from tests.generator.leases import make_lease

SIZES, CLIENTS, SESSIONS = (100, 10_000, 100_000), (1, 50, 200), (0, 200)
SAMPLED, KEYS = 64, 4000
WANTED_MS, WANTED_US = 100.0, 100.0
PATH = "/inference/v1/generate"
_SPAWN = multiprocessing.get_context("spawn")
_START_S = 60.0
_LONGEST = 1 << 20
_numbers = itertools.count()


def reply(call: int) -> Reply:
    ids = np.arange(SAMPLED, dtype="<i4")
    logprobs, versions = np.full(SAMPLED, -0.5, "<f4"), np.zeros(SAMPLED, "<i4")
    return Reply(call, ids.tobytes(), logprobs.tobytes(), versions.tobytes(), "stop", 1, "")


def serve_front(address: Connection) -> None:
    """Answer the calls of a front until this process is ended."""
    front = Front("benchmark", _LONGEST)
    front.open(f"k{number}" for number in range(KEYS))
    address.send(front.url)
    while True:
        select.select([front._link], [], [])
        for message in front.poll():
            if isinstance(message, Call):
                front.reply(reply(message.call))


def serve_bare(address: Connection, answer: bytes) -> None:
    """Answer each request with ``answer`` until this process is ended."""

    async def generate(request: Request) -> Response:
        await request.body()
        return Response(answer, media_type="application/json")

    # asyncio sends at once (TCP_NODELAY) only on sockets that know their protocol, as those from a descriptor do.
    listener = socket.socket(fileno=socket.create_server(("127.0.0.1", 0), backlog=1024).detach())
    app = Starlette(routes=[Route("/s/{key}" + PATH, generate, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none"))
    address.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
    asyncio.run(server.serve(sockets=[listener]))


@contextmanager
def served(target: Callable[..., None], *arguments: object) -> Iterator[str]:
    """The address of a server that runs in a process of its own."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(theirs, *arguments))
    process.start()
    try:
        if not ours.poll(_START_S):
            raise TimeoutError(f"{target.__name__} did not start in {_START_S:.0f} s")
        yield ours.recv()
    finally:
        process.kill()  # a front ends with its generator
        process.join()


class Client:
    """One connection, which sends a request after the other, each with the next key: a key alone would have to wait."""

    def __init__(self, url: str, body: bytes) -> None:
        self._netloc = urlsplit(url).netloc
        self._rest = f"{PATH} HTTP/1.1\r\nHost: {self._netloc}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def run(self, calls: int) -> tuple[list[float], bytes]:
        """The seconds that each call took, and the last answer."""
        host, _, port = self._netloc.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
        took: list[float] = []
        answer = b""
        for _ in range(calls):
            started = time.perf_counter()
            writer.write(b"POST /s/k%d%b" % (next(_numbers) % KEYS, self._rest))
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            answer = await reader.readexactly(int(length.partition(b":")[2]))
            took.append(time.perf_counter() - started)
            assert head.startswith(b"HTTP/1.1 200"), head
        writer.close()
        return took, answer


async def _load(url: str, clients: int, body: bytes, calls: int) -> list[float]:
    runs = [Client(url, body).run(max(2, calls // clients)) for _ in range(clients)]
    return [one for took, _ in await asyncio.gather(*runs) for one in took]


def body_of(num_ids: int) -> bytes:
    ids = np.random.default_rng(0).integers(0, 150_000, num_ids).tolist()
    return json.dumps({"model": "m", "token_ids": ids, "sampling_params": {"max_tokens": SAMPLED}}).encode()


def compare(urls: Sequence[str], clients: int, body: bytes, calls: int, rounds: int) -> list[np.ndarray]:
    """For both sides, p50 and p99 in ms."""
    found: list[list[list[float]]] = [[], []]
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            took = asyncio.run(_load(urls[side], clients, body, calls))
            if number:  # the first round warms both up
                found[side].append([1000 * float(np.percentile(took, q)) for q in (50, 99)])
    return [np.median(side, axis=0) for side in found]


def parsing_ms(body: bytes) -> float:
    took: list[float] = []
    for _ in range(20):
        started = time.perf_counter()
        read_generate(body, print)
        took.append(time.perf_counter() - started)
    return 1000 * statistics.median(took)


@contextmanager
def rollouts(num_sessions: int) -> Iterator[AgentRollouts]:
    """Rollouts whose ``num_sessions`` agents call nothing."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = directory / "agent.py"
        path.write_text("import asyncio\nasync def run(task):\n    await asyncio.sleep(1e6)\n")
        config = EnvironmentConfig(name=f"{path}:run")
        pool = EnvironmentPool(config, allowed=[str(path)], digest=None, has_agents=True)
        stack.enter_context(closing(pool))
        front = stack.enter_context(closing(Front("benchmark", _LONGEST)))
        backend = FakeBackend(GeneratorConfig(backend="fake"))
        grader = ThreadGrader(lambda item: RewardOutput({}, 0.0), num_threads=1)
        stack.enter_context(closing(grader))
        found = AgentRollouts(backend, pool, front, grader, backend.text.render, config, make_lease().sampling)
        if num_sessions:
            lease = make_lease(group_size=num_sessions)
            found.submit(lease, found.encode(lease))
        while len(pool.pids) < num_sessions:
            found.collect()
        time.sleep(1.0)  # the agents' processes have begun, and use no CPU any more
        yield found


def turn_us(num_sessions: int) -> tuple[float, float]:
    """Microseconds of ``collect``, and of what else the loop asks in each turn, per turn."""
    with rollouts(num_sessions) as found:

        def asked() -> None:
            _ = (found.num_open, found.num_pending, found.num_pending)

        return _us(found.collect), _us(asked)


def _us(run: Callable[[], object], repeats: int = 2000) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="in each round of each side")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with served(serve_front) as ours:
        _, answer = asyncio.run(Client(ours, body_of(1)).run(1))
        with served(serve_bare, answer) as bare:
            urls = (ours, bare)
            print("ids       ours ms   bare ms   ratio   parsing ms   beyond parsing ms")
            for size in SIZES:
                body, calls = body_of(size), max(20, min(arguments.calls, 2_000_000 // size))
                (own, _), (other, _) = compare(urls, 1, body, calls, arguments.rounds)
                parsing = parsing_ms(body)
                print(f"{size:<7} {own:>9.2f} {other:>9.2f} {own / other:>7.2f} {parsing:>12.2f} "
                      f"{own - other - parsing:>19.2f}")  # fmt: skip
            print(f"wanted: under {WANTED_MS:.0f} ms for {SIZES[-1]} ids\n")
            print("clients   ours p50   bare p50   ratio   ours p99   bare p99   ratio   (ms)")
            for clients in CLIENTS:
                calls = max(arguments.calls, 10 * clients)
                own, other = compare(urls, clients, body_of(SIZES[0]), calls, arguments.rounds)
                figures = [f"{a:>8.2f}   {b:>8.2f}   {a / b:>5.2f}" for a, b in zip(own, other, strict=True)]
                print(f"{clients:<7}   {'   '.join(figures)}")
    print("\nsessions   collect us   questions us   (per turn of the loop)")
    for sessions in SESSIONS:
        collect, questions = turn_us(sessions)
        print(f"{sessions:<8}   {collect:>10.1f}   {questions:>12.1f}")
    print(f"wanted: collect under {WANTED_US:.0f} us")


if __name__ == "__main__":
    main()
