"""``CHECKS``: every check of a config before a start, with the earliest moment at which it can be made.

``config`` makes those of the config alone; ``launch`` and its dry run all but the doctor's own; a ``learner`` that a
user starts by hand those of the learner; and the doctor all of them. So a new check is a row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.document import preset_line
from async_rl.config.extension import check_extension_settings
from async_rl.config.loading import parse_config
from async_rl.data.untrained_rows import untrained_end
from async_rl.errors import RunError
from async_rl.launch.checks import addresses, data, machine, models, rewards, settings
from async_rl.launch.checks.capacity import check_disk, check_memory, find_size
from async_rl.launch.checks.device_memory import check_device_memory
from async_rl.launch.checks.extensions import find_packages
from async_rl.launch.checks.finding import Finding, made, warnings
from async_rl.launch.checks.prediction import find_prediction
from async_rl.launch.checks.start import Check, Role, Start
from async_rl.launch.checks.user_code_trial import try_loss
from async_rl.learner.checkpoints.mirror import mirror_of
from async_rl.queue.core.prompts import PromptStream
from async_rl.registry import find_offer, load
from async_rl.run.directory import check_writable
from async_rl.run.following.sinks import check_sinks
from async_rl.run.reuse import check_run_dir, has_ended

logger = logging.getLogger(__name__)

NOT_MADE = "not checked"
"""The name of the finding about checks that were not made."""

_LAUNCH: tuple[Role, ...] = ("launch",)
_LEARNERS: tuple[Role, ...] = ("launch", "learner")
_TRAINERS: tuple[Role, ...] = (*_LEARNERS, "offline")
_ALL: tuple[Role, ...] = (*_TRAINERS, "generator")
_PLANS: tuple[Role, ...] = (*_LAUNCH, "plan")


def _check_address(start: Start) -> Iterable[Finding]:
    if start.role == "launch":
        return addresses.check_queue_address(start.config, insecure=start.insecure, may_run=start.may_run)
    if addresses.serves_here(start.config):
        addresses.check_reachable(start.config.queue, insecure=start.insecure)
    return ()


def _mirror(start: Start) -> Iterable[Finding]:
    mirror = mirror_of(start.config)
    return () if mirror is None else warnings("checkpoint.mirror", mirror.check(start.config))


OfferedCheck = Callable[[Start], Iterable[Finding]]
"""What is offered of the kind ``async_rl.checks``. It may raise ``UserError`` in place of a FAIL."""


def _offered(name: str, start: Start) -> Iterable[Finding]:
    """Make the check that an extension offers as ``name``."""
    if offer := find_offer("async_rl.checks", name):
        run: OfferedCheck = load(offer)
        return run(start)
    return [Finding(name, "skip", "no extension offers this check")]


def _parity(start: Start) -> Iterable[Finding]:
    from async_rl.launch.checks.parity import check_parity  # it loads PyTorch

    return check_parity(start.config, start.rows)


def _environment(start: Start) -> Iterable[Finding]:
    if start.config.has_agents:
        return _offered("agents", start)
    return rewards.try_own_environment(start.config, start.rows)


CHECKS: tuple[Check, ...] = (
    Check("versions", "doctor", _ALL, lambda s: machine.check_versions()),
    Check("packages", "doctor", _ALL, lambda s: find_packages()),
    Check("cores", "doctor", _ALL, lambda s: machine.find_cores()),
    Check("ranks", "config", (*_LEARNERS, "plan"), lambda s: settings.check_ranks(s.config, s.num_ranks)),
    Check("engine keys", "config", (*_LEARNERS, "generator", "plan"), lambda s: settings.check_engine_keys(s.config)),
    Check("extension", "config", (*_TRAINERS, "plan"), lambda s: check_extension_settings(s.config)),
    Check("run.dir", "files", _LEARNERS, lambda s: check_writable(Path(s.config.run.dir), "run.dir")),
    Check("queue.address", "machine", _LEARNERS, _check_address),
    Check("weights.port", "machine", _LEARNERS, lambda s: addresses.check_weights_ports(s.config)),
    Check("keys", "files", _LEARNERS, lambda s: addresses.check_keys(s.config, is_server=s.role == "launch")),
    Check("interface", "doctor", ("launch", "generator"),
          lambda s: addresses.check_interfaces(s.config, s.connect)),
    Check("log.to", "machine", _TRAINERS, lambda s: check_sinks(s.config)),
    Check("checkpoint.mirror", "machine", _LEARNERS, _mirror),
    Check("devices", "machine", _ALL, lambda s: machine.check_devices(s.config, *s.devices_of)),
    Check("all devices", "doctor", _ALL, machine.find_devices, needs=("devices",)),
    Check("learner.offload", "machine", _TRAINERS,
          lambda s: settings.check_offloading(s.config, is_offline=s.role == "offline")),
    Check("engines", "machine", (*_LEARNERS, "generator"), machine.check_engines),
    Check("generator.engine", "machine", (*_LEARNERS, "generator"), lambda s: machine.check_engine_arguments(s.config)),
    Check("code", "files", _LAUNCH, lambda s: rewards.check_code(s.config)),
    Check("data", "files", _LEARNERS, lambda s: data.describe_rows(s.loaded, s.config.data.source)),
    Check("offline data", "doctor", ("launch", "offline"),
          lambda s: _offered("offline", s) if s.config.offline_commands else ()),
    Check("model", "files", (*_TRAINERS, "plan"),
          lambda s: find_size(s.config) if s.role == "plan" else models.check_policy(s.config)),
    Check("critic", "files", _LEARNERS, lambda s: models.check_critic(s.config)),
    Check("parallel", "files", (*_TRAINERS, "plan"), lambda s: settings.check_division(s.config), needs=("model",)),
    Check("routers", "files", _LEARNERS, lambda s: settings.check_routing(s.config), needs=("model",)),
    Check("compiler", "machine", _TRAINERS, lambda s: machine.check_compiler(s.config)),
    Check("model.attention", "machine", _TRAINERS, lambda s: machine.check_attention(s.config), needs=("devices",)),
    Check("disk", "machine", _LEARNERS, lambda s: check_disk(s.config), needs=("run.dir", "model")),
    Check("temporary files", "doctor", ("generator",), lambda s: machine.check_scratch()),
    Check("memory", "machine", _PLANS, lambda s: check_memory(s.config, s.machines), needs=("model",)),
    Check("device memory", "machine", (*_TRAINERS, "plan"),
          lambda s: check_device_memory(
              s.config, s.num_ranks, is_alone=s.role not in _PLANS, machines=s.machines
          ),
          needs=("ranks", "devices", "model")),
    Check("prediction", "doctor", ("plan",),
          lambda s: find_prediction(s.config, s.machines, s.tokens) if s.machines and s.tokens else (),
          needs=("ranks", "parallel")),
    Check("template", "files", _LEARNERS, lambda s: models.check_template(s.config, s.rows), needs=("data", "model")),
    Check("sampling.stop_token_ids", "files", _LEARNERS, lambda s: settings.check_stop_tokens(s.config),
          needs=("model",)),
    Check("lengths", "files", (*_LEARNERS, "plan"), lambda s: data.check_lengths(s.config, s.rows),
          needs=("model", "data", "template")),
    Check("loss.preset", "doctor", _LAUNCH,
          lambda s: [Finding("loss.preset", "OK", line)] if (line := preset_line(s.config)) else []),
    Check("age of data", "doctor", _LAUNCH, lambda s: [settings.find_age(s.config)]),
    Check("queue.max_bytes", "doctor", _LAUNCH, lambda s: data.check_queue_bytes(s.config), needs=("lengths",)),
    Check("tokenizer", "files", _LEARNERS, lambda s: data.check_tokenizer(s.config, s.rows), needs=("template",)),
    Check("special tokens", "doctor", _LAUNCH, lambda s: data.find_spellings(s.config, s.rows), needs=("template",)),
    Check("end of turn", "doctor", ("launch", "offline"), lambda s: models.find_turn_ends(s.config),
          needs=("model", "template")),
    Check("first prompt", "doctor", _LAUNCH, lambda s: data.show_first_prompt(s.config, s.rows), needs=("template",)),
    Check("lora.rank", "files", _TRAINERS, lambda s: warnings("lora.rank", untrained_end(s.config)), needs=("model",)),
    Check("sandbox", "machine", _LAUNCH,
          lambda s: _offered("sandbox", s) if s.config.reward.runs_programs else ()),
    Check("scorers", "machine", _LAUNCH, lambda s: models.check_scorers(s.config, insecure=s.insecure)),
    Check("scorers elsewhere", "doctor", _LAUNCH, lambda s: addresses.scorers_away(s.config)),
    Check("environment.relay", "machine", _LAUNCH,
          lambda s: () if s.config.environment.relay is None else _offered("relay", s)),
    Check("judge", "files", _LAUNCH, lambda s: rewards.check_judge(s.config)),
    Check("own reward", "trial", _LAUNCH, lambda s: rewards.try_own_reward(s.config, s.rows), needs=("data", "code")),
    Check("environment", "trial", _LAUNCH, _environment, needs=("data", "code")),
    Check("loss", "trial", _LEARNERS, lambda s: try_loss(s.config)),
    Check("two ranks", "process", ("launch", "generator"), machine.check_two_ranks, needs=("interface",)),
    Check("reward", "process", _LAUNCH, lambda s: rewards.grade_first_rows(s.config, s.rows),
          needs=("data", "code", "sandbox", "judge", "own reward")),
    Check("parity", "process", _LAUNCH, _parity, needs=("data", "template")),
)  # fmt: skip
"""In the order in which they are made: what is quick, and what others depend on, comes first."""


def checks_of(start: Start, *, with_doctors: bool) -> list[Check]:
    """Return the checks that are made of ``start``, those of the doctor alone only ``with_doctors``."""
    return [c for c in CHECKS if start.role in c.roles and (with_doctors or c.moment not in ("doctor", "process"))]


def findings_of(checks: Iterable[Check], make: Callable[[Check], Iterable[Finding]]) -> Iterator[Finding]:
    """Make ``checks`` by ``make``, and yield what they find; at last the checks that were not made, because what they
    need failed.
    """
    failed: set[str] = set()
    skipped: list[str] = []
    for check in checks:
        if not failed.union(skipped).isdisjoint(check.needs):
            skipped.append(check.name)
            continue
        for finding in make(check):
            if finding.state == "FAIL":
                failed.add(check.name)
            yield finding
    if skipped:
        yield Finding(NOT_MADE, "skip", f"{', '.join(skipped)}: they need what failed")


def caught(check: Check, start: Start) -> list[Finding]:
    """Make ``check``. An error is a FAIL."""
    return made(check.name, lambda: check.findings(start))


def make_alone(name: str, config: dict[str, Any], role: Role, insecure: bool, connect: str | None) -> list[Finding]:
    """Make the check ``name``, of a config as JSON data, in a process of its own."""
    start = Start(parse_config(config, "the doctor's config"), role, insecure, connect=connect)
    return [finding for check in CHECKS if check.name == name for finding in caught(check, start)]


def check_launch(config: Config, *, insecure: bool) -> float:
    """Check that ``launch`` can run ``config`` on this machine. The caller has called ``check_run_dir`` before.

    Returns:
        The number of prompts of the training data in all epochs; infinite without ``data.epochs``.

    Raises:
        UserError: a check failed. The later checks are not made.
    """
    start = Start(config, insecure=insecure)
    _make(start)
    return math.inf if config.data.source else PromptStream.of_config(config, start.rows).most_prompts_left


def check_learner(config: Config, *, fresh: bool, insecure: bool) -> None:
    """Check that a learner which a user starts by hand can run on this machine.

    Nothing is checked if the run is finished, because the learner then only reports that. The data is checked only if
    the queue server is on this machine, because the server reads the data.

    Raises:
        UserError: a check failed. The later checks are not made.
    """
    if fresh or not has_ended(check_run_dir(config, fresh=fresh), config):
        _make(Start(config, "learner", insecure))


def check_queue(config: Config) -> None:
    """Check that a queue server has training data and a run directory that can be written.

    The server itself checks the content of the data and its address before it writes a file.

    Raises:
        UserError: a check failed. The later checks are not made.
    """
    data.check_train_is_set(config)
    check_writable(check_run_dir(config, fresh=False).path, "run.dir")


def _make(start: Start) -> None:
    for check in checks_of(start, with_doctors=False):
        for problem in _failures(check.findings(start)):
            raise RunError(problem)


def _failures(findings: Iterable[Finding]) -> Iterator[str]:
    """Log the warnings among ``findings``, and yield the messages of the failures."""
    for finding in findings:
        if finding.state == "FAIL":
            yield finding.message
        elif finding.state == "WARN":
            logger.warning("warning: %s", finding.message)


def launch_problems(config: Config, *, insecure: bool) -> list[str]:
    """Make all checks of ``launch``, log the warnings, and return why it would refuse ``config``."""
    start = Start(config, insecure=insecure)
    checks = checks_of(start, with_doctors=False)
    return list(_failures(findings_of(checks, lambda check: caught(check, start))))


def problems_of_config(config: Config) -> list[str]:
    """Return why ``launch`` would refuse ``config`` on any machine."""
    start = Start(config, "offline" if config.is_offline_only else "launch")
    checks = [check for check in checks_of(start, with_doctors=False) if check.moment == "config"]
    return [finding.message for check in checks for finding in caught(check, start)]
