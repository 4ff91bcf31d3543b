"""The whole system in separate processes: two learner ranks, generators that die and join, resume after SIGKILL."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.harness import (
    Role,
    check_ledger,
    metrics,
    queue_address,
    roles,
    steps,
    wait_until,
    write_config,
)
from tests.end_to_end.tiny import tiny_config, write_tiny_task

Start = Callable[..., Role]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(start: Start, config: Path, world_size: int) -> list[Role]:
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    return [
        start(f"learner-{rank}", "learner", str(config), env={**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    ]


def start_generator(start: Start, name: str, address: str, *overrides: str) -> Role:
    settings = [word for item in overrides for word in ("--set", item)]
    return start(name, "generator", "--connect", address, "--id", name, *settings)


@pytest.mark.slow
def test_two_ranks_train_while_generators_die_and_join(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    raw = tiny_config(tmp_path, task, learner={"steps": 12}, queue={"lease_timeout_s": 3.0})
    config = write_config(tmp_path / "config.toml", raw)
    run_dir = tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        start("queue", "queue", str(config))
        address = wait_until("the queue's address", lambda: queue_address(run_dir))
        ranks = start_ranks(start, config, world_size=2)
        first = start_generator(start, "first", address)
        victim = start_generator(start, "victim", address)
        wait_until("two steps", lambda: len(steps(run_dir)) >= 2, deadline_s=150)
        victim.kill(signal.SIGKILL)
        late = start_generator(start, "late", address)
        for role in (*ranks, first, late):
            role.succeed()
        for step in range(1, 13):
            assert [rank.log.count(f" step {step}/12 | reward ") for rank in ranks] == [1, 0]
        assert f"async-rl status {run_dir}" in ranks[0].log
    assert steps(run_dir) == list(range(1, 13))
    ledger = check_ledger(run_dir)
    assert ledger["groups"]["trained"] == 12 * 4
    assert ledger["groups"]["in_flight"] == ledger["groups"]["queued"] == ledger["groups"]["taken"] == 0
    rows = [row for row in metrics(run_dir) if "version" in row]
    assert max(row["staleness/max"] for row in rows) <= 2
    assert [row["step"] for row in metrics(run_dir) if "eval/held_out/accuracy" in row] == [0, 3, 6, 9, 12]
    eval_rows = {row["step"]: row for row in metrics(run_dir) if "eval/held_out/accuracy" in row}
    assert eval_rows[0]["eval/held_out/version_max"] == 0
    assert eval_rows[12]["eval/held_out/version_min"] == rows[-1]["version"]


@pytest.mark.slow
def test_a_killed_learner_resumes_at_its_checkpoint(tmp_path: Path):
    task = write_tiny_task(tmp_path)
    config = write_config(tmp_path / "config.toml", tiny_config(tmp_path, task, learner={"steps": 8}))
    run_dir = tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        start("queue", "queue", str(config))
        address = wait_until("the queue's address", lambda: queue_address(run_dir))
        (learner,) = start_ranks(start, config, world_size=1)
        generator = start_generator(start, "generator", address)
        latest = run_dir / "checkpoints" / "latest"
        wait_until("a checkpoint", latest.exists, deadline_s=150)
        learner.kill(signal.SIGKILL)
        learner.wait()
        (again,) = start_ranks(start, config, world_size=1)
        again.succeed()
        generator.succeed()
        assert "resuming from" in again.log
    assert steps(run_dir) == list(range(1, 9))
    assert check_ledger(run_dir)["groups"]["trained"] == 8 * 4
    finished = json.loads((run_dir / "finished.json").read_text())
    assert finished["step"] == 8
    assert (run_dir / "export" / "model.safetensors").exists()


@pytest.mark.slow
def test_an_exported_run_loads_as_a_hugging_face_model(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    from async_rl.data.chat import load_tokenizer

    task = write_tiny_task(tmp_path)
    config = write_config(tmp_path / "config.toml", tiny_config(tmp_path, task, learner={"steps": 2}))
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
        start("export", "export", str(tmp_path / "run"), str(tmp_path / "exported")).succeed()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert model.config.model_type == "qwen2"
    assert load_tokenizer(tmp_path / "exported").chat_template
