"""What a step writes down: sampled rollouts as text, and the times that its clock measures."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.learner.loop import recorder
from async_rl.learner.loop.recorder import StepClock, WaitLog, log_rollouts
from async_rl.queue.messages import Decoded, GeneratorStats, TakenGroup
from tests.generator.leases import make_lease
from tests.queue.builders import group, make_config

NUM_GROUPS = 6


def logged(directory: Path, *, step: int = 1, seed: int = 0, masked: bool = False, **log: Any) -> list[dict[str, Any]]:
    lease = make_lease()
    taken = [
        TakenGroup(group(make_lease(str(i)), version=2 + i), lease.prompt, 0.0, 0, masked) for i in range(NUM_GROUPS)
    ]
    config = make_config(str(directory), run={"seed": seed}, log=log, learner={"steps": 6})
    log_rollouts(directory, taken, step=step, version=9, config=config, decode=lambda ids: " ".join(map(str, ids)))
    path = directory / "rollouts" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def groups_in(lines: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(line["lease_id"] for line in lines))


def test_a_line_tells_text_reward_parts_and_versions_and_whose_it_is(tmp_path: Path):
    first, second, *_ = logged(tmp_path, rollouts_groups="all")
    assert first == {
        "position": 0, "lease_id": "0", "generator": "g0", "trained_at": 9, "masked": False, "temperature": 1.0,
        "index": 0, "row": 0, "messages": [{"role": "user", "content": "1+1"}], "response": "2 3 4", "extracted": None,
        "expected": "2",
        "accuracy": 1.0, "reward": 1.0, "reward_parts": {"correct": 1.0}, "finish_reason": "stop", "num_tokens": 3,
        "versions": [2, 2],
    }  # fmt: skip
    assert (second["index"], second["lease_id"], second["accuracy"]) == (1, "0", 0.0)
    assert logged(tmp_path / "masked", masked=True)[0]["masked"]


def test_all_groups_are_written_in_their_order(tmp_path: Path):
    for name, groups in (("all", "all"), ("many", 100)):
        lines = logged(tmp_path / name, rollouts_groups=groups)
        assert groups_in(lines) == [str(i) for i in range(NUM_GROUPS)]
        assert len(lines) == 2 * NUM_GROUPS


def test_some_groups_are_drawn_by_seed_and_step(tmp_path: Path):
    draws = {
        (seed, step): groups_in(logged(tmp_path / f"{seed}-{step}", seed=seed, step=step, rollouts_every=1))
        for seed in range(2) for step in range(1, 13)
    }  # fmt: skip
    assert all(len(draw) == 2 and draw == sorted(draw) for draw in draws.values())
    assert {name for draw in draws.values() for name in draw} == {str(i) for i in range(NUM_GROUPS)}
    assert groups_in(logged(tmp_path / "again", seed=1, step=5, rollouts_every=1)) == draws[1, 5]
    assert [draws[0, step] for step in range(1, 13)] != [draws[1, step] for step in range(1, 13)]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (2, [1, 3, 5, 6]), (5, [1, 6]), (0, [])])
def test_every_so_many_steps_are_written_from_the_first_on_and_the_last(tmp_path: Path, every: int, steps: list[int]):
    for step in range(1, 7):
        logged(tmp_path, step=step, rollouts_every=every)
    written = sorted(path.name for path in tmp_path.glob("rollouts/*"))
    assert written == [f"step-{step:06d}.jsonl" for step in steps]


ALIVE = ("g0",)


def test_generator_figures_are_differences_between_laps():
    clock = StepClock(elapsed_s=100.0)
    clock.lap(
        GeneratorStats(max_running=4, wall_s=10, busy_s=8, busy_sequence_s=20, num_tokens=100),
        alive_generators=ALIVE,
        trained_tokens=10,
    )
    row = clock.lap(
        GeneratorStats(
            max_running=4, wall_s=20, busy_s=17, busy_sequence_s=28, num_tokens=150, pause_s=0.3, num_activations=3
        ),
        alive_generators=ALIVE,
        trained_tokens=10,
    )
    # Busy 9 of 10 s; 8 sequence-seconds of 4 slots: a fifth of the step; 50 tokens in 10 s; 0.3 s over 3 pauses.
    assert abs(row["idle/generators"] - 0.1) < 1e-9
    assert abs(row["time/generate_s"] / row["time/step_s"] - 0.2) < 1e-9
    assert abs(row["throughput/generated_tokens_per_s"] - 5.0) < 1e-9
    assert abs(row["time/pause_s"] - 0.1) < 1e-9
    assert row["time_s"] >= 100.0


@pytest.mark.parametrize(
    ("sequence_s", "spare"),
    [
        (0.0, 0.75),  # a step of 8 takes as long as one of 2, so a quarter of the time would do
        (0.01, 0.625),  # 0.10 + 0.08 instead of 0.10 + 0.02 s: 0.25 * 0.18 / 0.12 = 0.375 of the time
    ],
)
def test_generators_have_to_spare_what_full_batches_would_save(sequence_s: float, spare: float):
    def decoded(running: int, num_steps: int) -> Decoded:
        busy_s = num_steps * (0.1 + sequence_s * running)
        return Decoded(busy_s, busy_s * running, num_steps * running)

    clock = StepClock(elapsed_s=0.0)
    first, later = decoded(4, 100), decoded(2, 100)
    before = GeneratorStats(
        max_running=16, wall_s=100, busy_s=first.busy_s, busy_sequence_s=first.busy_sequence_s,
        decoded=(Decoded(), Decoded(), first),
    )  # fmt: skip
    wall_s = later.busy_s  # of two generators together, both busy all the time
    after = GeneratorStats(
        max_running=16, wall_s=100 + wall_s, busy_s=first.busy_s + later.busy_s,
        busy_sequence_s=first.busy_sequence_s + later.busy_sequence_s, decoded=(Decoded(), later, first),
    )  # fmt: skip
    clock.lap(before, alive_generators=("a", "b"), trained_tokens=0)
    row = clock.lap(after, alive_generators=("a", "b"), trained_tokens=0)
    assert row["idle/spare"] == pytest.approx(spare)


def test_generators_that_sampled_nothing_have_all_their_time_to_spare():
    """Where the fitted line has no part that all steps share, a decode step of no sequence takes no time."""
    clock = StepClock(elapsed_s=0.0)
    decoded = (Decoded(), Decoded(1.0, 2.0, 20), Decoded(9.0, 36.0, 90))  # 0.1 s for two, 0.4 s for four
    for wall_s in (100, 110):
        stats = GeneratorStats(
            max_running=8, wall_s=wall_s, busy_s=10.0, busy_sequence_s=38.0, num_tokens=110, decoded=decoded
        )
        row = clock.lap(stats, alive_generators=ALIVE, trained_tokens=0)
    assert row["time/decode_step_s"] == 0.0
    assert row["idle/spare"] == 1.0


def test_counters_of_rewards_are_metrics():
    clock = StepClock(elapsed_s=0.0)
    stats = GeneratorStats(max_running=4, wall_s=10, counters={"judge_requests": 3})
    assert clock.lap(stats, alive_generators=ALIVE, trained_tokens=1)["grading/judge_requests"] == 3.0


def test_rates_do_not_depend_on_how_often_heartbeats_come():
    # Two generators with 4 slots each. In 10 s each was busy for 8 s with all slots: 64 of 80 sequence-seconds.
    clock = StepClock(elapsed_s=0.0)
    clock.lap(GeneratorStats(max_running=8, wall_s=20), alive_generators=("a", "b"), trained_tokens=0)
    later = GeneratorStats(max_running=8, wall_s=40, busy_s=16, busy_sequence_s=64, num_tokens=300)
    row = clock.lap(later, alive_generators=("a", "b"), trained_tokens=0)
    assert abs(row["time/generate_s"] / row["time/step_s"] - 0.8) < 1e-9
    assert abs(row["throughput/generated_tokens_per_s"] - 30.0) < 1e-9
    between_heartbeats = clock.lap(later, alive_generators=("a", "b"), trained_tokens=0)
    assert "time/generate_s" not in between_heartbeats


def test_without_two_readings_of_the_same_slots_the_generator_figures_are_left_out():
    clock = StepClock(elapsed_s=0.0)
    first = clock.lap(GeneratorStats(max_running=4, wall_s=10), alive_generators=ALIVE, trained_tokens=0)
    after_a_join = clock.lap(GeneratorStats(max_running=8, wall_s=30), alive_generators=ALIVE, trained_tokens=0)
    assert "idle/generators" not in first
    assert "idle/generators" not in after_a_join


def test_parts_of_a_step_are_timed_apart_and_start_anew_each_lap():
    clock = StepClock(elapsed_s=0.0)
    with clock.part("train"), clock.part("prepare"):
        pass
    row = clock.lap(GeneratorStats(), alive_generators=ALIVE, trained_tokens=0)
    assert 0 < row["time/prepare_s"] <= row["time/train_s"] <= row["time/step_s"]
    assert row["time/wait_s"] == 0
    assert clock.lap(GeneratorStats(), alive_generators=ALIVE, trained_tokens=0)["time/train_s"] == 0


def test_a_wait_for_parts_of_which_some_are_done_says_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    times = iter([100.0, 110.0, 119.9, 120.0])
    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: next(times)))
    caplog.set_level(logging.INFO)
    wait = WaitLog(every_s=10.0)
    for done in (0, 10, 20):
        wait.still_waiting("the evaluation of test", done, 120)
    # 20 of 120 rows in 20 s, so 100 s for the others
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "waiting 10 s for the evaluation of test"),
        ("INFO", "waiting 20 s for the evaluation of test, about 1m40s left"),
    ]


def test_generator_figures_are_left_out_when_one_takes_another_s_place():
    # Eight slots before and after; the newcomer has run longer than the one that left, so every sum has grown.
    clock = StepClock(elapsed_s=0.0)
    clock.lap(GeneratorStats(max_running=8, wall_s=105, num_tokens=1000), alive_generators=("a", "b"), trained_tokens=0)
    row = clock.lap(
        GeneratorStats(max_running=8, wall_s=130, num_tokens=1700), alive_generators=("a", "c"), trained_tokens=0
    )
    assert "idle/generators" not in row


def test_generator_figures_are_left_out_when_one_counts_from_zero_again():
    # "b" was restarted under its name: its 500 tokens are gone, the sum of seconds has grown all the same.
    clock = StepClock(elapsed_s=0.0)
    clock.lap(GeneratorStats(max_running=8, wall_s=105, num_tokens=1000), alive_generators=("a", "b"), trained_tokens=0)
    row = clock.lap(
        GeneratorStats(max_running=8, wall_s=110, num_tokens=600), alive_generators=("a", "b"), trained_tokens=0
    )
    assert "throughput/generated_tokens_per_s" not in row


def test_a_long_wait_says_how_long_for_what_and_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    times = iter([100.0, 129.0, 130.0, 131.0])
    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: next(times)))
    wait = WaitLog()
    for _ in range(3):
        wait.still_waiting("groups (0 of 2 are queued, 0 in flight): no generator is connected")
    said = "waiting 30 s for groups (0 of 2 are queued, 0 in flight): no generator is connected"
    assert [record.getMessage() for record in caplog.records] == [said]
