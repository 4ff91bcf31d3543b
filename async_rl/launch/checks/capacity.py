"""Check that this machine has the disk space and the host's memory that a run needs, by the model's files.

The estimates are lower bounds: a run that is refused could not have run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.generator import AUTO, FALLBACK, has_model
from async_rl.data.chat import model_directory
from async_rl.data.model_config import read_model_config
from async_rl.errors import ModelError
from async_rl.generator.vllm.adapter import workers_receive
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.learner_memory import shape_of
from async_rl.launch.checks.placement import VISIBLE, visible_devices
from async_rl.learner.cards import Machines
from async_rl.learner.memory_plan import UnknownShapeError, compute_bytes, num_sampling_copies, state_bytes
from async_rl.output import size_text
from async_rl.process.cgroup import available_memory, limit_text
from async_rl.queue.server.start import journal_directory
from async_rl.queue.storage.journal import file_system_at, refuse_network_file_system
from async_rl.run.directory import check_writable

_LITTLE_BYTES = 1 << 30
"""Less free space than this is little."""
_PROCESS_BYTES = {"queue": 60 << 20, "learner": 300 << 20, "generator": 220 << 20}
"""Memory that a process takes without a model and without groups, most of it Python's and torch's modules."""


def check_disk(config: Config) -> Iterator[Finding]:
    """Check that the disk of the run directory has room for the checkpoints that stay, and the queue's journal is on a
    disk of this machine, because file locks are unreliable on network file systems.

    Raises:
        ConfigError: a directory can't be written, or the journal would be on a network file system.
    """
    yield _checkpoints_room(config, Path(config.run.dir).absolute())
    if not config.experimental.journal:
        fix = "set experimental.journal = true"
        yield Finding("journal", "WARN", "switched off: if the queue server dies, its groups are lost", fix=fix)
        return
    journal = journal_directory(config).absolute()
    check_writable(journal, "queue.journal_dir")
    refuse_network_file_system(journal)
    yield room_on_disk("journal", journal, fix="free disk space, or set queue.journal_dir to another disk")


def room_on_disk(check: str, directory: Path, *, fix: str) -> Finding:
    """Return how much is free on the disk of ``directory``; a warning with ``fix`` if that is little."""
    free = free_bytes(directory)
    text = f"{directory} on {file_system_at(directory) or 'a disk'}, {size_text(free)} free"
    return Finding(check, "WARN", text, fix) if free < _LITTLE_BYTES else Finding(check, "OK", text)


def _checkpoints_room(config: Config, run_dir: Path) -> Finding:
    free, checkpoint, every = free_bytes(run_dir), checkpoint_bytes(config), config.checkpoint.keep_every
    num_kept = config.checkpoint.keep_last + (config.learner.steps // every if every else 0)
    text = f"{run_dir} on {file_system_at(run_dir) or 'a disk'}, {size_text(free)} free"
    if checkpoint:
        text += f", checkpoints of {size_text(checkpoint)}"
    fix = "free disk space, choose another run.dir, or keep fewer checkpoints (checkpoint.keep_last, keep_every)"
    if free < checkpoint:
        return Finding("run.dir", "FAIL", f"{text}: no room for one checkpoint", fix=fix)
    if free < (num_kept + 1) * checkpoint:
        kept = f"checkpoint.keep_last = {config.checkpoint.keep_last}"
        if every:
            kept += f" and keep_every = {every}, {num_kept} checkpoints"
        return Finding("run.dir", "WARN", f"{text}: no room for {kept}", fix=fix)
    return Finding("run.dir", "OK", text)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def checkpoint_bytes(config: Config) -> int:
    """Return the size of a checkpoint, with a critic and a reference that moves. 0 if the models' sizes are unknown.

    A checkpoint with low-rank adapters counts as 0, too.
    """
    if config.lora.rank is not None:
        return 0
    moving = config.has_reference_model and config.loss.reference_every > 0
    return _float32_bytes(config, 1) + moving * 4 * num_parameters(config.model.path)


def _float32_bytes(config: Config, num_copies: int) -> int:
    """Return the bytes of so many copies of all parameters in float32, and of the optimizer's state, with a critic's.

    Of Muon the state counts that it has at least.
    """
    each = 4 * num_copies + state_bytes(config.optimizer.name)
    return int(each * (num_parameters(config.model.path) + _of_critic(config, lambda c: num_parameters(c.model.path))))


def _of_critic(config: Config, measure: Callable[[Config], int]) -> int:
    """Return ``measure`` of the critic's settings. 0 if there is none."""
    return measure(config.of_critic) if config.loss.has_critic else 0


