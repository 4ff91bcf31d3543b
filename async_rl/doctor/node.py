"""The doctor's checks of a machine that will run generators: ``async-rl doctor --connect ADDRESS``.

The address of a queue server enters; no config is needed. The checks join the run as a generator does. The queue
server's answer brings the config and the tokenizer files, the learner sends a version of its weights, and the config's
engine loads them. The doctor takes no prompts, and leaves the queue when it ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from async_rl.config.config import Config
from async_rl.doctor import machine
from async_rl.doctor.check import COLLECTIVE_DEADLINE_S, Check, CheckProcess, plain_checks, run_check
from async_rl.doctor.findings import Finding, exit_code
from async_rl.errors import AsyncRLError, QueueError, WeightsError
from async_rl.generator.backend import Backend
from async_rl.generator.start.worker import (
    build_environment,
    build_generator_backend,
    build_grader,
    generator_config,
    scratch_directory,
    write_files,
)
from async_rl.launch.capacity import free_bytes
from async_rl.launch.checks import Start
from async_rl.net.keys import ClientKeys
from async_rl.output import Report, ignore, size_text
from async_rl.process.cgroup import available_memory
from async_rl.process.user_code import DIGESTS_FILE, read_digests
from async_rl.queue.client.clients import GeneratorQueue
from async_rl.queue.messages import DOCTOR, Announcement, GeneratorStats, Welcome
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.collective.libraries import collectives
from async_rl.weights.control import parse_channel
from async_rl.weights.receive_buffers import ReceivedWeights

_JOIN_S = 10.0
_TRANSFER_SHARE = 0.5
"""The part of the time limit in which a version of the weights must arrive. The rest is for the engine."""
_LEAST_PATIENCE_S = 15.0
_PATIENCE = 0.1
"""The part of the time for weights, but at least ``_LEAST_PATIENCE_S``, after which an error that stays is reported."""
_HEARTBEAT_S = 1.0
_POLL_S = 0.1
_SCRATCH_BYTES = 1 << 30


def run_node_checks(
    address: str, overrides: Sequence[str], *, keys_file: Path | None, insecure: bool, deadline_s: float,
    report: Report = ignore,
) -> list[Finding]:  # fmt: skip
    """Check that a generator on this machine could work for the queue server at ``address``. Return the findings.

    If the server does not answer, or no learner has attached, the checks that need them are left out.

    Args:
        overrides: the ``--set`` options with which the generator would be started.
        keys_file: the key file with which the generator would connect; None without keys.
        insecure: without keys, accept also an address that other machines can reach.
        deadline_s: time limit in seconds for receiving a version and for loading the engine, together.
        report: gets what is checked, before the doctor waits for that check.
    """
    found: list[Finding] = []

    def run_all(*checks: Check) -> list[Finding]:
        rows: list[Finding] = []
        for check in checks:
            report(f"checking {check.name}")
            rows += run_check(check)
        found.extend(rows)
        return rows

    if exit_code(run_all(Check("peer", lambda: machine.check_peer(address, keys_file, insecure=insecure), 20.0))):
        return found
    configs: list[Config] = []
    run_all(Check("run", lambda: _check_run(address, overrides, keys_file, configs.append), 2 * _JOIN_S))
    if not configs:
        return found
    config = configs[0]
    run_all(
        Check("versions", lambda: machine.check_versions(config)),
        *plain_checks(Start(config, "generator"), "config"),
        Check("cores", machine.check_cores),
        Check("devices", lambda: machine.check_cuda(config, "generator"), 60.0),
        Check("disk", check_scratch),
        Check("interface", lambda: machine.check_interfaces(config, address)),
    )
    arguments = {
        "address": address, "overrides": list(overrides), "keys_file": None if keys_file is None else str(keys_file),
        "insecure": insecure, "deadline_s": deadline_s,
    }  # fmt: skip
    with ExitStack() as stack:

        def start(name: str, function: str, arguments: Mapping[str, object], limit_s: float) -> CheckProcess:
            process = CheckProcess(name, f"async_rl.doctor.{function}", arguments, limit_s)
            report(f"checking {name}")
            return stack.enter_context(closing(process))

        for backend in _collectives_of(config):
            ranks = {"host": machine.weights_host(config, address), "backend": backend}
            name = f"{backend}, two ranks"
            found += start(name, "machine:check_collective", ranks, COLLECTIVE_DEADLINE_S).findings()
        found += start("weights and engine", "node:check_generator", arguments, _JOIN_S + deadline_s).findings()
    return found


def _collectives_of(config: Config) -> list[str]:
    """Return the collective transports that the run may use on this machine."""
    chosen = config.weights.transport
    names = collectives(has_cuda=bool(machine.num_cuda_devices()))
    return [name for name in names if chosen in ("auto", name) and config.weights.port is None]


def _check_run(
    address: str, overrides: Sequence[str], keys_file: Path | None, take_config: Callable[[Config], None]
) -> list[Finding]:
    """Ask the queue server for the run's config, and pass it to ``take_config``."""
    with ExitStack() as stack:
        queue = stack.enter_context(closing(_queue(address, keys_file)))
        try:
            welcome = _join(queue)
        except QueueError as error:
            fix = "start the learner, then run the doctor again"
            return [Finding("run", "WARN", f"weights and engine can't be checked: {error}", fix=fix)]
    config = generator_config(welcome.config_toml, overrides)
    take_config(config)
    found = f"{config.run.name or config.run.dir}: model {config.model.path}, backend {config.generator.backend}"
    return [Finding("run", "OK", found)]


