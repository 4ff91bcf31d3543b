"""Fleets with a generator that forges, in real processes: the audit finds it and nobody else, and the run goes on."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.end_to_end.harness import check_ledger, metrics, queue_address, roles, wait_until, write_config
from tests.end_to_end.test_roles import start_generator, start_ranks
from tests.end_to_end.tiny import tiny_config, write_tiny_task

FORGERS = Path(__file__).with_name("forgers.py")


def sharpen(model: Path, factor: float) -> None:
    """Make the random model prefer some tokens, as trained models do: a changed token is then an unlikely one."""
    path = model / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"] * factor
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.long
@pytest.mark.parametrize(
    ("forger", "test", "most_groups"),
    [("Biased", "bias", 60), ("Changed", "outliers|size", 40), ("Late", "size", 100), ("Right", "rewards", 40)],
)
def test_a_forger_is_found_and_honest_generators_are_not(tmp_path: Path, forger: str, test: str, most_groups: int):
    task = write_tiny_task(tmp_path)
    # Each version must differ from the one before: no policy learns whether the sum is odd, so every step has a
    # gradient. Answers stay long.
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def odd(item):\n    return (item.finish_reason == 'length') + sum(item.token_ids) % 2 / 2\n")
    sharpen(tmp_path / "model", 4.0 if forger == "Late" else 8.0)
    raw = tiny_config(
        tmp_path, task,
        learner={"steps": 80 if forger == "Late" else 40, "audit": 1.0, "audit_rewards": True},
        sampling={"group_size": 4, "max_new_tokens": 16},
        optimizer={"lr": 1e-3 if forger == "Late" else 1e-6},
        reward={"soft_overlong": False, **({"type": f"{rewards}:odd"} if forger == "Late" else {})},
        generator={"allow_code": [str(rewards)]},
        queue={"max_staleness": 1},
        weights={"parity": "off"},
        experimental={"parity_limit": 0.01},
        checkpoint={"every": 0},
        eval={"every": 0},
    )  # fmt: skip
    config = write_config(tmp_path / "config.toml", raw)
    with roles(tmp_path / "logs") as start:
        start("queue", "queue", str(config))
        address = wait_until("the queue's address", lambda: queue_address(tmp_path / "run"))
        allowed = f'generator.allow_code=["{FORGERS}", "{rewards}"]'
        for name in (forger, "Bfloat16"):
            start_generator(start, name, address, f"generator.backend={FORGERS}:{name}", allowed)
        start_generator(start, "honest", address, allowed)
        (learner,) = start_ranks(start, config, world_size=1)
        learner.succeed()
    found = re.findall(r"generator (\S+) is quarantined: audit \((\w+)\), after (\d+) audited groups", learner.log)
    assert [name for name, _, _ in found] == [forger]
    assert found[0][1] in test.split("|")
    assert int(found[0][2]) <= most_groups
    rows = [row for row in metrics(tmp_path / "run") if "version" in row]
    assert rows[-1]["audit/quarantined"] == 1
    assert sum(row["audit/regraded"] for row in rows) > 0
    check_ledger(tmp_path / "run")


@pytest.mark.long
def test_a_spot_node_that_gets_sigterm_gives_its_leases_back_at_once(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    # An answer takes 240 s, and a lease expires after 600 s: only giving it back ends it.
    raw = tiny_config(
        tmp_path, task,
        generator={"backend": "fake"},
        experimental={"fake": {"mean_tokens": 1e6, "step_time_s": 0.5, "sigma": 0.0}},
        sampling={"max_new_tokens": 480},
        queue={"lease_timeout_s": 600.0},
    )  # fmt: skip
    del raw["data"]["eval"], raw["eval"]
    config = write_config(tmp_path / "config.toml", raw)

    def num_leases() -> int:
        with roles(tmp_path / "logs" / str(time.monotonic_ns())) as start:
            status = start("status", "status", str(tmp_path / "run"), "--json")
            status.succeed()
            return int(json.loads(status.log)["ledger"]["groups"]["in_flight"])

    with roles(tmp_path / "logs") as start:
        start("queue", "queue", str(config))
        address = wait_until("the queue's address", lambda: queue_address(tmp_path / "run"))
        spot = start_generator(start, "spot", address)
        start_ranks(start, config, world_size=1)
        wait_until("its leases", num_leases)
        spot.kill(signal.SIGTERM)
        assert spot.wait(60) == 128 + signal.SIGTERM
        wait_until("no leases", lambda: num_leases() == 0, deadline_s=20)
        start_generator(start, "other", address)
        wait_until("the other's leases", num_leases)
