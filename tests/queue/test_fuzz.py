"""Mutants of every valid message: at the handlers with every right that a key gives, and at a real server.

The server must go on serving, and its memory must not grow.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import asdict

from async_rl.errors import AsyncRLError
from async_rl.net import caller
from async_rl.net.codec import encode_group
from async_rl.net.frames import send_frames
from async_rl.net.keys import ClientKeys, make_keys
from async_rl.net.wire import Frame, decode, encode, pack_plain
from async_rl.queue.client.clients import GeneratorQueue, LearnerQueue
from async_rl.queue.core import generator_requests, persistence
from async_rl.queue.core.state import QueueState, encode_state
from async_rl.queue.messages import (
    REQUESTS,
    WIRE_TYPES,
    Announcement,
    Batch,
    FailedRollouts,
    FailLease,
    Failure,
    ReturnGroups,
    StepAck,
)
from async_rl.queue.server.handlers import Deferred, Handlers, owner_of
from async_rl.queue.server.sockets import MessageLimits
from tests.examples import is_full
from tests.fuzz import CHUNK, REPLAYED, SEED, long_chunks
from tests.processes import anonymous_bytes
from tests.queue.builders import LINEAGE, all_trained, group, leases, make_config, make_state, rows, with_failed
from tests.queue.conftest import DEADLINE_S, Server, attach
from tests.queue.mutants import Frames, corpus, framed, gets_past_the_frame, mutants
from tests.queue.test_identity import is_answered
from tests.queue.test_server import get_leases, return_all

A_TURN = 10
"""Mutants between two steps of the client."""
MAX_GROWTH_BYTES = 20 << 20


def test_the_corpus_has_every_type_that_the_server_knows():
    known = {name.removeprefix("_on_") for name in dir(Handlers) if name.startswith("_on_")}
    assert set(corpus()) == known == set(REQUESTS)


def fresh_handlers() -> tuple[Handlers, dict[str, Frames]]:
    """A queue in the middle of a run, and messages that are its own learner's and generator's."""
    state = make_state(num_rows=50)
    generator_requests.claim(state, "fuzz", owner_of("", ""), 0.0)
    generator_requests.hello(state, "fuzz", "h", "fake", 0.0)
    held = leases(state, 3, generator="fuzz")
    handlers = Handlers(state, make_config("unused"), {"test": rows(2)}, "run")
    messages = corpus(lineage=LINEAGE, generator_id="fuzz", run_id="run", step=0)
    failure = Failure("reward_error", "KeyError: 'x'", "/r.py:3")
    failed = (FailedRollouts(held[0].lease_id, failure, 1),)
    payload = encode_group(with_failed(group(held[0], generator="fuzz"), 1))
    messages["return"] = framed(ReturnGroups("fuzz", (held[0].lease_id,), failed), [payload])
    messages["fail"] = framed(FailLease("fuzz", held[1].lease_id, failure))
    return handlers, messages


def handle(handlers: Handlers, frames: Frames, sizes: MessageLimits, now: float) -> bool:
    """As the server does it. Whether it was answered with something else than a refusal."""
    try:
        message = decode(frames[0], sizes.wire).with_parts(map(memoryview, frames[1:]))
        sizes.check(message, sum(map(len, frames)))
        handlers.generator_of(message, b"peer", "", now)
        answer = handlers.handle(message, now)
        reply = answer.attempt(now, True) if isinstance(answer, Deferred) else answer
    except AsyncRLError:
        return False
    if reply is not None:
        encode(WIRE_TYPES[type(reply.record)], {**asdict(reply.record), **handlers.notice("fuzz")})
    return True


def test_no_mutant_breaks_the_books_even_with_every_right():
    sizes, answered = MessageLimits(1 << 20), 0
    handlers, messages = fresh_handlers()
    source = mutants(messages, SEED)
    for number, frames in enumerate(itertools.islice(source, 6000 if is_full() else 2000)):
        if number % 50 == 0:
            # What ended or took over the run is undone, so that the next ones find one to break.
            handlers, _ = fresh_handlers()
        answered += handle(handlers, frames, sizes, number * 0.01)
        state: QueueState = handlers.state
        state.check()
        assert encode_state(state)
        assert pack_plain({"handlers": handlers.save()})
        json.dumps(persistence.status(state, number * 0.01), allow_nan=False)
        json.dumps(persistence.ledger_file(state), allow_nan=False)
    assert answered > 300


class Fuzzer:
    """A peer that sends mutants and replays, with a valid key. It reads every answer, as a legitimate peer would."""

    def __init__(self, address: str, key_file: Path, recorded: Sequence[Frames]) -> None:
        """``recorded`` are messages of others, which may grow."""
        self._messages, self._recorded = corpus(), recorded
        self.totals = Counter[str]()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        ClientKeys.load(key_file).identify(self._socket)
        self._socket.connect(address)
        # The first one names the generator that this connection speaks for.
        self._socket.send_multipart(self._messages["hello"])

    def attack(self, seed: int) -> Iterator[None]:
        """Send a chunk of mutants, a few a turn."""
        rng, limits = random.Random(seed), MessageLimits(1 << 20).wire
        for number, mutant in enumerate(itertools.islice(mutants(self._messages, seed), CHUNK)):
            is_replay = self._recorded and rng.random() < REPLAYED
            frames = rng.choice(self._recorded) if is_replay else mutant
            self.totals.update(sent=1, decodable=gets_past_the_frame(frames, limits))
            self._socket.send_multipart(frames)
            if number % A_TURN == 0:
                self._read(0)
                yield
        self._read(500)

    def _read(self, timeout_ms: int) -> None:
        while self._socket.poll(timeout_ms):
            self.totals.update(answers=len(self._socket.recv_multipart()))  # those of one turn come together

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Client:
    """A legitimate learner and generator, step after step."""

    def __init__(self, address: str, keys: ClientKeys) -> None:
        self.learner = LearnerQueue(address, DEADLINE_S, keys)
        self.generator = GeneratorQueue(address, "g0", keys)
        self.step = 0
        attach(self.learner, num_steps=10**6)
        self.generator.hello(DEADLINE_S, "fake")

    def work(self) -> None:
        """One step of training."""
        held = get_leases(self.generator, self.step)
        assert return_all(self.generator, held, self.step) == ["queued"] * len(held)
        assert isinstance(self.learner.take(LINEAGE, self.step, self.step, DEADLINE_S), Batch)
        self.learner.ack(StepAck(LINEAGE, self.step, self.step + 1, all_trained()))
        self.step += 1
        self.learner.announce(Announcement(LINEAGE, self.step, f"digest-{self.step}", "tcp://127.0.0.1:1"))

    def close(self) -> None:
        self.generator.close()
        self.learner.close()


@contextmanager
def fuzzed_server(servers: Any, tmp_path: Path, **experimental: Any) -> Iterator[tuple[Server, Client, Fuzzer]]:
    make_keys(tmp_path / "keys", ["client", "fuzzer"])
    keys = ClientKeys.load(tmp_path / "keys" / "client.key")
    config = make_config(str(tmp_path / "run"), queue={"keys": str(tmp_path / "keys")}, experimental=experimental)
    server = servers.start(config, "--run-id", "run", "--rows", "1000")
    recorded: deque[Frames] = deque(maxlen=40)

    def recording_send(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
        recorded.append(tuple(map(bytes, frames)))
        send_frames(socket, frames)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caller, "send_frames", recording_send)
        client = Client(server.address, keys)
        fuzzer = Fuzzer(server.address, tmp_path / "keys" / "fuzzer.key", recorded)
        try:
            yield server, client, fuzzer
        finally:
            client.close()
            fuzzer.close()


def attack(client: Client, fuzzer: Fuzzer, chunks: Iterable[int]) -> None:
    """The client goes on with its work between the mutants."""
    for chunk in chunks:
        for _ in fuzzer.attack(SEED + chunk):
            client.work()


def check_unmoved(servers: Any, tmp_path: Path, chunks: Sequence[int]) -> None:
    """All mutants reach the parser: the limit on malformed messages is lifted."""
    with fuzzed_server(servers, tmp_path, max_malformed_per_minute=10**6) as (server, client, fuzzer):
        attack(client, fuzzer, [-1])
        before, fuzzer.totals = anonymous_bytes(server.process.pid), Counter()
        attack(client, fuzzer, chunks)
        growth, totals = anonymous_bytes(server.process.pid) - before, fuzzer.totals
        status = client.learner.status()
        make_keys(tmp_path / "other")
        unlisted = ClientKeys.load(tmp_path / "other" / "client.key")
        known = ClientKeys.load(tmp_path / "keys" / "client.key")
        assert not is_answered(server.address, unlisted.for_server(known.server), 0.5)
        client.work()
    server.process.terminate()
    _, log = server.process.communicate(timeout=DEADLINE_S)
    assert "by a bug" not in log, log[-5000:]
    print(f"{dict(totals)}; memory grew by {growth / 2**20:.1f} MiB")
    assert totals["sent"] == len(chunks) * CHUNK
    assert totals["decodable"] >= 0.3 * totals["sent"]
    assert totals["answers"] >= 0.8 * totals["sent"]
    assert status["limited"] == 0
    assert status["malformed"] >= 0.3 * totals["sent"]
    assert "broken" not in json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert growth < MAX_GROWTH_BYTES, f"grew by {growth >> 20} MiB"


@pytest.mark.slow
def test_five_thousand_mutants_leave_the_server_serving(servers, tmp_path):
    check_unmoved(servers, tmp_path, range(5))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_mutants_leave_the_server_serving(servers, tmp_path, pytestconfig):
    check_unmoved(servers, tmp_path, long_chunks(pytestconfig))


def test_a_peer_that_sends_mutants_is_soon_unheard(servers, tmp_path):
    with fuzzed_server(servers, tmp_path) as (_, client, fuzzer):
        attack(client, fuzzer, [0])
        status = client.learner.status()
    # 64 malformed ones are forgiven, and mutants that are well-formed all the same come between them.
    assert 64 <= status["malformed"] < 100
    assert status["limited"] > CHUNK - 400
