import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from async_rl.errors import ConfigError, WeightsError
from async_rl.weights.collective import nccl
from async_rl.weights.collective.gloo import GlooLibrary
from async_rl.weights.collective.libraries import SUBSTITUTE, make_library
from async_rl.weights.collective.library import Communicator, Endpoint, Library, OnChunk
from async_rl.weights.collective.nccl import choose_interface

LOOPBACK = Endpoint("127.0.0.1", "127.0.0.1")


def two_ranks(stall_s: float, libraries: Sequence[Library] = ()) -> list[Communicator]:
    """Both ranks in this process: a rank that does not take part looks frozen to the other."""
    libraries = libraries or [make_library("gloo", LOOPBACK) for _ in range(2)]
    unique_id = libraries[0].unique_id()
    ranks: dict[int, Communicator] = {}

    def connect(rank: int) -> None:
        ranks[rank] = Communicator.connect(libraries[rank], unique_id, rank=rank, size=2, stall_s=stall_s)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ranks[0], ranks[1]]


NUM_CHUNKS = 7


def broadcast(ranks: list[Communicator]) -> tuple[list[torch.Tensor], list[bytes], list[str]]:
    """Broadcast 2000 bytes in seven chunks. Return both ranks' buckets, what the receiver read, and both's errors."""
    buckets = [torch.arange(2000).to(torch.uint8), torch.zeros(2000, dtype=torch.uint8)]
    read: list[bytes] = []
    deadline = time.monotonic() + 10.0

    def take_part(rank: int, on_chunk: OnChunk | None) -> str:
        try:
            ranks[rank].broadcast([buckets[rank]], chunk_bytes=300, deadline=deadline, on_chunk=on_chunk)
        except WeightsError as error:
            ranks[rank].close()
            return str(error)
        return ""

    def keep(bucket: int, chunk: torch.Tensor) -> Future[None]:
        return pool.submit(lambda: read.append(chunk.numpy().tobytes()))

    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as receiver:
        received = receiver.submit(take_part, 1, keep)
        errors = [take_part(0, None), received.result()]
    return buckets, read, errors


def check_broadcasts(ranks: list[Communicator]) -> None:
    """Chunks pass in their order, and each is read when it is there; a communicator serves many versions."""
    for _ in range(2):
        (sent, got), read, errors = broadcast(ranks)
        assert errors == ["", ""]
        assert torch.equal(got, sent)
        assert len(read) == NUM_CHUNKS
        assert b"".join(read) == sent.numpy().tobytes()


def test_chunks_pass_between_two_ranks_in_their_order():
    ranks = two_ranks(30)
    check_broadcasts(ranks)
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_peer_costs_a_collective_no_more_than_its_deadline(rank: int):
    ranks = two_ranks(30)
    bucket = torch.zeros(32 << 20, dtype=torch.uint8)
    start = time.monotonic()
    with pytest.raises(WeightsError, match="broadcast"):
        ranks[rank].broadcast([bucket], chunk_bytes=64 << 20, deadline=start + 0.5)
    assert 0.4 < time.monotonic() - start < 5
    for each in ranks:
        each.close()


def test_connecting_to_a_peer_that_never_comes_ends_in_time():
    start = time.monotonic()
    library = make_library("gloo", LOOPBACK)
    with pytest.raises(WeightsError, match="rank 0 of 2 could not connect to the others"):
        Communicator.connect(library, library.unique_id(), rank=0, size=2, stall_s=0.5)
    assert time.monotonic() - start < 5


def test_connecting_to_a_learner_that_has_given_up_fails_at_once():
    # torch's store would try again, with growing pauses, for up to three times the limit.
    learner, member = (GlooLibrary(Endpoint("127.0.0.1", "127.0.0.1")) for _ in range(2))
    unique_id = learner.unique_id()
    learner.abort()
    start = time.monotonic()
    with pytest.raises(WeightsError, match=r"rank 1 of 2 .*the learner does not listen at 127\.0\.0\.1 port \d+"):
        Communicator.connect(member, unique_id, rank=1, size=2, stall_s=2.0)
    assert time.monotonic() - start < 1.0


def test_a_library_for_tests_is_refused_outside_of_tests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SUBSTITUTE, "tests.weights.faulty_library:FaultyLibrary")
    monkeypatch.delenv("ASYNC_RL_FAULTS", raising=False)
    with pytest.raises(ConfigError, match=f"{SUBSTITUTE} is for async-rl's own tests"):
        make_library("gloo", LOOPBACK)


def test_nccl_without_its_package_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl, "_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(WeightsError, match=r"pip install 'async-rl\[nccl\]'"):
        make_library("nccl", LOOPBACK)


def test_nccl_uses_the_interface_of_the_advertised_address_unless_the_user_chose_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(nccl, "interface_of", {"10.0.0.1": "ib0", "10.0.0.2": "eth1"}.__getitem__)
    choose_interface("127.0.0.1")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    choose_interface("10.0.0.1")
    choose_interface("10.0.0.2")
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == "=ib0"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    choose_interface("10.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "bond0"
