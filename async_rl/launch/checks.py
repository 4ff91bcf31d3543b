"""``CHECKS``: every check of a config before a learner starts, with the earliest moment at which it can be made.

``config`` reads those of the config alone; ``launch`` and its dry run all of them; a ``learner`` that a user starts by
hand those of the learner; and the doctor those about which it has no findings of its own. So a new check is a row.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from async_rl.config.config import Config
from async_rl.data.dataset import Row
from async_rl.data.untrained_rows import untrained_end
from async_rl.errors import UserError
from async_rl.launch import preflight
from async_rl.launch.capacity import check_disk_space, check_memory, memory_warning
from async_rl.launch.device_memory import check_device_memory
from async_rl.launch.scorer_checks import check_relay, check_scorers
from async_rl.launch.user_code_trial import try_loss
from async_rl.learner.mirror.fetch import check_mirror
from async_rl.queue.core.prompts import PromptStream
from async_rl.run.directory import check_writable
from async_rl.run.loggers import check_loggers
from async_rl.run.reuse import check_run_dir, has_ended

logger = logging.getLogger(__name__)

Moment = Literal["config", "files", "machine", "trial"]
"""What a check needs: the config alone, files that it names, this machine, or a trial of the user's code."""


Role = Literal["launch", "learner", "offline", "generator"]
"""What starts: ``launch`` with all its processes, a learner or a generator by hand, or a command such as sft."""
_LEARNERS: tuple[Role, ...] = ("launch", "learner")
_ALL: tuple[Role, ...] = (*_LEARNERS, "offline")


@dataclass(frozen=True)
class Start:
    """What shall start on this machine. ``insecure``: addresses may be open to a network without keys."""

    config: Config
    role: Role = "launch"
    insecure: bool = False

    @property
    def devices_of(self) -> tuple[str, ...]:
        """The sections of the processes with devices that start here."""
        return ("learner", "generator") if self.role == "launch" else ("learner",)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the learner: what ``launch`` starts, or torchrun has started for a learner by hand."""
        return int(os.environ.get("WORLD_SIZE", "1")) if self.role == "learner" else self.config.learner.nproc

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The training rows. Empty if a queue server on another machine reads them.

        Raises:
            UserError: they, or those of an evaluation, can't be loaded.
        """
        is_here = self.role == "launch" or preflight.serves_here(self.config)
        return preflight.check_data(self.config).rows if is_here else ()


class Check(NamedTuple):
    """A check before a start.

    Attributes:
        name: the check's, in the doctor's table.
        moment: the earliest moment at which it can be made.
        roles: for what it is made.
        run: makes it. It raises ``UserError``; a text that it returns is a warning.
    """

    name: str
    moment: Moment
    roles: tuple[Role, ...]
    run: Callable[[Start], object]

    def warning(self, start: Start) -> str:
        """Make the check, and return its warning; empty if there is none.

        Raises:
            UserError: it failed.
        """
        found = self.run(start)
        return found if isinstance(found, str) else ""


def _check_address(start: Start) -> None:
    if start.role == "launch":
        preflight.check_bindable(start.config.queue, insecure=start.insecure)
    elif preflight.serves_here(start.config):
        preflight.check_reachable(start.config.queue, insecure=start.insecure)


