"""Weights from learner to generator: every transport beside a raw socket, a bare gloo broadcast and a memory copy.

Both ends of every side are processes of their own on this machine; rounds of all sides alternate, and ratios are
medians over rounds. A transfer of the product counts from ``publish`` to the receiver's acknowledgement, digests
included; staging is listed apart, and so is the pause, which is all that decoding sees of it.

    python -m benchmarks.weights [--sizes 10,100,1000] [--rounds 5] [--tables transfer,delta,publish]
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.learner.loop.publishing import StagedWeights
from async_rl.net.keys import make_keys
from async_rl.queue.messages import Announcement
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.staging import Staging
from async_rl.weights.tcp.delta import apply_delta, encode_delta
from benchmarks.weights_product import Product, Runs, receive
from benchmarks.weights_raw import BUCKET_BYTES, DEADLINE_S, BareGloo, Child, MemoryCopy, RawSocket, goal

LR = 1e-6
SCALE = 0.02
"""Standard deviation of trained weights: that of most linear layers of language models."""
SMALLEST_GOAL_MB = 100
"""Smaller transfers take milliseconds: they measure how fast threads are woken."""
RAW, BARE_GLOO, MEMORY = "raw loopback socket", "bare gloo broadcast", "memory copy"
GLOO, TCP, ENCRYPTED, DELTA = "gloo", "tcp", "tcp, encrypted", "tcp, deltas"


def weights_of(size_bytes: int) -> dict[str, Tensor]:
    """bfloat16 weights of about this size, in tensors of up to 16 MB, of trained scale."""
    generator = torch.Generator().manual_seed(0)
    count, largest = size_bytes // 2, 8 << 20
    sizes = [largest] * (count // largest) + ([count % largest] if count % largest else [])
    return {
        f"layer.{index}": (torch.randn(size, generator=generator) * SCALE).to(torch.bfloat16)
        for index, size in enumerate(sizes)
    }


def transfer_table(size_mb: int, num_rounds: int) -> None:
    # A transfer of milliseconds is at the scheduler's mercy: up to ten times the rounds for the small ones.
    num_rounds *= max(1, min(10, 100 // size_mb))
    size = size_mb * 1_000_000
    weights = weights_of(size)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        make_keys(keys)
        limits: dict[str, Any] = {
            name: stack.enter_context(closing(limit(size)))
            for name, limit in ((MEMORY, MemoryCopy), (RAW, RawSocket), (BARE_GLOO, BareGloo))
        }
        runs = {name: Runs() for name in (*limits, GLOO, TCP, ENCRYPTED, DELTA)}
        # One product at a time: four receivers of 1 GB, three buffers each, would not fit beside each other.
        for name, options in (
            (GLOO, {"transport": "gloo", "keys": None, "has_deltas": False}),
            (TCP, {"transport": "tcp", "keys": None, "has_deltas": False}),
            (ENCRYPTED, {"transport": "tcp", "keys": keys, "has_deltas": False}),
            (DELTA, {"transport": "tcp", "keys": None, "has_deltas": True}),
        ):
            with closing(Product(options.pop("transport"), weights, **options)) as product:
                for _ in range(num_rounds):
                    product.once(runs[name])
                    for limit_name, limit in limits.items():
                        runs[limit_name].seconds.append(limit.once())
    _print_transfers(size_mb, size, num_rounds, runs)


def _print_transfers(size_mb: int, size: int, num_rounds: int, runs: Mapping[str, Runs]) -> None:
    print(f"\n{size_mb} MB of bfloat16, medians of {num_rounds} rounds")
    print(f"{'side':22s}{'seconds':>10s}{'best':>9s}{'GB/s':>8s}{'on the wire':>13s}{'stage s':>10s}{'pause s':>11s}")
    for name, measured in runs.items():
        seconds = median(measured.seconds)
        wire = f"{median(measured.wire_bytes) / size:.1%}" if any(measured.wire_bytes) else "-"
        stage = f"{median(measured.stage):.4f}" if measured.stage else "-"
        pause = f"{median(measured.pause):.6f}" if measured.pause else "-"
        rates = f"{seconds:10.4f}{min(measured.seconds):9.4f}{size / seconds / 1e9:8.2f}"
        print(f"{name:22s}{rates}{wire:>13s}{stage:>10s}{pause:>11s}", flush=True)
    order = [GLOO, TCP, ENCRYPTED, DELTA]

    def ratio(name: str, limit: str) -> float:
        # The limit's rounds are those that ran between this side's own.
        first = order.index(name) * num_rounds
        beside = runs[limit].seconds[first : first + num_rounds]
        return median(a / b for a, b in zip(beside, runs[name].seconds, strict=True))

    for transport, limit, least in ((TCP, RAW, 0.8), (GLOO, BARE_GLOO, 0.75)):
        if size_mb >= SMALLEST_GOAL_MB:
            goal(f"{transport} over {limit}", ratio(transport, limit), least)
        else:
            print(f"  {transport} over {limit}: {ratio(transport, limit):.2f}")
    share = median(runs[TCP].pause) / median(runs[TCP].seconds)
    goal("pause over a full transfer (pointer swap)", share, 0.05, at_most=True)
    print(
        f"  {ENCRYPTED} over {RAW}: {ratio(ENCRYPTED, RAW):.2f}; a memory copy takes "
        f"{median(runs[MEMORY].seconds):.4f} s"
    )


def delta_table() -> None:
    """Real AdamW steps on weights of trained scale: what the delta of the next step takes."""
    print(f"\ndeltas after AdamW at lr {LR:g} on weights of scale {SCALE}, 32 M of them")
    print(f"{'dtype':12s}{'step':>6s}{'changed':>10s}{'bytes':>9s}{'encode GB/s':>13s}{'apply GB/s':>12s}")
    generator = torch.Generator().manual_seed(0)
    master = nn.Parameter(torch.randn(1 << 25, generator=generator) * SCALE)
    optimizer = torch.optim.AdamW([master], lr=LR, weight_decay=0.01)
    for number in range(1, 4):
        before = master.detach().clone()
        master.grad = torch.randn(master.shape, generator=generator) * 1e-3
        optimizer.step()
        for dtype, width in ((torch.bfloat16, 2), (torch.float32, 4)):
            old, new = (_bytes_of(tensor.to(dtype)) for tensor in (before, master.detach()))
            runs = [(len(old), width)]
            start = time.perf_counter()
            encoded = encode_delta(old, new, runs)
            encode_s = time.perf_counter() - start
            changed = np.mean(old.view(f"<u{width}") != new.view(f"<u{width}"))
            apply_s = float("nan")
            if encoded is not None:
                patched = old.copy()
                start = time.perf_counter()
                apply_delta(patched, encoded, runs)
                apply_s = time.perf_counter() - start
                assert np.array_equal(patched, new), "a delta is without loss"
            share = 1.0 if encoded is None else len(encoded) / len(new)
            name = str(dtype).removeprefix("torch.")
            rates = f"{len(new) / encode_s / 1e9:13.2f}{len(new) / apply_s / 1e9:12.2f}"
            print(f"{name:12s}{number:6d}{changed:10.2%}{share:9.2%}{rates}", flush=True)
            if dtype == torch.bfloat16:
                goal("bytes of a bfloat16 delta over the full bytes", share, 0.1, at_most=True)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def publish_table(num_rounds: int, step_s: float = 1.0) -> None:
    """A learner with float32 masters of a 100 MB model; its step is a fixed amount of work of about ``step_s``."""
    masters = {name: tensor.float() for name, tensor in weights_of(100_000_000).items()}
    work = _work_of(step_s)
    print(f"\npublishing a 100 MB model every step of about {step_s:g} s, gather and cast included")
    print(f"{'transport':12s}{'step s':>9s}{'with publishing':>17s}{'publish s':>11s}{'of the step':>13s}")
    for transport in ("gloo", "tcp"):
        staging = Staging(None, BUCKET_BYTES, deadline_s=DEADLINE_S, is_pulled=transport == "tcp")
        with closing(Publisher("127.0.0.1", deadline_s=DEADLINE_S, insecure=False, transport=transport)) as publisher:
            if transport != "tcp":
                assert publisher.wait_for_collective(DEADLINE_S), "the process that broadcasts weights did not start"
            plane = StagedWeights(staging, publisher)
            child = Child(receive, {name: tuple(t.shape) for name, t in masters.items()}, None)
            with closing(child):
                plain, publishing, shares = _timed_steps(plane, masters, child, work, num_rounds)
        cost = median(shares)
        print(
            f"{transport:12s}{median(plain):9.3f}{median(publishing):17.3f}{cost * median(plain):11.4f}{cost:13.2%}",
            flush=True,
        )
        goal(f"publish time over the step, {transport}", cost, 0.05, at_most=True)


def _timed_steps(
    plane: StagedWeights, masters: Mapping[str, Tensor], child: Child, work: Callable[[], None], num_rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Steps without and with publishing, in turn; the share of a step that ``publish`` takes."""

    def gather() -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(torch.bfloat16)) for name, tensor in masters.items())

    first = plane.publish("benchmark", 0, gather(), tick=lambda: None)
    child.pipe.send(Announcement("benchmark", 0, first.digest, plane.channel))
    child.pipe.recv()
    plain: list[float] = []
    publishing: list[float] = []
    shares: list[float] = []
    for version in range(1, num_rounds + 3):
        start = time.perf_counter()
        work()
        middle = time.perf_counter()
        for tensor in masters.values():
            tensor.mul_(1.001)
        begun = time.perf_counter()
        plane.publish("benchmark", version, gather(), tick=lambda: None)
        published = time.perf_counter()
        work()  # the send goes on beside it
        end = time.perf_counter()
        child.pipe.recv()
        if version > 2:  # before, buffers are made
            plain.append(middle - start)
            publishing.append(end - begun)
            shares.append((published - begun) / (middle - start))
    return plain, publishing, shares


def _work_of(step_s: float) -> Callable[[], None]:
    matrix = torch.randn(512, 512)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < step_s:
        torch.mm(matrix, matrix)
        count += 1

    def work() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    return work


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,100,1000", help="MB of parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tables", default="transfer,delta,publish")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(
        f"CPython {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f} "
        f"before the start, buckets of {BUCKET_BYTES >> 20} MiB"
    )
    tables = options.tables.split(",")
    if "transfer" in tables:
        for size_mb in map(int, options.sizes.split(",")):
            transfer_table(size_mb, options.rounds)
    if "delta" in tables:
        delta_table()
    if "publish" in tables:
        publish_table(options.rounds)


if __name__ == "__main__":
    main()
