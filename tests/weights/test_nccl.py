"""``NcclLibrary`` through the real nccl4py, over ``fake_nccl.c`` in place of libnccl: two ranks in this process.

nccl4py asks for ``libnccl.so.2``, and the loader answers with a library of that soname that this process has loaded.
"""

import ctypes
import itertools
import shutil
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from async_rl.errors import WeightsError
from async_rl.weights.collective.library import HOST, Communicator, Endpoint
from async_rl.weights.collective.nccl import NcclLibrary, offer
from async_rl.weights.control import CollectiveOffer
from tests.weights.test_collective import two_ranks

SOURCE = Path(__file__).with_name("fake_nccl.c")
ON_DEVICE = Endpoint("127.0.0.1", "127.0.0.1", "127.0.0.1", "cuda:0")
NUM_CHUNKS = 7


core = pytest.importorskip("nccl.core", reason="needs the packages nccl4py and cuda-bindings")
if torch.version.cuda is not None:
    pytest.skip("this build of torch has loaded NCCL itself, which nccl4py would use", allow_module_level=True)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a fake libnccl needs a C compiler (cc)")
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    options = ["-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{path.name}"]
    subprocess.run([compiler, *options, "-o", path, SOURCE], check=True, timeout=60)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.fake_count.argtypes, library.fake_count.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_long
    found = core.get_version().libnccl
    assert found is not None
    assert found.path == path
    return library


@pytest.fixture
def libraries(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NcclLibrary]]:
    """Two ranks' libraries, and two more. CUDA is replaced by streams with handles and events that ask the fake."""
    handles = itertools.count(4096)

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.cuda_stream = next(handles)

    class Event:
        def record(self, stream: Stream) -> None:
            self.handle = stream.cuda_stream
            self.count = fake.fake_count(self.handle, False)

        def query(self) -> bool:
            return fake.fake_count(self.handle, True) >= self.count

    for name, stand_in in {"Stream": Stream, "Event": Event, "device": nullcontext, "stream": nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    # nccl4py compares it with the index of a tensor's device, which host memory does not have.
    on_host = types.SimpleNamespace(device_id=None)
    monkeypatch.setattr(core.Communicator, "device", property(lambda _: on_host))
    made = [NcclLibrary(ON_DEVICE) for _ in range(4)]
    for library in made:
        library.device = HOST
    yield made
    ctypes.c_int.in_dll(fake, "fake_failing_rank").value = -1
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

    def take_part(rank: int, on_chunk: Callable[[torch.Tensor], None] | None) -> None:
        try:
            ranks[rank].broadcast(buckets[rank], chunk_bytes=300, deadline=deadline, on_chunk=on_chunk)
        except WeightsError as error:
            errors[rank] = str(error)
            ranks[rank].close()

    receiver = threading.Thread(target=take_part, args=(1, lambda chunk: read.append(chunk.numpy().tobytes())))
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
        ranks[rank].broadcast(torch.zeros(2000, dtype=torch.uint8), chunk_bytes=300, deadline=started + 0.1)
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


def test_a_call_before_the_last_one_has_ended_is_refused(libraries: list[NcclLibrary]):
    # So that the tests above would notice a library that does not wait for ``state``.
    libraries[0].init(libraries[0].unique_id(), 0, 1, 1.0)
    with pytest.raises(RuntimeError, match="NCCL"):
        libraries[0].broadcast(torch.zeros(8, dtype=torch.uint8), 1.0)
