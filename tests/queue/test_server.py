"""The server and both clients over real sockets, the server in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from contextlib import closing

import pytest

from async_rl.config.queue import QueueConfig
from async_rl.errors import AddressError, QueueError
from async_rl.net.keys import ClientKeys, make_keys
from async_rl.net.wire import decode, encode
from async_rl.process.stop import StopRequest
from async_rl.queue import messages
from async_rl.queue.messages import (
    Batch,
    Cancelled,
    Failure,
    GeneratorStats,
    LeasesGranted,
    NotReady,
    Returned,
    StepAck,
)
from async_rl.queue.server.handlers import Deferred, Handlers
from async_rl.queue.server.lifetime import Lifetime
from async_rl.queue.server.start import answering_run, ensure_queue
from async_rl.records import Sampling
from async_rl.run.queue_files import read_record
from tests.end_to_end.harness import wait_until
from tests.queue.builders import LINEAGE, ack, all_trained, announce, group, leases, make_config, make_state, put, take
from tests.queue.conftest import ROOT, attach


def events_until(queue, kind, count: int = 1) -> list:
    """Everything that was heard until ``count`` events of ``kind`` came."""
    heard: list = []

    def enough() -> bool:
        heard.extend(queue.poll(1.0))
        return sum(isinstance(event, kind) for event in heard) >= count

    wait_until(f"{count} of {kind}", enough)
    return heard


def get_leases(queue, version: int = 0, count: int = 2, lineage: str = "line-a") -> list:
    queue.request_leases(lineage, version, count, 5.0)
    return [lease for e in events_until(queue, LeasesGranted) if isinstance(e, LeasesGranted) for lease in e.leases]


def return_all(queue, leases: list, version: int = 0) -> list[str]:
    for lease in leases:
        accuracies = [1.0] + [0.0] * (lease.group_size - 1)
        queue.return_group(group(lease, version, accuracies=accuracies, generator=queue.generator_id))
    heard = events_until(queue, Returned, len(leases))
    return [event.verdict for event in heard if isinstance(event, Returned)]


def test_a_generator_that_leaves_hands_its_leases_back_before_it_is_closed(servers, tmp_path):
    _, learner, generator = servers.run(make_config(str(tmp_path / "run")))
    get_leases(generator, count=2)
    assert len(learner.status()["leases"]) == 2
    generator.leave()
    generator.leave()
    wait_until("the leases to be handed back", lambda: learner.status()["leases"] == [])
    assert learner.status()["stream"]["requeued"] == 2


def test_hello_says_whether_nobody_answered_or_no_learner_is_there(servers, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(AddressError, match="no queue answered"):
            servers.generator(f"tcp://127.0.0.1:{free.getsockname()[1]}").hello(0.3, "fake")
    server = servers.start(make_config(str(tmp_path / "run")))
    with pytest.raises(QueueError, match="no learner attached"):
        servers.generator(server.address, "g1").hello(3.0, "fake")


def test_a_begun_take_is_answered_while_other_requests_are_made(servers, tmp_path):
    _, learner, generator = servers.run(make_config(str(tmp_path / "run")))
    assert not learner.is_take_answered, "none was begun"
    learner.begin_take("line-a", 0, 0, 20.0)
    assert not learner.is_take_answered
    assert return_all(generator, get_leases(generator), 0) == ["queued", "queued"]
    # The batch is on its way or here; requests made meanwhile get their own answers.
    assert learner.ping() == "run"
    assert learner.status()["run_id"] == "run"
    wait_until("the batch", lambda: learner.is_take_answered)
    batch = learner.take("line-a", 0, 0, 5.0)
    assert isinstance(batch, Batch)
    assert [taken.prompt.position for taken in batch.groups] == [0, 1]
    # Asked for once more, it is the same batch.
    again = learner.take("line-a", 0, 0, 5.0)
    assert isinstance(again, Batch)
    assert [taken.prompt.position for taken in again.groups] == [0, 1]


def test_an_evaluation_is_sampled_as_its_set_says_and_its_results_reach_the_learner(servers, tmp_path):
    own = {"num_samples": 3, "temperature": 0.6, "top_p": 0.9, "top_k": 5, "max_new_tokens": 3}
    sets = {"data": {"eval": {"test": "none.jsonl"}}, "eval": {"num_samples": 9, "sets": {"test": own}}}
    server = servers.start(make_config(str(tmp_path / "run"), **sets))
    learner, generator = servers.learner(server.address), servers.generator(server.address)
    attach(learner)
    with pytest.raises(QueueError, match=r"data\.eval"):
        learner.evaluate("line-a", "other", 0, 0, True)
    learner.evaluate("line-a", "test", 0, 0, True)
    assert "0 of 2 rows" in learner.await_eval("line-a", wait_s=0.0).reason
    learner.confirm_awaited("line-a", [("test", 0)])
    with pytest.raises(QueueError, match="does not know the evaluation of other at step 0"):
        learner.confirm_awaited("line-a", [("test", 0), ("other", 0)])
    generator.hello(10.0, "fake")
    held = get_leases(generator, count=9)
    sampling = Sampling(0.6, 0.9, 5, 3, 8, ())
    assert [(lease.kind, lease.group_size, lease.sampling) for lease in held] == [("eval", 3, sampling)] * 2
    generator.fail(held[1].lease_id, Failure("prompt_too_long", "99 tokens"))
    events_until(generator, Returned)
    assert return_all(generator, held[:1]) == ["eval_done"]
    assert learner.await_eval("line-a", wait_s=5.0).reason == ""
    (result,) = learner.eval_results("line-a")
    assert (result.dataset, result.step) == ("test", 0)
    assert [(prompt.row, len(answer.rollouts)) for prompt, answer in result.groups] == [(0, 3), (1, 0)]
    assert learner.eval_results("line-a", [("test", 0)]) == []


def test_a_learner_of_another_run_is_refused(servers, tmp_path):
    server = servers.start(make_config(str(tmp_path / "run")), "--run-id", "mine")
    with pytest.raises(QueueError, match="run mine"):
        attach(servers.learner(server.address))


def test_a_restarted_server_goes_on_on_its_old_port_with_every_group_and_lease(servers, tmp_path):
    config = make_config(str(tmp_path / "run"), queue={"max_staleness": 4})
    first, learner, generator = servers.run(config, "--run-id", "run")
    held = get_leases(generator, count=4)
    assert return_all(generator, held[:3]) == ["queued"] * 3
    taken = learner.take("line-a", 0, 0, 5.0)
    assert isinstance(taken, Batch)
    first.process.kill()
    first.process.wait()
    # Both go on talking, and neither has to know.
    generator.return_group(group(held[3]))
    second = servers.start(config, "--run-id", "run")
    assert second.address == first.address
    again = learner.take("line-a", 0, 0, 5.0)
    assert isinstance(again, Batch)
    assert [t.group.lease_id for t in again.groups] == [t.group.lease_id for t in taken.groups]
    assert learner.ack(StepAck("line-a", 0, 1, all_trained())).stats.ledger["groups"]["trained"] == 2
    returned = [e for e in events_until(generator, Returned) if isinstance(e, Returned)]
    assert [e.verdict for e in returned] == ["queued"]
    batch = learner.take("line-a", 1, 1, 5.0)
    assert isinstance(batch, Batch)
    assert [t.prompt.position for t in batch.groups] == [2, 3]
    # A generator that joins now is welcomed with what the learner once brought.
    assert servers.generator(second.address, "late").hello(10.0, "fake").run_id == "run"


def test_leases_without_progress_are_cancelled_and_their_holder_told(servers, tmp_path):
    config = make_config(str(tmp_path / "run"), queue={"lease_timeout_s": 0.3})
    _, _, stuck = servers.run(config)
    held = get_leases(stuck, count=1)
    heard = events_until(stuck, Cancelled)
    assert [e.lease_ids for e in heard if isinstance(e, Cancelled)] == [(held[0].lease_id,)]


def test_a_server_that_its_learner_left_or_never_found_ends(servers, tmp_path):
    left = servers.start(make_config(str(tmp_path / "run"), queue={"linger_s": 0.2}))
    learner = servers.learner(left.address)
    attach(learner)
    learner.close()
    never = servers.spawn(make_config(str(tmp_path / "other")), "--orphan-s", "0.2")
    assert left.process.communicate(timeout=20)[0].startswith("ended: the learner has been gone")
    assert never.communicate(timeout=20)[0].startswith("ended: no learner attached")
    assert (left.process.returncode, never.returncode) == (1, 1), "a service manager starts it again"


def test_a_learner_that_is_away_for_nine_minutes_finds_its_queue(run):
    gone = "the learner has been gone for 600 s (queue.linger_s = 600)"
    with closing(Lifetime(linger_s=QueueConfig().linger_s, orphan_s=None, grace_s=0.0)) as lifetime:
        for now, reason in ((time.monotonic() + 540.0, ""), (time.monotonic() + 600.0, gone)):
            assert lifetime.reason_to_end(run.server._state, [], now, learner_left=True) == reason


def test_the_server_ends_with_its_parent(servers, tmp_path):
    watched, parent = multiprocessing.Pipe(duplex=False)
    server = servers.start(make_config(str(tmp_path / "run")), parent_watch=watched)
    parent.close()
    assert server.process.communicate(timeout=20)[0] == "ended: SIGTERM\n"


def test_a_server_that_gets_sigterm_serves_its_learner_until_that_has_saved_and_left(servers, tmp_path):
    server, learner, generator = servers.run(make_config(str(tmp_path / "run")))
    get_leases(generator, count=2)
    server.process.send_signal(signal.SIGTERM)
    assert learner.snapshot("line-a")
    learner.checkpoint_committed("line-a", 0)
    assert server.process.poll() is None
    learner.close()
    assert server.process.communicate(timeout=20)[0] == "ended: SIGTERM\n"
    assert server.process.returncode == 0
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert ledger["groups"]["in_flight"] == 2


def test_a_learner_that_waits_for_groups_notices_a_signal(servers, tmp_path):
    _, learner, _ = servers.run(make_config(str(tmp_path / "run")))
    with StopRequest(3600.0, exit_now=lambda code: None) as stop:
        # The signal interrupts the poll of the socket, which must go on as if nothing had happened.
        timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM])
        timer.start()
        while not stop.signum:
            assert isinstance(learner.take("line-a", 0, 0, wait_s=0.5), NotReady)
        timer.join()
        assert learner.snapshot("line-a")
    assert stop.signum == signal.SIGTERM


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM twice", "grace", "no learner"])
def test_a_server_ends_without_its_learner_when_told_to_or_in_time(servers, tmp_path, how: str):
    grace_s = 0.1 if how == "grace" else 3600.0
    server = servers.start(make_config(str(tmp_path / "run"), checkpoint={"grace_s": grace_s}))
    learner = servers.learner(server.address)
    if how != "no learner":
        attach(learner)
    first = signal.SIGINT if how == "SIGINT" else signal.SIGTERM
    server.process.send_signal(first)
    if how == "SIGTERM twice":
        assert learner.snapshot("line-a")  # it has handled the first
        server.process.send_signal(signal.SIGTERM)
    assert server.process.communicate(timeout=20)[0] == f"ended: {first.name}\n"


def test_status_shows_who_holds_what(servers, tmp_path):
    _, learner, generator = servers.run(make_config(str(tmp_path / "run")))
    generator.hello(10.0, "fake", "host-1")
    (lease,) = get_leases(generator, count=1)
    generator.heartbeat({lease.lease_id: 5}, GeneratorStats(max_running=4, num_tokens=5), "no answer from 10.0.0.1:1")
    wait_until("an answer", lambda: generator.poll(0.1) is not None and not generator.heartbeat_outstanding)
    status = learner.status()
    assert (status["run_id"], status["step"], status["version"], status["num_steps"]) == ("run", 0, 0, 3)
    (shown,) = status["leases"]
    assert (shown["generator"], shown["progress"]) == ("g0", 5)
    # Anybody may ask for the status, so it does not show the random part.
    assert lease.lease_id.startswith(f"{shown['lease_id']}-")
    (known,) = status["generators"]
    assert (known["id"], known["host"], known["backend"], known["active"]) == ("g0", "host-1", "fake", ["line-a", 0])
    assert known["stats"]["max_running"] == 4
    assert known["trouble"] == "no answer from 10.0.0.1:1"
    assert (status["announced"]["version"], status["announced"]["ports"]) == (0, [5556, 5557])
    assert json.loads(json.dumps(status)) == status


def test_a_learner_starts_a_queue_with_its_keys_and_finds_it_again(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    make_keys(tmp_path / "keys")
    keys = ClientKeys.load(tmp_path / "keys" / "client.key")
    config = make_config(str(tmp_path / "run"), queue={"keys": str(tmp_path / "keys")})
    command = (sys.executable, "-m", "tests.queue.serve")
    log = tmp_path / "run" / "logs" / "queue.log"
    address = ensure_queue(config, "run", False, log, command=command)
    try:
        assert answering_run(address, 10.0, keys) == "run"
        assert ensure_queue(config, "run", False, log, command=("false",)) == address
    finally:
        record = read_record(tmp_path / "run")
        assert record is not None
        os.kill(record.pid, signal.SIGTERM)
        os.waitpid(record.pid, 0)


def test_ensure_queue_shows_why_a_server_did_not_start(tmp_path):
    config = make_config(str(tmp_path / "run"))
    script = "import sys; sys.exit('no such data set')"
    with pytest.raises(QueueError, match="no such data set"):
        ensure_queue(config, "run", False, tmp_path / "queue.log", command=(sys.executable, "-c", script))


def test_ensure_queue_uses_the_one_at_a_fixed_address(servers, tmp_path):
    config = make_config(str(tmp_path / "elsewhere"))
    server = servers.start(config)
    fixed = make_config(str(tmp_path / "run"), queue={"address": server.address})
    assert ensure_queue(fixed, "run", False, tmp_path / "queue.log", command=("false",)) == server.address
    assert not (tmp_path / "run").exists()


def test_a_learner_of_launch_waits_for_the_queue_server_and_never_starts_one(servers, tmp_path):
    config = make_config(str(tmp_path / "run"))
    log = tmp_path / "queue.log"
    with pytest.raises(QueueError, match="no queue server of run run answered within 0 s"):
        ensure_queue(config, "run", False, log, may_start=False, wait_s=0.3)
    assert not log.exists()
    server = servers.start(config, "--run-id", "run")
    assert ensure_queue(config, "run", False, log, may_start=False) == server.address


def test_the_status_has_what_the_learner_says_is_wrong_until_it_is_gone(run):
    for trouble in ("pulls are slow", ""):
        run.post(b"learner", messages.Alive(LINEAGE, trouble))
        assert run.learner(messages.GetStatus()).fields["status"]["learner_trouble"] == trouble


def test_no_answer_of_an_earlier_learner_s_time_is_repeated_to_a_generator():
    # The reply that names version 1 was lost; meanwhile a learner came that is at version 0.
    state = make_state(max_staleness=0)
    handlers = Handlers(state, make_config("unused"), {}, "run")
    for lease in leases(state, 2):
        put(state, group(lease))
    take(state)
    ack(state)
    fields = {"generator_id": "g0", "lineage": LINEAGE, "version": 0, "max_leases": 2, "wait_s": 0.0}
    request = decode(encode("lease", {"request_id": "r1", **fields}))

    def asked() -> LeasesGranted:
        """The answer to ``request``, which comes again and again under one id."""
        answer = handlers.handle(request, 0.0)
        reply = answer.attempt(0.0, True) if isinstance(answer, Deferred) else answer
        assert reply is not None
        assert isinstance(reply.record, LeasesGranted)
        return reply.record

    assert asked().activate == 1
    assert asked().activate == 1
    attach = {"run_id": "run", "lineage": "line-b", "parent_lineage": "", "fork_version": 0, "step": 0, "num_steps": 9}
    handlers.handle(decode(encode("attach", {**attach, "config_toml": "", "files": [], "has_snapshot": False})), 0.0)
    announce(state, 0, "line-b")
    assert asked().activate == 0
