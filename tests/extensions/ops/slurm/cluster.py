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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.end_to_end.harness import processes_of, wait_until

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
AuthInfo=socket={home}/munge.socket,cred_expire=5
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
KillWait=30
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """A running cluster with the nodes node1, node2, ...; ``home`` has its files."""

    home: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def marker(self) -> str:
        """What all processes of this cluster have in their environment."""
        return f"SLURM_CONF={self.home}/slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which Slurm's commands find this cluster."""
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.home / "slurm.conf")}

    def run(self, *command: str, is_checked: bool = True) -> str:
        """What a command of Slurm prints."""
        found = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert not is_checked or found.returncode == 0, f"{command} exited {found.returncode}: {found.stderr}"
        return found.stdout

    def start(self, name: str, *command: str) -> None:
        """Start a daemon in the foreground. Its output goes to NAME.out."""
        with (self.home / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """Kill a daemon. Of a node, kill all that runs on it, too, as when the machine loses power."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        self.kill_processes(f"SLURMD_NODENAME={name}")

    def processes(self, *variables: str) -> set[int]:
        """Processes of this cluster, whose environment has ``variables``."""
        return set.intersection(*(set(processes_of(one)) for one in (self.marker, *variables)))

    def kill_processes(self, *variables: str) -> None:
        for pid in self.processes(*variables):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def states(self, job: str) -> dict[str, str]:
        """The state of each task of ``job`` that Slurm still knows, by its id, such as ``7`` or ``8_0``."""
        lines = self.run("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%i %T", is_checked=False).split("\n")
        return {words[0]: words[1] for words in map(str.split, lines) if len(words) == 2}

    def await_end(self, job: str, deadline_s: float = 900.0) -> dict[str, str]:
        """The states of a job's tasks when none is active any more."""
        active = lambda: [state for state in self.states(job).values() if state in ACTIVE]  # noqa: E731
        wait_until(f"the end of job {job}", lambda: not active(), deadline_s=deadline_s)
        return self.states(job)


@contextlib.contextmanager
def slurm(num_nodes: int = 3) -> Iterator[Slurm]:
    """Run a cluster. A requeued job starts after 5 seconds, instead of two minutes."""
    if os.geteuid() != 0 or any(shutil.which(program, path=_path()) is None for program in PROGRAMS):
        pytest.skip("a Slurm of its own needs root and Debian's slurm-wlm and munge")
    home = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path has at most 108 characters
    home.chmod(0o755)
    ports = _free_ports(num_nodes + 1)
    nodes = "\n".join(
        f"NodeName=node{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={NUM_CPUS}"
        for i, port in enumerate(ports[1:], start=1)
    )
    text = CONFIG.format(home=home, host=socket.gethostname(), port=ports[0], nodes=nodes)
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
            cluster.start(f"node{i}", "slurmd", "-D", "-N", f"node{i}", "-f", str(home / "slurm.conf"))
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
    cluster.kill_processes()
    shutil.rmtree(cluster.home, ignore_errors=True)


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
