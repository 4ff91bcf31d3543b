"""Deal the GPUs of this machine to the processes that ``launch`` starts: learner ranks, generators, then scorers.

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
        scorers: the device of each scorer that ``launch`` starts. Empty without GPUs.
    """

    learner: tuple[str, ...] | None = None
    generators: tuple[tuple[str, ...], ...] | None = None
    scorers: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The placement as a line of text; empty if no process has a device of its own."""
        named = [(f"learner-{rank}", device) for rank, device in enumerate(self.learner or ())]
        named += [(f"generator-{index}", "+".join(own)) for index, own in enumerate(self.generators or ()) if own]
        named += [(f"scorer-{index}", device) for index, device in enumerate(self.scorers)]
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
    scorers = _scorers(config, visible, {*(ranks or ()), *(samplers or ())}, is_limited=is_limited)
    return Placement(
        None if ranks is None else tuple(ranks),
        None if samplers is None else tuple(
            tuple(samplers[index * size : (index + 1) * size]) for index in range(generator.count)
        ),
        scorers,
    )  # fmt: skip


def _scorers(config: Config, visible: Sequence[str], taken: set[str], *, is_limited: bool) -> tuple[str, ...]:
    """Return the device of each scorer that ``launch`` starts: the one that it names, or one that nobody has. If there
    is one GPU, it is shared. Empty without GPUs.

    Raises:
        ConfigError: a device that the config names is not visible, or none is left.
    """
    if not visible:
        return ()
    chosen_devices: list[str] = []
    for name, scorer in config.scorer.items():
        if not scorer.launch:
            continue
        own = None if scorer.device is None else (scorer.device,)
        chosen = _chosen(f"scorer.{name}.device", own, visible, is_limited=is_limited) or [
            device for device in visible if len(visible) == 1 or device not in (*taken, *chosen_devices)
        ]
        if not chosen:
            raise ConfigError(
                f"scorer.{name}: expected a GPU that no other process has, got {len(visible)} GPUs, all taken; set "
                f"scorer.{name}.device to share one"
            )
        chosen_devices.append(chosen[0])
    return tuple(chosen_devices)


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
                f"{key}: expected indices below {len(visible)}, the number of devices in {','.join(visible)!r}, "
                f"got {device}; correct {key}, or unset {VISIBLE}"
            )
    return [visible[device] for device in devices]
