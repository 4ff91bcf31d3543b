"""Checks of this machine: versions, devices, disk and file systems, keys."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import requires
from pathlib import Path

from async_rl.config.backends import BACKENDS
from async_rl.config.config import Config
from async_rl.doctor.check import Finding
from async_rl.errors import UserError
from async_rl.launch.preflight import check_devices, check_keys
from async_rl.launch.status import size_text
from async_rl.process.package_versions import package_versions
from async_rl.queue.server.start import journal_directory
from async_rl.queue.storage.journal import file_system_of, is_network_file_system
from async_rl.run.directory import check_writable

_JOURNAL_BYTES = 1 << 30


def check_versions(config: Config) -> list[Finding]:
    """Compare Python and the packages with the versions that async-rl requires."""
    from packaging.requirements import Requirement

    wanted = {r.name: r for r in map(Requirement, requires("async-rl") or ()) if r.marker is None}
    found = package_versions()
    rows = [Finding("python", "OK", found["python"])]
    for name in ("torch", "transformers", "pyzmq"):
        version, requirement = found.get(name), wanted.get(name)
        if version is None:
            rows.append(Finding(name, "FAIL", "not installed", fix=f'pip install "{requirement or name}"'))
        elif requirement is not None and not requirement.specifier.contains(version, prereleases=True):
            rows.append(
                Finding(
                    name,
                    "WARN",
                    f"{version}, async-rl requires {requirement.specifier}",
                    fix=f'pip install "{requirement}"',
                )
            )
        else:
            rows.append(Finding(name, "OK", version))
    engines = (name for name, capabilities in BACKENDS.items() if capabilities.package)
    return [*rows, *(_engine_row(config, name, found.get(BACKENDS[name].package)) for name in engines)]


def _engine_row(config: Config, name: str, version: str | None) -> Finding:
    """Whether the package of the backend ``name`` is here in the version that the backend requires."""
    needs, backend = BACKENDS[name], config.generator.backend
    is_chosen = backend == name
    if version is None:
        if is_chosen:
            state = "FAIL" if config.generator.count else "WARN"
            return Finding(needs.package, state, f'not installed, generator.backend = "{name}"', fix=needs.install)
        return Finding(needs.package, "OK", f'not installed, and not needed by generator.backend = "{backend}" here')
    if not version.startswith(f"{needs.package_version}."):
        state = "FAIL" if is_chosen else "WARN"
        text = f"{version}, the backend requires {needs.package_version}"
        return Finding(needs.package, state, text, fix=needs.install)
    return Finding(needs.package, "OK", version)


def num_cuda_devices() -> int:
    """Number of CUDA devices that torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_cuda(config: Config) -> list[Finding]:
    """Whether the devices that the config names are among those that torch finds."""
    try:
        check_devices(config, "learner", "generator")
    except UserError as error:
        fix = "leave the key out, or install a CUDA build of torch and check nvidia-smi"
        return [Finding("devices", "FAIL", str(error), fix=fix)]
    count = num_cuda_devices()
    if not count:
        return [Finding("devices", "OK", "no CUDA device: learner and generators compute on the CPU")]
    import torch

    names: list[str] = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        names.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, {size_text(free)} free of {size_text(total)}")
    learner, generator = config.learner, config.generator
    rows = [Finding("devices", "OK", "; ".join(names))]
    processes = learner.nproc + generator.count * generator.tensor_parallel_size
    if learner.devices is None and generator.devices is None and processes > 1:
        rows.append(
            Finding(
                "devices",
                "WARN",
                f"{processes} processes of launch share them without assignment",
                fix="set learner.devices and generator.devices",
            )
        )
    return rows


def check_disk(config: Config) -> list[Finding]:
    """Whether the run directory and the journal can be written, and whether there is room."""
    run_dir, journal = Path(config.run.dir).absolute(), journal_directory(config).absolute()
    check_writable(run_dir, "run.dir")
    rows = [_space_row(config, run_dir)]
    if not config.experimental.journal:
        fix = "set experimental.journal = true"
        return [*rows, Finding("journal", "WARN", "off: a queue server that dies loses its groups", fix=fix)]
    check_writable(journal, "queue.journal_dir")
    kind, free = _file_system(journal), _free_bytes(journal)
    found = f"{journal} on {kind}, {size_text(free)} free"
    if is_network_file_system(kind):
        fix = "set queue.journal_dir to a directory on this machine's own disk"
        rows.append(Finding("journal", "FAIL", f"{found}: locks don't hold on network file systems", fix=fix))
    elif free < _JOURNAL_BYTES:
        fix = "free disk space, or set queue.journal_dir to another disk"
        rows.append(Finding("journal", "WARN", found, fix=fix))
    else:
        rows.append(Finding("journal", "OK", found))
    return rows


def _space_row(config: Config, run_dir: Path) -> Finding:
    kind, free = _file_system(run_dir), _free_bytes(run_dir)
    checkpoint = 12 * _num_parameters(config)
    needed = (config.checkpoint.keep_last + 1) * checkpoint
    found = f"{run_dir} on {kind}, {size_text(free)} free"
    if checkpoint:
        found += f", checkpoints of {size_text(checkpoint)}"
    fix = "free disk space, choose another run.dir, or lower checkpoint.keep_last"
    if free < checkpoint:
        return Finding("run.dir", "FAIL", f"{found}: no room for one", fix=fix)
    if free < needed:
        return Finding(
            "run.dir", "WARN", f"{found}: no room for checkpoint.keep_last = {config.checkpoint.keep_last}", fix=fix
        )
    return Finding("run.dir", "OK", found)


def _num_parameters(config: Config) -> int:
    """Count from the headers of the model's safetensors files; 0 if they are not on this machine."""
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


def check_key_files(config: Config) -> list[Finding]:
    """Whether the key files of ``queue.keys`` can be read, by this user alone."""
    if config.queue.keys is None:
        return [
            Finding(
                "keys", "OK", "queue.keys is unset: nothing is encrypted, so use loopback or a trusted network only"
            )
        ]
    try:
        check_keys(config, is_server=True)
    except UserError as error:
        return [Finding("keys", "FAIL", str(error), fix=f"async-rl keys new {config.queue.keys}")]
    return [Finding("keys", "OK", f"{config.queue.keys}: the server's and the learner's key can be read, by you alone")]


def check_cores() -> list[Finding]:
    """Cores that this process may use, and the environment variables that limit threads and devices."""
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    limits = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    return [Finding("cores", "OK", f"{len(os.sched_getaffinity(0))}" + (f"; {limits}" if limits else ""))]
