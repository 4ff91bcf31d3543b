"""Versions of two worker processes: out of shared memory, of which each takes its part, and broadcast into them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from async_rl.generator.vllm.backend import VllmBackend
from async_rl.queue.messages import Announcement
from async_rl.weights.channel.engine_ranks import HeldByEngine
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.staging import Staging
from tests.generator.leases import run_all, submit
from tests.vllm.tiny import assert_scored_by, make_config, make_model, weights_of, write_files

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DEADLINE_S = 30.0


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with closing(Publisher("127.0.0.1", deadline_s=DEADLINE_S, insecure=False)) as publisher:
        assert publisher.wait_for_collective(60)
        yield publisher


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_every_token_scores_as_the_version_that_its_workers_received(tmp_path, publisher: Publisher, num_workers: int):
    config = make_config(tensor_parallel_size=num_workers, kv_after_update="recompute", batch_size=8)
    backend = VllmBackend.from_files(write_files(tmp_path), config, device="cpu")
    receiver = Receiver("vllm", insecure=False, engine=backend.ranks)
    staging = Staging(None, 1 << 16, deadline_s=DEADLINE_S)
    by_collective = 0
    finished = {}
    with closing(backend), closing(receiver):
        for version in range(6):
            staged = staging.stage("vllm", version, iter(weights_of(version % 3).items()))
            publisher.publish(staged)
            receiver.follow(Announcement("vllm", version, staged.manifest.digest, publisher.address))
            deadline = time.monotonic() + DEADLINE_S
            while (received := receiver.poll()) is None or received.version != version:
                assert time.monotonic() < deadline, receiver.error
                finished |= {(s.lease_id, s.index): s for s in backend.step()} if version else {}
            backend.activate(version, received.tensors)
            receiver.activated(received)
            by_collective += isinstance(received.tensors, HeldByEngine)
            assert publisher.wait(version, DEADLINE_S, num_members=1)
            submit(backend, f"{version}", "what is 23+4", group_size=2, max_new_tokens=200, seed=version)
        finished |= run_all(backend)
    assert (by_collective, publisher.stats().failures) == (5, 0)
    assert len(finished) == 12
    assert assert_scored_by({v: make_model(v % 3) for v in range(6)}, finished.values())
