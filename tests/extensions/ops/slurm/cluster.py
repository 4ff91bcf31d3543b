"""A Slurm of the test's own: munged, slurmctld and several slurmd on this machine, all of it in one directory.

Needs root and the commands of Debian's slurm-wlm and munge. Nothing of the system is changed: the key, the
configuration, the logs and the state are the test's, and clients find them by ``SLURM_CONF``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.end_to_end.harness import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STOPPED")
NUM_CPUS = 8
"""Processors that each node claims to have. They are this machine's, several times over."""

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={home}/munge.socket,cred_expire={cred_expire_s}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=2,bf_interval=2
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=10
KillWait={kill_wait_s}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """A running cluster with the nodes node1, node2, ...; ``home`` has its files."""

    home: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which Slurm's commands find this cluster."""
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.home / "slurm.conf")}

    def run(self, *command: str, environment: Mapping[str, str] | None = None, is_checked: bool = True) -> str:
        """What a command of Slurm prints."""
        found = subprocess.run(
            command, env={**self.environment, **(environment or {})}, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert not is_checked or found.returncode == 0, f"{command} exited {found.returncode}: {found.stderr}"
        return found.stdout

    def start(self, name: str, *command: str) -> None:
        """Start a daemon in the foreground. Its output goes to NAME.out."""
        with (self.home / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def start_node(self, name: str) -> None:
        self.start(name, "slurmd", "-D", "-N", name, "-f", str(self.home / "slurm.conf"))

    def kill(self, name: str) -> None:
        """Kill a daemon. Of a node, kill all that runs on it, too, as when the machine loses power."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        for pid in _processes_with({"SLURM_CONF": str(self.home / "slurm.conf"), "SLURMD_NODENAME": name}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def states(self, job: str) -> dict[str, str]:
        """The state of each task of ``job`` that Slurm still knows, by its id, such as ``7`` or ``8_0``."""
        lines = self.run("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%i %T", is_checked=False).split("\n")
        return {words[0]: words[1] for words in map(str.split, lines) if len(words) == 2}

    def state(self, job: str) -> str:
        """The state of a job of one task."""
        return self.states(job).get(job, "UNKNOWN")

    def await_state(self, job: str, *wanted: str, deadline_s: float = 240.0) -> None:
        wait_until(f"{job} to be {wanted}", lambda: self.state(job) in wanted, deadline_s=deadline_s)

    def await_end(self, job: str, deadline_s: float = 900.0) -> dict[str, str]:
        """The states of a job's tasks when none is active any more."""
        active = lambda: [state for state in self.states(job).values() if state in ACTIVE]  # noqa: E731
        wait_until(f"the end of job {job}", lambda: not active(), deadline_s=deadline_s)
        return self.states(job)


def skip_without_slurm() -> None:
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing or os.geteuid() != 0:
        reason = f"no {', '.join(missing)}" if missing else "not root"
        pytest.skip(f"a Slurm of its own needs root and Debian's slurm-wlm and munge: {reason}")


@contextlib.contextmanager
def slurm(*, num_nodes: int = 3, cred_expire_s: int = 5, kill_wait_s: int = 30) -> Iterator[Slurm]:
    """Run a cluster. A requeued job starts after ``cred_expire_s`` seconds, instead of two minutes."""
    skip_without_slurm()
    home = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path has at most 108 characters
    home.chmod(0o755)
    ports = _free_ports(num_nodes + 1)
    nodes = "\n".join(
        f"NodeName=node{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={NUM_CPUS}"
        for i, port in enumerate(ports[1:], start=1)
    )
    text = CONFIG.format(
        home=home, host=socket.gethostname(), port=ports[0], nodes=nodes, cred_expire_s=cred_expire_s,
        kill_wait_s=kill_wait_s,
    )  # fmt: skip
    (home / "slurm.conf").write_text(text)
    (home / "state").mkdir()
    key = home / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    cluster = Slurm(home)
    try:
        cluster.start(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={home}/munge.socket",
            f"--pid-file={home}/munged.pid", f"--seed-file={home}/munge.seed",
        )  # fmt: skip
        wait_until("munged", (home / "munge.socket").exists, deadline_s=30)
        cluster.start("slurmctld", "slurmctld", "-D", "-c", "-f", str(home / "slurm.conf"))
        for i in range(1, num_nodes + 1):
            cluster.start_node(f"node{i}")
        idle = lambda: cluster.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", is_checked=False).split()  # noqa: E731
        wait_until("the nodes", lambda: len(idle()) == num_nodes, deadline_s=60)
        yield cluster
    finally:
        _end(cluster)


def _end(cluster: Slurm) -> None:
    """End all jobs and daemons, and whatever is left of them."""
    if "slurmctld" in cluster.daemons and cluster.daemons["slurmctld"].poll() is None:
        cluster.run("scancel", "--user=root", is_checked=False)
        deadline = time.monotonic() + 20
        while cluster.run("squeue", "-h", is_checked=False) and time.monotonic() < deadline:
            time.sleep(0.2)
    for daemon in reversed(cluster.daemons.values()):
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for pid in _processes_with({"SLURM_CONF": str(cluster.home / "slurm.conf")}):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(cluster.home, ignore_errors=True)


def _processes_with(variables: Mapping[str, str]) -> list[int]:
    """Other processes whose environment has ``variables``."""
    found, wanted = list[int](), {f"{name}={value}".encode() for name, value in variables.items()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
