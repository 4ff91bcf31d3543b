"""The product's side of the queue benchmark: ``async-rl queue`` as users start it, a generator and a learner.

The generator samples nothing: it hands over ready-made groups, stamped with the moment, as fast as it gets leases. The
learner trains nothing: it takes a step's groups, acknowledges and announces them, and takes again.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tomli_w

from async_rl.net.codec import encode_group
from async_rl.net.keys import client_keys_of, make_keys
from async_rl.process.child import reuse_freed_memory
from async_rl.queue.client.clients import GeneratorQueue, LearnerQueue
from async_rl.queue.messages import Announced, Announcement, LeasesGranted, NotReady, Returned, StepAck, TrainedCounts
from async_rl.records import NO_VERSION, Group, Lease, Rollout, TokenSequence
from async_rl.run.queue_files import read_record
from benchmarks.queue_measure import Load, Measured, Meter, Pacer, processes, receive, result_of

GROUP_SIZE = 8
PROMPT_TOKENS = 4
_LINEAGE = "0123456789abcdef"
DIGEST = "of the weights"
_NUM_ROWS = 4096
_START_S = 60.0
_WAIT_S = 20.0
_MAX_UNANSWERED = 128
"""Groups on their way: enough that nobody waits for an answer, few enough that no socket fills up."""
_BYTES_IN_FLIGHT = 16 << 20


@dataclass(frozen=True, slots=True)
class ProductOptions:
    """``groups_per_step``: the learner's batch. ``sync_every``: it announces every so many versions.

    ``profile``: a file for cProfile's figures of the server.
    """

    journal_dir: Path
    has_journal: bool = False
    has_keys: bool = False
    groups_per_step: int = 32
    max_staleness: int = 16
    sync_every: int = 1
    num_generators: int = 1
    profile: Path | None = None


def measure_product(load: Load, options: ProductOptions) -> Measured:
    """One run of it, everything started afresh."""
    options.journal_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="queue-benchmark-", dir=options.journal_dir) as name, processes() as started:
        directory = Path(name)
        with _server(directory, load, options) as (server_pid, address):
            keys = str(directory / "keys") if options.has_keys else None
            pids: dict[str, list[int]] = {"server": [server_pid], "generator": []}
            learner_pid, learner = started.start(_learner, address, keys, load, options)
            assert receive(learner) == "attached"
            for index in range(options.num_generators):
                share = replace(load, rate=None if load.rate is None else load.rate / options.num_generators)
                pid, _ = started.start(_generator, address, keys, share, f"generator-{index}")
                pids["generator"].append(pid)
            learner.send(pids | {"learner": [learner_pid]})
            return result_of(learner, load)


@contextlib.contextmanager
def _server(directory: Path, load: Load, options: ProductOptions) -> Iterator[tuple[int, str]]:
    """A queue server's process id and address."""
    if options.has_keys:
        make_keys(directory / "keys")
    config = write_config(directory, load, options)
    profile = [] if options.profile is None else ["-m", "cProfile", "-o", str(options.profile)]
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *profile, "-m", "async_rl", "queue", str(config), "--run-id", "benchmark"],
            stdout=output, stderr=output,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + _START_S
        while (record := read_record(directory / "run")) is None or record.pid != process.pid:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the queue server did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.01)
        yield process.pid, record.address
    finally:
        process.terminate()
        process.wait(_START_S)


def write_config(directory: Path, load: Load, options: ProductOptions) -> Path:
    """The config file of a run whose queue takes this load; ``run.dir`` is ``directory / "run"``."""
    data = directory / "train.jsonl"
    rows = (
        {"messages": [{"role": "user", "content": f"{i} + {i}"}], "gt_answer": str(2 * i)} for i in range(_NUM_ROWS)
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    queue = {
        "max_staleness": options.max_staleness,
        **({"keys": str(directory / "keys")} if options.has_keys else {}),
    }  # fmt: skip
    config = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": "none"},
        "data": {"train": str(data), "system_prompt": ""},
        "sampling": {
            "group_size": GROUP_SIZE, "max_prompt_tokens": PROMPT_TOKENS,
            "max_new_tokens": max(2, tokens_for(load.size_bytes)),
        },
        "reward": {"cache_length": 1},
        "queue": queue,
        "experimental": {"journal": options.has_journal, "max_messages_per_s": 1e6},
        "weights": {"sync_every": options.sync_every},
        "learner": {"groups_per_step": options.groups_per_step, "steps": 10_000_000},
    }  # fmt: skip
    path = directory / "config.toml"
    path.write_text(tomli_w.dumps(config))
    return path


# The load.


