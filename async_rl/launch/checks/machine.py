"""Checks of this machine: package versions, CPU cores, CUDA devices, inference engines, compiler, and a broadcast
between two ranks."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.engine_arguments import shown
from async_rl.config.generator import BACKENDS, FALLBACK
from async_rl.errors import ConfigError, WeightsError
from async_rl.generator.start.worker import scratch_directory
from async_rl.generator.vllm.adapter import check_names, known_arguments
from async_rl.launch.checks.addresses import weights_host
from async_rl.launch.checks.capacity import has_gpu, room_on_disk
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.placement import VISIBLE, place, visible_devices
from async_rl.launch.checks.start import Start
from async_rl.learner.flash_attention import check_flash_attention
from async_rl.output import size_text
from async_rl.process.child import DEVICES_ARE_DEALT
from async_rl.process.package_versions import package_versions
from async_rl.weights.collective.libraries import COLLECTIVES, collectives

_SHARED_BYTES = 1 << 30
"""Docker gives a container 64 MiB; NCCL and vLLM take tens to hundreds for each process."""
_MEET_S = 10.0
_DRIVER = Path("/proc/driver/nvidia/version")
"""Where NVIDIA's driver says its version."""


def check_versions() -> Iterator[Finding]:
    """Check that Python and the installed packages have the versions that async-rl requires."""
    from packaging.requirements import Requirement

    required = {r.name: r for r in map(Requirement, _requirements()) if r.marker is None}
    installed = package_versions()
    yield Finding("python", "OK", installed["python"])
    for name in ("torch", "transformers", "pyzmq"):
        version, requirement = installed.get(name), required.get(name)
        fix = f'pip install "{requirement or name}"'
        if version is None:
            yield Finding(name, "FAIL", "not installed", fix=fix)
        elif requirement is not None and not requirement.specifier.contains(version, prereleases=True):
            yield Finding(name, "WARN", f"{version}, async-rl requires {requirement.specifier}", fix=fix)
        else:
            yield Finding(name, "OK", version)


def _requirements() -> list[str]:
    """Return what async-rl requires, as its installation says, or the checkout from which it runs uninstalled."""
    try:
        return requires("async-rl") or []
    except PackageNotFoundError:
        project = Path(__file__).resolve().parents[3] / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["dependencies"]


def check_engines(start: Start) -> Iterator[Finding]:
    """Check that the packages of inference engines (such as vLLM) that sample or score here are there, in the required
    version.
    """
    versions = package_versions()
    for name, capabilities in BACKENDS.items():
        if package := capabilities.package:
            version = versions.get(package)
            text = "not installed" if version is None else version
            users = [(key, is_here) for key, engine, is_here in _engine_users(start) if engine == name]
            here = " and ".join(key for key, is_here in users if is_here)
            elsewhere = " and ".join(key for key, is_here in users if not is_here)
            if here and (version is None or not version.startswith(f"{capabilities.package_version}.")):
                text = f'{text}, but {here} = "{name}" needs {capabilities.package_version}'
                yield Finding(package, "FAIL", text, fix=f'{capabilities.install}, or set {here} = "{FALLBACK}"')
            elif elsewhere and not here:
                yield Finding(package, "OK", f'{text} here; {elsewhere} = "{name}" needs it on other machines')
            else:
                yield Finding(package, "OK", text if version or here else f"{text}, and not needed by this config")


def check_engine_arguments(config: Config) -> Iterator[Finding]:
    """Show what ``generator.engine`` gives to vLLM, if it is set, and check the names if vLLM is here.

    Raises:
        ConfigError: vLLM does not know one.
    """
    if arguments := config.generator.engine:
        check_names(arguments)
        unchecked = "" if known_arguments() else "; vLLM is not installed here, so a generator checks the names"
        yield Finding("generator.engine", "OK", f"vLLM gets {shown(arguments.items())}{unchecked}")


def _engine_users(start: Start) -> Iterator[tuple[str, str, bool]]:
    """Yield the keys that name an engine, its name, and whether it runs on this machine."""
    config, has_generators = start.config, "generator" in start.devices_of
    is_here = has_generators and (config.generator.count > 0 or start.role == "generator")
    yield "generator.backend", config.generator.backend, is_here
    if config.learner.generate:
        yield "learner.generate_backend", config.learner.generate_backend, "learner" in start.devices_of
    for name in config.scorers_by_use.values():
        yield f"scorer.{name}.backend", config.scorer[name].backend, config.scorer[name].launch and has_generators


