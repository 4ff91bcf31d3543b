"""The doctor's checks of a machine that will run generators: ``async-rl doctor --connect ADDRESS``.

The address of a queue server enters; no config is needed. The checks join the run as a generator does. The queue
server's answer brings the config and the tokenizer files, the learner sends a version of its weights, and the config's
engine loads them. The doctor takes no prompts, and leaves the queue when it ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from async_rl.config.config import Config
from async_rl.errors import QueueError, WeightsError
from async_rl.generator.backend import Backend
from async_rl.generator.start.rollouts import RolloutSetup, open_rollouts
from async_rl.generator.start.worker import (
    build_generator_backend,
    build_grader,
    generator_config,
    scratch_directory,
    write_files,
)
from async_rl.launch.checks.check_process import CheckProcess
from async_rl.launch.checks.doctor import run_in_thread, run_table
from async_rl.launch.checks.finding import Finding, exit_code, made
from async_rl.launch.checks.start import Start
from async_rl.launch.checks.table import checks_of
from async_rl.net.address import check_address, refuse_open_connect
from async_rl.net.keys import ClientKeys
from async_rl.net.link import why_unreachable
from async_rl.output import Report, ignore, size_text
from async_rl.process.cgroup import available_memory
from async_rl.process.package_versions import package_versions
from async_rl.process.user_code import DIGESTS_FILE, read_digests
from async_rl.queue.client.clients import GeneratorQueue, LearnerQueue
from async_rl.queue.messages import DOCTOR, Announcement, GeneratorStats, Welcome
from async_rl.weights.channel.receiver import Receiver
from async_rl.weights.control import parse_channel
from async_rl.weights.receive_buffers import ReceivedWeights

_PEER_S = 20.0
_ANSWER_S = 5.0
_CLOCK_S = 2.0
_PACKAGES_THAT_MATTER = ("async-rl", "torch", "transformers")
_JOIN_S = 10.0
_TRANSFER_SHARE = 0.5
"""The part of the time limit in which a version of the weights must arrive. The rest is for the engine."""
_LEAST_PATIENCE_S = 15.0
_PATIENCE = 0.1
"""The part of the time for weights, but at least ``_LEAST_PATIENCE_S``, after which an error that stays is reported."""
_HEARTBEAT_S = 1.0
_POLL_S = 0.1


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
    report("checking peer")
    findings = run_in_thread("peer", lambda: check_peer(address, keys_file, insecure=insecure), _PEER_S)
    if exit_code(findings):
        return findings
    configs: list[Config] = []
    report("checking run")
    findings += run_in_thread("run", lambda: _check_run(address, overrides, keys_file, configs.append), 2 * _JOIN_S)
    if not configs:
        return findings
    start = Start(configs[0], "generator", insecure, connect=address)
    findings += run_table(start, checks_of(start, with_doctors=True), deadline_s=deadline_s, report=report)
    arguments = {
        "address": address, "overrides": list(overrides), "keys_file": None if keys_file is None else str(keys_file),
        "insecure": insecure, "deadline_s": deadline_s,
    }  # fmt: skip
    name = "weights and engine"
    report(f"checking {name}")
    limit_s = _JOIN_S + deadline_s
    with closing(CheckProcess(name, "async_rl.launch.checks.node:check_generator", arguments, limit_s)) as process:
        return findings + process.findings()


def check_peer(address: str, keys_file: Path | None, *, insecure: bool) -> Iterator[Finding]:
    """Check that a queue server answers at ``address``, and that it has the same package versions as this machine.

    ``keys_file`` is the key file with which the doctor connects; None without keys.
    """
    host, port = check_address(address)
    refuse_open_connect(address, insecure=insecure, has_keys=keys_file is not None)
    if unreachable := why_unreachable("the queue server", host, port):
        yield Finding.of_message("peer", unreachable)
        return
    keys = None if keys_file is None else ClientKeys.load(keys_file)
    started, started_s = time.monotonic(), time.time()
    with closing(LearnerQueue(address, _ANSWER_S, keys)) as queue:
        pong = queue.pong()
    took_s = time.monotonic() - started
    yield Finding("peer", "OK", f"the queue server at {address} answers in {1000 * took_s:.0f} ms")
    yield _versions_row(pong.versions, package_versions())
    yield clock_row(pong.time_s - (started_s + took_s / 2), took_s / 2)


def clock_row(ahead_s: float, error_s: float) -> Finding:
    """Compare the clocks. The queue server's is ``ahead_s`` ahead of this machine's, plus or minus ``error_s``."""
    side = "ahead of" if ahead_s > 0 else "behind"
    text = f"the queue server's clock is {abs(ahead_s):.2f} s {side} this one"
    if abs(ahead_s) <= _CLOCK_S + error_s:
        return Finding("clock", "OK", text)
    fix = "let both machines set their clocks by NTP (chrony, systemd-timesyncd)"
    return Finding("clock", "WARN", f"{text}, so the times in the logs of both can't be compared", fix=fix)


def _versions_row(theirs: Mapping[str, str], ours: Mapping[str, str]) -> Finding:
    names = [name for name in _PACKAGES_THAT_MATTER if theirs.get(name) != ours.get(name)]
    shown = ", ".join(f"{name} {theirs.get(name, 'none')} there, {ours.get(name, 'none')} here" for name in names)
    if not names:
        return Finding("peer's versions", "OK", ", ".join(f"{name} {ours[name]}" for name in _PACKAGES_THAT_MATTER))
    fix = "install the same versions on both machines, because others may compute or render differently"
    return Finding("peer's versions", "WARN", shown, fix=fix)


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
    text = f"{config.run.name or config.run.dir}: model {config.model.path}, backend {config.generator.backend}"
    return [Finding("run", "OK", text)]


def _queue(address: str, keys_file: Path | None) -> GeneratorQueue:
    keys = None if keys_file is None else ClientKeys.load(keys_file)
    return GeneratorQueue(address, f"doctor-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}", keys)


def _join(queue: GeneratorQueue) -> Welcome:
    return queue.hello(_JOIN_S, DOCTOR, socket.gethostname())


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
        rows = made("reward", lambda: _check_reward(config, digests, stack))
        is_trusted = insecure or config.weights.trusted_network
        receiver = Receiver(
            queue.generator_id, insecure=is_trusted, keys=None if path is None else ClientKeys.load(path),
            may_collect=False, has_ports=config.weights.port is not None,
        )  # fmt: skip
        stack.enter_context(closing(receiver))
        received: list[ReceivedWeights] = []
        deadline = started + _TRANSFER_SHARE * deadline_s
        rows += made("weights", lambda: _check_transfer(queue, receiver, deadline, received.append))
        backends: list[Backend] = []

        def check_engine() -> list[Finding]:
            backends.append(
                stack.enter_context(closing(build_generator_backend(config, overrides, directory, digests)))
            )
            return _check_engine(backends[0], config, received)

        rows += made("engine", check_engine)
        if backends and config.environment.is_set and config.environment.relay is None:
            rows += made("environment", lambda: _check_environment(config, directory, backends[0], digests, stack))
    return rows


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
            text = f"received version {received.version}, {size_text(size)} in {seconds:.2g} s, and verified it"
            return [Finding("weights", "OK", text)]
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
    text = f"{name} is loaded and activated version {version} in {time.monotonic() - started:.2g} s"
    return [Finding("engine", "OK", text), _memory_row(sum(tensor.nbytes for tensor in tensors.values()))]


def _memory_row(version_bytes: int) -> Finding:
    available = available_memory()
    text = f"{size_text(available)} available with the engine loaded; the next version needs {size_text(version_bytes)}"
    if available < version_bytes:
        return Finding("memory", "FAIL", text, fix="end other processes, or start fewer generators on this machine")
    return Finding("memory", "OK", text)


def _check_environment(
    config: Config, directory: Path, backend: Backend, digests: Mapping[str, str] | None, stack: ExitStack
) -> list[Finding]:
    grader = build_grader(config, digests, stack)
    stack.enter_context(open_rollouts(RolloutSetup(config, backend, grader, directory, digests)))
    return [Finding("environment", "OK", f"{config.environment.shown} can be used here")]
