"""A run whose roles are killed on purpose, and the judgement of what it trained on.

Roles that were killed are started again by ``tend`` with the same command, as a supervisor would; the queue server is
the learner's to start and to revive, or ``launch``'s. A role that ends by itself before the run is finished fails the
test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from async_rl.net.keys import SECRET_VARIABLE
from tests.end_to_end.harness import (
    Role,
    check_ledger,
    metrics,
    processes_of,
    roles,
    state_of,
    steps,
    wait_until,
    write_config,
)
from tests.end_to_end.tiny import tiny_config, write_tiny_task

Victim = Literal["queue", "learner", "generator"]
POISON = "poison"
GROUPS_PER_STEP = 2
CHECKPOINT_EVERY = 2
LEASE_TIMEOUT_S = 1.5
FAKE = {"mean_tokens": 6.0, "step_time_s": 0.05, "vocab_size": 20, "fails_on": POISON}
"""A group takes 0.3 s."""


def fault_config(directory: Path, *, num_rows: int, poison: Sequence[int] = (), **changes: dict[str, Any]) -> Path:
    """One epoch of ``num_rows`` prompts in file order, so that a position names its row; ``poison`` rows always fail.

    ``learner.steps`` is more than the data allows: the run ends with the data, however few prompts it believes in.
    """
    task = write_tiny_task(directory, num_rows=num_rows, num_eval=2)
    train = Path(task["train"])
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    for position in poison:
        rows[position]["messages"][0]["content"] += POISON
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = tiny_config(
        directory,
        task,
        data={"epochs": 1, "shuffle": False},
        # Prompts are lost by kills again and again: only what always fails may use its attempts up.
        queue={"lease_timeout_s": LEASE_TIMEOUT_S, "max_attempts": 12},
        learner={"steps": num_rows, "groups_per_step": GROUPS_PER_STEP},
        # As fast as the learner: there are always leases in flight, also when a checkpoint is taken.
        generator={"backend": "fake", "batch_size": 4},
        experimental={"fake": FAKE},
        weights={"deadline_s": 5.0},
        checkpoint={"every": CHECKPOINT_EVERY},
        eval={"every": 0},
    )
    for section, keys in changes.items():
        raw.setdefault(section, {}).update(keys)
    return write_config(directory / "config.toml", raw)


class Gates:
    """The fault points' directory: arm one, and see which process is held there."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory

    def arm(self, point: str) -> None:
        (self.directory / point).touch()

    def held(self, point: str) -> int | None:
        """The process that is stopped at ``point``."""
        for claimed in self.directory.glob(f"{point}.*"):
            pid = claimed.suffix.removeprefix(".")
            if pid.isdigit() and state_of(int(pid)) == "T":
                return int(pid)
        return None

    def release(self, point: str) -> None:
        """Let whoever is held there go on, if it lives."""
        for claimed in self.directory.glob(f"{point}.*"):
            claimed.unlink()
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(claimed.suffix.removeprefix(".")), signal.SIGCONT)


