"""The doctor's checks of this machine: package versions, CPU cores, CUDA devices, disk, key files and network.

The checks of the network are about the queue server's address, the server that answers there, the network interfaces,
and a broadcast between two ranks. Each function returns findings.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.generator import BACKENDS
from async_rl.doctor.findings import Finding
from async_rl.errors import AddressError, QueueError, UserError, WeightsError
from async_rl.launch.capacity import (
    HostMemory,
    check_memory,
    checkpoint_bytes,
    free_bytes,
    memory_warning,
)
from async_rl.launch.device_memory import find_room
from async_rl.launch.placement import VISIBLE, place, visible_devices
from async_rl.launch.preflight import (
    check_bindable,
    check_devices,
    check_keys,
    check_weights_ports,
    others_address,
)
from async_rl.launch.scorer_checks import why_scorers_are_away
from async_rl.net.address import check_address, host_towards, is_loopback, refuse_open_bind, refuse_open_connect
from async_rl.net.keys import ClientKeys, client_keys_of
from async_rl.net.link import why_unreachable
from async_rl.output import size_text
from async_rl.process.cgroup import available_memory, limit_text
from async_rl.process.package_versions import package_versions
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.server.start import answering_run, journal_directory
from async_rl.queue.storage.journal import file_system_of, is_network_file_system
from async_rl.run.directory import check_writable
from async_rl.run.queue_files import read_record

_JOURNAL_BYTES = 1 << 30
_SHARED_BYTES = 1 << 30
"""Docker gives a container 64 MiB; NCCL and vLLM take tens to hundreds for each process."""
_ANSWER_S = 5.0
_CLOCK_S = 2.0
_MEET_S = 10.0
_PACKAGES_THAT_MATTER = ("async-rl", "torch", "transformers")


def check_versions(config: Config) -> list[Finding]:
    """Check that Python and the installed packages have the versions that async-rl requires."""
    from packaging.requirements import Requirement

    wanted = {r.name: r for r in map(Requirement, _requirements()) if r.marker is None}
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
    rows += (_engine_row(config, name, found.get(BACKENDS[name].package)) for name in engines)
    return rows


def _requirements() -> list[str]:
    """Return what async-rl requires, as its installation says, or the checkout from which it runs uninstalled."""
    try:
        return requires("async-rl") or []
    except PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["dependencies"]


def _engine_row(config: Config, name: str, version: str | None) -> Finding:
    """Check that the package of the backend ``name`` (such as vLLM) is installed in the required version."""
    needs, backend = BACKENDS[name], config.generator.backend
    chosen = {"generator.backend": (backend, config.generator.count > 0)}
    if config.learner.generate:
        chosen["learner.generate_backend"] = config.learner.generate_backend, True
    for scorer in config.scorers_by_use.values():
        chosen[f"scorer.{scorer}.backend"] = config.scorer[scorer].backend, config.scorer[scorer].launch
    is_used = {key: runs_here for key, (one, runs_here) in chosen.items() if one == name}
    if version is None:
        if is_used:
            state = "FAIL" if any(is_used.values()) else "WARN"
            found = f'not installed, but {" and ".join(is_used)} = "{name}" needs it'
            return Finding(needs.package, state, found, fix=needs.install)
        return Finding(needs.package, "OK", f'not installed, and not needed by generator.backend = "{backend}" here')
    if not version.startswith(f"{needs.package_version}."):
        state = "FAIL" if is_used else "WARN"
        text = f"{version}, the backend requires {needs.package_version}"
        return Finding(needs.package, state, text, fix=needs.install)
    return Finding(needs.package, "OK", version)


def num_cuda_devices() -> int:
    """Return the number of CUDA devices that torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_cuda(config: Config, *roles: str) -> list[Finding]:
    """Check that torch finds the CUDA devices that the config names, and list all devices with their free memory.

    ``roles`` are the processes that will run on this machine: "learner", "generator", or both. For both, show which
    device ``launch`` gives to which process.
    """
    try:
        check_devices(config, *roles)
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
    rows = [Finding("devices", "OK", "; ".join(names)), *check_shared_memory(count)]
    if len(roles) > 1:
        placement = place(config, visible_devices(os.environ), is_limited=VISIBLE in os.environ)
        rows.append(Finding("devices", "OK", f"launch puts {placement.line}"))
    return rows