def num_cuda_devices() -> int:
    """Return the number of CUDA devices that torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _unusable() -> str:
    """Return the message on why torch can't use the GPUs that are here."""
    import torch

    built, cpu = torch.version.cuda or torch.version.hip, "set CUDA_VISIBLE_DEVICES= to compute on the CPU"
    if built is None:
        return (
            f"devices: this machine has a GPU, but torch {torch.__version__} is a build for the CPU; install one for "
            f"CUDA (pip install torch=={torch.__version__.split('+')[0]}), or {cpu}"
        )
    found = re.search(r"Module.*?\s(\d+\.[\d.]+)", _DRIVER.read_text()) if _DRIVER.exists() else None
    driver = found[1] if found else "of unknown version"
    return (
        f"devices: this machine has a GPU, but torch {torch.__version__} finds none that its CUDA {built} can use with "
        f"the driver {driver}; install a driver for CUDA {built.split('.')[0]} (nvidia-smi shows which CUDA a driver "
        f"has) or a torch for an older CUDA, or {cpu}"
    )


def check_devices(config: Config, *roles: str) -> None:
    """Check that torch can use this machine's GPUs, that the CUDA devices in the config exist, and that there is one if
    ``weights.transport`` needs CUDA.

    ``roles`` are the config's sections whose key ``devices`` is checked: ``learner``, ``generator``.

    Raises:
        ConfigError: a device does not exist or can't be used. Without this check the run would go on without it.
    """
    if has_gpu() and not num_cuda_devices():
        raise ConfigError(_unusable())
    named = {f"{role}.devices": getattr(config, role).devices for role in roles}
    named = {key: devices for key, devices in named.items() if devices is not None}
    collective = COLLECTIVES.get(config.weights.transport)  # None for "auto" and "tcp"
    needs_cuda = collective is not None and collective.needs_cuda
    if not named and not needs_cuda:
        return
    count = num_cuda_devices()
    if needs_cuda and not count:
        raise ConfigError(
            f'weights.transport: "{config.weights.transport}" needs CUDA devices, but torch finds none; set it to '
            f'"auto", "gloo" or "tcp"'
        )
    for key, devices in named.items():
        if not count:
            raise ConfigError(
                f"{key}: expected CUDA devices {list(devices)}, but torch finds none here; leave {key} out to run on "
                f"the CPU, or install a CUDA build of torch"
            )
        if DEVICES_ARE_DEALT not in os.environ and max(devices) >= count:
            raise ConfigError(
                f"{key}: expected indices below {count}, the number of CUDA devices here, got {list(devices)}; correct "
                f"{key}"
            )


def find_devices(start: Start) -> Iterator[Finding]:
    """List the CUDA devices with their free memory, and which of them ``launch`` gives to which process.

    With several, check the room in shared memory, too.
    """
    count = num_cuda_devices()
    if not count:
        yield Finding("devices", "OK", "no CUDA device: learner and generators compute on the CPU")
        return
    import torch

    names: list[str] = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        names.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, {size_text(free)} free of {size_text(total)}")
    yield Finding("devices", "OK", "; ".join(names))
    yield from check_shared_memory(count)
    if start.role == "launch":
        placement = place(start.config, visible_devices(os.environ), is_limited=VISIBLE in os.environ)
        yield Finding("devices", "OK", f"launch puts {placement.line}")


