"""A whole run that is killed and resumed: TensorBoard has its rows, and Prometheus sees all its processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.end_to_end.harness import metrics, processes_of, roles, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.run.read_loggers import tensorboard_rows
from tests.run.test_prometheus import free_port, scraped

NUM_STEPS = 160


@pytest.mark.slow
def test_a_killed_run_that_goes_on_is_one_run_and_all_its_processes_show_their_figures(tmp_path: Path):
    port = free_port()
    log = {"to": ["tensorboard"], "prometheus_port": port, "rollouts_every": 50}
    raw = tiny_config(
        tmp_path, write_tiny_task(tmp_path), learner={"steps": NUM_STEPS}, checkpoint={"every": 20}, log=log
    )
    config, marker = write_config(tmp_path / "config.toml", raw), f"ASYNC_RL_TEST={tmp_path}"

    def seen() -> dict[str, float] | None:
        try:
            found = {key: value for one in range(3) for key, value in scraped(port + one).items()}
        except OSError:  # not yet
            return None
        wanted = {"learner_step": 6, "queue_groups_total{trained}": 4 * 4, "generator_tokens_total": 1}
        return found if all(found.get(f"async_rl_{key}", 0) >= least for key, least in wanted.items()) else None

    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(config), env={"ASYNC_RL_TEST": str(tmp_path)})
        found = wait_until("figures of a step after a checkpoint", seen, deadline_s=150)
        launch.kill(signal.SIGKILL)
        launch.wait()
        wait_until("an empty process list", lambda: not processes_of(marker), deadline_s=40)
        start("again", "launch", str(config)).succeed()
    assert found["async_rl_queue_generators"] == 1
    assert found["async_rl_learner_version"] == found["async_rl_learner_step"]
    rows, written = tensorboard_rows(tmp_path / "run"), metrics(tmp_path / "run")
    assert {row["step"] for row in written if "version" in row} == set(range(1, NUM_STEPS + 1))
    for row in written:
        for key, value in row.items():
            if value is not None and key not in ("step", "time_s") and not isinstance(value, str):
                assert rows[row["step"]][key] == pytest.approx(value, rel=1e-5), key
    assert {step for step, row in rows.items() if "rollouts" in row} == {*range(1, NUM_STEPS + 1, 50), NUM_STEPS}
    assert not (tmp_path / "run" / "notes.log").exists()
