"""Real roles in real processes for the end-to-end tests: start them, watch them, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from tests import forked_roles
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_T = TypeVar("_T")


def wait_until(what: str, probe: Callable[[], _T | None], *, deadline_s: float = 90.0) -> _T:
    """The first true value of ``probe``; fails when there is none in time."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = probe()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {deadline_s:.0f} s in vain for {what}")


class Role:
    """One ``async-rl`` process in a session of its own, its output in a file; in a network namespace if given.

    It is forked from ``tests.role_server``, and so are its own roles, unless it ``is_program``: then Python starts it
    with its arguments and environment, as a user does. In a network namespace, or with a library loaded before all
    others, it always is.
    """

    def __init__(
        self,
        name: str,
        *arguments: str,
        log_dir: Path,
        env: Mapping[str, str] | None = None,
        namespace: str = "",
        is_program: bool = False,
    ) -> None:
        self.name, self.arguments, self.log_path = name, arguments, log_dir / f"{name}.log"
        log_dir.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        with self.log_path.open("ab") as log, Path(os.devnull).open("rb") as nothing:
            if namespace or is_program or "LD_PRELOAD" in environment:
                prefix = ("ip", "netns", "exec", namespace) if namespace else ()
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, "-m", "async_rl", *arguments],
                    cwd=ROOT, env=environment, stdin=nothing, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            else:
                self.process = forked_roles.start(
                    arguments, environment=environment, directory=ROOT,
                    stdin=nothing.fileno(), stdout=log.fileno(), stderr=log.fileno(),
                )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)

    def wait(self, deadline_s: float = 240.0) -> int:
        """Its exit code; the test fails with its last lines when it does not end in time."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end in {deadline_s:.0f} s:\n{self.tail()}") from None

    def succeed(self, deadline_s: float = 240.0) -> None:
        code = self.wait(deadline_s)
        assert code == 0, f"{self.name} exited {code}:\n{self.tail()}"

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.splitlines()[-lines:])


@contextlib.contextmanager
def roles(log_dir: Path) -> Iterator[Callable[..., Role]]:
    """Gives ``start(name, *arguments)``; every role started is ended with everything in its session."""
    started: list[Role] = []

    def start(name: str, *arguments: str, **options: Any) -> Role:
        role = Role(name, *arguments, log_dir=log_dir, **options)
        started.append(role)
        return role

    try:
        yield start
    finally:
        for role in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(role.process.pid, signal.SIGKILL)
            role.process.wait(10)


def start_ranks(start: Callable[..., Role], config: Path, world_size: int) -> list[Role]:
    """Ranks of a learner, started by hand."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    return [
        start(f"learner-{rank}", "learner", str(config), env={**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    ]


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    path.write_text(tomli_w.dumps(config), encoding="utf-8")
    return path


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Whole rows of ``metrics.jsonl`` so far."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in whole]


def steps(run_dir: Path) -> list[int]:
    """Steps of the training rows, in order of writing."""
    return [row["step"] for row in metrics(run_dir) if "version" in row]


def queue_address(run_dir: Path) -> str | None:
    try:
        return json.loads((run_dir / "queue.json").read_text())["address"]
    except FileNotFoundError:
        return None


def check_ledger(run_dir: Path) -> dict[str, Any]:
    """The final ledger, its identities worked out here from its own terms."""
    ledger = json.loads((run_dir / "ledger.json").read_text())
    groups = ledger["groups"]
    kept = groups["in_flight"] + groups["queued"] + groups["taken"] + groups["trained"] + groups["filtered"]
    assert groups["issued"] == kept + sum(groups["dropped"].values()), groups
    tokens = ledger["tokens"]
    counted = tokens["trained"] + sum(tokens["masked"].values()) + tokens["filtered"] + sum(tokens["dropped"].values())
    assert tokens["received"] == counted + tokens["queued"] + tokens["taken"], tokens
    return ledger


def launched(directory: Path, config: Mapping[str, Any], *options: str) -> list[dict[str, Any]]:
    """Launch a run to its end. Return the rows of its steps, which are all that the config asks for."""
    with roles(directory / "logs") as start:
        start("launch", "launch", str(write_config(directory / "config.toml", config)), *options).succeed()
    run_dir = Path(config["run"]["dir"])
    check_ledger(run_dir)
    assert steps(run_dir) == list(range(1, config["learner"]["steps"] + 1))
    return [row for row in metrics(run_dir) if "version" in row]


def state_of(pid: int) -> str | None:
    """The kernel's letter for a process's state: T is stopped, Z dead and not waited for; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def processes_of(marker: str) -> list[int]:
    """Living processes whose environment holds ``marker``, forked roles and their forks included."""
    found, mark = list[int](), forked_roles.mark_of(marker)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            files = forked_roles.open_files(int(entry.name))
        except OSError:
            continue  # it ended between the listing and the look
        is_marked = marker.encode() in environment.split(b"\0") or any(mark in file for file in files)
        if is_marked and state_of(int(entry.name)) not in (None, "Z"):
            found.append(int(entry.name))
    return found


def command_lines(marker: str) -> dict[int, list[str]]:
    """The words of the command line of each of ``processes_of(marker)``."""
    found = dict[int, list[str]]()
    for pid in processes_of(marker):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[pid] = forked_roles.command_line(pid)
    return found
