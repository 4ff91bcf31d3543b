"""Generators behind a bad line: packets lost and late, the line cut, connections that only one end still has."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.cable import cable
from tests.end_to_end.conftest import skip_without_namespaces
from tests.end_to_end.faults_harness import Gates, fault_config, judge
from tests.end_to_end.harness import Role, queue_address, roles, steps, wait_until

NUM_ROWS = 120


@pytest.mark.long
@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_lost_and_late_packets_cuts_and_half_open_connections_lose_no_prompt(tmp_path: Path, transport: str):
    skip_without_namespaces()
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("needs /dev/net/tun")
    run_dir = tmp_path / "run"
    with cable() as (network, line), roles(tmp_path / "logs") as start:
        config = fault_config(
            tmp_path, num_rows=NUM_ROWS,
            queue={"address": f"tcp://{network.host_address}:0", "max_staleness": 4},
            weights={"transport": transport, "trusted_network": transport == "gloo", "deadline_s": 20.0},
        )  # fmt: skip
        line.loss, line.delay_s, line.jitter_s = 0.02, 0.04, 0.04

        def num_expired() -> int:
            return json.loads((run_dir / "ledger.json").read_text())["groups"]["dropped"]["expired"]

        def generator(name: str, namespace: str = network.namespace) -> Role:
            return start(name, "generator", "--connect", address, "--insecure", "--id", name, namespace=namespace,
                         env={"ASYNC_RL_FAULTS": str(gates.directory)} if name == "far-0" else None)  # fmt: skip

        def cut_while_it_holds_leases() -> int:
            """Cut the line while ``far-0`` has finished a group and not handed it in; its process, which is stopped."""
            gates.arm("generator.sampled")
            stopped = wait_until("a finished group", lambda: gates.held("generator.sampled"))
            line.is_cut = True
            return stopped

        def reached(step: int) -> None:
            wait_until(f"step {step}", lambda: steps(run_dir)[-1:] >= [step], deadline_s=120.0)

        gates = Gates(tmp_path / "gates")
        learner = start("learner", "learner", str(config), "--insecure")
        address = wait_until("the queue's address", lambda: queue_address(run_dir))
        far = [generator("far-0"), generator("far-1")]
        reached(4)

        cut_while_it_holds_leases()  # its prompts come again, and its answers are refused when the line is back
        gates.release("generator.sampled")
        wait_until("the leases of the cut line to expire", num_expired)
        line.is_cut = False
        wait_until("refused answers", lambda: "the queue did not take lease" in far[0].log)

        expired = num_expired()
        stopped = cut_while_it_holds_leases()  # neither queue server nor learner hears of its end
        os.kill(stopped, signal.SIGKILL)
        far[0].wait()
        near = generator("near", "")
        wait_until("its leases to expire", lambda: num_expired() > expired)
        line.is_cut = False
        again = generator("far-2")

        learner.succeed()
        for role in (far[1], near, again):
            role.succeed()
        assert line.lost > 30
        assert "Traceback" not in learner.log
    print(judge(run_dir, num_rows=NUM_ROWS), f"{line.carried} packets carried, {line.lost} lost")
