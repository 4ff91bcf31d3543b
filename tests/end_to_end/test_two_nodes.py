"""Two ranks of a learner on two 'nodes', whose own names lead to 127.0.1.1, as on Debian and Ubuntu."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Network
from tests.end_to_end.harness import ROOT

RANK = """
from pathlib import Path
from tests.learner.rank_scenarios import run_scenario
run_scenario("talking", Path({!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [False, True], ids=["by address", "by name"])
def test_ranks_find_each_other_although_their_own_names_lead_nowhere(tmp_path: Path, network: Network, by_name: bool):
    with socket.socket() as probe:
        probe.bind((network.host_address, 0))
        port = probe.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    for rank, namespace in enumerate(([], ["ip", "netns", "exec", network.namespace])):
        hosts = tmp_path / f"hosts{rank}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{rank}\n{network.host_address} node0\n")
        inside = f'hostname node{rank} && mount --bind {hosts} /etc/hosts && exec "$@"'
        command = [*namespace, "unshare", "--mount", "--uts", "sh", "-c", inside, "sh"]
        places = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": "0"}
        master = {"MASTER_ADDR": "node0" if by_name else network.host_address, "MASTER_PORT": str(port)}
        with (tmp_path / f"rank{rank}.log").open("wb") as log:
            program = [sys.executable, "-c", RANK.format(str(tmp_path))]
            environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **places, **master}
            ranks.append(subprocess.Popen([*command, *program], cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        codes = [rank.wait(120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    logs = "\n".join((tmp_path / f"rank{rank}.log").read_text() for rank in range(2))
    assert codes == [0, 0], logs
