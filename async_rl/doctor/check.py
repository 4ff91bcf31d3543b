"""Run all checks of ``async-rl doctor CONFIG``, and return their findings.

Each check runs in a separate thread or process with a time limit, so that none can hang the doctor. Checks that load
models, run the user's code or connect ranks run in a process, because they may hang, crash the interpreter or keep much
memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

from async_rl.config.config import Config
from async_rl.config.loading import config_data
from async_rl.doctor.findings import Finding
from async_rl.errors import AddressError, AsyncRLError
from async_rl.launch.checks import CHECKS, Moment, Start
from async_rl.launch.checks import Check as StartCheck
from async_rl.output import Report, ignore
from async_rl.process.child import module_command, package_environment

_LAST_LINES = 3
COLLECTIVE_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Check:
    """A check that runs in a thread. ``run`` makes the check and returns the findings. ``deadline_s`` limits its time.

    If ``run`` raises an exception, the finding is a FAIL.
    """

    name: str
    run: Callable[[], Sequence[Finding]]
    deadline_s: float = 15.0


def run_check(check: Check) -> list[Finding]:
    """Run ``check`` in a thread and return its findings.

    Return a FAIL if the check raises an exception, or is still running at its time limit. In that case its thread goes
    on in the background, because a thread can't be killed.
    """
    found: list[Finding] = []

    def work() -> None:
        try:
            found.extend(check.run())
        except AsyncRLError as error:
            found.append(Finding.of_error(check.name, error))
        except Exception as error:  # a check that fails is a finding too
            found.append(
                Finding(
                    check.name,
                    "FAIL",
                    f"{type(error).__name__}: {error}",
                    fix="this is a bug in async-rl or in a package that it calls; please report it with this message",
                )
            )

    thread = threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True)
    thread.start()
    thread.join(check.deadline_s)
    return [_overdue(check.name, check.deadline_s)] if thread.is_alive() else found


def _overdue(name: str, deadline_s: float) -> Finding:
    return Finding(
        name, "FAIL", f"did not end within {deadline_s:g} s",
        fix="look for a file system, a network or a process that does not answer; for data, model, reward and parity "
        "you may also raise --timeout",
    )  # fmt: skip


class CheckProcess:
    """A check that runs in a separate process. The constructor starts the process; ``findings`` waits for its end.

    Args:
        name: the name of the check in the findings.
        function: the function to run, as ``module:function``. It returns findings.
        arguments: the keyword arguments of the function. They must be JSON data.
        deadline_s: seconds after the start at which the process is killed.
    """

    def __init__(self, name: str, function: str, arguments: Mapping[str, Any], deadline_s: float) -> None:
        self._name, self._deadline_s = name, deadline_s
        self._started = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            module_command("async_rl.doctor.check", function), env=package_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        # Smaller than the pipe's buffer, so that a process that never reads can't block this one.
        self._process.stdin.write(json.dumps(arguments).encode())
        self._process.stdin.close()
        self._process.stdin = None

    def findings(self) -> list[Finding]:
        """Wait until the process ends and return its findings.

        Return a FAIL if the process died without findings, or was killed at its time limit.
        """
        left_s = max(0.1, self._started + self._deadline_s - time.monotonic())
        try:
            output, _ = self._process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            return [_overdue(self._name, self._deadline_s)]
        finally:
            self.close()
        try:
            return [Finding.from_plain(plain) for plain in json.loads(output)]
        except ValueError:
            found = f"the process of this check ended with exit code {self._process.returncode}"
            return [
                Finding(
                    self._name, "FAIL", found, fix="see the last lines of its output below", details=self._last_lines()
                )
            ]

    def close(self) -> None:
        """Kill the process of the check and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_lines(self) -> str:
        self._output.seek(0)
        return "\n".join(self._output.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:])


def run_checks(
    config: Config, *, insecure: bool, deadline_s: float, with_parity: bool = True, report: Report = ignore
) -> list[Finding]:
    """Run every check and return the findings, in the order of the table. Of a config for ``sft``, ``rm`` or ``dpo``
    alone only the checks that matter to these commands run.

    The checks of reward and parity take long, so they start first, in separate processes. Their findings come last.

    Args:
        insecure: accept addresses that other machines can reach without keys.
        deadline_s: time limit in seconds of each check that loads data or a model.
        with_parity: compare the log-probabilities of generator and learner, too.
        report: gets what is checked, before the doctor waits for that check.
    """
    from async_rl.doctor import machine
    from async_rl.weights.collective.libraries import collectives

    plain = {"config": config_data(config)}
    found: list[Finding] = []

    def run_all(checks: list[Check]) -> None:
        for check in checks:
            report(f"checking {check.name}")
            found.extend(run_check(check))

    if config.is_offline_only:
        run_all(_offline_checks(config, deadline_s))
        return found

    with ExitStack() as stack:

        def start(name: str, function: str, arguments: dict[str, Any], limit_s: float) -> CheckProcess:
            return stack.enter_context(closing(CheckProcess(name, f"async_rl.doctor.{function}", arguments, limit_s)))

        parity = start("parity", "task:check_parity", plain, deadline_s) if with_parity else None
        reward = start("reward", "task:check_reward", plain, deadline_s)
        run_all(_machine_checks(config, insecure=insecure))
        try:
            host = machine.weights_host(config)
        except AddressError:  # the finding about the interface reports it
            host = "127.0.0.1"
        for backend in collectives(has_cuda=bool(machine.num_cuda_devices())):
            report(f"checking {backend}, two ranks")
            arguments = {"host": host, "backend": backend}
            found += start(
                f"{backend}, two ranks", "machine:check_collective", arguments, COLLECTIVE_DEADLINE_S
            ).findings()
        if not machine.num_cuda_devices():
            found.append(Finding("nccl, two ranks", "skip", "this machine has no CUDA device"))
        run_all(_task_checks(config, deadline_s))
        report("checking reward")
        found += reward.findings()
        if parity is not None:
            report("checking parity: engine and learner load the model")
            found += parity.findings()
    return found


