"""The learner's benchmark compares equals: every side computes the gradient of the same loss on the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learner import Result, ratio
from benchmarks.learner_data import Task, num_trained, sequences_of, write_model
from benchmarks.learner_sides import SIDES, packed_rows, padded_batches


def a_task(directory: Path) -> Task:
    return Task(
        directory=str(directory), shape="cpu", vocab_size=100, num_groups=2, length=48, sigma=1.0, max_tokens=128,
        device="cpu", dtype="float32", gradient_checkpointing=False, settings=(),
    )  # fmt: skip


def test_all_sides_with_a_policy_gradient_have_the_same_one(tmp_path: Path):
    task = a_task(tmp_path)
    write_model(task)
    norms = {name: SIDES[name](task)() for name in ("async-rl", "packed", "padded")}
    assert norms["packed"] == pytest.approx(norms["async-rl"], rel=1e-4)
    assert norms["padded"] == pytest.approx(norms["async-rl"], rel=1e-4)
    assert SIDES["limit"](task)() is None


def test_groups_share_a_prompt_and_lengths_vary_up_to_the_longest(tmp_path: Path):
    sequences = sequences_of(a_task(tmp_path))
    assert len(sequences) == 16
    for group in (sequences[:8], sequences[8:]):
        start = int(np.flatnonzero(group[0].loss_mask)[0])
        assert len({s.token_ids[:start].tobytes() for s in group}) == 1
        assert sum(s.advantages[0] for s in group) == pytest.approx(0, abs=1e-6)
    lengths = [len(s.token_ids) for s in sequences]
    assert max(lengths) <= 48
    assert len(set(lengths)) > 4


def test_without_spread_every_sequence_has_the_full_length(tmp_path: Path):
    sequences = sequences_of(replace(a_task(tmp_path), sigma=0.0))
    # A prompt of a tenth of 48, and an answer that fills the rest.
    assert {len(s.token_ids) for s in sequences} == {48}
    assert num_trained(sequences) == 16 * (48 - 4)


def test_every_side_holds_at_most_the_tokens_of_a_micro_batch(tmp_path: Path):
    task = a_task(tmp_path)
    sequences = sequences_of(task)
    padded = padded_batches(sequences, task.max_tokens)
    packed = packed_rows(sequences, task.max_tokens)
    for batches in (padded, packed):
        assert sorted(s.sequence_id for batch in batches for s in batch) == list(range(16))
    assert max(len(batch) * max(len(s.token_ids) for s in batch) for batch in padded) <= task.max_tokens
    assert max(sum(len(s.token_ids) for s in row) for row in packed) <= task.max_tokens


def test_a_ratio_is_the_median_of_the_rounds_and_absent_if_a_side_did_not_run():
    # 6 / 2, 4 / 2 and 9 / 3: 3, 2 and 3 times as fast.
    results = {"a": Result([2.0, 2.0, 3.0]), "b": Result([6.0, 4.0, 9.0]), "c": Result(failed="not run")}
    assert ratio(results, "a", "b") == 3.0
    assert ratio(results, "a", "c") is None