def find_size(config: Config) -> Iterator[Finding]:
    """Name the size of the model at ``model.path``, of which no weights need be here.

    Raises:
        ModelError: as ``num_parameters``; or its ``config.json`` can't be read.
    """
    read_model_config(model_directory(config.model.path))
    if number := num_parameters(config.model.path):
        yield Finding("model", "OK", f"{number / 1e9:.3g} billion weights")
    else:
        yield Finding("model", "WARN", "its config.json does not say its size, so nothing is predicted")


def num_parameters(path: str) -> int:
    """Return a model's number of parameters, from the headers of its safetensors files. Of a model of the hub whose
    weights are not here yet: from its config. 0 if they do not say it.

    Raises:
        ModelError: there is no model at ``path`` (see ``data.chat.model_directory``), or a file is damaged.
    """
    from safetensors import safe_open

    directory, number = model_directory(path), 0
    files = _weights_files(directory)
    if not files or not all(file.exists() for file in files):
        try:
            return shape_of(directory).num_parameters
        except UnknownShapeError:
            return 0
    for file_path in files:
        try:
            with safe_open(file_path, framework="numpy") as file:
                number += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except Exception as error:  # safetensors raises its own class for damaged files
            raise ModelError(
                f"model.path: can't read {file_path}: {error}; download or save the model again"
            ) from error
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
    return shutil.disk_usage(_existing(path)).free


def host_bytes(config: Config, device: str) -> tuple[int, int, int, int]:
    """Return the bytes of the host's memory that ``launch`` needs at least with a ``device``, "cpu" or "cuda": for the
    learner, all generators, all scorers; and for all processes without models and groups.
    """
    generators = config.generator.count * generator_bytes(config, device)
    scorers = scorer_bytes(config) if device == "cpu" else 0
    return learner_bytes(config, device), generators, scorers, process_bytes(config)


def check_memory(config: Config, machines: Machines | None = None) -> Iterator[Finding]:
    """Check that the host has memory for the processes that ``launch`` starts, within the limit of this process's
    cgroup; or that the hosts of ``machines`` have. Without room for what they take besides models it is a warning.
    """
    device = "cuda" if machines or has_gpu() else "cpu"
    learner, generators, scorers, processes = host_bytes(config, device)
    models = learner + generators + scorers
    if machines:
        available = int(machines.num_nodes * machines.host_bytes)
        where = f"{size_text(available)} of {machines.name}"
    else:
        available = _available()
        where = f"{size_text(available)} available of {limit_text()}"
    if available < models:
        parts = f"{size_text(learner)} for the learner, {size_text(generator_bytes(config, device))} for each of "
        parts += f"generator.count = {config.generator.count} generators"
        parts += f", {size_text(scorers)} for scorers" if scorers else ""
        offload = "" if config.learner.offload == "none" else ', learner.offload = "none"'
        yield Finding(
            "memory", "FAIL", f"expected memory for at least {size_text(models)} ({parts}), got {where}",
            fix=f"end other processes, lower generator.count, set lora.rank{offload} or checkpoint.asynchronous = "
            f"false, or take a smaller model or a machine with more memory",
        )  # fmt: skip
    elif available < models + processes:
        text = f"expected {size_text(models + processes)} for the processes that launch starts (about "
        text += f"{size_text(processes)} without their models), got {where}"
        fix = "the kernel may kill some: raise the limit, end other processes, or lower generator.count"
        yield Finding("memory", "WARN", text, fix=fix)
    else:
        least = f"learner and generators take at least {size_text(models)}"
        text = f"{where}; {least if models else 'the model is small or its size is unknown'}, and all "
        yield Finding("memory", "OK", f"{text}processes about {size_text(processes)} without their models")


def _available() -> int:
    """Return the memory that is available. With a GPU most of it is pinned, so that it can't be swapped out."""
    return available_memory(with_swap=not has_gpu())