_WITH_FINDINGS = frozenset({
    "run.dir", "queue.address", "weights.port", "keys", "devices", "engines", "code", "data", "model", "disk", "memory",
    "device memory", "lengths", "tokenizer", "sandbox", "judge", "reward", "environment",
})  # fmt: skip
"""Checks of ``launch.checks`` about which the doctor has findings of its own, with what it found."""
_PASSED: Mapping[str, Callable[[Config], str]] = {
    "compiler": lambda c: "" if not c.learner.compile else (
        "there is a compiler for learner.compile; whether it can use Python's headers shows when the learner starts"
    ),
    "critic": lambda c: c.critic.path or "",
    "scorers": lambda c: ", ".join(c.scorer),
    "loss": lambda c: "" if not c.loss.code_names else (
        f"{' and '.join(c.loss.code_names)} gave a made-up batch a finite result that does not depend on its cut"
    ),
}  # fmt: skip
"""What is found if one of the others passes. It has no finding if that is empty."""


def plain_checks(start: Start, *moments: Moment, deadline_s: float = 15.0) -> list[Check]:
    """Return those checks before a start, at these moments, about which the doctor has no findings of its own."""

    def findings(check: StartCheck) -> list[Finding]:
        if problem := check.warning(start):
            return [Finding(check.name, "WARN", problem)]
        found = _PASSED.get(check.name, lambda _: "")(start.config)
        return [Finding(check.name, "OK", found)] if found else []

    rows = (row for row in CHECKS if row.moment in moments and start.role in row.roles)
    return [Check(row.name, partial(findings, row), deadline_s) for row in rows if row.name not in _WITH_FINDINGS]


def _task_checks(config: Config, deadline_s: float) -> list[Check]:
    from async_rl.doctor import task

    return [
        Check("data", lambda: task.check_data(config), deadline_s),
        Check("offline data", lambda: _offline_rows(config), deadline_s),
        Check("model", lambda: task.check_model_files(config), deadline_s),
        Check("lengths", lambda: task.check_prompt_lengths(config), deadline_s),
        *plain_checks(Start(config), "files", "trial", deadline_s=deadline_s),
    ]


def _offline_rows(config: Config) -> list[Finding]:
    if not config.offline_commands:
        return []
    from async_rl.doctor.offline import check_offline_rows  # it loads PyTorch

    return check_offline_rows(config)


def _offline_checks(config: Config, deadline_s: float) -> list[Check]:
    from async_rl.doctor import machine, task

    return [
        Check("versions", lambda: machine.check_versions(config)),
        Check("cores", machine.check_cores),
        Check("devices", lambda: machine.check_cuda(config, "learner"), 60.0),
        *plain_checks(Start(config, "offline"), "machine", "files", deadline_s=60.0),
        Check("device memory", lambda: machine.check_devices_room(config, is_alone=True), 60.0),
        Check("data", lambda: _offline_rows(config), deadline_s),
        Check("model", lambda: task.check_model_files(config), deadline_s),
    ]


def _machine_checks(config: Config, *, insecure: bool) -> list[Check]:
    from async_rl.doctor import machine

    return [
        Check("versions", lambda: machine.check_versions(config)),
        Check("cores", machine.check_cores),
        Check("devices", lambda: machine.check_cuda(config, "learner", "generator"), 60.0),
        *plain_checks(Start(config, insecure=insecure), "config", "machine", deadline_s=60.0),
        Check("disk", lambda: machine.check_disk(config)),
        Check("memory", lambda: machine.check_room_in_memory(config)),
        Check("device memory", lambda: machine.check_devices_room(config), 60.0),
        Check("keys", lambda: machine.check_key_files(config)),
        Check("queue.address", lambda: machine.check_queue_address(config, insecure=insecure), 20.0),
        Check("scorers", lambda: machine.find_scorers(config), 60.0),
        Check("interface", lambda: machine.check_interfaces(config)),
    ]


def _child(function: str) -> None:
    """Run one check in this process, which ``CheckProcess`` has started.

    ``function`` is ``module:function``. Read its arguments as JSON from standard input, and write its findings as JSON
    to standard output. Output that libraries print goes to standard error instead, so that it can't damage the JSON.
    """
    from async_rl.process.child import exit_on_sigterm

    exit_on_sigterm()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    arguments = json.load(sys.stdin)
    found: list[Finding] = []
    check = getattr(importlib.import_module(module), name)
    try:
        found.extend(check(**arguments))
    except AsyncRLError as error:
        found.append(Finding.of_error(arguments.get("check", name), error))
    json.dump([asdict(finding) for finding in found], answer)
    answer.flush()
    # Do not wait for what the check left running, such as an engine's threads.
    os._exit(0)


if __name__ == "__main__":
    _child(sys.argv[1])