CHECKS: tuple[Check, ...] = (
    Check("ranks", "config", _LEARNERS, lambda s: preflight.check_ranks(s.config, s.num_ranks)),
    Check("engine keys", "config", (*_LEARNERS, "generator"), lambda s: preflight.check_engine_keys(s.config)),
    Check("run.dir", "files", _LEARNERS, lambda s: check_writable(Path(s.config.run.dir), "run.dir")),
    Check("queue.address", "machine", _LEARNERS, _check_address),
    Check("weights.port", "machine", _LEARNERS, lambda s: preflight.check_weights_ports(s.config)),
    Check("keys", "files", _LEARNERS, lambda s: preflight.check_keys(s.config, is_server=s.role == "launch")),
    Check("log.to", "machine", _ALL, lambda s: check_loggers(s.config)),
    Check("checkpoint.mirror", "machine", _LEARNERS, lambda s: check_mirror(s.config)),
    Check("devices", "machine", _ALL, lambda s: preflight.check_devices(s.config, *s.devices_of)),
    Check("learner.offload", "machine", _ALL,
          lambda s: preflight.check_offloading(s.config, is_offline=s.role == "offline")),
    Check("engines", "machine", _LEARNERS, lambda s: preflight.check_engines(s.config, *s.devices_of)),
    Check("code", "files", ("launch",), lambda s: preflight.check_code(s.config)),
    Check("data", "files", _LEARNERS, lambda s: s.rows),
    Check("model", "files", _LEARNERS, lambda s: preflight.check_policy(s.config, s.rows)),
    Check("critic", "files", _LEARNERS, lambda s: preflight.check_critic(s.config)),
    Check("parallel", "files", _ALL, lambda s: preflight.check_division(s.config)),
    Check("model.routing_replay", "files", _LEARNERS, lambda s: preflight.check_routing(s.config)),
    Check("compiler", "machine", _ALL, lambda s: preflight.check_compiler(s.config)),
    Check("disk", "machine", _LEARNERS, lambda s: check_disk_space(s.config)),
    Check("memory", "machine", ("launch",), lambda s: check_memory(s.config) or memory_warning(s.config)),
    Check("device memory", "machine", _ALL,
          lambda s: check_device_memory(s.config, s.num_ranks, is_alone=s.role != "launch")),
    Check("sampling.stop_token_ids", "files", _LEARNERS, lambda s: preflight.check_stop_tokens(s.config)),
    Check("lengths", "files", _LEARNERS, lambda s: preflight.check_lengths(s.config, s.rows)),
    Check("tokenizer", "files", _LEARNERS, lambda s: preflight.check_tokenizer(s.config, s.rows)),
    Check("lora.rank", "files", _ALL, lambda s: untrained_end(s.config)),
    Check("sandbox", "machine", ("launch",), lambda s: preflight.check_code_reward(s.config)),
    Check("scorers", "machine", ("launch",), lambda s: check_scorers(s.config, insecure=s.insecure)),
    Check("environment.relay", "machine", ("launch",), lambda s: check_relay(s.config, insecure=s.insecure)),
    Check("judge", "files", ("launch",), lambda s: preflight.check_judge(s.config)),
    Check("experimental.fake", "files", ("launch",), lambda s: preflight.check_fake_vocabulary(s.config)),
    Check("reward", "trial", ("launch",), lambda s: preflight.check_own_reward(s.config, s.rows)),
    Check("environment", "trial", ("launch",), lambda s: preflight.check_own_environment(s.config, s.rows)),
    Check("loss", "trial", _LEARNERS, lambda s: try_loss(s.config)),
)  # fmt: skip
"""In the order in which they are made: what is quick, and what others depend on, comes first."""


def check_launch(config: Config, *, insecure: bool) -> float:
    """Check that ``launch`` can run ``config`` on this machine. The caller has called ``check_run_dir`` before.

    Returns:
        The number of prompts of the training data in all epochs; infinite without ``data.epochs``.

    Raises:
        UserError: a check failed. The later checks are not made.
    """
    start = Start(config, insecure=insecure)
    _make(start)
    return PromptStream.of_config(config, start.rows).most_prompts_left


def check_learner(config: Config, *, fresh: bool, insecure: bool) -> None:
    """Check that a learner which a user starts by hand can run on this machine.

    Nothing is checked if the run is finished, because the learner then only reports that. The data is checked only if
    the queue server is on this machine, because the server reads the data.

    Raises:
        UserError: a check failed. The later checks are not made.
    """
    if fresh or not has_ended(check_run_dir(config, fresh=fresh), config):
        _make(Start(config, "learner", insecure))


def _make(start: Start) -> None:
    for check in CHECKS:
        if start.role in check.roles and (problem := check.warning(start)):
            logger.warning("warning: %s", problem)


def problems_of_config(config: Config) -> list[str]:
    """Return why ``launch`` would refuse ``config`` on any machine."""
    start = Start(config, "offline" if config.is_offline_only else "launch")
    problems: list[str] = []
    for check in CHECKS:
        if check.moment == "config" and start.role in check.roles:
            try:
                check.run(start)
            except UserError as error:
                problems.append(str(error))
    return problems
