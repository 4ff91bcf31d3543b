"""What shall start, and what a check of it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from async_rl.config.config import Config
from async_rl.data.dataset import LoadedRows, Row
from async_rl.launch.checks.addresses import serves_here
from async_rl.launch.checks.data import TRAIN, load_all_rows
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.prediction import Tokens
from async_rl.learner.cards import Machines

Moment = Literal["config", "files", "machine", "trial", "doctor", "process"]
"""What a check needs: the config alone, files that it names, this machine, or a trial of the user's code.

Those of the last two only the doctor makes, because they take long or only show what is there; the last in a process
of its own, because it may hang, crash the interpreter or keep much memory.
"""
Role = Literal["launch", "learner", "offline", "generator", "plan"]
"""What starts: ``launch`` with all its processes, a learner or a generator by hand, a command such as sft; or nothing,
in a plan for machines that are not here."""


@dataclass(frozen=True)
class Start:
    """What shall start on this machine.

    Attributes:
        insecure: addresses may be open to a network without keys.
        may_run: the run may be at work already, as the doctor looks at it.
        connect: the queue server's address as this machine's generators reach it; None on the learner's machine.
        machines: of a plan.
        tokens: of a plan's step.
    """

    config: Config
    role: Role = "launch"
    insecure: bool = False
    may_run: bool = False
    connect: str | None = None
    machines: Machines | None = None
    tokens: Tokens | None = None

    @property
    def devices_of(self) -> tuple[str, ...]:
        """The sections of the processes with devices that start here."""
        if self.role in ("launch", "plan"):
            return ("learner", "generator")
        return ("generator",) if self.role == "generator" else ("learner",)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the learner: what ``launch`` starts, or torchrun has started for a learner by hand."""
        return int(os.environ.get("WORLD_SIZE", "1")) if self.role == "learner" else self.config.learner.nproc

    @cached_property
    def loaded(self) -> Mapping[str, LoadedRows]:
        """The training set and the evaluation sets, by their keys. Empty if a queue server on another machine reads
        them.

        Raises:
            UserError: one can't be loaded.
        """
        is_here = self.role == "launch" or (self.role != "plan" and serves_here(self.config))
        return load_all_rows(self.config) if is_here else {}

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of the training set among ``loaded``."""
        return self.loaded[TRAIN].rows if self.loaded else ()


class Check(NamedTuple):
    """A check before a start.

    Attributes:
        name: the check's, in the doctor's table.
        moment: the earliest moment at which it can be made, and by whom.
        roles: for what it is made.
        run: makes it and returns its findings, if it has any. It may raise ``UserError`` in place of a FAIL.
        needs: checks without which it can't be made.
    """

    name: str
    moment: Moment
    roles: tuple[Role, ...]
    run: Callable[[Start], Iterable[Finding] | None]
    needs: tuple[str, ...] = ()

    def findings(self, start: Start) -> Iterable[Finding]:
        """Make the check, and return what it finds.

        Raises:
            UserError: it failed.
        """
        return self.run(start) or ()
