"""Ranks as real processes: frames, ticking past the timeout, and the first cause of a failure reaching everyone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.errors import ConfigError
from async_rl.learner.ranks import Place, device_index, init_ranks
from async_rl.process.child import DEVICES_ARE_DEALT
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


def test_a_rank_that_hangs_ends_those_of_its_group_within_the_timeout(tmp_path: Path):
    *others, hanging = start_ranks("group_with_a_silent_rank", tmp_path, world_size=4)
    try:
        ends = finish_ranks(others, timeout_s=60)
    finally:
        hanging.kill()
    assert [code for code, _ in ends] == [1, 1, 1]
    assert "imed out" in ends[2][1], ends[2][1]


def test_no_rank_leaves_the_group_before_the_last_one_is_done(tmp_path: Path):
    run_ranks("leaving", tmp_path)
    assert (tmp_path / "left_1").exists()


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


@pytest.mark.parametrize(
    ("devices", "local_rank", "num_visible", "is_dealt", "expected"),
    [
        (None, 3, 8, False, 3),  # the first devices of the machine
        ((4, 5, 6, 7), 3, 8, False, 7),  # torchrun by hand; Slurm has made all eight visible
        ((4, 5), 1, 2, True, 1),  # launch has made only these two visible
        ((0, 1, 2, 3), 4, 8, False, r"and local rank 4; start 4 ranks \(torchrun --nproc-per-node 4\)"),
        ((4, 5, 6, 7), 0, 4, False, "expected at least 5 visible CUDA devices for rank 0, got 4"),
        (None, 2, 2, False, "expected at least 3 visible CUDA devices for rank 2, got 2"),
        ((4, 5), 1, 1, True, "expected at least 2 visible CUDA devices for rank 1, got 1"),
    ],
)
def test_every_rank_takes_its_own_device_or_says_what_is_missing(
    devices: tuple[int, ...] | None, local_rank: int, num_visible: int, is_dealt: bool, expected: int | str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.delenv(DEVICES_ARE_DEALT, raising=False)
    if is_dealt:
        monkeypatch.setenv(DEVICES_ARE_DEALT, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    place = Place(local_rank, local_rank, 8)
    if isinstance(expected, int):
        assert device_index(devices, place, num_visible) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            device_index(devices, place, num_visible)
