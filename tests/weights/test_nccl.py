"""``NcclLibrary`` through the real nccl4py, over a fake libnccl: two ranks in this process, or in several."""

import ctypes
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from async_rl.errors import WeightsError
from async_rl.queue.messages import Announcement
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.collective.libraries import SUBSTITUTE
from async_rl.weights.collective.library import HOST, Communicator, Endpoint, OnChunk
from async_rl.weights.collective.nccl import NcclLibrary, offer
from async_rl.weights.control import CollectiveOffer
from async_rl.weights.staging import Staging
from tests.weights.conftest import ReceiverProcess
from tests.weights.nccl_on_host import DIRECTORY, compile_fake, load_fake, skip_if_impossible
from tests.weights.test_collective import two_ranks

skip_if_impossible()

ON_DEVICE = Endpoint("127.0.0.1", "127.0.0.1", "127.0.0.1", "cuda:0")
NUM_CHUNKS = 7


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nccl")
    compile_fake(directory)
    return directory


@pytest.fixture
def fake(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.setenv(DIRECTORY, str(directory))
    fake = load_fake(monkeypatch.setattr)
    yield fake
    ctypes.c_int.in_dll(fake, "fake_failing_rank").value = -1


@pytest.fixture
def libraries(fake: ctypes.CDLL) -> Iterator[list[NcclLibrary]]:
    """Two ranks' libraries, and two more."""
    made = [NcclLibrary(ON_DEVICE) for _ in range(4)]
    for library in made:
        library.device = HOST
    yield made
    for library in made:
        library.abort()


def _fail(fake: ctypes.CDLL, *, rank: int, broadcast: int) -> None:
    """Let the state of this rank become an error with this broadcast, counted from 1."""
    ctypes.c_long.in_dll(fake, "fake_failing_broadcast").value = broadcast
    ctypes.c_int.in_dll(fake, "fake_failing_rank").value = rank


def _broadcast(ranks: list[Communicator], deadline_s: float) -> tuple[list[torch.Tensor], list[bytes], list[str]]:
    """Broadcast 2000 bytes in seven chunks. Return both ranks' buckets, what the receiver read, and both's errors."""
    buckets = [torch.arange(2000).to(torch.uint8), torch.zeros(2000, dtype=torch.uint8)]
    read: list[bytes] = []
    errors = ["", ""]
    deadline = time.monotonic() + deadline_s

    def take_part(rank: int, on_chunk: OnChunk | None) -> None:
        try:
            ranks[rank].broadcast([buckets[rank]], chunk_bytes=300, deadline=deadline, on_chunk=on_chunk)
        except WeightsError as error:
            errors[rank] = str(error)
            ranks[rank].close()

    def keep(bucket: int, chunk: torch.Tensor) -> Future[None]:
        return pool.submit(lambda: read.append(chunk.numpy().tobytes()))

    pool = ThreadPoolExecutor(1)
    receiver = threading.Thread(target=take_part, args=(1, keep))
    receiver.start()
    take_part(0, None)
    receiver.join()
    return buckets, read, errors


def test_chunks_pass_between_two_ranks_in_their_order(libraries: list[NcclLibrary]):
    ranks = two_ranks(10, libraries)
    for _ in range(2):  # a communicator serves many versions
        (sent, got), read, errors = _broadcast(ranks, 10)
        assert errors == ["", ""]
        assert torch.equal(got, sent)
        assert len(read) == NUM_CHUNKS
        assert b"".join(read) == sent.numpy().tobytes()


@pytest.mark.parametrize("broadcast", [1, 3, NUM_CHUNKS])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_asynchronous_error_of_one_rank_ends_the_broadcast_of_both(
    libraries: list[NcclLibrary], fake: ctypes.CDLL, rank: int, broadcast: int
):
    ranks = two_ranks(10, libraries)
    _fail(fake, rank=rank, broadcast=broadcast)
    started = time.monotonic()
    _, _, errors = _broadcast(ranks, 10)
    assert "NCCL: other error: the fake's last error" in errors[rank]
    # The other one is told by the first one's abort, not by the deadline. The root may have sent its last chunk before.
    if not (rank == 1 and broadcast == NUM_CHUNKS):
        assert "remote error" in errors[1 - rank]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_takes_no_part_costs_a_broadcast_no_more_than_its_deadline(libraries: list[NcclLibrary], rank: int):
    ranks = two_ranks(10, libraries)
    started = time.monotonic()
    with pytest.raises(WeightsError, match="a peer did not answer in time"):
        ranks[rank].broadcast([torch.zeros(2000, dtype=torch.uint8)], chunk_bytes=300, deadline=started + 0.1)
    assert 0.1 <= time.monotonic() - started < 5


@pytest.mark.parametrize("rank", [0, 1])
def test_connecting_to_a_peer_that_never_comes_ends_in_time(libraries: list[NcclLibrary], rank: int):
    unique_id = libraries[0].unique_id()
    assert len(unique_id) == 128
    with pytest.raises(WeightsError, match=rf"rank {rank} of 2 could not connect .* a peer did not answer in time"):
        Communicator.connect(libraries[rank], unique_id, rank=rank, size=2, stall_s=0.1)


def test_a_rank_that_waits_to_connect_is_told_by_the_abort_of_another(libraries: list[NcclLibrary]):
    unique_id = libraries[0].unique_id()
    with pytest.raises(WeightsError):
        Communicator.connect(libraries[0], unique_id, rank=0, size=3, stall_s=0.1)
    started = time.monotonic()
    with pytest.raises(WeightsError, match=r"rank 1 of 3 could not connect .*remote error"):
        Communicator.connect(libraries[1], unique_id, rank=1, size=3, stall_s=10)
    assert time.monotonic() - started < 5


def test_after_an_abort_the_next_communicator_works(libraries: list[NcclLibrary]):
    for rank in two_ranks(10, libraries[:2]):
        rank.close()
    ranks = two_ranks(10, libraries[2:])
    (sent, got), _, errors = _broadcast(ranks, 10)
    assert errors == ["", ""]
    assert torch.equal(got, sent)


def test_the_version_that_a_rank_offers_is_that_of_the_library_which_nccl4py_loads(
    libraries: list[NcclLibrary], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=f"of-{device}"))
    assert offer("cuda:0") == CollectiveOffer("nccl", "2.28.9", ["of-cuda:0"])


