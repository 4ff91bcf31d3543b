"""A run whose ranks share every sequence, with answers as long as they can hold together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.harness import check_ledger, metrics, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


@pytest.mark.slow
def test_a_run_whose_answers_reach_the_longest_sequence_of_two_ranks_finishes(tmp_path: Path):
    # A prompt has 6 tokens, and most answers have the allowed 12: 18 tokens, two ranks of 9. A group shares its prompt.
    raw = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path),
        sampling={"max_prompt_tokens": 6, "max_new_tokens": 12},
        learner={"steps": 3, "nproc": 2, "max_tokens": 9},
        parallel={"sequence": 2},
        checkpoint={"every": 2},
    )
    config = write_config(tmp_path / "config.toml", raw)
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
    run_dir = tmp_path / "run"
    assert steps(run_dir) == [1, 2, 3]
    rows = [row for row in metrics(run_dir) if "version" in row]
    assert {(row["length/max"], row["tokens/masked"]) for row in rows} == {(12, 0)}
    # Of 4 groups of 2 answers, nothing is left out.
    assert [row["tokens/trained"] for row in rows] == [8 * row["length/mean"] for row in rows]
    check_ledger(run_dir)