class FaultRun:
    """One run in ``directory``; ``marker`` is in the environment of every process of it.

    ``generator_options`` are those of the generators that ``begin`` starts. ``killed_codes`` are the exit codes of a
    role that was killed, or that ends because a process of its own was.
    """

    def __init__(
        self, directory: Path, config: Path, start: Callable[..., Role], num_generators: int = 2,
        generator_options: Sequence[str] = (), killed_codes: Sequence[int] = (-signal.SIGKILL,),
    ) -> None:  # fmt: skip
        self.run_dir, self.gates = directory / "run", Gates(directory / "gates")
        self.marker = f"ASYNC_RL_TEST={directory}"
        self._config, self._start = config, start
        # With the same secret, a generator that begins again takes its id over at once.
        self._environment = {
            "ASYNC_RL_TEST": str(directory), "ASYNC_RL_FAULTS": str(self.gates.directory), SECRET_VARIABLE: "mine"
        }  # fmt: skip
        self._num_generators, self._generator_options = num_generators, generator_options
        self._killed_codes = killed_codes
        self._roles: dict[str, Role] = {}
        self.num_starts = 0

    def begin(self) -> None:
        """Start learner and generators by themselves, and wait for the first step."""
        self._begin_role("learner", "learner", str(self._config))
        wait_until("the queue server", self.tended(self.queue_pid))
        address = json.loads((self.run_dir / "queue.json").read_text())["address"]
        for index in range(self._num_generators):
            chosen = ("--connect", address, "--id", f"generator-{index}", *self._generator_options)
            self._begin_role(f"generator-{index}", "generator", *chosen)
        self.await_step(1)

    def launch(self) -> None:
        """Start all roles by ``async-rl launch``, which keeps them alive, and wait for the first step."""
        self.begin_launch()
        self.await_step(1)

    def begin_launch(self) -> None:
        """Start all roles by ``async-rl launch``, and do not wait."""
        self._begin_role("launch", "launch", str(self._config))

    def await_step(self, step: int) -> None:
        wait_until(f"step {step}", self.tended(lambda: self.last_step() >= step))

    def tend(self) -> None:
        """Start again what was killed. Raises AssertionError: a role ended by itself, and the run is not finished."""
        for name, role in list(self._roles.items()):
            code = role.process.poll()
            if code in self._killed_codes:
                self._begin_role(name, *role.arguments)
            elif code is not None:
                assert (code, self.is_finished) == (0, True), f"{name} exited {code}:\n{role.tail()}"

    def tended(self, probe: Callable[[], Any]) -> Callable[[], Any]:
        """``probe`` that tends the roles first, for ``wait_until``."""

        def tending() -> Any:
            self.tend()
            return probe()

        return tending

    def kill(self, victim: Victim, index: int = 0) -> None:
        """SIGKILL it, as soon as there is one."""
        os.kill(wait_until(f"a {victim} to kill", self.tended(lambda: self.pid_of(victim, index))), signal.SIGKILL)

    def pid_of(self, victim: Victim, index: int = 0) -> int | None:
        """A living process of that role."""
        if victim == "queue":
            return self.queue_pid()
        role = self._roles["learner" if victim == "learner" else f"generator-{index % self._num_generators}"]
        return role.process.pid if role.process.poll() is None else None

    def queue_pid(self) -> int | None:
        """The queue server's process, while it lives."""
        try:
            pid = json.loads((self.run_dir / "queue.json").read_text())["pid"]
        except FileNotFoundError:
            return None
        return pid if state_of(pid) not in (None, "Z") else None

    def hold(self, point: str) -> int:
        """Arm ``point``; the process that was stopped there. Others go on."""
        self.gates.arm(point)
        return wait_until(f"a process at {point}", self.tended(lambda: self.gates.held(point)))

    def kill_at(self, point: str, victim: Victim | None = None, index: int = 0) -> None:
        """Hold a process at ``point`` and kill the victim there: the held one (none named), or another."""
        if victim is not None:
            # The learner may be the one that is held, and it is the learner who would bring the queue server back.
            wait_until(f"a living {victim}", self.tended(lambda: self.pid_of(victim, index)))
        held = self.hold(point)
        if victim is None or point.startswith(victim):
            os.kill(held, signal.SIGKILL)
        else:
            self.kill(victim, index)
        self.gates.release(point)

    def finish(self, deadline_s: float = 120.0) -> None:
        """Wait for the end of every role and of the queue server."""

        def has_ended() -> bool:
            self.tend()
            return self.is_finished and not processes_of(self.marker)

        wait_until("the end of the run", has_ended, deadline_s=deadline_s)

    def ledger(self) -> dict[str, Any]:
        """As the queue server last wrote it."""
        return json.loads((self.run_dir / "ledger.json").read_text())

    @property
    def is_finished(self) -> bool:
        return (self.run_dir / "finished.json").exists()

    def last_step(self) -> int:
        """The last step in the learner's own record; 0 before the first."""
        rows = trained_rows(self.run_dir)
        return rows[-1]["step"] if rows else 0

    def log_of(self, name: str) -> str:
        return self._roles[name].log

    def _begin_role(self, name: str, *arguments: str) -> None:
        self.num_starts += 1
        self._roles[name] = self._start(name, *arguments, env=self._environment)


@contextlib.contextmanager
def fault_run(
    directory: Path, config: Path, num_generators: int = 2, generator_options: Sequence[str] = (),
    killed_codes: Sequence[int] = (-signal.SIGKILL,),
) -> Iterator[FaultRun]:  # fmt: skip
    """A ``FaultRun``; nothing of it is left afterwards."""
    with roles(directory / "logs") as start:
        run = FaultRun(directory, config, start, num_generators, generator_options, killed_codes)
        try:
            yield run
        finally:
            kill_all(run.marker)


def judge(run_dir: Path, *, num_rows: int, poison: Sequence[int] = (), has_eval: bool = True) -> str:
    """Whether every prompt was trained on exactly once, by the learner's own record; a line of what happened.

    Raises:
        AssertionError: it was not, or the metrics or the ledger tell another story.
    """
    rows = trained_rows(run_dir)
    positions = [position for row in rows for position, _ in row["groups"]]
    expected = set(range(num_rows)) - set(poison)
    twice = sorted(p for p in set(positions) if positions.count(p) > 1)
    assert not twice, f"trained twice: {twice}"
    assert set(positions) == expected, f"missing: {expected - set(positions)}, not ours: {set(positions) - expected}"
    lease_ids = [lease_id for row in rows for _, lease_id in row["groups"]]
    assert len(set(lease_ids)) == len(lease_ids)
    num_steps = -(-len(expected) // GROUPS_PER_STEP)  # the last one may be smaller
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert steps(run_dir) == list(range(1, num_steps + 1))
    evals = [row["step"] for row in metrics(run_dir) if "eval/held_out/accuracy" in row]
    assert evals == ([0, num_steps] if has_eval else [])
    ledger = check_ledger(run_dir)
    assert "broken" not in ledger, ledger["broken"]
    groups = ledger["groups"]
    assert (groups["trained"], groups["dropped"]["too_slow"]) == (len(expected), 0)
    assert {entry["position"]: entry["cause"] for entry in ledger["excluded"]} == dict.fromkeys(poison, "poison")
    assert groups["in_flight"] == groups["queued"] == groups["taken"] == 0
    dropped = ", ".join(f"{cause} {count}" for cause, count in groups["dropped"].items() if count)
    lineages = len({row["lineage"] for row in rows})
    return f"{len(positions)} prompts in {num_steps} steps, {lineages} lineages; dropped: {dropped or 'none'}"


def trained_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Whole rows of ``trained.jsonl``: which groups each step trained on, written by the learner after the ack."""
    try:
        *whole, _ = (run_dir / "trained.jsonl").read_text().split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in whole]


def kill_all(marker: str) -> None:
    """End every process of this test, also those that others than the test started."""
    while left := processes_of(marker):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
