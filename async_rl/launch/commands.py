"""The command lines of the roles that ``launch`` starts, each with the environment that it needs. Pure.

This module assigns devices, threads and the ranks' rendezvous. The supervisor runs the commands, ``--dry-run`` prints
them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.net.address import check_address
from async_rl.net.keys import CLIENT_FILE
from async_rl.process.child import module_command, package_path

_DAY_S = 86400


@dataclass(frozen=True, slots=True)
class Command:
    """One process to start.

    Attributes:
        name: also the name of its log file.
        environment: variables in addition to the inherited ones.
        cores: CPU cores that it is bound to; if empty, any.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()

    def shell_line(self) -> str:
        """The command as a user would type it."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.environment.items())]
        pinned = ["taskset", "-c", ",".join(map(str, self.cores))] if self.cores else []
        return " ".join([*variables, *pinned, shlex.join(self.argv)])


class RunCommands:
    """The commands of one ``launch`` of one config."""

    def __init__(
        self,
        config: Config,
        config_arguments: Sequence[str],
        *,
        run_id: str,
        insecure: bool,
        inherited: Mapping[str, str],
        num_cores: int,
        cores: Sequence[int] = (),
    ) -> None:
        """Assign devices, threads and cores.

        Args:
            config_arguments: how the roles name the config: a path and its ``--set`` options.
            inherited: the environment that every process inherits.
            cores: shared out among ranks and generators, if there is one for each and the user has set no number of
                threads. On a CPU that gains a fifth of the steps/s: otherwise the system moves processes away from
                their warm caches.

        Raises:
            ConfigError: a device index is not among those that ``inherited`` makes visible.
        """
        self._config, self._config_arguments, self._run_id = config, tuple(config_arguments), run_id
        self._flags = ("--insecure",) if insecure else ()
        keys = config.queue.keys
        self._generator_flags = self._flags if keys is None else (*self._flags, "--keys", str(Path(keys) / CLIENT_FILE))
        self._inherited = inherited
        self._num_threads = max(1, num_cores // max(1, config.learner.nproc + config.generator.count))
        chosen = (config.learner.num_threads, config.generator.num_threads, inherited.get("OMP_NUM_THREADS"))
        has_choice = any(threads is not None for threads in chosen)
        self._shares = _shares(() if has_choice else cores, config.learner.nproc + config.generator.count)
        self._learner_devices = _visible("learner.devices", config.learner.devices, inherited)
        self._generator_devices = _visible("generator.devices", config.generator.devices, inherited)

    @property
    def num_generators(self) -> int:
        return self._config.generator.count

    def queue(self, bound_port: int | None) -> Command:
        """The queue server. After a restart it binds its old port, since the others connect to it."""
        argv = ["queue", *self._config_arguments]
        if bound_port is not None:
            host, _ = check_address(self._config.queue.address or "tcp://127.0.0.1:0")
            host = f"[{host}]" if ":" in host else host
            argv += ["--set", f"queue.address=tcp://{host}:{bound_port}"]
        # The server ends with launch. Without a learner it must stay: loading a large model may take hours.
        argv += ["--set", f"experimental.linger_s={_DAY_S}", "--run-id", self._run_id, *self._flags]
        return Command("queue", _python(argv), self._environment(1, {"CUDA_VISIBLE_DEVICES": ""}))

    def learner(self, master_port: int) -> list[Command]:
        """Every rank of the learner. ``master_port`` is the port of the ranks' rendezvous on this machine."""
        world = self._config.learner.nproc
        threads = self._config.learner.num_threads
        devices = {} if self._learner_devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(self._learner_devices)}
        return [
            Command(
                f"learner-{rank}",
                _python(["learner", *self._config_arguments, *self._flags]),
                self._environment(
                    threads,
                    {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "LOCAL_WORLD_SIZE": str(world),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(master_port),
                        **devices,
                    },
                ),
                self._shares[rank],
            )
            for rank in range(world)
        ]

    def generator(self, index: int, address: str, num_restarts: int) -> Command:
        """One generator. A restarted one has a new name, and names the one that it replaces."""
        name = f"generator-{index}"
        identity, dead = (f"{name}-{n}" if n else name for n in (num_restarts, num_restarts - 1))
        size = self._config.generator.tensor_parallel_size
        extra: dict[str, str] = {}
        if self._generator_devices is not None:
            extra["CUDA_VISIBLE_DEVICES"] = ",".join(self._generator_devices[index * size : (index + 1) * size])
        # Each machine decides itself which code may be imported: the config that the queue sends never does.
        allowed = [json.dumps(name, ensure_ascii=False) for name in self._config.generator.allow_code]
        own = ["--set", f"generator.allow_code=[{', '.join(allowed)}]"] if allowed else []
        own += ["--replaces", dead] if num_restarts else []
        argv = _python(["generator", "--connect", address, "--id", identity, *self._generator_flags, *own])
        cores = self._shares[self._config.learner.nproc + index]
        return Command(name, argv, self._environment(self._config.generator.num_threads, extra), cores)

    def _environment(self, num_threads: int | None, extra: Mapping[str, str]) -> dict[str, str]:
        environment = {
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": package_path(self._inherited),
            **extra,
        }
        if num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(num_threads)
        elif "OMP_NUM_THREADS" not in self._inherited:
            environment["OMP_NUM_THREADS"] = str(self._num_threads)
        return environment


def _shares(cores: Sequence[int], num_processes: int) -> list[tuple[int, ...]]:
    """Neighbouring cores for each process, as even as can be, the first ones not the smallest; none if too few."""
    if len(cores) < num_processes:
        return [()] * num_processes
    bounds = [-(-index * len(cores) // num_processes) for index in range(num_processes + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(bounds)]


def _python(arguments: Sequence[str]) -> tuple[str, ...]:
    return module_command("async_rl", *arguments)


def _visible(key: str, devices: Sequence[int] | None, inherited: Mapping[str, str]) -> list[str] | None:
    """Entries of CUDA_VISIBLE_DEVICES for device indices, which count among the devices that this process may use."""
    if devices is None:
        return None
    value = inherited.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [str(device) for device in devices]
    visible = [entry for entry in value.split(",") if entry]
    for device in devices:
        if device not in range(len(visible)):
            raise ConfigError(
                f"{key}: expected indices into the {len(visible)} devices of CUDA_VISIBLE_DEVICES={value!r}, got "
                f"{device}"
            )
    return [visible[device] for device in devices]
