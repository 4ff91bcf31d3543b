"""Ranks as real processes: frames, ticking past the timeout, and the first cause of a failure reaching everyone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.errors import ConfigError
from async_rl.learner.engine.ranks import Place, init_ranks
from tests.learner.ranks import finish_ranks, run_ranks, start_ranks
from tests.learner.tiny import tiny_config


def test_frames_go_out_and_back_and_ticks_outlast_the_timeout(tmp_path: Path):
    # Rank 0 waits 2.5 s under a timeout of 2 s.
    run_ranks("talking", tmp_path, world_size=3)


def test_an_error_on_another_rank_stops_rank_0_with_its_cause(tmp_path: Path):
    (leader_code, leader), (follower_code, follower) = finish_ranks(start_ranks("follower_fails", tmp_path))
    assert leader_code == follower_code == 1
    assert "TrainingError: rank 1, update: ValueError: no memory left on device 1" in leader
    assert "ValueError: no memory left on device 1" in follower


def test_the_death_of_another_rank_stops_rank_0_long_before_the_timeout(tmp_path: Path):
    (leader_code, leader), (follower_code, _) = finish_ranks(start_ranks("follower_is_killed", tmp_path), timeout_s=50)
    assert (leader_code, follower_code) == (1, -9)
    assert "RuntimeError" in leader or "DistBackendError" in leader


def test_a_process_without_torchrun_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    ranks = init_ranks(tiny_config(tmp_path, "model"))
    assert (ranks.rank, ranks.world_size, ranks.is_leader, ranks.has_group) == (0, 1, True, False)
    assert ranks.scatter([b"frame"]) == b"frame"
    assert ranks.gather(b"frame") == [b"frame"]
    ranks.close()


def test_a_deterministic_learner_fixes_its_kernels_and_computes_with_one_thread_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    sections = {"sampling": {"deterministic": True}, "generator": {"backend": "transformers"}}
    before = torch.get_num_threads()
    try:
        init_ranks(tiny_config(tmp_path, "model", **sections))
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
        init_ranks(tiny_config(tmp_path, "model", **sections, learner={"num_threads": 2}))
        assert torch.get_num_threads() == 2
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


@pytest.mark.parametrize("environment", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "one"}])
def test_a_malformed_environment_is_refused(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun"):
        Place.from_environment()


def test_an_error_of_a_rank_alone_is_raised_as_it_is(tmp_path: Path):
    ranks = init_ranks(tiny_config(tmp_path, "model"))
    with pytest.raises(ZeroDivisionError), ranks.together("update"):
        raise ZeroDivisionError
