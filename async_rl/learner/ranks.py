"""The ranks of the learner: their numbers, rank 0's commands to the others, and how an error on one rank stops all.

Rank 0 runs the trainer's loop and sends commands. The other ranks wait for commands, which are wire frames over gloo on
the host, whatever the device. Rank 0 may wait an hour for data. While it waits, it sends the command ``tick`` every few
seconds. So the other ranks reach ``experimental.distributed_timeout_s``, and end, only if rank 0 hangs.

Errors reach the other ranks in two ways. A rank that fails writes the cause into the rendezvous store and ends. Its
closed gloo connections interrupt the collectives of the other ranks, which then read the first cause from the store. An
error of rank 0 between two commands is sent with the ``close`` command.

A signal that asks one rank to stop reaches rank 0 by the store, too. Rank 0 alone decides when all stop.

Called by ``fsdp_engine.py`` and by the commands that start ranks. Without torchrun's environment there is one rank.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.config.config import Config
from async_rl.config.parallel import Layout
from async_rl.errors import AddressError, ConfigError, TrainingError
from async_rl.learner.flash_attention import activate_flash_attention
from async_rl.learner.rank_network import chosen_interface
from async_rl.net.wire import decode, encode
from async_rl.process.child import DEVICES_ARE_DEALT
from async_rl.process.user_code import code_digests
from async_rl.registry import find_offer, load

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0
"""Ranks may start this many seconds apart, even if ``experimental.distributed_timeout_s`` is shorter."""

LEAVE_TIMEOUT_S = 60.0
"""A rank that is done waits this long for the others to be done as well."""

STORE_TIMEOUT_S = 10.0
"""The store's process answers within this time, or it is stopped, or its machine is gone."""

_FAILURE_KEY = "first_failure"
_STOP_KEY = "stop_signal"


