"""Deal the GPUs of this machine to the processes that ``launch`` starts: learner ranks first, then generators.

The keys ``learner.devices`` and ``generator.devices`` choose devices; what they leave open is dealt in order. Devices
are the entries of ``CUDA_VISIBLE_DEVICES``: indices, or UUIDs of GPUs and of their MIG parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of each process, as entries of ``CUDA_VISIBLE_DEVICES``. None: the process may use every device.

    Attributes:
        learner: one device for each rank.
        generators: the devices of each generator.
    """

    learner: tuple[str, ...] | None = None
    generators: tuple[tuple[str, ...], ...] | None = None

    @property
    def line(self) -> str:
        """The placement as a line of text; empty if no process has a device of its own."""
        named = [(f"learner-{rank}", device) for rank, device in enumerate(self.learner or ())]
        named += [(f"generator-{index}", "+".join(own)) for index, own in enumerate(self.generators or ()) if own]
        return ", ".join(f"{name} on {devices}" for name, devices in named)


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that processes with this environment can use: those of the variable, or all of the driver."""
    value = environment.get(VISIBLE)
    if value is not None:
        return [entry.strip() for entry in value.split(",") if entry.strip() not in ("", "-1")]
    return [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def place(config: Config, visible: Sequence[str], *, is_limited: bool) -> Placement:
    """Return the devices of every process of ``config``.

    If there is one GPU, a learner of one rank shares it with the generators. Otherwise every rank, and every part of a
    generator, gets a device of its own.

    Args:
        visible: what ``visible_devices`` returns.
        is_limited: whether ``CUDA_VISIBLE_DEVICES`` is set, so that there are no other devices than ``visible``.

    Raises:
        ConfigError: a device that the config names is not visible, or there are too few devices.
    """
    learner, generator = config.learner, config.generator
    size = generator.tensor_parallel_size
    num_sampling = generator.count * size if has_model(generator.backend) else 0
    ranks = _chosen("learner.devices", learner.devices, visible, is_limited=is_limited)
    samplers = _chosen("generator.devices", generator.devices, visible, is_limited=is_limited)
    if visible:
        if len(visible) == learner.nproc == size == 1:
            ranks, samplers = ranks or list(visible), samplers or list(visible) * num_sampling
        if ranks is None:
            free = [device for device in visible if device not in (samplers or ())]
            ranks = _first(free, learner.nproc, config, len(visible))
        if samplers is None:
            free = [device for device in visible if device not in ranks]
            samplers = _first(free, num_sampling, config, len(visible))
    return Placement(
        None if ranks is None else tuple(ranks),
        None if samplers is None else tuple(
            tuple(samplers[index * size : (index + 1) * size]) for index in range(generator.count)
        ),
    )  # fmt: skip


def _first(free: Sequence[str], number: int, config: Config, num_visible: int) -> list[str]:
    if len(free) < number:
        generator = config.generator
        raise ConfigError(
            f"expected a GPU for each of learner.nproc = {config.learner.nproc} ranks and generator.count x "
            f"tensor_parallel_size = {generator.count} x {generator.tensor_parallel_size} parts of generators, got "
            f"{num_visible}; lower these, set learner.devices and generator.devices to share GPUs, or hide the GPUs to "
            f"run on the CPU ({VISIBLE}=)"
        )
    return list(free[:number])


def _chosen(key: str, devices: Sequence[int] | None, visible: Sequence[str], *, is_limited: bool) -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` for ``devices``, the value of ``key``, which are indices into
    ``visible``; None if ``devices`` is None.
    """
    if devices is None:
        return None
    if not is_limited:
        return [str(device) for device in devices]
    for device in devices:
        if device not in range(len(visible)):
            raise ConfigError(
                f"{key}: expected indices below {len(visible)}, the number of devices in "
                f"{VISIBLE}={','.join(visible)!r}, got {device}; correct {key}, or unset {VISIBLE}"
            )
    return [visible[device] for device in devices]
