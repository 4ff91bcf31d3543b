"""Check that this machine has the disk space and the memory that a run needs, estimated from the model's files.

The estimates are lower bounds: a run that is refused could not have run.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.errors import ModelError, RunError
from async_rl.learner.memory_plan import num_sampling_copies
from async_rl.output import size_text
from async_rl.process.cgroup import available_memory, limit_text

_CHECKPOINT_BYTES = 12
"""Bytes per parameter in float32: the parameters and AdamW's two moments."""
_TRAINING_BYTES = 16
"""Bytes per parameter in float32: those of a checkpoint, and the gradient."""
_PROCESS_BYTES = {"queue": 60 << 20, "learner": 300 << 20, "generator": 220 << 20}
"""Memory that a process takes without a model and without groups, most of it Python's and torch's modules."""


def check_disk_space(config: Config) -> None:
    """Check that the disk of the run directory has room for one checkpoint.

    Raises:
        RunError: there is less room.
    """
    needed, free = checkpoint_bytes(config), free_bytes(Path(config.run.dir).absolute())
    if free < needed:
        raise RunError(
            f"run.dir: expected room for a checkpoint of {size_text(needed)} on the disk of {config.run.dir}, got "
            f"{size_text(free)} free; free disk space, or set run.dir to a directory on another disk"
        )


def checkpoint_bytes(config: Config) -> int:
    """Return the size of a checkpoint, with that of a critic. Return 0 if the models' sizes are unknown.

    A checkpoint with low-rank adapters counts as 0, too.
    """
    if config.lora.rank is not None:
        return 0
    return _CHECKPOINT_BYTES * (num_parameters(config) + _of_critic(config, num_parameters))


def _of_critic(config: Config, measure: Callable[[Config], int]) -> int:
    """Return ``measure`` of the critic's settings. 0 if it has no model of its own."""
    return measure(config.of_critic) if config.has_critic_model else 0


def num_parameters(config: Config) -> int:
    """Return the model's number of parameters, from the headers of its safetensors files.

    Return 0 if ``model.path`` is no directory on this machine.

    Raises:
        ModelError: a file is damaged.
    """
    from safetensors import safe_open

    directory = Path(config.model.path)
    if not directory.is_dir():
        return 0
    number = 0
    for path in _weights_files(directory):
        try:
            with safe_open(path, framework="numpy") as file:
                number += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except Exception as error:  # safetensors raises its own class for damaged files
            raise ModelError(f"model.path: can't read {path}: {error}; download or save the model again") from error
    return number


def _weights_files(directory: Path) -> list[Path]:
    """Return the files that transformers loads from a model's directory; some models have the weights twice."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            return [directory / name for name in names]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"model.path: can't read {index}: {error!r}; download or save the model again") from error
    return sorted(directory.glob("*.safetensors"))


def free_bytes(path: Path) -> int:
    """Return the free space, in bytes, on the disk on which ``path`` is or would be created."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_memory(config: Config) -> None:
    """Check that the machine has memory for the learner and the generators that ``launch`` starts on the CPU, within
    the limit of this process's cgroup.

    Nothing is checked on a machine with a GPU, because the processes then need its memory instead.

    Raises:
        RunError: there is less memory.
    """
    if has_gpu():
        return
    learner, generator = learner_bytes(config), generator_bytes(config)
    needed, available = learner + config.generator.count * generator, available_memory(with_swap=True)
    if available < needed:
        raise RunError(
            f"model.path: expected memory for at least {size_text(needed)} ({size_text(learner)} for the learner, "
            f"{size_text(generator)} for each of generator.count = {config.generator.count} generators), got "
            f"{size_text(available)} available of {limit_text()}; end other processes, lower generator.count, set "
            f"lora.rank or checkpoint.asynchronous = false, or take a smaller model or a machine with more memory"
        )


def memory_warning(config: Config) -> str:
    """Return a line if the memory has room for the models, but not for the rest of the processes; else empty text.

    With a GPU the models are not counted, because they need its memory instead.
    """
    models = 0 if has_gpu() else learner_bytes(config) + config.generator.count * generator_bytes(config)
    processes, available = process_bytes(config), available_memory(with_swap=True)
    if available >= models + processes:
        return ""
    return (
        f"memory: expected {size_text(models + processes)} for the processes that launch starts (about "
        f"{size_text(processes)} without their models), got {size_text(available)} available of {limit_text()}; the "
        f"kernel may kill some: raise the limit, end other processes, or lower generator.count"
    )


def learner_bytes(config: Config) -> int:
    """Return how much memory the learner needs at least on the CPU, on all its ranks together.

    That is the weights, gradients and AdamW's moments, one version of the weights for the generators, and the copy of
    weights and moments that is written as a checkpoint (``checkpoint.asynchronous``). With low-rank adapters only the
    weights (in ``lora.base_bits``) and the version are counted, and a version of the adapters alone not even that. With
    ``learner.generate`` each rank may need copies of the weights to sample with. A critic has weights, gradients and
    moments of its own.
    """
    number, size = num_parameters(config), _dtype_bytes(config)
    copied = checkpoint_bytes(config) if config.checkpoint.asynchronous else 0
    copied += num_sampling_copies(config, config.learner.nproc, "cpu") * config.learner.nproc * number * size
    version = 0 if config.lora.publishes_adapters else number * size
    return version + _trained_bytes(config) + _of_critic(config, _trained_bytes) + copied


def _trained_bytes(config: Config) -> int:
    """Return how much memory the model of ``model.path`` takes in the learner on the CPU while it is trained."""
    number = num_parameters(config)
    if config.lora.base_bits is not None:
        return number * config.lora.base_bits // 8
    return number * (_TRAINING_BYTES if config.lora.rank is None else _dtype_bytes(config))


def process_bytes(config: Config) -> int:
    """Return about how much memory the processes that ``launch`` starts take without their models.

    ``launch`` itself, or the doctor in its place, has its memory already when this is compared with what is available.
    """
    counts = {"queue": 1, "learner": config.learner.nproc, "generator": config.generator.count}
    return sum(number * _PROCESS_BYTES[role] for role, number in counts.items())


def generator_bytes(config: Config) -> int:
    """Return how much memory a generator needs at least on the CPU, for its weights and for the version that comes.

    A version of the adapters alone is not counted.
    """
    copies = 1 if config.lora.publishes_adapters else 2
    return copies * num_parameters(config) * _dtype_bytes(config) if has_model(config.generator.backend) else 0


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA or AMD GPU, from the driver's device file."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def _dtype_bytes(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4
