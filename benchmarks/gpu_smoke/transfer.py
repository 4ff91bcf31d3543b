"""Weights on their way: staging beside an optimizer step, and communicators that are made, broken and aborted."""

from __future__ import annotations

import threading
import time

import torch

from async_rl.errors import WeightsError
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from async_rl.weights.collective.libraries import make_library
from async_rl.weights.collective.library import Communicator, Endpoint
from async_rl.weights.manifest import digest_bytes
from async_rl.weights.staging import StagedVersion, Staging
from benchmarks.gpu_smoke import engine
from benchmarks.gpu_smoke.case import Figure, Machine

HOST = "127.0.0.1"
NUM_COMMUNICATORS = 50
STALL_S = 5.0
ABSENT_PEER_S = 2.0
BUCKET_BYTES = 4 << 20
LEAK_BYTES = 256 << 20


def check_staging(machine: Machine) -> str:
    """Change the weights as soon as a version is staged, ten times: each version must hold the weights of its time."""
    size = 64 << 20 if machine.has_cuda else 1 << 20
    torch.manual_seed(0)
    weights = {f"layer.{i}": torch.randn(size // 8, device=machine.device).bfloat16() for i in range(8)}
    staging = Staging(None, BUCKET_BYTES)
    start = time.perf_counter()
    for version in range(10):
        expected = {name: tensor.clone() for name, tensor in weights.items()}
        staged = staging.stage("smoke", version, iter(weights.items()))
        for tensor in weights.values():
            tensor.mul_(1.01)
        for spec in staged.manifest.tensors:
            raw = staged.buckets[spec.bucket][spec.offset : spec.offset + spec.size_bytes]
            found = raw.clone().view(torch.bfloat16)
            assert torch.equal(found, expected[spec.name].cpu()), f"version {version}: {spec.name} was changed later"
        _check_digests(staged)
        staged.retire()
    took = time.perf_counter() - start
    return f"10 versions of {2 * size / 1e6:.0f} MB in {took:.1f} s, each changed right after staging: all bytes right"


def check_version(machine: Machine) -> str:
    """Gather and stage versions of the shape of Qwen2.5-1.5B: how long the learner pauses, and what digests take."""
    shape, vocab = (engine.QWEN_15B, 151936) if machine.has_cuda else (engine.SMALL, engine.VOCAB)
    model = engine.write_model(machine.directory / "model", shape, vocab)
    config = engine.config_of(machine, model, machine.dtype, {"learner": {"max_tokens": 256}})
    learner, staging = FsdpEngine(config, init_ranks(config)), Staging(None, 64 << 20)
    for version in range(2):  # their memory is then there
        staging.stage("smoke", version, learner.gather()).retire()
    start = time.perf_counter()
    staged = staging.stage("smoke", 2, learner.gather())
    pause_s = time.perf_counter() - start
    _check_digests(staged)
    machine.figures["pause"] = Figure(pause_s, "s")
    gigabytes = staged.manifest.size_bytes / 1e9
    return (
        f"{gigabytes:.2f} GB: the learner pauses {pause_s:.2f} s, {staged.gather_s:.2f} s of them to gather and copy, "
        f"{staged.digest_s:.2f} s for digests"
    )


def _check_digests(staged: StagedVersion) -> None:
    digests = [digest_bytes(bucket.numpy().data) for bucket in staged.buckets]
    version = staged.manifest.version
    assert list(staged.manifest.bucket_digests) == digests, f"version {version}: expected the digests of its bytes"


def check_gloo(machine: Machine) -> str:
    """Make and abort communicators of gloo between two ranks on this machine."""
    return _make_and_abort("gloo", [None, None])


def check_nccl_alone(machine: Machine) -> str:
    """Make and abort communicators of NCCL with a single rank, which needs one device only."""
    return _make_and_abort("nccl", [str(machine.device)])


def check_nccl_pair(machine: Machine) -> str:
    """Make and abort communicators of NCCL between two devices."""
    return _make_and_abort("nccl", ["cuda:0", "cuda:1"])


def _make_and_abort(name: str, devices: list[str | None]) -> str:
    """Broadcast over a new communicator fifty times. Then one whose peer is absent must fail in time, and one more
    must work.
    """
    threads, free = threading.active_count(), _free_bytes()
    start = time.perf_counter()
    for number in range(NUM_COMMUNICATORS):
        _broadcast_once(name, devices, number)
    took_ms = 1000 * (time.perf_counter() - start) / NUM_COMMUNICATORS
    library = make_library(name, Endpoint(HOST, HOST, devices[0]))
    begun = time.monotonic()
    try:
        Communicator.connect(library, library.unique_id(), rank=0, size=len(devices) + 1, stall_s=ABSENT_PEER_S)
        raise AssertionError("expected an error without the last peer, got a communicator")
    except WeightsError:
        waited = time.monotonic() - begun
    assert waited < 3 * ABSENT_PEER_S, f"expected to give up after {ABSENT_PEER_S} s, took {waited:.1f} s"
    _broadcast_once(name, devices, NUM_COMMUNICATORS)
    left = threading.active_count() - threads
    assert left <= 0, f"expected no thread left behind, got {left}"
    lost = free - _free_bytes()
    assert lost < LEAK_BYTES, f"expected the device's memory back, {lost / 1e6:.0f} MB are missing"
    return (
        f"{NUM_COMMUNICATORS} communicators of size {len(devices)}, {took_ms:.0f} ms each; an absent peer was given up "
        f"after {waited:.1f} s"
    )


def _broadcast_once(name: str, devices: list[str | None], number: int) -> None:
    """Connect the ranks, broadcast 1 MiB from rank 0, and close them. Each rank is a thread."""
    libraries = [make_library(name, Endpoint(HOST, HOST, device)) for device in devices]
    unique_id = libraries[0].unique_id()
    buckets = [torch.full((1 << 20,), number if rank == 0 else 255, dtype=torch.uint8) for rank in range(len(devices))]
    failures: list[BaseException] = []

    def take_part(rank: int) -> None:
        try:
            communicator = Communicator.connect(
                libraries[rank], unique_id, rank=rank, size=len(devices), stall_s=STALL_S
            )
            communicator.broadcast([buckets[rank]], chunk_bytes=256 << 10, deadline=time.monotonic() + STALL_S)
            communicator.close()
        except WeightsError as error:
            failures.append(error)

    threads = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * STALL_S)
        assert not thread.is_alive(), f"communicator {number}: a call did not return"
    assert not failures, f"communicator {number}: {failures[0]}"
    assert all(bool((bucket == number).all()) for bucket in buckets), f"communicator {number}: wrong bytes"


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
