"""The ``async-rl generator`` command: shake hands with the queue, build what the loop needs, run it.

What enters is an address and ``--set generator.*``; everything else comes with the handshake. Torch is imported only
once a backend or the weights receiver needs it.

Model and tokenizer files lie in a *scratch directory*: the generator's own, in the system's temporary directory,
removed when the generator ends. A generator that is killed leaves its directory behind. Each directory holds a lock,
which ends with its process, so the next generator on the machine knows which directories have no owner, and removes
them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.loading import apply_override, check_generator_overrides, parse_config
from async_rl.data.chat import load_tokenizer
from async_rl.environments.pool import EnvironmentPool
from async_rl.errors import QueueError
from async_rl.generator.backend import Backend, TextBackend, build_backend, cuda_device
from async_rl.generator.environment_rollouts import EnvironmentRollouts, TokenizerText
from async_rl.generator.loop import Worker
from async_rl.generator.rollouts import ThreadGrader
from async_rl.net.address import check_address, refuse_open_connect
from async_rl.net.keys import ClientKeys
from async_rl.process.memory import reuse_freed_memory
from async_rl.process.user_code import DIGESTS_FILE, digest_of, read_digests
from async_rl.rewards.combine import RewardSum
from async_rl.rewards.functions import MAX_CONCURRENT_CALLS
from async_rl.rewards.verifier import MAX_WORKERS

_SCRATCH_PREFIX = "async-rl-generator-"
_SCRATCH_LOCK = "lock"
_SCRATCH_YOUNG_S = 60.0
"""A directory that is younger may be just before it takes its lock."""


def run_generator(
    address: str, overrides: Sequence[str], *, wait_s: float, insecure: bool, generator_id: str | None = None,
    keys_file: Path | None = None, replaces: str | None = None,
) -> None:  # fmt: skip
    """Sample for the queue at ``address`` until its run is finished.

    Args:
        address: ``tcp://HOST:PORT`` of the queue.
        overrides: ``generator.key=value``, this generator's own settings.
        wait_s: how long the queue may be unreachable or silent.
        insecure: join a queue beyond loopback without keys, and take weights over an unauthenticated network.
        keys_file: a client's file of ``async-rl keys new``; none: an unencrypted queue.
        generator_id: unique among the run's generators; none: host, process id and a random part.
        replaces: a dead generator, whose leases are given out again at once; none: they expire in their time.

    Raises:
        AddressError: the address is malformed, or beyond loopback without keys or ``insecure``.
        KeyFileError: the key file is missing or unfit.
        ConfigError: an override is not a ``generator.*`` key, or its value is wrong; or the run names code of the
            user's that is not allowed here, not there, or not the learner's.
        ModelError: the model is not one that the backend can run.
        QueueError: the queue does not answer within ``wait_s``, or has been silent for as long.
        WeightsError: the receiver has failed for good, or the weights don't fit the model or give NaN.
    """
    from async_rl.queue.client.learner_client import GeneratorQueue
    from async_rl.rewards.registry import build_reward
    from async_rl.weights.receiver import Receiver

    reuse_freed_memory()
    check_address(address)
    refuse_open_connect(address, insecure=insecure, has_keys=keys_file is not None)
    keys = None if keys_file is None else ClientKeys.load(keys_file)
    check_generator_overrides(overrides)
    host = socket.gethostname()
    generator_id = generator_id or f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
    with ExitStack() as stack:
        queue = stack.enter_context(closing(GeneratorQueue(address, generator_id, keys)))
        # The real backend is only known from the config that this answer carries, so hello names what was asked for.
        welcome = queue.hello(wait_s, _requested_backend(overrides), host, replaces=replaces)
        config = generator_config(welcome.config_toml, overrides)
        directory = stack.enter_context(scratch_directory())
        write_files(directory, welcome.files)
        digests = read_digests(welcome.files.get(DIGESTS_FILE))
        # A backend of this operator's own choice is not the learner's, which sent no digest of it.
        is_own_choice = config.generator.backend == _requested_backend(overrides)
        backend = build_backend(config, directory, code_digests=None if is_own_choice else digests)
        stack.enter_context(closing(backend))
        is_trusted = insecure or config.weights.trusted_network
        receiver = Receiver(generator_id, insecure=is_trusted, device=cuda_device(config), keys=keys)
        stack.enter_context(closing(receiver))
        reward = stack.enter_context(closing(build_reward(config, code_digests=digests)))
        num_threads = grading_threads(config, reward)
        grader = stack.enter_context(closing(ThreadGrader(reward, num_threads=num_threads)))
        environment = build_environment(config, directory, backend, digests, stack)
        Worker(
            queue=queue,
            receiver=receiver,
            backend=backend,
            grader=grader,
            config=config,
            generator_id=generator_id,
            wait_s=wait_s,
            environment=environment,
        ).run()


def grading_threads(config: Config, reward: RewardSum) -> int:
    """The number of answers that are graded at a time: one for each worker process, or call of a user's async function.

    Without either it is 1.
    """
    mathematics = MAX_WORKERS if config.reward.compares_mathematics else 1
    threads = max(mathematics, config.reward.code.num_workers if config.reward.runs_programs else 1)
    return max(threads, MAX_CONCURRENT_CALLS) if reward.is_async else threads


def _requested_backend(overrides: Sequence[str]) -> str:
    raw: dict = {}
    for override in overrides:
        apply_override(raw, override)
    return str(raw.get("generator", {}).get("backend", "auto"))


def generator_config(config_toml: str, overrides: Sequence[str]) -> Config:
    """The run's config with this generator's own settings, threads included.

    Raises:
        ConfigError: an override is not a ``generator.*`` key, or the result is not a valid config.
    """
    check_generator_overrides(overrides)
    raw = tomllib.loads(config_toml)
    run = parse_config(raw, "the queue's config")
    section = raw.setdefault("generator", {})
    if run.generator.num_threads is None:
        section["num_threads"] = _default_threads(run)
    # This process is one generator; the run's list of devices is dealt out by launch, which overrides it.
    section["count"] = 1
    section.pop("devices", None)
    section.pop("allow_code", None)  # its operator's to say, not the queue's
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw, "the queue's config with this generator's --set")


def _default_threads(run: Config) -> int:
    if run.sampling.deterministic:
        # The number of threads decides the order of float sums, so it must not depend on the machine.
        return 1
    if (given := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(given) > 0:
        return int(given)
    processes = run.generator.count + run.learner.nproc
    return max(1, len(os.sched_getaffinity(0)) // processes)


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write the welcome's files into ``directory``.

    Raises:
        QueueError: a name is not a plain file name (it came over a socket, so it is not trusted).
    """
    for name, content in files.items():
        if not name or name in (".", "..") or Path(name).name != name or "\\" in name:
            raise QueueError(f"expected plain file names from the queue, got {name!r}")
        (directory / name).write_bytes(content)


