"""Who is who: a generator's id and leases belong to one client key, or on a queue without keys to one secret.

And who is let in, over real sockets.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.config.config import Config
from async_rl.errors import IdInUseError, QueueError
from async_rl.net.codec import encode_group, read_as
from async_rl.net.keys import ClientKeys, make_keys
from async_rl.net.wire import decode, encode
from async_rl.queue import messages
from async_rl.queue.client.clients import GeneratorQueue, LearnerQueue
from async_rl.queue.client.connection import Connection
from async_rl.queue.core import generator_requests
from async_rl.queue.core.generator_requests import claim, hello
from async_rl.queue.core.generators import Owner
from async_rl.queue.core.groups import read_summary
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import GeneratorStats, LeasesGranted
from async_rl.queue.parity import Answer, encode_answer
from async_rl.records import Lease
from tests.end_to_end.harness import wait_until
from tests.queue.builders import LINEAGE, fail, group, leases, make_config, make_state, put
from tests.queue.conftest import DEADLINE_S, attach, dealer
from tests.queue.direct import RefusedError
from tests.queue.test_server import get_leases

PROBE_ANSWER = encode_answer(Answer(0, "fake", "", None))
MINE, THEIRS = Owner("my-key", has_key=True), Owner("their-key", has_key=True)
MY_SECRET, THEIR_SECRET = Owner("mine"), Owner("theirs")


def owned(owner: Owner) -> tuple[QueueState, list[Lease]]:
    """A queue on which ``g0`` belongs to ``owner`` and has two leases. Generators are alive for 30 s."""
    state = make_state(lease_timeout_s=1000.0)
    claim(state, "g0", owner, 0.0)
    hello(state, "g0", "host", "fake", 0.0)
    return state, leases(state, 2)


def num_foreign(state: QueueState, generator_id: str = "g0") -> int:
    (entry,) = [entry for entry in state.generators.as_dicts(state.now) if entry["id"] == generator_id]
    return entry["foreign_requests"]


@pytest.mark.parametrize("now", [1.0, 31.0], ids=["alive", "silent"])
def test_an_id_belongs_to_the_key_that_used_it_first_until_it_says_goodbye(now: float):
    state, _ = owned(MINE)
    with pytest.raises(QueueError, match="generator id 'g0' belongs to another client key; choose another --id"):
        claim(state, "g0", THEIRS, now)
    claim(state, "g0", MINE, now)  # A restarted process with the same key is the same generator.
    claim(state, "g1", MINE, now)  # A key may own several ids.
    assert (num_foreign(state), num_foreign(state, "g1")) == (1, 0)
    assert state.ledger.groups.in_flight == 2
    generator_requests.goodbye(state, "g0", now)
    claim(state, "g0", THEIRS, now)


def test_without_keys_another_secret_gets_an_id_only_when_its_generator_is_silent():
    state, _ = owned(MY_SECRET)
    with pytest.raises(QueueError, match=r"which was alive 30 s ago; .* until it was silent for 30 s"):
        claim(state, "g0", THEIR_SECRET, 30.0)
    assert state.ledger.groups.in_flight == 2
    claim(state, "g0", THEIR_SECRET, 30.1)
    # The leases of the silent one are requeued at once.
    assert state.ledger.groups.in_flight == 0
    with pytest.raises(QueueError, match="belongs to another generator"):
        claim(state, "g0", MY_SECRET, 30.2)
    state.check()


@pytest.mark.parametrize(("owner", "other"), [(MINE, THEIRS), (MY_SECRET, THEIR_SECRET)])
def test_only_its_owner_may_replace_a_living_generator(owner: Owner, other: Owner):
    state, _ = owned(owner)
    claim(state, "stranger", other, 1.0)
    with pytest.raises(QueueError, match=r"generator id 'g0' belongs to .*; start without --replaces"):
        hello(state, "stranger", "host", "fake", 1.0, replaces="g0")
    assert (state.ledger.groups.in_flight, num_foreign(state)) == (2, 1)
    claim(state, "g0-1", owner, 1.0)
    hello(state, "g0-1", "host", "fake", 1.0, replaces="g0")
    assert state.ledger.groups.in_flight == 0
    state.check()


def test_a_group_or_a_failure_for_anothers_lease_is_refused_and_counted():
    state, (first, second) = owned(MINE)
    claim(state, "g1", THEIRS, 0.0)
    assert put(state, group(first, generator="g1")) == "refused"
    assert fail(state, second, "prompt_too_long", generator="g1") == "refused"
    assert state.ledger.groups.in_flight == 2
    entry = state.generators.get("g1")
    assert entry is not None
    assert entry.refused == {"not its lease": 2}
    # The owner's own groups are accepted.
    assert put(state, group(first)) == put(state, group(second)) == "queued"
    state.check()


def test_a_group_that_names_another_generator_than_its_sender_is_refused():
    state, (lease, _) = owned(MINE)
    payload = encode_group(group(lease, generator="g1"))
    verdict, reason = generator_requests.receive(state, "g0", read_summary(payload), payload, 0.0)
    assert verdict == "refused"
    assert "expected a group of generator 'g0', which sent it, got one of 'g1'" in reason


def test_lease_ids_depend_on_the_servers_secret_and_on_nothing_else():
    ids = []
    for instance in ("a" * 32, "a" * 32, "b" * 32):
        state = make_state()
        state.instance = instance
        ids.append([lease.lease_id for lease in leases(state, 2)])
    assert ids[0] == ids[1]
    assert not set(ids[0]) & set(ids[2])
    readable, hidden = ids[0][0].rsplit("-", 1)
    assert (readable, len(hidden)) == ("line-a-train0-1", 16)
    assert hidden not in str(state.generators.as_dicts(0.0))


def test_owners_and_refusals_outlive_the_server(run):
    reply = run.call(b"peer", messages.LeaseRequest("g0", LINEAGE, 0, 2))
    first, _ = read_as(reply.fields, LeasesGranted).leases
    assert run.call(b"peer", messages.ReturnGroups("g0", (first.lease_id,)), [b"no group"])
    run.server._durable.revert()
    entry = run.server._state.generators.get("g0")
    assert entry is not None
    assert (entry.refused, list(entry.returned)) == ({"malformed": 1}, [True])
    # It counts as silent until it is heard, so a restarted generator with a new secret is not shut out.
    assert not any(run.server._state.generators.alive_clients(run.server._state.now))
    run.call(b"peer", messages.Goodbye("g0"))
    run.server._durable.revert()
    assert run.server._state.generators.get("g0") is None


def test_a_refused_request_leaves_no_change_even_if_it_took_over_an_id(run):
    claim(run.server._state, "g0", MY_SECRET, 0.0)
    assert leases(run.server._state, 1, now=0.0)
    # The sender gets g0's id, because g0 was silent for long. Then its malformed request is refused, and nobody else
    # is disturbed.
    run.server._state.generators.seen("g0", 0.0).seen_at = -1e9
    with pytest.raises(RefusedError, match="expected 1 parts"):
        run.call(b"peer", messages.ReturnGroups("g0", ("x",)))
    assert not run.endpoint.blocked
    assert run.ledger["groups"]["in_flight"] == 0


def test_a_generator_is_never_taken_for_the_learner(run):
    run.call(b"peer", messages.AnswerProbe("g0", LINEAGE, 0, PROBE_ANSWER))
    assert run.server._learner_peer == b"learner"


# Over real sockets.


def requests_of(lease: Lease) -> list[tuple[msgspec.Struct, list[bytes]]]:
    """Every request that a stranger may try under the name of ``g0``."""
    return [
        (messages.Hello("g0", "host", "fake"), []),
        (messages.LeaseRequest("g0", LINEAGE, 0, 1), []),
        (messages.Heartbeat("g0", {lease.lease_id: 10**6}, GeneratorStats()), []),
        (messages.ReturnGroups("g0", (lease.lease_id,)), [encode_group(group(lease))]),
        (messages.FailLease("g0", lease.lease_id, messages.Failure("prompt_too_long", "")), []),
        (messages.AnswerProbe("g0", LINEAGE, 0, PROBE_ANSWER), []),
        (messages.Goodbye("g0"), []),
    ]


def answer_to(connection: Connection, request: msgspec.Struct, parts: list[bytes]) -> tuple[str, str]:
    request_id = connection.post(request, parts)
    found: list[Any] = []

    def has_answer() -> bool:
        found.extend(m for r, m in connection.poll(0.2) if r is not None and r.request_id == request_id)
        return bool(found)

    wait_until(f"an answer to {request}", has_answer)
    return found[0].type, str(found[0].fields.get("message"))


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_stranger_can_do_nothing_in_a_generators_name(servers, tmp_path, has_keys: bool):
    make_keys(tmp_path / "keys", ["client", "node7", "node8"])
    queue = {"keys": str(tmp_path / "keys")} if has_keys else {}
    server = servers.start(make_config(str(tmp_path / "run"), queue=queue))
    learner_key, own, other = (
        ClientKeys.load(tmp_path / "keys" / f"{name}.key") if has_keys else None
        for name in ("client", "node7", "node8")
    )
    with (
        closing(LearnerQueue(server.address, DEADLINE_S, learner_key)) as learner,
        closing(GeneratorQueue(server.address, "g0", own, secret="known")) as generator,
        # Where there are keys, the secret does not count.
        closing(Connection(server.address, "g0", other, secret="known" if has_keys else "a guess")) as stranger,
    ):
        attach(learner)
        generator.hello(10.0, "fake")
        (lease,) = get_leases(generator, count=1)
        for request, parts in requests_of(lease):
            type_, text = answer_to(stranger, request, parts)
            cause = "belongs to another client key" if has_keys else "belongs to another generator"
            assert (type_, cause in text) == ("error", True), (request, text)
        status = learner.status()
        (shown,) = status["generators"]
        # A request that was sent while the connection was made may be sent twice.
        assert (shown["foreign_requests"] >= 7, shown["refused"]) == (True, {})
        assert [(held["generator"], held["progress"]) for held in status["leases"]] == [("g0", 0)]
        generator.return_group(group(lease))
        wait_until("an answer", lambda: generator.poll(0.2) is not None and not generator.num_unanswered_returns)
        assert learner.status()["depth"] == 1


def test_a_generator_waits_for_its_id_while_another_has_it(servers, tmp_path, caplog: pytest.LogCaptureFixture):
    server = servers.start(make_config(str(tmp_path / "run")))
    attach(servers.learner(server.address))

    def join(wait_s: float) -> str:
        with closing(GeneratorQueue(server.address, "g0")) as second:
            return second.hello(wait_s, "fake").run_id

    with ThreadPoolExecutor(1) as pool:
        with closing(GeneratorQueue(server.address, "g0")) as first:
            first.hello(DEADLINE_S, "fake")
            with pytest.raises(IdInUseError, match="belongs to another generator, which was alive"):
                join(0.1)
            joined = pool.submit(join, DEADLINE_S)
            wait_until("the second generator", lambda: "waiting, because generator id 'g0' belongs to" in caplog.text)
        assert joined.result()


# Who is let in: a server with keys, clients with the right key, a wrong one, or none.

SILENCE_S = 0.6
"""So long nothing may come; an answer takes about a millisecond."""


def client_file(directory: Path, name: str = "client") -> ClientKeys:
    return ClientKeys.load(directory / f"{name}.key")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["client", "node7"])
    return tmp_path / "keys"


def config_with(tmp_path: Path, keys: Path, **queue: object) -> Config:
    return make_config(str(tmp_path / "run"), queue={"keys": str(keys), **queue})


def is_answered(address: str, keys: ClientKeys | None, within_s: float) -> bool:
    with dealer(address, keys) as socket:
        socket.send(encode("ping", {"request_id": "r"}))
        return bool(socket.poll(int(within_s * 1000)))


def test_a_generators_key_can_not_speak_for_the_learner(servers, tmp_path, keys):
    server = servers.start(config_with(tmp_path, keys))
    unlisted = LearnerQueue(server.address, DEADLINE_S, client_file(keys, "node7"))
    learner = LearnerQueue(server.address, DEADLINE_S, client_file(keys))
    try:
        with pytest.raises(
            QueueError, match=r"expected 'attach' to be sent with the learner's key \(client\.key\), got .* 'node7'"
        ):
            attach(unlisted)
        attach(learner)
        with pytest.raises(QueueError, match="expected 'finish' to be sent with the learner's key"):
            unlisted.finish("lineage")
        assert unlisted.ping() == "run"
    finally:
        unlisted.close()
        learner.close()


def test_who_is_not_on_the_list_gets_no_answer_and_is_counted(servers, tmp_path, keys):
    server = servers.start(config_with(tmp_path, keys))
    make_keys(tmp_path / "other")
    unlisted, listed = client_file(tmp_path / "other"), client_file(keys)
    assert is_answered(server.address, listed, DEADLINE_S)
    assert not is_answered(server.address, unlisted.for_server(listed.server), SILENCE_S)
    assert not is_answered(server.address, None, SILENCE_S)
    assert not is_answered(server.address, unlisted, SILENCE_S), "it would talk to another server only"
    learner = LearnerQueue(server.address, DEADLINE_S, listed)
    try:
        wait_until("refused handshakes to be counted", lambda: learner.status()["refused_handshakes"] >= 3)
        assert learner.status()["malformed"] == 0
    finally:
        learner.close()
    server.process.send_signal(signal.SIGTERM)
    assert "refused" in server.process.communicate(timeout=20)[1]


def test_only_with_keys_does_a_server_bind_beyond_loopback(servers, tmp_path, keys):
    open_address = {"address": "tcp://0.0.0.0:0", "advertise": "tcp://127.0.0.2:0"}
    process = servers.spawn(config_with(tmp_path, keys, **open_address))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "queue.advertise: expected an address by which other machines reach this machine" in errors
    open_address["advertise"] = "tcp://192.0.2.2:0"
    server = servers.start(config_with(tmp_path, keys, **open_address))
    assert server.address.startswith("tcp://192.0.2.2:")
    bound = server.address.replace("192.0.2.2", "127.0.0.1")
    assert is_answered(bound, client_file(keys), DEADLINE_S)
    process = servers.spawn(make_config(str(tmp_path / "other"), queue=open_address))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "async-rl keys new" in errors


def test_a_connection_speaks_for_one_generator(servers, tmp_path):
    server = servers.start(make_config(str(tmp_path / "run")))
    learner = servers.learner(server.address)
    attach(learner)
    with dealer(server.address, None) as socket:

        def hello(name: str) -> tuple[str, str]:
            fields = {"generator_id": name, "host": "h", "backend": "fake", "wait_s": 0.0}
            socket.send(encode("hello", fields))
            assert socket.poll(int(DEADLINE_S * 1000))
            answer = decode(socket.recv_multipart()[0])
            return answer.type, str(answer.fields.get("message", ""))

        assert hello("first") == hello("first") == ("welcome", "")
        assert hello("second") == (
            "error",
            "expected messages of generator 'first' on this connection, got one of 'second'; open one "
            "connection for each generator",
        )
        assert "length <= 256" in hello("x" * 257)[1]
    assert [known["id"] for known in learner.status()["generators"]] == ["first"]