def learner_bytes(config: Config, device: str = "cpu") -> int:
    """Return how much of the host's memory the learner needs at least, on all its ranks together.

    On either ``device``, "cpu" or "cuda", that is the versions of the weights that are staged for the generators, and
    the copy of weights and the optimizer's state that is written as a checkpoint (``checkpoint.asynchronous``). On the
    CPU, or with ``learner.offload = "all"``, also weights, gradients and state; with low-rank adapters only the weights
    (in ``lora.base_bits``), and a version of the adapters alone is not counted. A critic has its own. With
    ``learner.generate`` each rank may need copies of the weights to sample with. A reference model that is offloaded
    is counted, too.
    """
    version = 0 if config.lora.publishes_adapters else _version_bytes(config, device)
    needed = num_staged(config, version) * version + (checkpoint_bytes(config) if config.checkpoint.asynchronous else 0)
    copies = num_sampling_copies(config, config.learner.nproc, "cpu") if device == "cpu" else 0
    if config.learner_uses_vllm and device == "cuda" and version:
        copies = 2  # what arrived, and what vLLM loads it from
    needed += copies * config.learner.nproc * _version_bytes(config, device)
    if device == "cuda" and config.learner.offload != "none" and config.has_reference_model:
        needed += 4 * num_parameters(config.model.path)
    if device == "cuda" and config.learner.offload != "all":
        return needed
    return needed + _trained_bytes(config, device)


def num_staged(config: Config, version: int) -> int:
    """Return how many versions of so many bytes ``weights.staging.Staging`` needs memory for in every run."""
    number = 3 if config.weights.transport == "tcp" or config.weights.port is not None else 2
    allowed = config.weights.staging_bytes
    return number if allowed is None else min(number, max(1, allowed // max(1, version)))


def _trained_bytes(config: Config, device: str) -> int:
    """Return how much memory weights, gradients and the optimizer's state take, of a critic, too."""
    if config.lora.rank is None:
        return _float32_bytes(config, 2)
    size = compute_bytes(config, device) if config.lora.base_bits is None else config.lora.base_bits / 8
    number = num_parameters(config.model.path) + _of_critic(config, lambda c: num_parameters(c.model.path))
    return int(size * number)


def process_bytes(config: Config) -> int:
    """Return about how much memory the processes that ``launch`` starts take without their models.

    ``launch`` itself, or the doctor in its place, has its memory already when this is compared with what is available.
    """
    launched = sum(scorer.launch for scorer in config.scorer.values())
    counts = {"queue": 1, "learner": config.learner.nproc, "generator": config.generator.count + launched}
    return sum(number * _PROCESS_BYTES[role] for role, number in counts.items())


def generator_bytes(config: Config, device: str = "cpu") -> int:
    """Return how much of the host's memory a generator needs at least, for the versions in use and that comes.

    On the CPU the engine computes with the first of them. vLLM on a GPU either receives them there; or here, and loads
    them from a third copy. A version of the adapters alone is not counted, but the weights below them on the CPU.
    """
    if not has_model(config.generator.backend):
        return 0
    if config.lora.publishes_adapters:
        return _version_bytes(config, device) if device == "cpu" else 0
    copies = 2
    if device == "cuda" and backend_here(config) == "vllm":
        copies = 0 if workers_receive(config, device=device) else 3
    return copies * _version_bytes(config, device)


def backend_here(config: Config) -> str:
    """Return the backend of generators on this machine, which has a GPU."""
    if config.generator.backend != AUTO:
        return config.generator.backend
    return "vllm" if find_spec("vllm") is not None else FALLBACK


def scorer_bytes(config: Config) -> int:
    """Return how much memory the models of the scorers that ``launch`` starts take on the CPU."""
    return sum(
        num_parameters(scorer.model) * (2 if scorer.dtype in ("bfloat16", "float16") else 4)
        for scorer in config.scorer.values() if scorer.launch
    )  # fmt: skip


def _version_bytes(config: Config, device: str) -> int:
    return num_parameters(config.model.path) * compute_bytes(config, device)


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA or AMD GPU, from the driver's device file, that is not hidden from
    this process.
    """
    is_hidden = VISIBLE in os.environ and not visible_devices(os.environ)
    return not is_hidden and (Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists())
