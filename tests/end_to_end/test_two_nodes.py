"""Two 'nodes': ranks, whose own names lead to 127.0.1.1, as on Debian and Ubuntu; recipes of docs/many_nodes.md."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.net.keys import make_keys
from tests.end_to_end.conftest import Network
from tests.end_to_end.harness import ROOT, Role, roles, steps, wait_until, write_config
from tests.end_to_end.test_firewall import three_free_ports
from tests.end_to_end.tiny import tiny_config, write_tiny_task

FAKE = {"mean_tokens": 6.0, "step_time_s": 0.1, "vocab_size": 20}
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


@pytest.mark.slow
def test_a_learner_elsewhere_a_new_key_the_order_of_stopping_and_a_queue_that_moves(tmp_path: Path, network: Network):
    keys, elsewhere, port = tmp_path / "keys", tmp_path / "elsewhere", three_free_ports(network.host_address)
    sections = {"data": {"eval": {}}, "generator": {"backend": "fake"}, "experimental": {"fake": FAKE}}
    raw = tiny_config(tmp_path, write_tiny_task(tmp_path), queue={"keys": str(keys)}, **sections)
    config = str(write_config(tmp_path / "config.toml", raw))

    with roles(tmp_path / "logs") as start:

        def start_run(port: int, num_steps: int) -> tuple[Role, Role, Role]:
            of_others = shutil.ignore_patterns("queue.key", "node-b.key", "old.key")
            shutil.copytree(keys, elsewhere, ignore=of_others, dirs_exist_ok=True)
            address = f"tcp://{network.host_address}:{port}"
            at = ("--set", f"queue.address={address}", "--set")
            own = (f"queue.keys={elsewhere}", "--set", "weights.port=5556", "--set", f"learner.steps={num_steps}")
            return (
                start(f"queue-{port}", "queue", config, *at, f"run.dir={tmp_path}/{port}"),
                start(f"learner-{port}", "learner", config, *at, *own, namespace=network.namespace),
                start(f"generator-{port}", "generator", "--connect", address, "--keys", str(keys / "node-b.key")),
            )

        make_keys(keys, ["node-b"])
        queue, learner, old = start_run(port, 10_000)
        wait_until("a step", lambda: steps(tmp_path / "run"), deadline_s=240)
        (keys / "node-b.key").rename(keys / "old.key")
        make_keys(keys, ["node-b"])
        for role, code in ((learner, 143), (queue, 0), (old, 143)):
            role.kill(signal.SIGTERM)
            assert role.wait() == code, role.tail()
        client, _, new = (keys / "allowed.txt").read_text().splitlines()
        (keys / "allowed.txt").write_text(f"{client}\n{new}\n")
        num_steps = steps(tmp_path / "run")[-1] + 3
        for role in start_run(port + 1, num_steps):
            role.succeed()
    assert steps(tmp_path / "run") == list(range(1, num_steps + 1))
