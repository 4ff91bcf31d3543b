"""Host memory is pinned byte for byte and unlocked when it is freed, by a stand-in for CUDA's runtime."""

import gc
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from async_rl.errors import TrainingError, WeightsError
from async_rl.learner.checkpoints.stored_tensors import HostCopy, TrainingState
from async_rl.weights.staging import Staging

PAGE = 4096


class Cudart:
    """Refuses what CUDA refuses: memory that is locked already, and to unlock what is not locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.sizes: list[int] = []
        self.answer = 0

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:  # noqa: N802  (CUDA's name)
        assert type(ptr) is type(size) is type(flags) is int  # pybind11 takes unsigned integers, by position
        pages = set(range(ptr // PAGE, (ptr + size - 1) // PAGE + 1))
        taken = {page for at, n in self.locked.items() for page in range(at // PAGE, (at + n - 1) // PAGE + 1)}
        if self.answer or pages & taken:
            return self.answer or 712  # cudaErrorHostMemoryAlreadyRegistered
        self.locked[ptr] = size
        self.sizes.append(size)
        return 0

    def cudaHostUnregister(self, ptr: int) -> int:  # noqa: N802
        return 0 if self.locked.pop(ptr, None) else 713  # cudaErrorHostMemoryNotRegistered


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    found = Cudart()
    monkeypatch.setattr("torch.cuda.cudart", lambda: found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: None)
    monkeypatch.setattr("torch.cuda.Event", Mock)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    return found


def version(fails: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(20)  # 80 bytes, more than the 64 of a bucket
    yield "b", torch.ones(5)  # 20 bytes
    if fails:
        raise RuntimeError("no third tensor")


def test_staging_pins_its_buckets_and_unlocks_them_at_an_error_and_at_its_end(cudart: Cudart):
    staging = Staging(None, 64)
    with pytest.raises(RuntimeError, match="no third"):
        staging.stage("l", 0, version(fails=True))
    assert (cudart.sizes, cudart.locked) == ([80], {})
    staged = staging.stage("l", 1, version())
    assert cudart.sizes == [80, 80, 20]
    assert sorted(cudart.locked.values()) == [20, 80]
    first = staged.buckets[0]
    del staging, staged
    gc.collect()
    assert list(cudart.locked.values()) == [80]  # while a tensor in it is there
    assert first.sum() == 20 * (0x80 + 0x3F)  # 1.0 is 00 00 80 3f
    del first
    assert cudart.locked == {}


def state() -> TrainingState:
    tensors = {"a": torch.arange(5.0), "b": torch.ones(10, 10, dtype=torch.bfloat16), "c": torch.tensor(7)}
    return TrainingState({**tensors, "none": torch.empty(0, 3)}, {}, num_updates=1)


def test_the_copy_for_a_checkpoint_is_pinned_in_one_piece_and_unlocked_with_it(cudart: Cudart):
    copy = HostCopy()
    copy.take(state())
    for taken in (copy.take(state()), copy.take(state())):
        assert cudart.sizes == [64 + 256 + 64]  # of 20, 200, 8 and 0 bytes
        for name, tensor in state().tensors.items():
            assert taken.tensors[name].dtype == tensor.dtype
            assert torch.equal(taken.tensors[name], tensor)
    del copy, taken
    assert cudart.locked == {}


def test_nothing_is_pinned_without_cuda_and_a_refusal_says_how_much(monkeypatch: pytest.MonkeyPatch, cudart: Cudart):
    cudart.answer = 2
    with pytest.raises(WeightsError, match=r"can't pin 80 bytes of host memory \(CUDA error 2\)"):
        Staging(None, 64).stage("l", 0, version())
    with pytest.raises(TrainingError, match=r"checkpoint: can't pin 384 bytes .* set checkpoint.asynchronous = false"):
        HostCopy().take(state())
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    HostCopy().take(state())
    Staging(None, 64).stage("l", 0, version())
    assert cudart.sizes == []


def test_more_memory_than_there_is_ends_with_a_remedy_and_not_a_signal():
    huge = torch.empty(1, dtype=torch.uint8).expand(1 << 62)
    with pytest.raises(TrainingError, match=r"can't have \d+ bytes of host memory: .*checkpoint.asynchronous = false"):
        HostCopy().take(TrainingState({"a": huge}, {}, num_updates=1))
