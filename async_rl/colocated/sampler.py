"""Run a generator in a rank of the learner: in a thread, on the rank's own device, with the policy's own weights.

The thread does what the command ``async-rl generator`` does: it joins the queue, builds an engine, and runs the
generator's loop. Two things differ. ``SharedDevice`` lets it compute only while the rank does not. And weights come
from the rank's engine instead of the network.

The built-in engine computes in this process. Where the rank holds the whole policy in the dtype that it samples with,
its weights are the policy's own memory, and no copy. Between two samplings the policy changes in place. This is safe
because a decode step and the activation of the version that it names happen in one turn on the device.

vLLM's engine is processes of its own, with memory of its own. It gets each version through the host's memory, and
sleeps while the rank computes: then a GPU's memory is the rank's, but for that of CUDA's context and graphs.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.colocated.device import SharedDevice
from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.generator.backend import Backend, SleepingBackend
from async_rl.generator.loop import Worker
from async_rl.generator.start.backends import build_backend
from async_rl.generator.start.worker import build_worker, scratch_directory, write_files
from async_rl.learner.sampling import SamplingOrder, sampler_id
from async_rl.net.address import refuse_open_connect
from async_rl.net.keys import SECRET_VARIABLE, client_keys_of
from async_rl.queue.client.clients import GeneratorQueue
from async_rl.queue.messages import Announcement

if TYPE_CHECKING:
    from torch import Tensor, device

logger = logging.getLogger(__name__)

_JOIN_S = 300.0
"""Seconds. The learner has attached already, so only a queue server that is restarted makes it wait."""
_END_S = 10.0
"""Seconds in which the thread notices that it must end: the longest wait of its loop, and the end of its engine."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""How the environment variables begin that make a process a rank of the learner."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldWeights:
    """A version of the policy that this rank holds. It is what the loop gets from ``HeldByRank.poll``."""

    lineage: str
    version: int
    digest: str
    tensors: Mapping[str, Tensor]


class HeldByRank:
    """Gives the generator's loop the version that the rank holds. It implements ``generator.loop.WeightsReceiver``."""

    error: str | None = None

    def __init__(self) -> None:
        self._held: HeldWeights | None = None

    def hold(self, held: HeldWeights) -> None:
        """Set the version that ``poll`` returns. The rank's device must be closed to sampling."""
        self._held = held

    def follow(self, announcement: Announcement) -> None:
        """The rank's engine hands every version over, whether it is announced yet or not."""

    def poll(self) -> HeldWeights | None:
        return self._held

    def activated(self, staged: HeldWeights) -> None:
        """The memory is the rank's own."""


