"""Make all checks of ``async-rl doctor CONFIG``, and return their findings.

Each check runs in a separate thread or process with a time limit, so that none can hang the doctor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial

from async_rl.config.config import Config
from async_rl.config.loading import config_data
from async_rl.launch.checks.check_process import CheckProcess, overdue_finding
from async_rl.launch.checks.finding import Finding, made
from async_rl.launch.checks.prediction import on_machines, tokens_of
from async_rl.launch.checks.start import Check, Start
from async_rl.launch.checks.table import NOT_MADE, caught, checks_of, findings_of
from async_rl.learner.cards import Machines
from async_rl.output import Report, ignore

_DEADLINE_S = 60.0
"""Time limit of checks that load neither data nor a model, nor run the user's code."""
_TRIAL_S = 180.0
"""Time limit of trials of the user's code, which have shorter ones of their own and then end their processes."""


def run_in_thread(name: str, check: Callable[[], Iterable[Finding]], deadline_s: float = _DEADLINE_S) -> list[Finding]:
    """Make ``check`` in a thread and return its findings.

    There is a FAIL among them if the check raises an exception. If it is still running at its time limit, that is all:
    its thread goes on in the background, because a thread can't be killed.
    """
    findings: list[Finding] = []

    def work() -> None:
        try:
            findings.extend(made(name, check))
        except Exception as error:  # a check that fails is a finding too
            fix = "this is a bug in async-rl or in a package that it calls; please report it with this message"
            findings.append(Finding(name, "FAIL", f"{type(error).__name__}: {error}", fix=fix))

    thread = threading.Thread(target=work, name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    return [overdue_finding(name, deadline_s)] if thread.is_alive() else findings


def run_checks(
    config: Config, *, insecure: bool, deadline_s: float, with_parity: bool = True, machines: Machines | None = None,
    mean_tokens: float | None = None, report: Report = ignore,
) -> list[Finding]:  # fmt: skip
    """Make every check and return the findings, in the order of the table. Of a config for ``sft``, ``rm`` or ``dpo``
    alone only the checks that matter to these commands are made.

    Args:
        insecure: accept addresses that other machines can reach without keys.
        deadline_s: time limit in seconds of each check that loads data or a model.
        with_parity: compare the log-probabilities of generator and learner, too.
        machines: check for these, which are not here, instead of this one, by sums over the model's config.json.
        mean_tokens: mean length of answers on ``machines``. None: assumed.
        report: gets what is checked, before the doctor waits for that check.

    Raises:
        ConfigError: ``mean_tokens`` is above the limit of answers.
    """
    role = "plan" if machines else "offline" if config.is_offline_only else "launch"
    config = on_machines(config, machines) if machines else config
    tokens = tokens_of(config, mean_tokens) if machines else None
    start = Start(config, role, insecure, may_run=True, machines=machines, tokens=tokens)
    checks = [check for check in checks_of(start, with_doctors=True) if with_parity or check.name != "parity"]
    found = run_table(start, checks, deadline_s=deadline_s, report=report)
    if machines:
        others = [c.name for c in checks_of(Start(config), with_doctors=True) if start.role not in c.roles]
        text = "what needs data, reward or the machines: run `async-rl doctor` there, without --on, for "
        found.append(Finding(NOT_MADE, "skip", text + ", ".join(others)))
    return found


def run_table(start: Start, checks: Sequence[Check], *, deadline_s: float, report: Report) -> list[Finding]:
    """Make ``checks`` of ``start`` and return the findings. Those in processes of their own begin first, because they
    take long.
    """
    with ExitStack() as stack:
        plain = {"config": config_data(start.config), "role": start.role, "insecure": start.insecure}

        def process_of(check: Check) -> CheckProcess:
            given = {"name": check.name, "connect": start.connect, **plain}
            process = CheckProcess(check.name, "async_rl.launch.checks.table:make_alone", given, deadline_s)
            return stack.enter_context(closing(process))

        processes = {check.name: process_of(check) for check in checks if check.moment == "process"}

        def make(check: Check) -> list[Finding]:
            report(f"checking {check.name}")
            if check.moment == "process":
                return processes[check.name].findings()
            limits = {"config": _DEADLINE_S, "machine": _DEADLINE_S, "trial": _TRIAL_S}
            return run_in_thread(check.name, partial(caught, check, start), limits.get(check.moment, deadline_s))

        return list(findings_of(checks, make))
