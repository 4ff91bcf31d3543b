"""Run all checks of one config on this machine, in the order of the table.

The long checks, in processes of their own, start first and are collected last; the others run one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.doctor import machine, network, task
from async_rl.doctor.check import Check, CheckProcess, Finding, run_check
from async_rl.errors import AddressError
from async_rl.weights.transport import collectives

_COLLECTIVE_DEADLINE_S = 60.0
OnCheck = Callable[[str], None]


def run_checks(
    config: Config, *, connect: str | None, keys_file: Path | None, insecure: bool, deadline_s: float,
    with_parity: bool = True, on_check: OnCheck = lambda name: None,
) -> list[Finding]:  # fmt: skip
    """Run every check and return the findings.

    Args:
        connect: address of a queue server to check, as a generator of this machine would; None: check instead that
            this machine can bind ``queue.address``.
        deadline_s: limit for each check that loads the model.
        on_check: called with the name of each check before the command waits for it.
    """
    plain = {"config": config.model_dump(mode="json", exclude_none=True)}
    with ExitStack() as stack:

        def start(name: str, function: str, arguments: dict[str, Any], limit_s: float) -> CheckProcess:
            return stack.enter_context(closing(CheckProcess(name, function, arguments, limit_s)))

        parity = start("parity", "async_rl.doctor.task:check_parity", plain, deadline_s) if with_parity else None
        reward = start("reward", "async_rl.doctor.task:check_reward", plain, deadline_s)
        found: list[Finding] = []

        def run_all(checks: list[Check]) -> None:
            for check in checks:
                on_check(check.name)
                found.extend(run_check(check))

        run_all(_machine_checks(config))
        run_all(_network_checks(config, connect, keys_file, insecure=insecure))
        for backend in collectives(has_cuda=bool(machine.num_cuda_devices())):
            on_check(f"{backend} of two")
            arguments = {"host": _host(config, connect), "backend": backend}
            function = "async_rl.doctor.network:check_collective"
            found += start(f"{backend} of two", function, arguments, _COLLECTIVE_DEADLINE_S).findings()
        if not machine.num_cuda_devices():
            found.append(Finding("nccl of two", "skip", "no CUDA device here"))
        run_all(_task_checks(config, deadline_s))
        on_check("reward")
        found += reward.findings()
        if parity is not None:
            on_check("parity: engine and learner load the model")
            found += parity.findings()
        return found


def _machine_checks(config: Config) -> list[Check]:
    return [
        Check("versions", lambda: machine.check_versions(config)),
        Check("cores", machine.check_cores),
        Check("devices", lambda: machine.check_cuda(config), 60.0),
        Check("disk", lambda: machine.check_disk(config)),
        Check("keys", lambda: machine.check_key_files(config)),
    ]


def _task_checks(config: Config, deadline_s: float) -> list[Check]:
    return [
        Check("data", lambda: task.check_data(config), deadline_s),
        Check("model", lambda: task.check_model_files(config), deadline_s),
    ]


def _network_checks(config: Config, connect: str | None, keys_file: Path | None, *, insecure: bool) -> list[Check]:
    checks = [Check("interface", lambda: network.check_interfaces(config, connect))]
    if connect is None:
        return [Check("queue.address", lambda: network.check_queue_address(config, insecure=insecure), 20.0), *checks]
    return [Check("peer", lambda: network.check_peer(connect, keys_file, insecure=insecure), 20.0), *checks]


def _host(config: Config, connect: str | None) -> str:
    try:
        return network.weights_host(config, connect)
    except AddressError:  # the finding about the interface reports it
        return "127.0.0.1"