def check_shared_memory(num_devices: int, directory: Path = Path("/dev/shm")) -> list[Finding]:
    """Check the room of ``directory`` on a machine with several GPUs. Return no finding if all is well."""
    size = shutil.disk_usage(directory).total if directory.is_dir() else 0
    if num_devices < 2 or size >= _SHARED_BYTES:
        return []
    found = f"{directory} has {size_text(size)}" if size else f"{directory} does not exist"
    return [
        Finding(
            "shared memory",
            "WARN",
            f"{found}; processes on several GPUs (NCCL's ranks, vLLM's workers) exchange data there",
            fix="start the container with --ipc=host or --shm-size=8g; on Kubernetes mount an emptyDir of medium "
            "Memory at /dev/shm",
        )
    ]


def check_disk(config: Config) -> list[Finding]:
    """Check that the run directory and the queue's journal directory can be written, and that their disks have space.

    Fail if the journal is on a network file system, because file locks are unreliable there.
    """
    run_dir, journal = Path(config.run.dir).absolute(), journal_directory(config).absolute()
    check_writable(run_dir, "run.dir")
    rows = [_space_row(config, run_dir)]
    if not config.experimental.journal:
        fix = "set experimental.journal = true"
        return [
            *rows,
            Finding("journal", "WARN", "switched off: if the queue server dies, its groups are lost", fix=fix),
        ]
    check_writable(journal, "queue.journal_dir")
    kind, free = _file_system(journal), free_bytes(journal)
    found = f"{journal} on {kind}, {size_text(free)} free"
    if is_network_file_system(kind):
        fix = "set queue.journal_dir to a directory on this machine's own disk"
        rows.append(Finding("journal", "FAIL", f"{found}: file locks are unreliable on network file systems", fix=fix))
    elif free < _JOURNAL_BYTES:
        fix = "free disk space, or set queue.journal_dir to another disk"
        rows.append(Finding("journal", "WARN", found, fix=fix))
    else:
        rows.append(Finding("journal", "OK", found))
    return rows