def _queue(address: str, keys_file: Path | None) -> GeneratorQueue:
    keys = None if keys_file is None else ClientKeys.load(keys_file)
    return GeneratorQueue(address, f"doctor-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}", keys)


def _join(queue: GeneratorQueue) -> Welcome:
    return queue.hello(_JOIN_S, DOCTOR, socket.gethostname())


def check_scratch() -> list[Finding]:
    """Check that generators can write their tokenizer files to the system's temporary directory."""
    directory = Path(tempfile.gettempdir())
    with scratch_directory() as scratch:
        (scratch / "file").write_bytes(bytes(1 << 16))
    free = free_bytes(directory)
    found = f"{directory}, {size_text(free)} free"
    if free < _SCRATCH_BYTES:
        return [Finding("disk", "WARN", found, fix="free disk space, or set TMPDIR to a directory on another disk")]
    return [Finding("disk", "OK", found)]


def check_generator(
    address: str, overrides: Sequence[str], keys_file: str | None, insecure: bool, deadline_s: float
) -> list[Finding]:
    """Check reward, weights and engine as a generator would use them.

    Join the run at ``address``, receive a version of the weights from the learner, load the engine and let it activate
    the version. ``CheckProcess`` runs this function in a separate process.
    """
    started = time.monotonic()
    path = None if keys_file is None else Path(keys_file)
    with ExitStack() as stack:
        queue = stack.enter_context(closing(_queue(address, path)))
        welcome = _join(queue)
        config = generator_config(welcome.config_toml, overrides)
        directory = stack.enter_context(scratch_directory())
        write_files(directory, welcome.files)
        digests = read_digests(welcome.files.get(DIGESTS_FILE))
        rows = _rows_of("reward", lambda: _check_reward(config, digests, stack))
        is_trusted = insecure or config.weights.trusted_network
        receiver = Receiver(
            queue.generator_id, insecure=is_trusted, keys=None if path is None else ClientKeys.load(path),
            may_collect=False, has_ports=config.weights.port is not None,
        )  # fmt: skip
        stack.enter_context(closing(receiver))
        received: list[ReceivedWeights] = []
        deadline = started + _TRANSFER_SHARE * deadline_s
        rows += _rows_of("weights", lambda: _check_transfer(queue, receiver, deadline, received.append))
        backends: list[Backend] = []

        def check_engine() -> list[Finding]:
            backends.append(
                stack.enter_context(closing(build_generator_backend(config, overrides, directory, digests)))
            )
            return _check_engine(backends[0], config, received)

        rows += _rows_of("engine", check_engine)
        if backends and config.environment.is_set and config.environment.relay is None:
            rows += _rows_of("environment", lambda: _check_environment(config, directory, backends[0], digests, stack))
    return rows


