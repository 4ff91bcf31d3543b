"""Checks of this machine: versions, devices, disk and file systems, keys."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from async_rl.config.backends import BACKENDS
from async_rl.config.config import Config
from async_rl.doctor.rows import Row
from async_rl.errors import UserError
from async_rl.launch.preflight import check_devices, check_keys, check_writable
from async_rl.launch.status import size_text
from async_rl.process.package_versions import package_versions
from async_rl.queue.server.start import journal_directory
from async_rl.queue.storage.journal import file_system_of, is_network_file_system

_JOURNAL_BYTES = 1 << 30


def check_versions(config: Config) -> list[Row]:
    """Python and packages, against what async-rl was made for."""
    from packaging.requirements import Requirement

    wanted = {r.name: r for r in map(Requirement, requires("async-rl") or ()) if r.marker is None}
    found = package_versions()
    rows = [Row("python", "OK", found["python"])]
    for name in ("torch", "transformers", "pyzmq"):
        version, requirement = found.get(name), wanted.get(name)
        if version is None:
            rows.append(Row(name, "FAIL", "not installed", fix=f'pip install "{requirement or name}"'))
        elif requirement is not None and not requirement.specifier.contains(version, prereleases=True):
            rows.append(
                Row(name, "WARN", f"{version}, made for {requirement.specifier}", fix=f'pip install "{requirement}"')
            )
        else:
            rows.append(Row(name, "OK", version))
    engines = (name for name, capabilities in BACKENDS.items() if capabilities.package)
    return [*rows, *(_engine_row(config, name, found.get(BACKENDS[name].package)) for name in engines)]


def _engine_row(config: Config, name: str, version: str | None) -> Row:
    """Whether the package of the backend ``name`` is here in the version that the backend is made for."""
    needs, backend = BACKENDS[name], config.generator.backend
    is_chosen = backend == name
    if version is None:
        if is_chosen:
            state = "FAIL" if config.generator.count else "WARN"
            return Row(needs.package, state, f'not installed, generator.backend = "{name}"', fix=needs.install)
        return Row(needs.package, "OK", f'not installed, and not needed by generator.backend = "{backend}" here')
    if not version.startswith(f"{needs.package_version}."):
        state = "FAIL" if is_chosen else "WARN"
        text = f"{version}, the backend is made for {needs.package_version}"
        return Row(needs.package, state, text, fix=needs.install)
    return Row(needs.package, "OK", version)


def num_cuda_devices() -> int:
    """What torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_cuda(config: Config) -> list[Row]:
    """What torch finds, and whether the devices that the config names are among it."""
    try:
        check_devices(config, "learner", "generator")
    except UserError as error:
        fix = "leave the key out, or install a CUDA build of torch and look at nvidia-smi"
        return [Row("devices", "FAIL", str(error), fix=fix)]
    count = num_cuda_devices()
    if not count:
        return [Row("devices", "OK", "no CUDA device: learner and generators compute on the CPU")]
    import torch

    names: list[str] = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        names.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, {size_text(free)} free of {size_text(total)}")
    learner, generator = config.learner, config.generator
    rows = [Row("devices", "OK", "; ".join(names))]
    processes = learner.nproc + generator.count * generator.tensor_parallel_size
    if learner.devices is None and generator.devices is None and processes > 1:
        rows.append(
            Row(
                "devices",
                "WARN",
                f"{processes} processes of launch share them as they come",
                fix="set learner.devices and generator.devices",
            )
        )
    return rows


def check_disk(config: Config) -> list[Row]:
    """Whether what the run writes can be written, where, and for how long."""
    run_dir, journal = Path(config.run.dir).absolute(), journal_directory(config).absolute()
    check_writable(run_dir, "run.dir")
    rows = [_space_row(config, run_dir)]
    if not config.queue.journal:
        fix = "set queue.journal = true"
        return [*rows, Row("journal", "WARN", "off: a queue server that dies loses its groups", fix=fix)]
    check_writable(journal, "queue.journal_dir")
    kind, free = _file_system(journal), _free_bytes(journal)
    found = f"{journal} on {kind}, {size_text(free)} free"
    if is_network_file_system(kind):
        fix = "set queue.journal_dir to a directory on this machine's own disk"
        rows.append(Row("journal", "FAIL", f"{found}: locks don't hold on network file systems", fix=fix))
    elif free < _JOURNAL_BYTES:
        fix = "make room, or set queue.journal_dir elsewhere"
        rows.append(Row("journal", "WARN", found, fix=fix))
    else:
        rows.append(Row("journal", "OK", found))
    return rows


def _space_row(config: Config, run_dir: Path) -> Row:
    kind, free = _file_system(run_dir), _free_bytes(run_dir)
    checkpoint = 12 * _num_parameters(config)
    needed = (config.checkpoint.keep_last + 1) * checkpoint
    found = f"{run_dir} on {kind}, {size_text(free)} free"
    if checkpoint:
        found += f", checkpoints of {size_text(checkpoint)}"
    fix = "make room, choose another run.dir, or lower checkpoint.keep_last"
    if free < checkpoint:
        return Row("run.dir", "FAIL", f"{found}: not one fits", fix=fix)
    if free < needed:
        return Row(
            "run.dir", "WARN", f"{found}: checkpoint.keep_last = {config.checkpoint.keep_last} won't fit", fix=fix
        )
    return Row("run.dir", "OK", found)


def _num_parameters(config: Config) -> int:
    """From the headers of the model's safetensors; 0 if they are not here."""
    from safetensors import safe_open

    directory = Path(config.model.path)
    total = 0
    for path in directory.glob("*.safetensors") if directory.is_dir() else ():
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


def _file_system(path: Path) -> str:
    mountinfo = Path("/proc/self/mountinfo")
    if not mountinfo.exists():
        return "an unknown file system"
    text = mountinfo.read_text(encoding="utf-8", errors="surrogateescape")
    return file_system_of(_existing(path).resolve(), text)


def check_key_files(config: Config) -> list[Row]:
    """The keys of ``queue.keys``."""
    if config.queue.keys is None:
        return [Row("keys", "OK", "none: nothing is encrypted, so loopback or a trusted network only")]
    try:
        check_keys(config, is_server=True)
    except UserError as error:
        return [Row("keys", "FAIL", str(error), fix=f"async-rl keys new {config.queue.keys}")]
    return [Row("keys", "OK", f"{config.queue.keys}: the server's and the learner's can be read, by you alone")]


def threads_row(environment: Sequence[str] = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")) -> Row:
    """Cores, and what the environment says of them."""
    said = ", ".join(f"{name}={os.environ[name]}" for name in environment if name in os.environ)
    return Row("cores", "OK", f"{len(os.sched_getaffinity(0))}" + (f"; {said}" if said else ""))