def test_a_device_of_torch_has_the_uuid_that_a_rank_offers():
    # A build without CUDA has no such class, but the declarations of all builds.
    declared = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text(encoding="utf-8")
    fields = declared.partition("class _CudaDeviceProperties:")[2].partition("\nclass ")[0]
    assert "    uuid: str\n" in fields


def test_a_call_before_the_last_one_has_ended_is_refused(libraries: list[NcclLibrary]):
    # So that the tests above would notice a library that does not wait for ``state``.
    libraries[0].init(libraries[0].unique_id(), 0, 1, 1.0)
    with pytest.raises(RuntimeError, match="NCCL"):
        libraries[0].broadcast(torch.zeros(8, dtype=torch.uint8), 1.0)


@pytest.mark.slow
def test_a_learner_broadcasts_versions_to_two_generators_by_nccl4py(
    directory: Path, start_receiver: Callable[[str], ReceiverProcess], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(DIRECTORY, str(directory))
    monkeypatch.setenv("ASYNC_RL_FAULTS", str(directory))
    monkeypatch.setenv(SUBSTITUTE, "tests.weights.nccl_on_host:NcclOnHost")
    receivers = [start_receiver(name) for name in ("first", "second")]
    staging = Staging(None, 1 << 16, deadline_s=30)
    with closing(Publisher("127.0.0.1", deadline_s=30, insecure=False, chunk_bytes=10_000)) as publisher:
        assert publisher.wait_for_collective(60)
        for version in range(4):
            staged = staging.stage("nccl", version, iter([("weight", torch.full((50_000,), float(version)))]))
            publisher.publish(staged)
            for receiver in receivers:
                receiver.follow(Announcement("nccl", version, staged.manifest.digest, publisher.address))
            facts = [receiver.version(version) for receiver in receivers]
            assert [fact["corrupt"] for fact in facts] == [0, 0]
            assert publisher.wait(version, 30, num_members=2)
        stats = publisher.stats()
    # The first version is pulled, because nobody was a member yet. The digests of all were verified.
    assert (stats.attempts, stats.failures) == (3, 0)
