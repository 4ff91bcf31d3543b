"""``async-rl doctor``: all checks of one config on this machine, in the order of the table. Imports lazily.

The long ones, in processes of their own, begin first and are waited for last; the others run one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.doctor import machine, network, task
from async_rl.doctor.rows import Row
from async_rl.doctor.running import Check, CheckProcess, run_check

_MEET_DEADLINE_S = 60.0
Told = Callable[[str], None]


def visit(
    config: Config, *, connect: str | None, keys_file: Path | None, insecure: bool, deadline_s: float,
    with_parity: bool = True, told: Told = lambda name: None,
) -> list[Row]:  # fmt: skip
    """Every check's rows.

    Args:
        connect: a queue server to ask, as a generator of this machine would.
        deadline_s: for what loads the model.
        told: called with the name of what is waited for.
    """
    plain = config.model_dump(mode="json", exclude_none=True)
    with ExitStack() as stack:

        def begin(name: str, function: str, arguments: dict[str, Any], limit_s: float) -> CheckProcess:
            return stack.enter_context(closing(CheckProcess(name, function, arguments, limit_s)))

        with_config = {"config": plain}
        parity = (
            begin("parity", "async_rl.doctor.engines:check_parity", with_config, deadline_s) if with_parity else None
        )
        reward = begin("reward", "async_rl.doctor.task:check_reward", with_config, deadline_s)
        rows = [row for check in _machine_checks(config) for row in _named(check, told)]
        for check in _network_checks(config, connect, keys_file, insecure=insecure):
            rows += _named(check, told)
        for backend in ("gloo", "nccl") if machine.num_cuda_devices() else ("gloo",):
            told(f"{backend} of two")
            arguments = {"host": _host(config, connect), "backend": backend}
            meeting = begin(f"{backend} of two", "async_rl.doctor.network:meet_two", arguments, _MEET_DEADLINE_S)
            rows += meeting.rows()
        if not machine.num_cuda_devices():
            rows.append(Row("nccl of two", "skip", "no CUDA device here"))
        for check in _task_checks(config, deadline_s):
            rows += _named(check, told)
        told("reward")
        rows += reward.rows()
        if parity is not None:
            told("parity: engine and learner load the model")
            rows += parity.rows()
        return rows


def _named(check: Check, told: Told) -> list[Row]:
    told(check.name)
    return run_check(check)


def _machine_checks(config: Config) -> list[Check]:
    return [
        Check("versions", lambda: machine.check_versions(config)),
        Check("cores", lambda: [machine.threads_row()]),
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
    from async_rl.errors import AddressError

    try:
        return network.weights_host(config, connect)
    except AddressError:  # said by the row of the interface
        return "127.0.0.1"
