"""What a step writes down: sampled rollouts as text, and the times that its clock measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.learner.loop.decode_times import decode_times
from async_rl.learner.loop.recorder import StepClock, log_rollouts
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


def test_all_groups_are_written_in_their_order_and_some_are_drawn_by_seed_and_step(tmp_path: Path):
    for name, groups in (("all", "all"), ("many", 100)):
        lines = logged(tmp_path / name, rollouts_groups=groups)
        assert groups_in(lines) == [str(i) for i in range(NUM_GROUPS)]
        assert len(lines) == 2 * NUM_GROUPS
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


def laps(*readings: dict[str, GeneratorStats]) -> list[dict[str, float]]:
    """The rows of laps at these reports of generators, by their ids. The first report has what all of them count."""
    clock = StepClock(elapsed_s=100.0)
    return [clock.lap(next(iter(reports.values())), reports, trained_tokens=10) for reports in readings]


def test_generator_figures_are_differences_between_reports_and_stay_until_the_next_ones():
    first = GeneratorStats(max_running=4, wall_s=20, busy_s=17, busy_sequence_s=20, num_tokens=100)
    later = GeneratorStats(
        max_running=4, wall_s=30, busy_s=26, busy_sequence_s=52, num_tokens=250, pause_s=0.3, num_activations=3,
        counters={"judge_requests": 3},
    )  # fmt: skip
    other = GeneratorStats(max_running=4, wall_s=5), GeneratorStats(max_running=4, wall_s=15, busy_s=7)
    _, row, between_heartbeats = laps(*({"a": a, "b": b} for a, b in zip((first, later, later), (*other, other[1]))))
    # Two generators with 4 slots each, in 10 s: busy 16 of 20 s; 32 of 80 sequence-seconds; 150 tokens; 3 pauses.
    for each in (row, between_heartbeats):
        assert each["idle/generators"] == pytest.approx(0.2)
        assert each["time/generate_s"] / each["time/step_s"] == pytest.approx(0.4)
        assert each["throughput/generated_tokens_per_s"] == pytest.approx(15.0)
        assert each["time/pause_s"] == pytest.approx(0.1)
    assert row["grading/judge_requests"] == 3.0
    assert row["time_s"] >= 100.0


def test_rates_of_a_fast_and_a_slow_generator_are_right_whichever_of_them_has_reported():
    def report(tokens_per_s: float, wall_s: int) -> GeneratorStats:
        return GeneratorStats(max_running=4, wall_s=wall_s, num_tokens=round(tokens_per_s * wall_s))

    # Each reports every 4 s, a step takes 2 s: the fast one is heard in odd steps, the slow one in even ones.
    rows = laps(*(
        {"fast": report(2000, 4 * ((step + 1) // 2)), "slow": report(0.5, 2 + 4 * (step // 2))} for step in range(9)
    ))  # fmt: skip
    assert [row["throughput/generated_tokens_per_s"] for row in rows[3:]] == pytest.approx([2000.5] * 6, rel=0.1)


@pytest.mark.parametrize(
    "now",
    [
        {"c": GeneratorStats(max_running=8, wall_s=130, num_tokens=1700)},  # another one
        {"a": GeneratorStats(max_running=8, wall_s=10, num_tokens=1600)},  # it was restarted under its name
        {"a": GeneratorStats(max_running=4, wall_s=130, num_tokens=1600)},  # likewise, with fewer sequences
    ],
)
def test_generator_figures_are_left_out_without_two_reports_of_a_generator(now: dict[str, GeneratorStats]):
    for row in laps({"a": GeneratorStats(max_running=8, wall_s=105, num_tokens=1000)}, now):
        assert not {"idle/generators", "throughput/generated_tokens_per_s"} & row.keys()


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

    first, later = decoded(4, 100), decoded(2, 100)
    before = GeneratorStats(
        max_running=8, wall_s=100, busy_s=first.busy_s, busy_sequence_s=first.busy_sequence_s,
        decoded=(Decoded(), Decoded(), first),
    )  # fmt: skip
    # Busy all the time.
    after = GeneratorStats(
        max_running=8, wall_s=100 + later.busy_s, busy_s=first.busy_s + later.busy_s,
        busy_sequence_s=first.busy_sequence_s + later.busy_sequence_s, decoded=(Decoded(), later, first),
    )  # fmt: skip
    assert laps({"a": before}, {"a": after})[1]["idle/spare"] == pytest.approx(spare)


def test_parts_of_a_step_are_timed_apart_and_start_anew_each_lap():
    clock = StepClock(elapsed_s=0.0)
    with clock.part("train"), clock.part("prepare"):
        pass
    row = clock.lap(GeneratorStats(), {}, trained_tokens=0)
    assert 0 < row["time/prepare_s"] <= row["time/train_s"] <= row["time/step_s"]
    assert row["time/wait_s"] == 0
    assert clock.lap(GeneratorStats(), {}, trained_tokens=0)["time/train_s"] == 0


def decode_steps(running: int, step_s: float, num_steps: int) -> Decoded:
    """Decode steps that all have this many sequences and take this long."""
    return Decoded(step_s * num_steps, step_s * num_steps * running, running * num_steps)


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        ([decode_steps(2**n, 0.02 + 0.001 * 2**n, 10 * 7**n) for n in range(6)], (0.02, 0.001)),
        ([], None),
        ([Decoded(), Decoded()], None),
        ([Decoded(), Decoded(), decode_steps(5, 0.25, 3)], (0.25, 0)),
        # Faster with more sequences: the mean of 3 steps of 0.4 s and one of 0.2 s.
        ([decode_steps(1, 0.4, 3), decode_steps(2, 0.2, 1)], (0.35, 0)),
        # A line through (1, 0.1) and (2, 0.4) begins below 0; the best one through 0 has the slope 0.9 / 5.
        ([decode_steps(1, 0.1, 1), decode_steps(2, 0.4, 1)], (0, 0.18)),
    ],
)
def test_the_line_is_that_of_the_measured_steps_and_no_part_of_it_is_negative(
    steps: list[Decoded], line: tuple[float, float] | None
):
    assert decode_times(steps) == (line if line is None else pytest.approx(line))