@dataclass(frozen=True, slots=True)
class Place:
    """This process's rank numbers, from the environment variables that torchrun or ``launch`` sets."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Place:
        """Read ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` from the environment. Without them there is one rank.

        Raises:
            ConfigError: the variables are not numbers, or contradict each other.
        """
        texts = {name: os.environ.get(name, default) for name, default in _PLACE_DEFAULTS.items()}
        try:
            rank, local_rank, world_size = (int(text) for text in texts.values())
        except ValueError:
            raise ConfigError(
                f"expected numbers in the environment variables, got {texts}; start the ranks with torchrun or "
                f"async-rl launch"
            ) from None
        if not 0 <= rank < world_size or local_rank < 0:
            raise ConfigError(
                f"expected environment variables with 0 <= RANK < WORLD_SIZE and LOCAL_RANK >= 0, got {texts}; start "
                f"the ranks with torchrun or async-rl launch"
            )
        return cls(rank, local_rank, world_size)


_PLACE_DEFAULTS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def init_ranks(config: Config) -> Ranks:
    """Connect to the other ranks and return the connection. A single rank on the CPU in float32 gets no process group.

    Raises:
        ConfigError: torchrun's environment is malformed, the CUDA device does not exist or can't have
            ``model.attention``, or the ranks can't be divided as ``[parallel]`` says.
        TrainingError: the other ranks did not connect in time.
    """
    place = Place.from_environment()
    layout = Layout.of(config.parallel, place.world_size)
    _set_threads(config, place)
    if config.sampling.deterministic:
        _use_deterministic_kernels()
    device = _device(config, place)
    if config.model.attention != "auto":
        activate_flash_attention(config.model.attention, device.index)
    if place.world_size == 1 and device.type == "cpu" and compute_dtype(config, device) == torch.float32:
        return Ranks(place, device, None, layout=layout)
    timeout = timedelta(seconds=config.experimental.distributed_timeout_s)
    try:
        if place.world_size == 1:
            store: dist.Store = dist.HashStore()
            interface = nullcontext()
        else:
            store, _, _ = next(dist.rendezvous("env://", timeout=max(timeout, timedelta(seconds=JOIN_TIMEOUT_S))))
            interface = chosen_interface(store, place.rank, place.world_size)
        with interface:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore("async_rl_ranks", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
    except (RuntimeError, ValueError, AddressError) as error:
        raise TrainingError(
            f"rank {place.rank} of {place.world_size} could not join the other ranks: {error}; check that all ranks "
            f"were started with the same MASTER_ADDR and MASTER_PORT, and that their machines reach each other"
        ) from error
    ranks = Ranks(place, device, dist.PrefixStore("async_rl_failure", store), layout=layout, timeout=timeout)
    if place.world_size > 1 and (offer := find_offer("async_rl.rank_watches", "files")):
        ranks.end_watch = load(offer)(config, place.rank, lambda: ranks.command)
    return ranks


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype that ``model.dtype`` selects on ``device``."""
    if config.model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32


def _set_threads(config: Config, place: Place) -> None:
    if config.learner.num_threads is not None:
        torch.set_num_threads(config.learner.num_threads)
    elif config.sampling.deterministic:
        # The order of float sums depends on the number of threads, so that must not depend on the machine.
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ and place.world_size > 1:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))


def _use_deterministic_kernels() -> None:
    """Make torch sum in a fixed order. By default CUDA kernels use atomic additions, whose order varies."""
    # cuBLAS reads this when it starts. Without it the workspace, and so the order of sums, may differ every time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _device(config: Config, place: Place) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(config.learner.devices, place, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def device_index(devices: Sequence[int] | None, place: Place, num_visible: int) -> int:
    """Return the index of this rank's CUDA device among the visible ones.

    ``launch`` makes only the learner's devices visible, one for each rank (``DEVICES_ARE_DEALT``). Otherwise
    ``devices`` are indices into the visible ones, whoever has set ``CUDA_VISIBLE_DEVICES``.

    Args:
        devices: the value of ``learner.devices``.
        place: this rank.
        num_visible: number of visible CUDA devices.

    Raises:
        ConfigError: there is no device for this rank.
    """
    index = place.local_rank
    if devices is not None and DEVICES_ARE_DEALT not in os.environ:
        if index >= len(devices):
            raise ConfigError(
                f"learner.devices: expected a device for each rank of this machine, got {list(devices)} and local rank "
                f"{index}; start {len(devices)} ranks (torchrun --nproc-per-node {len(devices)}), or name more devices"
            )
        index = devices[index]
    if index >= num_visible:
        raise ConfigError(
            f"learner.devices: expected at least {index + 1} visible CUDA devices for rank {place.rank}, got "
            f"{num_visible}; name other devices, or start fewer ranks on this machine"
        )
    return index


class Ranks:
    """This process's connection to the other ranks of the learner.

    ``store`` is the rendezvous store. It is None if there is no process group. ``layout`` says how the ranks divide the
    work; if None, each has micro-batches of its own. ``timeout``: a collective of any group of ranks fails after it.
    """

    def __init__(
        self,
        place: Place,
        device: torch.device,
        store: dist.Store | None,
        *,
        layout: Layout | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.layout = layout or Layout(shards=place.world_size)
        self.rank, self.world_size, self.device = place.rank, place.world_size, device
        self._store, self.timeout = store, timeout
        self.is_broken = False
        """Whether a collective failed on this rank. If so, it can send nothing to the other ranks."""
        self.command = "no command"
        """What this rank does together with the others now."""
        self.end_watch: Callable[[], None] = lambda: None
        """Ends what reports long waits of this rank."""
        # torch.distributed.checkpoint and our commands work on the host, over gloo.
        self.host_group: dist.ProcessGroup | None = None
        if store is not None and device.type == "cuda":
            self.host_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        # Checkpoints are written by a thread, whose collectives must not mix with those of the steps.
        self.save_group: dist.ProcessGroup | None = None
        if store is not None:
            self.save_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def has_group(self) -> bool:
        """Whether there is a process group. Only then can the model be sharded."""
        return self._store is not None

    def scatter_parts(self, frame_of: Callable[[int], bytes]) -> None:
        """On rank 0, send every other rank the frame of its data rank (``Layout.data_rank``), each made once."""
        data_ranks = [self.layout.data_rank(rank) for rank in range(1, self.world_size)]
        frames = {data_rank: frame_of(data_rank) for data_rank in set(data_ranks)}
        self.scatter([b"", *(frames[data_rank] for data_rank in data_ranks)])

    def scatter(self, frames: Sequence[bytes]) -> bytes:
        """On rank 0, send every other rank its frame. Return rank 0's frame."""
        if self.world_size > 1:
            sizes = torch.tensor([len(frame) for frame in frames])
            dist.broadcast(sizes, 0, group=self.host_group)
            sent = [
                dist.isend(_as_tensor(frame), rank, group=self.host_group) for rank, frame in enumerate(frames) if rank
            ]
            for work in sent:
                if work is not None:
                    work.wait()
        return frames[0]

    def broadcast(self, frame: bytes) -> None:
        """On rank 0, send every rank the same frame."""
        self.scatter([frame] * self.world_size)

    def receive(self) -> bytes:
        """On a rank other than 0, wait for rank 0's next frame, up to ``experimental.distributed_timeout_s``, and
        return it.
        """
        sizes = torch.empty(self.world_size, dtype=torch.int64)
        dist.broadcast(sizes, 0, group=self.host_group)
        frame = torch.empty(int(sizes[self.rank]), dtype=torch.uint8)
        dist.recv(frame, 0, group=self.host_group)
        return frame.numpy().tobytes()

    def gather(self, frame: bytes) -> list[bytes]:
        """Send this rank's frame to rank 0. Return all frames in rank order on rank 0, and an empty list on other
        ranks.
        """
        if self.world_size == 1:
            return [frame]
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(frame)
        dist.all_reduce(sizes, group=self.host_group)
        if not self.is_leader:
            dist.send(_as_tensor(frame), 0, group=self.host_group)
            return []
        frames = [frame]
        for rank in range(1, self.world_size):
            received = torch.empty(int(sizes[rank]), dtype=torch.uint8)
            dist.recv(received, rank, group=self.host_group)
            frames.append(received.numpy().tobytes())
        return frames

    def gather_reports(self, frame: bytes) -> list[bytes]:
        """Send this rank's frame to rank 0. Return, on rank 0, those of the ranks that report (``Layout.is_reporter``),
        in the order of their data ranks, and an empty list on other ranks.
        """
        return [one for rank, one in enumerate(self.gather(frame)) if self.layout.is_reporter(rank)]

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a host tensor over all ranks, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self.host_group)
        return values

    def exchange_saved(self, error: str) -> list[str]:
        """Return what every rank passes here, in the thread that writes its part of a checkpoint: its error, if any."""
        if self.world_size == 1:
            return [error]
        errors = [""] * self.world_size
        dist.all_gather_object(errors, error, group=self.save_group)
        return errors

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Wrap work that all ranks do at the same time. An error on this rank is recorded for the other ranks.

        Raises:
            TrainingError: another rank failed first. The message is the cause on that rank.
        """
        before, self.command = self.command, what
        try:
            yield
        except Exception as error:
            if self.world_size == 1:
                raise
            self.is_broken = True
            self.end_watch()  # what it has written last is what the rank did until now
            cause = self.record_failure(f"rank {self.rank}, {what}: {type(error).__name__}: {error}")
            if cause.startswith(f"rank {self.rank},"):
                raise
            raise TrainingError(cause) from error
        except (KeyboardInterrupt, SystemExit):
            # The other ranks may be inside a collective, where they receive no command.
            self.is_broken = True
            self.record_failure(f"rank {self.rank}, {what}: its process was stopped")
            raise
        finally:
            self.command = before

    def record_failure(self, cause: str) -> str:
        """Record ``cause`` for the other ranks unless a cause is recorded already. Return the first cause."""
        return self._asked(lambda store: store.compare_set(_FAILURE_KEY, "", cause).decode(), cause)

    def first_failure(self) -> str:
        """Return the first recorded cause. Empty if there is none or the store can't be reached."""
        return self._read(_FAILURE_KEY)

    def pass_stop_on(self, signum: int) -> None:
        """Notify rank 0 that this rank got the signal ``signum``. Any thread may call it."""
        self._asked(lambda store: store.set(_STOP_KEY, str(signum)), None)

    def stop_signal(self) -> int:
        """Return the number of the signal that a rank reported with ``pass_stop_on``. 0 if there is none."""
        return int(self._read(_STOP_KEY) or 0)

    def _read(self, key: str) -> str:
        return self._asked(lambda store: store.get(key).decode() if store.check([key]) else "", "")

    def _asked(self, ask: Callable[[dist.Store], Any], otherwise: Any) -> Any:
        """Return what ``ask`` returns; ``otherwise`` if there are no other ranks, or the store can't be reached.

        A thread asks, because a store whose process is stopped never answers, whatever its timeout.
        """
        store = self._store
        if store is None or self.world_size == 1:
            return otherwise
        answers: list[Any] = []

        def wait() -> None:
            try:
                answers.append(ask(store))
            except RuntimeError as error:
                logger.warning("can't reach the ranks' store, probably because rank 0 or torchrun has ended: %s", error)

        thread = threading.Thread(target=wait, name="ranks-store", daemon=True)
        thread.start()
        thread.join(STORE_TIMEOUT_S)
        if thread.is_alive():
            logger.warning("the ranks' store has not answered for %g s, so rank 0 is stopped", STORE_TIMEOUT_S)
        return answers[0] if answers else otherwise

    def close(self) -> None:
        """Leave the process group when every rank does. After a failure, leaving could hang, so the group is left to
        the end of the process.

        Who leaves resets gloo's connections, and a rank that is still busy with the last collective would fail.
        """
        self.end_watch()
        if self._store is not None and not self.is_broken and dist.is_initialized():
            if self.world_size > 1:
                self._await_all(self._store)
            dist.destroy_process_group()
        self._store = None

    def _await_all(self, store: dist.Store) -> None:
        """Return when all ranks are here, on rank 0 when they have seen it: its process may hold the store."""
        limit = timedelta(seconds=LEAVE_TIMEOUT_S)
        ranks = range(self.world_size)
        try:
            store.set(f"done_{self.rank}", "")
            store.wait([f"done_{rank}" for rank in ranks], limit)
            store.set(f"seen_{self.rank}", "")
            if self.is_leader:
                store.wait([f"seen_{rank}" for rank in ranks], limit)
        except RuntimeError as error:
            logger.warning("rank %d leaves before another rank is done, or has failed: %s", self.rank, error)


def check_same_code(config: Config, ranks: Ranks) -> None:
    """Check that all ranks have the same source of the user's own loss. All ranks call this.

    Raises:
        ConfigError: they have not. Raised on rank 0.
    """
    name = config.loss.function
    if name is None or ranks.world_size == 1:
        return
    digests = [decode(f).fields["digest"] for f in ranks.gather(encode("code", {"digest": code_digests([name])[name]}))]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ConfigError(
                f"loss.function: expected the same source of {name} on all ranks, got SHA-256 {digests[0][:16]} on "
                f"rank 0 and {digest[:16]} on rank {rank}; copy the file to the machines of all ranks"
            )


def _as_tensor(frame: bytes) -> Tensor:
    # A copy, because torch warns about read-only memory, and gloo may use the buffer until the send is done.
    return torch.from_numpy(np.frombuffer(bytearray(frame), dtype=np.uint8))
