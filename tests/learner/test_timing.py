"""Step times and overlap from cumulative generator counters."""

from async_rl.learner.timing import StepClock
from async_rl.queue.messages import GeneratorStats


def test_generator_figures_are_differences_between_laps():
    clock = StepClock(elapsed_s=100.0)
    clock.lap(GeneratorStats(seats=4, wall_s=10, busy_s=8, busy_seat_s=20, num_tokens=100), trained_tokens=10)
    row = clock.lap(
        GeneratorStats(seats=4, wall_s=20, busy_s=17, busy_seat_s=28, num_tokens=150, pause_s=0.3, num_activations=3),
        trained_tokens=10,
    )
    # Busy 9 of 10 s; 8 seat-seconds over 4 seats are 2 s a step; 0.3 s over 3 activations.
    assert abs(row["idle/generators"] - 0.1) < 1e-9
    assert abs(row["time/generate_s"] - 2.0) < 1e-9
    assert abs(row["time/pause_s"] - 0.1) < 1e-9
    assert row["time_s"] >= 100.0


def test_without_two_readings_of_the_same_seats_the_generator_figures_are_left_out():
    clock = StepClock(elapsed_s=0.0)
    first = clock.lap(GeneratorStats(seats=4, wall_s=10), trained_tokens=0)
    after_a_join = clock.lap(GeneratorStats(seats=8, wall_s=30), trained_tokens=0)
    assert "idle/generators" not in first
    assert "idle/generators" not in after_a_join


def test_parts_of_a_step_are_timed_apart_and_start_anew_each_lap():
    clock = StepClock(elapsed_s=0.0)
    with clock.part("train"):
        pass
    row = clock.lap(GeneratorStats(), trained_tokens=0)
    assert 0 < row["time/train_s"] <= row["time/step_s"]
    assert row["time/wait_s"] == 0
    assert clock.lap(GeneratorStats(), trained_tokens=0)["time/train_s"] == 0
