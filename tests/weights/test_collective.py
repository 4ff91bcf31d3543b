import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from async_rl.errors import ConfigError, WeightsError
from async_rl.weights.collective import nccl
from async_rl.weights.collective.gloo import GlooLibrary
from async_rl.weights.collective.libraries import SUBSTITUTE, make_library
from async_rl.weights.collective.library import Communicator, Endpoint, Library
from async_rl.weights.collective.nccl import choose_interface

LOOPBACK = Endpoint("127.0.0.1", "127.0.0.1", "127.0.0.1")
DEVICE = torch.device("cuda", 0)


class OnDevice(torch.Tensor):
    """Host memory that says that it is on a device."""

    device = DEVICE  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    @staticmethod
    def empty(size: int) -> torch.Tensor:
        return torch.full((size,), 255, dtype=torch.uint8).as_subclass(OnDevice)


class DeviceLibrary(GlooLibrary):
    """gloo as a library that broadcasts device memory, whose copies begin in the order of a stream."""

    device = DEVICE

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.copied: list[tuple[str, str]] = []

    def broadcast(self, memory: torch.Tensor, timeout_s: float, *, after: Any = None) -> None:
        assert isinstance(memory, OnDevice)
        super().broadcast(memory.as_subclass(torch.Tensor), timeout_s, after=after)

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return OnDevice.empty(num_bytes) if device == DEVICE else torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Any = None) -> Any:
        self.copied.append((source.device.type, target.device.type))
        return super().copy(target, source, after=after)


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


def test_a_broadcast_brings_the_bytes_chunk_by_chunk():
    ranks = two_ranks(30)
    sent, got = torch.arange(100_000).to(torch.uint8), torch.zeros(100_000, dtype=torch.uint8)
    deadline = time.monotonic() + 30
    receive = threading.Thread(
        target=ranks[1].broadcast, args=([got],), kwargs={"chunk_bytes": 7001, "deadline": deadline}
    )
    receive.start()
    ranks[0].broadcast([sent], chunk_bytes=7001, deadline=deadline)
    receive.join()
    assert torch.equal(got, sent)
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(("library", "is_on_device"), [
    (DeviceLibrary, True), (DeviceLibrary, False), (GlooLibrary, True), (GlooLibrary, False),
])  # fmt: skip
def test_chunks_reach_host_and_device_memory_and_are_read_back_from_where_they_lie(
    library: type[GlooLibrary], is_on_device: bool
):
    libraries = [library(LOOPBACK) for _ in range(2)]
    ranks = two_ranks(30, libraries)
    sent = torch.arange(50_000).to(torch.uint8)
    got = OnDevice.empty(50_000) if is_on_device else torch.zeros(50_000, dtype=torch.uint8)
    read: list[torch.Tensor] = []
    deadline = time.monotonic() + 30

    def keep(chunk: torch.Tensor) -> None:
        assert not isinstance(chunk, OnDevice)
        read.append(chunk.clone())

    pool = ThreadPoolExecutor(1)
    options = {"chunk_bytes": 7001, "deadline": deadline, "on_chunk": lambda _, chunk: pool.submit(keep, chunk)}
    receive = threading.Thread(target=ranks[1].broadcast, args=([got],), kwargs=options)
    receive.start()
    ranks[0].broadcast([sent], chunk_bytes=7001, deadline=deadline)
    receive.join()
    assert torch.equal(got.as_subclass(torch.Tensor), sent)
    assert torch.equal(torch.cat(read), sent)
    if isinstance(receiving := libraries[1], DeviceLibrary):
        # Into host memory, by way of the device; or from the device back to the host, to be read.
        assert receiving.copied == [("cuda", "cpu")] * 8
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
    learner, member = (GlooLibrary(Endpoint("127.0.0.1", "127.0.0.1", "127.0.0.1")) for _ in range(2))
    unique_id = learner.unique_id()
    learner.abort()
    start = time.monotonic()
    with pytest.raises(WeightsError, match=r"rank 1 of 2 .*the learner does not listen at 127\.0\.0\.1 port \d+"):
        Communicator.connect(member, unique_id, rank=1, size=2, stall_s=2.0)
    assert time.monotonic() - start < 1.0


def test_an_unknown_collective_is_refused():
    with pytest.raises(WeightsError, match=r"\['nccl', 'gloo'\], got 'mpi'"):
        make_library("mpi", LOOPBACK)


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
