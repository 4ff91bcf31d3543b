"""What is recorded of a step's rollouts, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_rl.config.config import Config
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.data.batch import PreparedBatch, prepare_batch
from async_rl.learner.interface import TokenOutcomes, UpdateStats
from async_rl.learner.loop.rollout_records import RolloutRecords, TokenTexts, recorded_rollouts
from async_rl.learner.loop.step_result import StepResult, rollout_causes, step_result
from async_rl.queue.messages import TakenGroup
from async_rl.run.directory import RunDir
from async_rl.run.records.step_log import StepLog, read_rows
from async_rl.run.records.token_columns import columns_path, read_token_columns
from tests.learner.data.test_batch import rollout, taken
from tests.learner.loop.scripted_run import PLAIN_STATS

LOG = {"rollouts_every": 2, "rollouts_groups": "all"}


def config(path: Path, **log: object) -> Config:
    return Config.model_validate({"run": {"dir": str(path)}, "model": {"path": "m"}, "log": {**LOG, **log}})


def prepared_of(*groups: TakenGroup, num_updates: int = 1, oldest_version: int | None = None) -> PreparedBatch:
    return prepare_batch(
        groups, mask_truncated=True, num_updates=num_updates, oldest_version=oldest_version,
        known_weights=lambda group: True,
    )  # fmt: skip


def update(prepared: PreparedBatch, fates: dict[int, list[int]], *, skipped: tuple[int, ...] = ()) -> UpdateStats:
    """An update whose log-probabilities are -0.5 and entropies 2 at every recorded token."""
    tokens = {
        s.sequence_id: TokenOutcomes(
            np.full(int(s.loss_mask.sum()), -0.5, np.float32),
            np.full(int(s.loss_mask.sum()), 2.0, np.float32),
            np.array(fates[s.sequence_id], np.uint8),
        )
        for s in prepared.sequences
        if s.is_recorded and s.sequence_id in fates
    }
    return replace(PLAIN_STATS, skipped_sequence_ids=skipped, tokens=tokens)


def record(
    path: Path,
    groups: tuple[TakenGroup, ...],
    *fates: dict[int, list[int]],
    skipped: tuple[int, ...] = (),
    step: int = 3,
    num_updates: int = 1,
    **log: object,
) -> StepResult:
    """Record ``step``, at version 5, in the directory ``path``. ``fates`` has those of each update."""
    state = TrainerState(step=step - 1, version=5)
    summaries = StepLog(RunDir(path).rollout_summaries)
    part = RolloutRecords(
        config(path, **log), state, run_dir=RunDir(path), summaries=summaries, decode=lambda ids: f"<{int(ids[-1])}>"
    )
    prepared = part.train(prepared_of(*groups, num_updates=num_updates, oldest_version=2), version=5)
    result = step_result(groups, prepared, [update(prepared, of, skipped=skipped) for of in fates], version=5)
    state.step += 1
    part.record(result)
    summaries.close()
    return result


def test_every_token_has_its_values_and_its_outcome(tmp_path: Path):
    # Sequence 0: tokens of versions 4, 3 and 1, of which the last is too old, as 5 - 3 = 2 is the oldest allowed.
    # Sequence 1 is skipped by the loss. The third rollout was cut, and is masked before it is a sequence.
    groups = (taken(rollout(1, [4, 3, 1]), rollout(0, [5, 5]), rollout(0, [4], "length")),)
    record(tmp_path, groups, {0: [0, 2], 1: [3, 3]}, skipped=(1,))
    table = read_token_columns(columns_path(tmp_path / "rollouts" / "step-000003.jsonl"))
    assert table.sizes.tolist() == [5, 4, 3]
    assert table.places["index"].tolist() == [0, 1, 2]
    assert table.places["learner_version"].tolist() == [5, 5, 5]
    given = ["given", "given"]
    assert table.outcomes[:5] == [*given, "trained", "clipped_high", "stale"]
    assert table.outcomes[5:] == [*given, "skip_threshold", "skip_threshold", *given, "truncated"]
    assert table.numbers["versions"].tolist() == [-1, -1, 4, 3, 1, -1, -1, 5, 5, -1, -1, 4]
    nan = math.nan
    np.testing.assert_equal(table.numbers["behavior_logprobs"][:5], np.array([nan, nan, -1, -1, -1], np.float32))
    np.testing.assert_equal(table.numbers["logprobs"][:5], np.array([nan, nan, -0.5, -0.5, nan], np.float32))
    np.testing.assert_equal(table.numbers["entropies"][-3:], np.array([nan] * 3, np.float32))
    assert table.texts[:3] == ["<0>", "<1>", "<2>"]


def test_the_summary_has_every_rollout_also_one_whose_reward_is_not_finite(tmp_path: Path):
    groups = (
        taken(rollout(1, [4, 3, 1]), rollout(0, [5, 5]), rollout(0, [4], "length")),
        taken(rollout(math.nan, [5])),
    )
    result = record(tmp_path, groups, {}, skipped=(1,), rollouts_groups=1)
    (row,) = read_rows(RunDir(tmp_path).rollout_summaries)
    causes = ["", "skip_threshold", "truncated", "invalid"]
    assert row["cause"] == rollout_causes(result.prepared, result.causes) == causes
    expected = {
        "step": 3, "version": 5, "sizes": [3, 1], "reward": [1, 0, 0, None], "tokens": [3, 2, 1, 1],
        "staleness": [4, 0, 1, 0], "finish": ["stop", "stop", "length", "stop"],
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected


def test_other_steps_write_no_columns_and_mark_nothing(tmp_path: Path):
    result = record(tmp_path, (taken(rollout(1, [5])),), {}, step=2)
    assert not any(sequence.is_recorded for sequence in result.prepared.sequences)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["summaries.jsonl"]


@pytest.mark.parametrize(("limit", "recorded"), [(0, []), (6, [0]), (7, [0, 1]), (8, [0, 1]), (100, [0, 1, 2])])
def test_the_limit_is_on_tokens_with_prompts(tmp_path: Path, limit: int, recorded: list[int]):
    groups = (taken(rollout(1, [5])), taken(rollout(1, [5, 5]), rollout(0, [5])))  # 3, 4 and 3 tokens
    assert sorted(recorded_rollouts(groups, config(tmp_path, rollouts_tokens=limit), step=1)) == recorded


def test_values_are_those_of_the_first_update_on_a_sequence(tmp_path: Path):
    # Two epochs of two mini-batches: the second update is at version 6.
    groups = (taken(rollout(1, [5])), taken(rollout(0, [5])))
    record(tmp_path, groups, {0: [0]}, {1: [0]}, {0: [0]}, {1: [0]}, step=1, num_updates=2)
    table = read_token_columns(columns_path(tmp_path / "rollouts" / "step-000001.jsonl"))
    assert table.places["learner_version"].tolist() == [5, 6]


def test_tokens_that_share_a_character_are_decoded_together_and_no_space_is_lost_that_a_decoder_drops():
    pieces = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b" b", 5: "é".encode()[:1]}

    def decode(ids: np.ndarray) -> str:
        return b"".join(pieces[int(i)] for i in ids).decode("utf-8", "replace").lstrip()

    texts = TokenTexts(decode).of([np.array([1, 2, 3, 4]), np.array([5])])
    assert texts == ["a", "", "é", " b", "\ufffd"]