def _space_row(config: Config, run_dir: Path) -> Finding:
    kind, free = _file_system(run_dir), free_bytes(run_dir)
    checkpoint = checkpoint_bytes(config)
    every = config.checkpoint.keep_every
    num_kept = config.checkpoint.keep_last + (config.learner.steps // every if every else 0)
    needed = (num_kept + 1) * checkpoint
    found = f"{run_dir} on {kind}, {size_text(free)} free"
    if checkpoint:
        found += f", checkpoints of {size_text(checkpoint)}"
    fix = "free disk space, choose another run.dir, or keep fewer checkpoints (checkpoint.keep_last, keep_every)"
    if free < checkpoint:
        return Finding("run.dir", "FAIL", f"{found}: no room for one checkpoint", fix=fix)
    if free < needed:
        kept = f"checkpoint.keep_last = {config.checkpoint.keep_last}"
        if every:
            kept += f" and keep_every = {every}, {num_kept} checkpoints"
        return Finding("run.dir", "WARN", f"{found}: no room for {kept}", fix=fix)
    return Finding("run.dir", "OK", found)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _file_system(path: Path) -> str:
    mountinfo = Path("/proc/self/mountinfo")
    if not mountinfo.exists():
        return "an unknown file system"
    text = mountinfo.read_text(encoding="utf-8", errors="surrogateescape")
    return file_system_of(_existing(path).resolve(), text)


def check_key_files(config: Config) -> list[Finding]:
    """Check that this user can read the key files in the directory ``queue.keys``, and that no other user can."""
    if config.queue.keys is None:
        return [
            Finding(
                "keys", "OK", "queue.keys is unset: nothing is encrypted, so use loopback or a trusted network only"
            )
        ]
    try:
        check_keys(config, is_server=True)
    except UserError as error:
        return [
            Finding(
                "keys",
                "FAIL",
                str(error),
                fix=f"correct the file, or make missing keys: async-rl keys new {config.queue.keys}",
            )
        ]
    return [Finding("keys", "OK", f"{config.queue.keys}: the server's and the learner's key can be read, by you alone")]


def check_room_in_memory(config: Config) -> list[Finding]:
    """Check that the host's memory has room for the processes of this config, and for what they keep there."""
    check_memory(config)
    if problem := memory_warning(config):
        found, _, fix = problem.removeprefix("memory: ").partition("; ")
        return [Finding("memory", "WARN", found, fix=fix)]
    needed = HostMemory.of(config)
    models = f"learner and generators take at least {size_text(needed.models)}" if needed.models else ""
    where = f"{size_text(available_memory())} available of {limit_text()}"
    found = f"{where}; {models or 'the model is small or its size is unknown'}, and all processes about "
    return [Finding("memory", "OK", f"{found}{size_text(needed.processes)} without their models")]


def check_devices_room(config: Config, *, is_alone: bool = False) -> list[Finding]:
    """Check that what runs on each device fits its memory, and propose settings if it does not.

    ``is_alone``: only the learner runs here.
    """
    rooms = find_room(config, config.learner.nproc, is_alone=is_alone)
    return [Finding(room.check, room.state, room.found, fix=room.fix) for room in rooms]


def check_cores() -> list[Finding]:
    """Return a finding, always OK, with the number of CPU cores that this process may use.

    It also shows the environment variables that limit threads and devices.
    """
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    limits = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    return [Finding("cores", "OK", f"{len(os.sched_getaffinity(0))}" + (f"; {limits}" if limits else ""))]


def check_queue_address(config: Config, *, insecure: bool) -> list[Finding]:
    """Check that a queue server on this machine could bind ``queue.address``.

    The check also passes if this run's queue server is running already.
    """
    address = config.queue.address
    if address is None:
        return [Finding("queue.address", "OK", "unset: any free port on loopback")]
    record = read_record(Path(config.run.dir))
    if record is not None and answering_run(record.address, 2.0, client_keys_of(config.queue.keys)) == record.run_id:
        return [Finding("queue.address", "OK", f"this run's queue server answers at {record.address}")]
    has_keys = config.queue.keys is not None
    try:
        refuse_open_bind(address, insecure=insecure, has_keys=has_keys)
    except AddressError as error:
        fix = "make keys (async-rl keys new keys) and set queue.keys; or pass --insecure on a trusted network"
        return [Finding("queue.address", "FAIL", str(error), fix=fix)]
    try:
        others_address(config.queue)
    except AddressError as error:
        return [Finding.of_error("queue.address", error)]
    try:
        check_bindable(config.queue, insecure=insecure)
    except UserError as error:
        fix = (
            "stop the process that listens there (ss -ltnp shows it), or choose another port or address of this machine"
        )
        return [Finding("queue.address", "FAIL", str(error), fix=fix)]
    return [Finding("queue.address", "OK", f"{address} can be bound"), *_ports_rows(config)]


def _ports_rows(config: Config) -> list[Finding]:
    if config.weights.ports is None:
        return []
    check_weights_ports(config)
    return [Finding("weights.port", "OK", "two ports are free")]


def check_peer(address: str, keys_file: Path | None, *, insecure: bool) -> list[Finding]:
    """Check that a queue server answers at ``address``, and that it has the same package versions as this machine.

    ``keys_file`` is the key file with which the doctor connects; None without keys.
    """
    host, port = check_address(address)
    try:
        refuse_open_connect(address, insecure=insecure, has_keys=keys_file is not None)
    except AddressError as error:
        return [Finding.of_error("peer", error)]
    unreachable = why_unreachable("the queue server", host, port)
    if unreachable:
        found, _, fix = unreachable.partition("; ")
        return [Finding("peer", "FAIL", found, fix=fix)]
    keys = None if keys_file is None else ClientKeys.load(keys_file)
    queue = LearnerQueue(address, _ANSWER_S, keys)
    started, started_s = time.monotonic(), time.time()
    try:
        pong = queue.pong()
    except QueueError as error:
        return [Finding.of_error("peer", error)]
    finally:
        queue.close()
    took_s = time.monotonic() - started
    return [
        Finding("peer", "OK", f"the queue server at {address} answers in {1000 * took_s:.0f} ms"),
        _versions_row(pong.versions, package_versions()),
        clock_row(pong.time_s - (started_s + took_s / 2), took_s / 2),
    ]


def clock_row(ahead_s: float, error_s: float) -> Finding:
    """Compare the clocks. The queue server's is ``ahead_s`` ahead of this machine's, plus or minus ``error_s``."""
    side = "ahead of" if ahead_s > 0 else "behind"
    found = f"the queue server's clock is {abs(ahead_s):.2f} s {side} this one"
    if abs(ahead_s) <= _CLOCK_S + error_s:
        return Finding("clock", "OK", found)
    fix = "let both machines set their clocks by NTP (chrony, systemd-timesyncd)"
    return Finding("clock", "WARN", f"{found}, so the times in the logs of both can't be compared", fix=fix)


def _versions_row(theirs: Mapping[str, str], ours: Mapping[str, str]) -> Finding:
    names = [name for name in _PACKAGES_THAT_MATTER if theirs.get(name) != ours.get(name)]
    shown = ", ".join(f"{name} {theirs.get(name, 'none')} there, {ours.get(name, 'none')} here" for name in names)
    if not names:
        return Finding("peer's versions", "OK", ", ".join(f"{name} {ours[name]}" for name in _PACKAGES_THAT_MATTER))
    return Finding(
        "peer's versions",
        "WARN",
        shown,
        fix="install the same versions on both machines, because others may compute or render differently",
    )


def check_interfaces(config: Config, connect: str | None = None) -> list[Finding]:
    """Check that this machine has the network interfaces that environment variables (for gloo, NCCL) name.

    Also show the address of this machine over which weights would be sent. ``connect`` is the queue server's address as
    this machine's generators reach it; None on the learner's machine.
    """
    names = {name for _, name in socket.if_nameindex()}
    rows: list[Finding] = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "").lstrip("=^")
        unknown = [name for name in chosen.split(",") if name and not any(n.startswith(name) for n in names)]
        if unknown:
            fix = f"unset {variable}, or set it to one of {', '.join(sorted(names))}"
            rows.append(
                Finding(
                    "interface",
                    "FAIL",
                    f"{variable}: expected an interface of this machine, got {', '.join(unknown)}",
                    fix=fix,
                )
            )
    try:
        host = weights_host(config, connect)
    except AddressError as error:
        return [*rows, Finding("interface", "FAIL", str(error), fix="check the address, and this machine's routes")]
    if is_loopback(host):
        found = f"{host}: weights stay on this machine"
        return [*rows, Finding("interface", "OK", found)]
    return [
        *rows,
        Finding(
            "interface", "OK", f"{host}: weights are sent over this address (interfaces: {', '.join(sorted(names))})"
        ),
    ]


