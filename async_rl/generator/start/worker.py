"""The ``async-rl generator`` command: connect to the queue, build what the loop needs, run the loop.

An address and ``--set generator.*`` enter. The queue's answer to the handshake brings everything else. torch is
imported when a backend or the weights receiver needs it.

Each generator keeps model and tokenizer files in a *scratch directory* of its own, below the system's temporary
directory, and removes it at its end.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.config.loading import (
    apply_override,
    check_generator_overrides,
    parse_config,
    refuse_foreign_decisions,
)
from async_rl.data.answer_text import answer_decoder
from async_rl.data.chat import load_tokenizer
from async_rl.data.turn_end import turn_ends
from async_rl.errors import AddressError, ConfigError, QueueError, RewardError, naming
from async_rl.generator.backend import Backend, MultiRankBackend
from async_rl.generator.loop import Device, WeightsReceiver, Worker
from async_rl.generator.rollouts import ThreadGrader
from async_rl.generator.start.backends import build_backend, cuda_device
from async_rl.generator.start.rollouts import RolloutSetup, open_rollouts
from async_rl.generator.teachers import build_teachers
from async_rl.net.address import check_address, refuse_open_connect
from async_rl.net.keys import SECRET_VARIABLE, ClientKeys
from async_rl.output import logged
from async_rl.process.child import reuse_freed_memory
from async_rl.process.user_code import DIGESTS_FILE, digest_of, load_code, read_digests
from async_rl.queue.messages import GeneratorStats
from async_rl.rewards.functions import MAX_CONCURRENT_CALLS
from async_rl.rewards.math.verifier import MAX_CALLERS
from async_rl.rewards.registry import RewardSum, build_reward
from async_rl.run.records.eval_records import Decode
from async_rl.run.records.prometheus import Endpoint

if TYPE_CHECKING:
    from async_rl.queue.client.clients import GeneratorQueue
    from async_rl.weights.channel.receiver import Receiver

logger = logging.getLogger(__name__)


def run_generator(
    address: str, overrides: Sequence[str], *, wait_s: float, insecure: bool, generator_id: str | None = None,
    keys_file: Path | None = None, replaces: str | None = None,
) -> None:  # fmt: skip
    """Sample rollouts for the queue server at ``address`` until the run is finished.

    Args:
        address: ``tcp://HOST:PORT`` of the queue server.
        overrides: this generator's own settings, each as ``generator.key=value``.
        wait_s: seconds for which the queue server may be unreachable or silent.
        insecure: connect to other machines without keys, and take part in collectives, which authenticate nobody.
        keys_file: a client's key file, which ``async-rl keys new`` made; None if the queue server has no keys.
        generator_id: unique among the run's generators; if None, made of host, process id and a random part.
        replaces: the id of a dead generator that this one replaces. Its leases are then granted again at once, instead
            of when they expire.

    Raises:
        AddressError: the address is malformed, or is on another machine and there are neither keys nor ``insecure``.
        KeyFileError: the key file is missing or not a client's.
        ConfigError: an override is wrong or not a ``generator.*`` key; or this machine does not allow the user's own
            code, lacks it, or has another version of it than the learner.
        ModelError: the backend can't run the model.
        QueueError: the queue does not answer within ``wait_s``, or was silent for as long.
        WeightsError: weights can't be received any more; or they don't fit the model, or give NaN.
    """
    from async_rl.queue.client.clients import GeneratorQueue

    reuse_freed_memory()
    check_address(address)
    refuse_open_connect(address, insecure=insecure, has_keys=keys_file is not None)
    keys = None if keys_file is None else ClientKeys.load(keys_file)
    check_generator_overrides(overrides)
    host = socket.gethostname()
    generator_id = generator_id or f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
    with ExitStack() as stack:
        # Taken out of the environment, which code rewards and environments inherit.
        secret = os.environ.pop(SECRET_VARIABLE, None)
        queue = stack.enter_context(closing(GeneratorQueue(address, generator_id, keys, secret=secret)))
        # The backend is only known from the config in this answer, so hello names the one in the overrides.
        welcome = queue.hello(wait_s, _requested_backend(overrides), host, replaces=replaces)
        config = generator_config(welcome.config_toml, overrides)
        directory = stack.enter_context(scratch_directory())
        write_files(directory, welcome.files)
        digests = read_digests(welcome.files.get(DIGESTS_FILE))
        with logged(logger, f"loading the backend {config.generator.backend}"):
            backend = stack.enter_context(closing(build_generator_backend(config, overrides, directory, digests)))
        receiver = stack.enter_context(closing(_receiver(config, backend, generator_id, keys, insecure=insecure)))
        worker = build_worker(
            config, queue=queue, receiver=receiver, backend=backend, generator_id=generator_id, wait_s=wait_s,
            directory=directory, code_digests=digests, keys=keys, insecure=insecure, stack=stack,
            on_stats=stack.enter_context(
                closing(Endpoint("generator", config.generator.prometheus_port, config))
            ).update,
        )  # fmt: skip
        stack.callback(queue.leave)  # first of all: engine and environments may take long to end
        worker.run()


def build_worker(
    config: Config, *, queue: GeneratorQueue, receiver: WeightsReceiver, backend: Backend, generator_id: str,
    wait_s: float, directory: Path, code_digests: Mapping[str, str] | None, keys: ClientKeys | None, insecure: bool,
    stack: ExitStack, device: Device | None = None, on_stats: Callable[[GeneratorStats], None] = lambda stats: None,
) -> Worker:  # fmt: skip
    """Build the loop, with the rewards, scorers, teachers and rollouts of ``config``. ``stack`` closes them.

    Args:
        config: the run's, with this generator's own settings.
        queue, receiver, backend, generator_id, wait_s, device, on_stats: as in ``Worker``.
        directory: has the files of model and tokenizer.
        code_digests: the learner's digests of the user's own code. None: code that is here is the learner's.
        keys: this machine's keys, for scorers.
        insecure: connect to other machines without keys.
        stack: closes what is built.
    """
    refuse_open_scorers(config, insecure=insecure, has_keys=keys is not None)
    grader = build_grader(config, code_digests, stack, directory, keys)
    setup = RolloutSetup(config, backend, grader, directory, code_digests, keys, insecure)
    return Worker(
        queue=queue, receiver=receiver, backend=backend, rollouts=stack.enter_context(open_rollouts(setup)),
        grader=grader, config=config, generator_id=generator_id, wait_s=wait_s, device=device,
        teachers=build_teachers(config, directory, keys, stack), group_filter=own_filter(config, code_digests),
        on_stats=on_stats,
    )  # fmt: skip


def _receiver(
    config: Config, backend: Backend, generator_id: str, keys: ClientKeys | None, *, insecure: bool
) -> Receiver:
    from async_rl.weights.channel.receiver import Receiver

    return Receiver(
        generator_id,
        insecure=insecure or config.weights.trusted_network,
        device=cuda_device(config),
        keys=keys,
        has_ports=config.weights.port is not None,
        has_peers=config.weights.peers,
        peer_port=config.generator.peer_port,
        engine=backend.ranks if isinstance(backend, MultiRankBackend) else None,
    )


def build_generator_backend(
    config: Config, overrides: Sequence[str], directory: Path, code_digests: Mapping[str, str] | None
) -> Backend:
    """Build the config's backend. The learner has no digest of a backend that this generator's operator chose."""
    is_own_choice = config.generator.backend == _requested_backend(overrides)
    return build_backend(config, directory, code_digests=None if is_own_choice else code_digests)


def own_filter(config: Config, code_digests: Mapping[str, str] | None) -> Callable[..., Any] | None:
    """Import the group filter of ``config``; None if there is none. ``code_digests`` are as for ``build_worker``.

    Raises:
        ConfigError: it is not allowed here, missing, or different from the learner's.
    """
    if (name := config.queue.filter_function) is None:
        return None
    return load_code(name, allowed=config.generator.allow_code, digest=digest_of(name, code_digests))


def refuse_open_scorers(config: Config, *, insecure: bool, has_keys: bool, has_teachers: bool = True) -> None:
    """Refuse scorers on other machines without keys, unless ``insecure`` is set. Teachers count if ``has_teachers``.

    Raises:
        AddressError: such a scorer is in use. The message names its key.
    """
    names = [name for key, name in config.scorers_by_use.items() if has_teachers or key == "reward.model"]
    for name in dict.fromkeys(names):
        with naming(f"scorer.{name}.address", AddressError):
            refuse_open_connect(config.scorer[name].address, insecure=insecure, has_keys=has_keys)


def build_grader(
    config: Config,
    code_digests: Mapping[str, str] | None,
    stack: ExitStack,
    directory: Path | None = None,
    keys: ClientKeys | None = None,
) -> ThreadGrader:
    """Build the grader for the config's rewards. ``stack`` closes it at its end.

    ``code_digests`` are the learner's digests of the user's own code. They are None if this machine's user chose the
    code. ``directory`` has the tokenizer, which finds the tokens of rewards for parts of a text. None: nobody trains on
    the rollouts, so these are left out. ``keys`` are this machine's keys, for scorers.
    """
    reward = stack.enter_context(closing(build_reward(config, code_digests=code_digests, keys=keys)))
    decode = None if directory is None else _text_of_tokens(config, directory)
    threads, max_abs = grading_threads(config, reward), config.reward.max_abs
    grader = ThreadGrader(reward, num_threads=threads, decode=decode, max_abs=max_abs)
    return stack.enter_context(closing(grader))


def _text_of_tokens(config: Config, directory: Path) -> Decode:
    """Return a function that decodes token ids with the tokenizer in ``directory``, which it loads when it is called
    first.
    """
    lock, found = threading.Lock(), list[Decode]()

    def decode(token_ids: np.ndarray) -> str:
        if not has_model(config.generator.backend):
            raise RewardError(
                f"expected a reward without spans, because generator.backend = {config.generator.backend!r} has no "
                f"tokenizer that could find their tokens; return RewardOutput without spans"
            )
        with lock:
            if not found:
                tokenizer = load_tokenizer(directory, needs_template=False)
                ends = turn_ends(tokenizer, directory, config.data.template_arguments)
                found.append(answer_decoder(tokenizer, ends.ids))
            return found[0](token_ids)

    return decode


def grading_threads(config: Config, reward: RewardSum) -> int:
    """Return how many answers to grade at the same time, at least 1.

    There is one for each program that runs at the same time, for each call of a user's async function that may run at
    once, or for each comparison of mathematics that may wait for a worker.
    """
    mathematics = MAX_CALLERS if config.reward.compares_mathematics else 1
    threads = max(mathematics, config.reward.code.num_workers if config.reward.runs_programs else 1)
    return max(threads, MAX_CONCURRENT_CALLS) if reward.is_async else threads


def _requested_backend(overrides: Sequence[str]) -> str:
    raw: dict = {}
    for override in overrides:
        apply_override(raw, override)
    return str(raw.get("generator", {}).get("backend", "auto"))


def generator_config(config_toml: str, overrides: Sequence[str]) -> Config:
    """Return the run's config, with the settings of this generator in place of the run's.

    Raises:
        ConfigError: an override is not a generator's own key, or the result is not a valid config; or the queue's
            config asks for what only this machine's operator may decide.
    """
    check_generator_overrides(overrides)
    raw = tomllib.loads(config_toml)
    run = parse_config(raw, "the queue's config")
    refuse_foreign_decisions(run, overrides)
    section = raw.setdefault("generator", {})
    if run.generator.num_threads is None:
        section["num_threads"] = _default_threads(run)
    # This process is one generator. `launch` assigns one of the run's devices to each by an override.
    section["count"] = 1
    section.pop("devices", None)
    section.pop("prometheus_port", None)
    section.pop("allow_code", None)  # the generator's operator decides this, not the queue
    for override in overrides:
        apply_override(raw, override)
    config = parse_config(raw, "the queue's config with this generator's --set")
    if config.generator.serve != run.generator.serve:
        raise ConfigError(
            f"--set generator.serve: expected the run's {str(run.generator.serve).lower()}, got "
            f"{str(config.generator.serve).lower()}: it decides what a rollout is; leave it out, or set it in the "
            f"learner's config"
        )
    return config


def _default_threads(run: Config) -> int:
    if run.sampling.deterministic:
        # The order of float sums depends on the number of threads, so that must be the same on every machine.
        return 1
    if (given := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(given) > 0:
        return int(given)
    processes = run.generator.count + run.learner.nproc
    return max(1, len(os.sched_getaffinity(0)) // processes)


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write the files that the queue sent in its welcome message into ``directory``.

    Raises:
        QueueError: a name is not a plain file name. Names came over a socket, so they are not trusted.
    """
    for name, content in files.items():
        if not name or name in (".", "..") or Path(name).name != name or "\\" in name:
            raise QueueError(
                f"the queue sent the model file {name!r}: expected a file name without a folder; check the address of "
                f"the queue, which may not be an async-rl queue of this version"
            )
        (directory / name).write_bytes(content)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Create a temporary directory for this generator's files, and remove it at the end of the ``with`` block."""
    with tempfile.TemporaryDirectory(prefix="async-rl-generator-") as name:
        yield Path(name)