def check_shared_memory(num_devices: int, directory: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check the room of ``directory`` on a machine with several GPUs. Yield no finding if all is well."""
    size = shutil.disk_usage(directory).total if directory.is_dir() else 0
    if num_devices > 1 and size < _SHARED_BYTES:
        text = f"{directory} has {size_text(size)}" if size else f"{directory} does not exist"
        yield Finding(
            "shared memory", "WARN",
            f"{text}; processes on several GPUs (NCCL's ranks, vLLM's workers) exchange data there",
            fix="start the container with --ipc=host or --shm-size=8g; on Kubernetes mount an emptyDir of medium "
            "Memory at /dev/shm",
        )  # fmt: skip


def find_cores() -> Iterator[Finding]:
    """Show the number of CPU cores that this process may use, and the environment variables that limit threads and
    devices.
    """
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    limits = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    yield Finding("cores", "OK", f"{len(os.sched_getaffinity(0))}" + (f"; {limits}" if limits else ""))


def check_compiler(config: Config) -> Iterator[Finding]:
    """Check that this machine has the compiler that ``learner.compile`` needs, if it is set.

    On CUDA torch's compiler generates programs for Triton, which needs a C compiler; on the CPU it generates C++.

    Raises:
        ConfigError: there is none.
    """
    if not config.learner.compile:
        return
    variable, language, names = ("CC", "C", ("gcc", "clang")) if has_gpu() else ("CXX", "C++", ("g++",))
    named = os.environ.get(variable)
    compilers = (named,) if named else names
    if not any(shutil.which(name) for name in compilers):
        raise ConfigError(
            f"learner.compile: expected a {language} compiler ({' or '.join(compilers)}), found none; install one, "
            f"name it in the environment variable {variable}, or leave the key out"
        )
    text = (
        f"there is {' or '.join(compilers)} for learner.compile; only a start shows whether it finds Python's headers"
    )
    yield Finding("compiler", "OK", text)


def check_attention(config: Config) -> Iterator[Finding]:
    """Check that the learner's devices here have the kernels of ``model.attention``, if it is set.

    Raises:
        ConfigError: they have not.
    """
    if (name := config.model.attention) != "auto":
        check_flash_attention(name, config.learner.devices or range(num_cuda_devices()))
        yield Finding("model.attention", "OK", f"torch can activate {name}; only a start shows whether it runs")


def check_scratch() -> Iterator[Finding]:
    """Check that generators can write their tokenizer files to the system's temporary directory."""
    directory = Path(tempfile.gettempdir())
    with scratch_directory() as scratch:
        (scratch / "file").write_bytes(bytes(1 << 16))
    yield room_on_disk("disk", directory, fix="free disk space, or set TMPDIR to a directory on another disk")


def check_two_ranks(start: Start) -> Iterator[Finding]:
    """Check each collective library that the run may use here between two ranks of this machine."""
    host, weights = weights_host(start.config, start.connect), start.config.weights
    has_cuda = bool(num_cuda_devices())
    for name in collectives(has_cuda=has_cuda):
        if start.role == "launch" or (weights.transport in ("auto", name) and weights.port is None):
            yield check_collective(host, name)
    if not has_cuda:
        yield Finding("nccl, two ranks", "skip", "this machine has no CUDA device")


def check_collective(host: str, backend: str) -> Finding:
    """Check that two ranks on this machine can connect at the address ``host``, and broadcast 1 MiB between them.

    ``backend`` is the collective library, such as gloo or nccl. The ranks connect as a learner and a generator do to
    send weights. With nccl and a single CUDA device there is only one rank.
    """
    import torch

    from async_rl.weights.collective.libraries import make_library
    from async_rl.weights.collective.library import Communicator, Endpoint

    name = f"{backend}, two ranks"
    needs_cuda = COLLECTIVES[backend].needs_cuda
    size = 1 if needs_cuda and num_cuda_devices() < 2 else 2
    buckets = [torch.full((1 << 20,), rank, dtype=torch.uint8) for rank in range(size)]
    failures: list[Exception] = []
    endpoints = [Endpoint(host, host, f"cuda:{rank}" if needs_cuda else None) for rank in range(size)]
    libraries = [make_library(backend, endpoint) for endpoint in endpoints]
    unique_id = libraries[0].unique_id()

    def take_part(rank: int) -> None:
        try:
            communicator = Communicator.connect(libraries[rank], unique_id, rank=rank, size=size, stall_s=_MEET_S)
            communicator.broadcast([buckets[rank]], chunk_bytes=1 << 20, deadline=time.monotonic() + _MEET_S)
        except WeightsError as error:
            failures.append(error)

    started = time.monotonic()
    threads = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _MEET_S)
    if failures or any(int(bucket.max()) for bucket in buckets):
        fix = (
            "check this machine's firewall, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; or set "
            'weights.transport = "tcp"'
        )
        reason = failures[0] if failures else "the broadcast's bytes did not arrive"
        return Finding(name, "FAIL", f"on {host}: {reason}", fix=fix)
    took_ms = 1000 * (time.monotonic() - started)
    alone = " (one rank only, because there is one device)" if size == 1 else ""
    return Finding(name, "OK", f"connected on {host}{alone} and broadcast 1 MiB in {took_ms:.0f} ms")