def build_environment(
    config: Config, directory: Path, backend: Backend, code_digests: Mapping[str, str] | None, stack: ExitStack
) -> EnvironmentRollouts | None:
    """What plays rollouts of several turns, closed with ``stack``; None where the config names no environment.

    ``code_digests`` are the learner's; none: this machine is the user's own.

    Raises:
        ConfigError: the environment's code is not allowed here, not there, not the learner's, or fails when it is
            imported.
        ModelError: there is no tokenizer in ``directory``.
    """
    if not config.environment.is_set:
        return None
    if isinstance(backend, TextBackend):
        text = backend.text
    else:
        tokenizer = load_tokenizer(directory, needs_template=config.data.prompt_format == "chat")
        text = TokenizerText(tokenizer)
    digest = digest_of(config.environment.name, code_digests)
    pool = EnvironmentPool(config.environment, allowed=config.generator.allow_code, digest=digest)
    stack.enter_context(closing(pool))
    return EnvironmentRollouts(backend, pool, text, config.environment)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """An empty directory but for its lock. Those of dead generators of the same user go first."""
    _remove_ownerless(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX) as name:
        lock = os.open(Path(name) / _SCRATCH_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


def _remove_ownerless(parent: Path) -> None:
    for directory in parent.glob(f"{_SCRATCH_PREFIX}*"):
        try:
            lock = os.open(directory / _SCRATCH_LOCK, os.O_RDWR)
        except OSError:
            # Another user's, or just being made: not ours to judge.
            continue
        if time.time() - os.fstat(lock).st_mtime < _SCRATCH_YOUNG_S:
            os.close(lock)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
