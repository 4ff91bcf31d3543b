"""``NcclLibrary`` through the real nccl4py, over a fake libnccl: two ranks in this process, or in several."""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.weights.collective.library import HOST, Endpoint
from async_rl.weights.collective.nccl import NcclLibrary
from tests.weights.nccl_on_host import DIRECTORY, compile_fake, load_fake, skip_if_impossible
from tests.weights.test_collective import NUM_CHUNKS, broadcast, check_broadcasts, two_ranks

skip_if_impossible()

ON_DEVICE = Endpoint("127.0.0.1", "127.0.0.1", "cuda:0")


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


def test_chunks_pass_between_two_ranks_in_their_order(libraries: list[NcclLibrary]):
    check_broadcasts(two_ranks(10, libraries))


@pytest.mark.parametrize("failing", [1, 3, NUM_CHUNKS])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_asynchronous_error_of_one_rank_ends_the_broadcast_of_both(
    libraries: list[NcclLibrary], fake: ctypes.CDLL, rank: int, failing: int
):
    ranks = two_ranks(10, libraries)
    _fail(fake, rank=rank, broadcast=failing)
    started = time.monotonic()
    _, _, errors = broadcast(ranks)
    assert "NCCL: other error: the fake's last error" in errors[rank]
    # The other one is told by the first one's abort, not by the deadline. The root may have sent its last chunk before.
    if not (rank == 1 and failing == NUM_CHUNKS):
        assert "remote error" in errors[1 - rank]
    assert time.monotonic() - started < 5