def rollouts(num_tokens: int, version: int) -> tuple[Rollout, ...]:
    """A group's rollouts, half of them right, each of ``num_tokens`` sampled tokens behind a short prompt."""
    total = PROMPT_TOKENS + num_tokens
    mask = np.arange(total) >= PROMPT_TOKENS
    sequence = TokenSequence(
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, version, NO_VERSION).astype(np.int32),
    )
    return tuple(
        Rollout((sequence,), {"correct": float(i % 2)}, float(i % 2), "stop", extracted="42") for i in range(GROUP_SIZE)
    )


def make_group(lease_id: str, position: int, lineage: str, made: tuple[Rollout, ...], generator_id: str) -> Group:
    """``made`` as the group of a lease, stamped with the moment."""
    version = int(made[0].sequences[0].versions[-1])
    return Group(
        lease_id=lease_id, kind="train", position=position, generator_id=generator_id, lineage=lineage,
        temperature=1.0, rollouts=made, weights_digest={version: DIGEST}, sampling_time_s=time.monotonic(),
    )  # fmt: skip


def body_of(num_tokens: int) -> bytes:
    """An encoded group, like those that the generator returns."""
    return encode_group(
        make_group(f"{_LINEAGE[:8]}-0000-train1000-1000", 1000, _LINEAGE, rollouts(num_tokens, 1), "generator-0")
    )


@lru_cache
def tokens_for(size_bytes: int) -> int:
    """Sampled tokens a rollout, so that a group is encoded in at most ``size_bytes``, and hardly less."""
    fewest, most = 1, max(2, size_bytes // GROUP_SIZE)
    while most - fewest > 1:
        middle = (fewest + most) // 2
        fewest, most = (middle, most) if len(body_of(middle)) <= size_bytes else (fewest, middle)
    return fewest


# The roles.


def _learner(address: str, keys: str | None, load: Load, options: ProductOptions, pipe: Connection) -> None:
    reuse_freed_memory()  # as async-rl learner does
    queue = LearnerQueue(address, _START_S, client_keys_of(keys))
    queue.attach("benchmark", _LINEAGE, "", 0, 0, 10_000_000, "", {}, None)
    queue.announce(Announcement(_LINEAGE, 0, DIGEST, "tcp://127.0.0.1:1"))
    pipe.send("attached")
    meter, step = Meter(load, receive(pipe)), 0
    num_rollouts = options.groups_per_step * GROUP_SIZE
    facts = TrainedCounts(True, num_rollouts, {}, num_rollouts * tokens_for(load.size_bytes), {})
    queue.begin_take(_LINEAGE, step, step, _WAIT_S)
    while True:
        batch = queue.take(_LINEAGE, step, step, _WAIT_S)
        if isinstance(batch, NotReady):
            raise RuntimeError(batch.reason)
        if (measured := meter.arrive([taken.group.sampling_time_s for taken in batch.groups])) is not None:
            break
        queue.ack(StepAck(_LINEAGE, step, step + 1, facts), next_take_s=_WAIT_S)
        step += 1
        if step % options.sync_every == 0:
            queue.announce(Announcement(_LINEAGE, step, DIGEST, "tcp://127.0.0.1:1"))
    pipe.send(measured)
    queue.close()


def _generator(address: str, keys: str | None, load: Load, generator_id: str, pipe: Connection) -> None:
    reuse_freed_memory()  # as async-rl generator does
    queue = GeneratorQueue(address, generator_id, client_keys_of(keys))
    queue.hello(_START_S, "benchmark")
    num_tokens = tokens_for(load.size_bytes)
    most = min(_MAX_UNANSWERED, max(8, _BYTES_IN_FLIGHT // load.size_bytes))
    leases: deque[Lease] = deque()
    pacer, version, made = Pacer(load.rate), 0, rollouts(num_tokens, 0)
    while True:
        if len(leases) <= most // 2:
            queue.request_leases(_LINEAGE, version, most, _WAIT_S)
        while leases and queue.num_unanswered_returns < most and not pacer.left_s():
            lease = leases.popleft()
            queue.return_group(make_group(lease.lease_id, lease.prompt.position, lease.lineage, made, generator_id))
            pacer.step()
        is_waiting = not leases or queue.num_unanswered_returns >= most
        for event in queue.poll(_WAIT_S if is_waiting else pacer.left_s()):
            if isinstance(event, LeasesGranted):
                leases += event.leases
            elif isinstance(event, Announced) and event.announcement.version > version:
                version = event.announcement.version
                made = rollouts(num_tokens, version)
            elif isinstance(event, Returned) and event.verdict != "queued":
                raise RuntimeError(f"expected every group to be queued, {event.lease_id} was {event.verdict}")
