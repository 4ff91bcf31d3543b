"""Step times and overlap from cumulative generator counters."""

from async_rl.learner.recorder import StepClock
from async_rl.queue.messages import GeneratorStats

ROSTER = ("g0",)


def test_generator_figures_are_differences_between_laps():
    clock = StepClock(elapsed_s=100.0)
    clock.lap(
        GeneratorStats(max_running=4, wall_s=10, busy_s=8, busy_sequence_s=20, num_tokens=100),
        roster=ROSTER,
        trained_tokens=10,
    )
    row = clock.lap(
        GeneratorStats(
            max_running=4, wall_s=20, busy_s=17, busy_sequence_s=28, num_tokens=150, pause_s=0.3, num_activations=3
        ),
        roster=ROSTER,
        trained_tokens=10,
    )
    # Busy 9 of 10 s; 8 sequence-seconds of 4 slots: a fifth of the step; 50 tokens in 10 s; 0.3 s over 3 pauses.
    assert abs(row["idle/generators"] - 0.1) < 1e-9
    assert abs(row["time/generate_s"] / row["time/step_s"] - 0.2) < 1e-9
    assert abs(row["throughput/generated_tokens_per_s"] - 5.0) < 1e-9
    assert abs(row["time/pause_s"] - 0.1) < 1e-9
    assert row["time_s"] >= 100.0


def test_rates_do_not_depend_on_how_often_heartbeats_come():
    # Two generators with 4 slots each. In 10 s each was busy for 8 s with all slots: 64 of 80 sequence-seconds.
    clock = StepClock(elapsed_s=0.0)
    clock.lap(GeneratorStats(max_running=8, wall_s=20), roster=("a", "b"), trained_tokens=0)
    later = GeneratorStats(max_running=8, wall_s=40, busy_s=16, busy_sequence_s=64, num_tokens=300)
    row = clock.lap(later, roster=("a", "b"), trained_tokens=0)
    assert abs(row["time/generate_s"] / row["time/step_s"] - 0.8) < 1e-9
    assert abs(row["throughput/generated_tokens_per_s"] - 30.0) < 1e-9
    between_heartbeats = clock.lap(later, roster=("a", "b"), trained_tokens=0)
    assert "time/generate_s" not in between_heartbeats


def test_without_two_readings_of_the_same_slots_the_generator_figures_are_left_out():
    clock = StepClock(elapsed_s=0.0)
    first = clock.lap(GeneratorStats(max_running=4, wall_s=10), roster=ROSTER, trained_tokens=0)
    after_a_join = clock.lap(GeneratorStats(max_running=8, wall_s=30), roster=ROSTER, trained_tokens=0)
    assert "idle/generators" not in first
    assert "idle/generators" not in after_a_join


def test_parts_of_a_step_are_timed_apart_and_start_anew_each_lap():
    clock = StepClock(elapsed_s=0.0)
    with clock.part("train"):
        pass
    row = clock.lap(GeneratorStats(), roster=ROSTER, trained_tokens=0)
    assert 0 < row["time/train_s"] <= row["time/step_s"]
    assert row["time/wait_s"] == 0
    assert clock.lap(GeneratorStats(), roster=ROSTER, trained_tokens=0)["time/train_s"] == 0


def test_generator_figures_are_left_out_when_one_takes_another_s_place():
    # Eight slots before and after; the newcomer has run longer than the one that left, so every sum has grown.
    clock = StepClock(elapsed_s=0.0)
    clock.lap(GeneratorStats(max_running=8, wall_s=105, num_tokens=1000), roster=("a", "b"), trained_tokens=0)
    row = clock.lap(GeneratorStats(max_running=8, wall_s=130, num_tokens=1700), roster=("a", "c"), trained_tokens=0)
    assert "idle/generators" not in row


def test_generator_figures_are_left_out_when_one_counts_from_zero_again():
    # "b" was restarted under its name: its 500 tokens are gone, the sum of seconds has grown all the same.
    clock = StepClock(elapsed_s=0.0)
    clock.lap(GeneratorStats(max_running=8, wall_s=105, num_tokens=1000), roster=("a", "b"), trained_tokens=0)
    row = clock.lap(GeneratorStats(max_running=8, wall_s=110, num_tokens=600), roster=("a", "b"), trained_tokens=0)
    assert "throughput/generated_tokens_per_s" not in row