class LearnerSampler:
    """A generator on one rank of the learner. It implements ``learner.sampling.RankSampler``."""

    def __init__(
        self, config: Config, *, rank: int, device: device, report: Callable[[str], object], insecure: bool = False
    ) -> None:
        """Prepare to sample; the first ``resume`` starts the thread.

        Args:
            config: the run's config.
            rank: the number of this rank.
            device: the rank's device.
            report: called with the text of an error that ends sampling.
            insecure: connect to a queue server on another machine without keys.
        """
        self._config, self._rank, self._torch_device = _engine_config(config, device), rank, device
        self._report, self._insecure = report, insecure
        # Taken out of the environment, which code rewards and environments inherit.
        self._secret = os.environ.pop(SECRET_VARIABLE, None)
        self._device = SharedDevice(config.learner.generate_groups)
        self._weights = HeldByRank()
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closing = False

    @property
    def busy_s(self) -> float:
        return self._device.busy_s

    def resume(self, order: SamplingOrder, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        if weights is not None:
            # vLLM's processes read them from the host's memory, and the device's is short.
            held = {name: tensor.cpu() if self._uses_vllm else tensor for name, tensor in weights}
            self._weights.hold(HeldWeights(order.lineage, order.version, order.digest, held))
        self.check()  # other ranks take part in reading the weights, so this comes after it
        if self._uses_vllm and self._torch_device.type == "cuda":
            import torch

            torch.cuda.empty_cache()  # what training has freed stays with torch otherwise
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(order,), name="sampling", daemon=True)
            self._thread.start()
        self._device.open()

    def pause(self) -> None:
        self._device.close()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._is_closing = True
        if self._worker is not None:
            self._worker.stop()
        # An engine keeps the device until it has ended, which its building and the ends of environments may hold up.
        self._device.close(_END_S)
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self, order: SamplingOrder) -> None:
        try:
            if self._torch_device.type == "cuda":
                import torch

                torch.cuda.set_device(self._torch_device)  # each thread has a current device of its own
            self._sample(order)
        except BaseException as error:
            if not self._is_closing:
                logger.exception("sampling on rank %d of the learner has failed", self._rank)
                self._report(f"rank {self._rank}, sampling: {type(error).__name__}: {error}")
                self._error = error
        finally:
            self._device.give_up()

    def _sample(self, order: SamplingOrder) -> None:
        """Join the queue and sample until ``close`` or the end of the run."""
        config, keys = self._config, client_keys_of(self._config.queue.keys)
        refuse_open_connect(order.address, insecure=self._insecure, has_keys=keys is not None)
        own_id = sampler_id(self._rank, order.lineage)
        with ExitStack() as stack:
            queue = stack.enter_context(closing(GeneratorQueue(order.address, own_id, keys, secret=self._secret)))
            welcome = queue.hello(_JOIN_S, config.generator.backend, socket.gethostname())
            directory = stack.enter_context(scratch_directory())
            write_files(directory, welcome.files)
            backend = self._build(directory)
            if backend is None:
                return
            stack.callback(backend.close)
            worker = build_worker(
                config, queue=queue, receiver=self._weights, backend=backend, generator_id=own_id,
                wait_s=math.inf,  # the learner's own client decides how long the queue may be silent
                directory=directory, code_digests=None, keys=keys, insecure=self._insecure, stack=stack,
                device=self._device,
            )  # fmt: skip
            self._worker = worker
            stack.callback(queue.leave)  # first of all: engine and environments may take long to end
            logger.info("the learner samples while it waits, as generator %s", own_id)
            if not self._is_closing:
                worker.run()

    @property
    def _uses_vllm(self) -> bool:
        return self._config.generator.backend == "vllm"

    def _build(self, directory: Path) -> Backend | None:
        """Build the engine in a turn on the device: it measures how much memory is free. None if it must end before.

        An engine that computes between its steps, too, keeps the device from then on.
        """
        while not self._is_closing:
            with self._device.turn() as is_free:
                if not is_free:
                    continue
                with engine_environment(self._torch_device):
                    backend = build_backend(self._config, directory, can_sleep=True)
                if isinstance(backend, SleepingBackend):
                    self._device.keep(backend.sleep)
                return backend
        return None


@contextmanager
def engine_environment(device: device) -> Iterator[None]:
    """For the ``with`` block, have new processes of an engine see only ``device``, and be no ranks of the learner."""
    visible = os.environ.get(_VISIBLE)
    of_ranks = _take_variables_of_ranks()
    if device.type == "cuda":
        os.environ[_VISIBLE] = visible.split(",")[device.index] if visible else str(device.index)
    try:
        yield
    finally:
        _take_variables_of_ranks()  # vLLM's CPU build sets one for its own processes
        os.environ.update(of_ranks)
        if visible is not None:
            os.environ[_VISIBLE] = visible
        else:
            os.environ.pop(_VISIBLE, None)


def _take_variables_of_ranks() -> dict[str, str]:
    """Remove the environment variables that make a process a rank of the learner, and return them."""
    return {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_OF_RANKS)}


def _engine_config(config: Config, device: device) -> Config:
    """Return the config for the engine on ``device``, which has the learner's threads."""
    changed: dict[str, Any] = {"num_threads": None, "tensor_parallel_size": 1, "count": 1, "devices": None}
    if has_model(config.generator.backend):
        changed["backend"] = config.learner.generate_backend
    if changed.get("backend") == "vllm":
        changed["double_buffer"] = False  # versions come through the host's memory
    elif device.index is not None:
        changed["devices"] = (device.index,)
    return config.model_copy(update={"generator": config.generator.model_copy(update=changed)})
