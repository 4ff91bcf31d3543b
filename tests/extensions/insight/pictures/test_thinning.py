"""Rows of a long run are thinned out to what a picture can show."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from async_rl.extensions.insight.pictures.thinning import thinned


def steps_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def test_neighbours_are_merged_to_means_and_maxima_and_the_first_stays_alone():
    rows = [{"step": step, "a": float(step), "a/max": float(-step), "not drawn": 1.0} for step in range(1, 8)]
    rows[2]["b"], rows[3]["b"] = 3.0, None  # the mean is of those rows that have it
    # Steps 2 to 5 fill four points, which become 2 and 3, 4 and 5; then come 6 and 7.
    assert thinned(rows, ("a", "a/max", "b"), max_points=4) == [
        {"step": 1, "a": 1.0, "a/max": -1.0},
        {"step": 3, "a": 2.5, "a/max": -2.0, "b": 3.0},
        {"step": 5, "a": 4.5, "a/max": -4.0},
        {"step": 7, "a": 6.5, "a/max": -6.0},
    ]


def test_evaluations_keep_the_first_and_the_newest_and_their_figures():
    rows = [{"step": step, f"eval/{name}/accuracy": step / 10} for step in range(7) for name in ("x", "y")]
    found = thinned(rows, (), max_points=4)
    # The steps 1 to 4 fill four points, of which 2 and 4 stay; then every second one, and the newest.
    assert found == [{"step": s, "eval/x/accuracy": s / 10, "eval/y/accuracy": s / 10} for s in (0, 2, 4, 6)]


@given(num_rows=st.integers(0, 400), max_points=st.sampled_from([2, 4, 10, 16]), every=st.integers(1, 5))
def test_rows_are_bounded_in_order_and_end_with_the_last(num_rows: int, max_points: int, every: int):
    rows: list[dict[str, Any]] = []
    for step in range(1, num_rows + 1):
        rows.append({"step": step, "a": 1.0, "a/max": step})
        rows += [{"step": step, "eval/x/accuracy": 0.5}] if step % every == 0 else []
    found = thinned(rows, ("a", "a/max"), max_points=max_points)
    for kind, first in (("a", 1), ("eval/x/accuracy", every)):
        steps = steps_of([row for row in found if kind in row])
        given_steps = steps_of([row for row in rows if kind in row])
        assert len(steps) <= max_points + 1
        assert steps == sorted(set(steps))
        assert steps[:1] == ([first] if given_steps else [])
        assert steps[-1:] == given_steps[-1:]
    assert max((row["a/max"] for row in found if "a" in row), default=0) == num_rows