def weights_host(config: Config, connect: str | None = None) -> str:
    """Return the address of this machine over which it would send or receive weights.

    It is the address of the network interface from which the queue server can be reached.

    Raises:
        AddressError: this machine has no route to the queue server, or others can't reach the server's address.
    """
    return host_towards(connect or others_address(config.queue))


def check_collective(host: str, backend: str) -> list[Finding]:
    """Check that two ranks on this machine can connect at the address ``host``, and broadcast 1 MiB between them.

    ``backend`` is the collective library, such as gloo or nccl. The ranks connect as a learner and a generator do to
    send weights. With nccl and a single CUDA device there is only one rank. ``CheckProcess`` runs this function in a
    separate process.
    """
    import torch

    from async_rl.weights.collective.libraries import COLLECTIVES, make_library
    from async_rl.weights.collective.library import Communicator, Endpoint

    name = f"{backend}, two ranks"
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needs_cuda = COLLECTIVES[backend].needs_cuda
    size = 1 if needs_cuda and devices < 2 else 2
    buckets = [torch.full((1 << 20,), rank, dtype=torch.uint8) for rank in range(size)]
    failures: list[Exception] = []
    endpoints = [Endpoint(host, host, host, f"cuda:{rank}" if needs_cuda else None) for rank in range(size)]
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
        return [Finding(name, "FAIL", f"on {host}: {reason}", fix=fix)]
    took_ms = 1000 * (time.monotonic() - started)
    alone = " (one rank only, because there is one device)" if size == 1 else ""
    return [Finding(name, "OK", f"connected on {host}{alone} and broadcast 1 MiB in {took_ms:.0f} ms")]


def find_scorers(config: Config) -> list[Finding]:
    """Look for the scorers that somebody else must start."""
    away = {name: why for name, why in why_scorers_are_away(config).items() if why}
    return [Finding(f"scorer.{name}", "WARN", why, fix=f"async-rl scorer CONFIG {name}") for name, why in away.items()]