def _rows_of(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of ``check``, or a FAIL with the error that it raises."""
    try:
        return check()
    except AsyncRLError as error:
        return [Finding.of_error(name, error)]


def _check_reward(config: Config, digests: Mapping[str, str] | None, stack: ExitStack) -> list[Finding]:
    build_grader(config, digests, stack)
    return [Finding("reward", "OK", f"{', '.join(config.reward.names)} can be used here")]


def _check_transfer(
    queue: GeneratorQueue, receiver: Receiver, deadline: float, take: Callable[[ReceivedWeights], None]
) -> list[Finding]:
    """Receive the version that the learner announces, and pass it to ``take``.

    Give up at ``deadline``, or earlier if the receiver reports an error all the time.
    """
    followed: Announcement | None = None
    next_heartbeat, well_at = 0.0, time.monotonic()
    patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * (deadline - well_at))
    while time.monotonic() < min(deadline, well_at + patience_s) and not queue.finished:
        if receiver.error is None:
            well_at = time.monotonic()
        if time.monotonic() >= next_heartbeat:
            next_heartbeat = time.monotonic() + _HEARTBEAT_S
            queue.heartbeat({}, GeneratorStats(), receiver.error or "")
        queue.poll(_POLL_S)
        if queue.announcement is not None and queue.announcement != followed:
            followed = queue.announcement
            receiver.follow(followed)
        received = receiver.poll()
        if received is not None:
            take(received)
            size, seconds = sum(tensor.nbytes for tensor in received.tensors.values()), received.receive_s
            found = f"received version {received.version}, {size_text(size)} in {seconds:.2g} s, and verified it"
            return [Finding("weights", "OK", found)]
    raise WeightsError(_why_no_weights(queue, receiver, followed))


def _why_no_weights(queue: GeneratorQueue, receiver: Receiver, followed: Announcement | None) -> str:
    if queue.finished:
        return "the run is finished, so its learner sends no weights; start the next run, then run the doctor again"
    if followed is None:
        return "the learner has announced no weights yet; wait until it has loaded its model, then run the doctor again"
    address, _ = parse_channel(followed.channel)
    if receiver.error:
        return f"no weights from the learner at {address}: {receiver.error}"
    return f"no whole version from the learner at {address} in time; raise --timeout, or check the network"


def _check_engine(backend: Backend, config: Config, received: Sequence[ReceivedWeights]) -> list[Finding]:
    """Let the loaded engine activate the received version, and check that the memory has room for the next one."""
    name = getattr(backend, "name", config.generator.backend)
    if not received:
        return [Finding("engine", "OK", f"{name} is loaded; without weights it could not activate a version")]
    version, tensors = received[0].version, received[0].tensors
    started = time.monotonic()
    backend.activate(version, tensors)
    found = f"{name} is loaded and activated version {version} in {time.monotonic() - started:.2g} s"
    return [Finding("engine", "OK", found), _memory_row(sum(tensor.nbytes for tensor in tensors.values()))]


def _memory_row(version_bytes: int) -> Finding:
    available = available_memory()
    found = (
        f"{size_text(available)} available with the engine loaded; the next version needs {size_text(version_bytes)}"
    )
    if available < version_bytes:
        return Finding("memory", "FAIL", found, fix="end other processes, or start fewer generators on this machine")
    return Finding("memory", "OK", found)


def _check_environment(
    config: Config, directory: Path, backend: Backend, digests: Mapping[str, str] | None, stack: ExitStack
) -> list[Finding]:
    grader = build_grader(config, digests, stack)
    build_environment(config, directory, backend, digests, stack, grader)
    return [Finding("environment", "OK", f"{config.environment.shown} can be used here")]
