"""Who is who: a generator's id and leases belong to one client key, or on a queue without keys to one secret."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.errors import IdInUseError, QueueError
from async_rl.net.codec import encode_group, read_as
from async_rl.net.keys import SECRET_VARIABLE, ClientKeys, make_keys
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
from tests.queue.builders import LINEAGE, fail, group, leases, make_config, make_state, put
from tests.queue.conftest import DEADLINE_S, attach, wait_until
from tests.queue.direct import RefusedError, Run

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


def test_an_id_belongs_to_the_key_that_used_it_first():
    state, _ = owned(MINE)
    with pytest.raises(QueueError, match="generator id 'g0' belongs to another client key; choose another --id"):
        claim(state, "g0", THEIRS, 1.0)
    claim(state, "g0", MINE, 1.0)
    claim(state, "g1", MINE, 1.0)  # A key may own several ids.
    assert (num_foreign(state), num_foreign(state, "g1")) == (1, 0)
    assert state.ledger.groups.in_flight == 2


def test_a_silent_generator_keeps_its_id_if_it_has_a_key():
    state, _ = owned(MINE)
    with pytest.raises(QueueError, match="another client key"):
        claim(state, "g0", THEIRS, 31.0)
    # A restarted process with the same key is the same generator.
    claim(state, "g0", MINE, 31.0)
    assert state.ledger.groups.in_flight == 2


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


def test_an_id_is_free_after_a_goodbye():
    state, _ = owned(MINE)
    generator_requests.goodbye(state, "g0", 1.0)
    claim(state, "g0", THEIRS, 1.0)


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


def attached_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(tmp_path, monkeypatch)
    run.learner(messages.Attach("run", LINEAGE, "", 0, 0, 3, "[run]", (), has_snapshot=False))
    run.learner(messages.Announcement(LINEAGE, 0, "digest-0", "tcp://127.0.0.1:1"))
    return run


def test_owners_and_refusals_outlive_the_server(tmp_path, monkeypatch):
    run = attached_run(tmp_path, monkeypatch)
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
    run.close()


def test_a_refused_request_leaves_no_change_even_if_it_took_over_an_id(tmp_path, monkeypatch):
    run = attached_run(tmp_path, monkeypatch)
    claim(run.server._state, "g0", MY_SECRET, 0.0)
    assert leases(run.server._state, 1, now=0.0)
    # The sender gets g0's id, because g0 was silent for long. Then its malformed request is refused, and nobody else
    # is disturbed.
    run.server._state.generators.seen("g0", 0.0).seen_at = -1e9
    with pytest.raises(RefusedError, match="expected 1 parts"):
        run.call(b"peer", messages.ReturnGroups("g0", ("x",)))
    assert not run.endpoint.blocked
    assert run.ledger["groups"]["in_flight"] == 0
    run.close()


def test_a_generator_is_never_taken_for_the_learner(tmp_path, monkeypatch):
    run = attached_run(tmp_path, monkeypatch)
    run.call(b"peer", messages.AnswerProbe("g0", LINEAGE, 0, PROBE_ANSWER))
    assert run.server._learner_peer == b"learner"
    run.close()


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

    wait_until(has_answer, f"an answer to {request}")
    return found[0].type, str(found[0].fields.get("message"))


def get_lease(generator: GeneratorQueue) -> Lease:
    generator.request_leases(LINEAGE, 0, 1, 5.0)
    found: list[Lease] = []

    def has_lease() -> bool:
        for event in generator.poll(0.2):
            found.extend(event.leases if isinstance(event, LeasesGranted) else ())
        return bool(found)

    wait_until(has_lease, "a lease")
    return found[0]


def check_strangers(learner: LearnerQueue, generator: GeneratorQueue, stranger: Connection, cause: str) -> None:
    """Try every request as a stranger: each is refused, and the generator goes on."""
    try:
        attach(learner)
        generator.hello(10.0, "fake")
        lease = get_lease(generator)
        for request, parts in requests_of(lease):
            type_, text = answer_to(stranger, request, parts)
            assert (type_, cause in text) == ("error", True), (request, text)
        status = learner.status()
        (shown,) = status["generators"]
        # A request that was sent while the connection was made may be sent twice.
        assert (shown["foreign_requests"] >= 7, shown["refused"]) == (True, {})
        assert [(held["generator"], held["progress"]) for held in status["leases"]] == [("g0", 0)]
        generator.return_group(group(lease))
        wait_until(lambda: generator.poll(0.2) is not None and not generator.num_unanswered_returns, "an answer")
        assert learner.status()["depth"] == 1
    finally:
        stranger.close()
        generator.close()
        learner.close()


def test_another_client_key_can_do_nothing_in_a_generators_name(servers, tmp_path):
    make_keys(tmp_path / "keys", ["client", "node7", "node8"])
    server = servers.start(make_config(str(tmp_path / "run"), queue={"keys": str(tmp_path / "keys")}))
    learner_keys, own_keys, other_keys = (
        ClientKeys.load(tmp_path / "keys" / f"{name}.key") for name in ("client", "node7", "node8")
    )
    check_strangers(
        LearnerQueue(server.address, DEADLINE_S, learner_keys),
        GeneratorQueue(server.address, "g0", own_keys, secret="known"),
        # Where there are keys, the secret does not count.
        Connection(server.address, "g0", other_keys, secret="known"),
        "belongs to another client key",
    )


def test_without_keys_another_secret_can_do_nothing_in_a_generators_name(servers, tmp_path):
    server = servers.start(make_config(str(tmp_path / "run")))
    check_strangers(
        LearnerQueue(server.address, DEADLINE_S),
        GeneratorQueue(server.address, "g0"),
        Connection(server.address, "g0", secret="a guess"),
        "belongs to another generator",
    )


def test_the_same_secret_is_the_same_generator_over_another_connection(servers, tmp_path):
    server = servers.start(make_config(str(tmp_path / "run")))
    learner = servers.learner(server.address)
    attach(learner)
    first, second = (GeneratorQueue(server.address, "g0", secret="shared") for _ in range(2))
    third = GeneratorQueue(server.address, "g0-1", secret="shared")
    try:
        first.hello(10.0, "fake")
        get_lease(first)
        second.hello(10.0, "fake")
        assert learner.status()["ledger"]["groups"]["in_flight"] == 1
        third.hello(10.0, "fake", replaces="g0")
        status = learner.status()
        assert status["ledger"]["groups"]["in_flight"] == 0
        assert [shown["id"] for shown in status["generators"]] == ["g0-1"]
    finally:
        for generator in (first, second, third):
            generator.close()


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
            wait_until(lambda: "waiting, because generator id 'g0' belongs to" in caplog.text, "the second generator")
        assert joined.result()


def test_the_variable_with_the_secret_has_the_documented_name():
    assert SECRET_VARIABLE == "ASYNC_RL_GENERATOR_SECRET"
