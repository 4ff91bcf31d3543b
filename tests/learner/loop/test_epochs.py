"""``learner.epochs_per_batch``: passes over one batch, their ages under the bound, and what counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.data.batch import PreparedBatch
from async_rl.learner.interface import UpdateStats
from async_rl.learner.loop.staleness import staleness_summary
from async_rl.learner.loop.step_result import StepResult, step_result, trained_metrics
from async_rl.learner.sequences import TrainSequence
from async_rl.queue.messages import TakenGroup
from async_rl.records import Group, Lease, Prompt
from async_rl.run.records.step_log import read_rows
from tests.examples import examples
from tests.learner.loop.test_trainer import Run, ScriptedEngine, answered, make_run
from tests.learner.losses.test_advantages import prepare, rollout


@dataclass
class RecordingEngine(ScriptedEngine):
    """Remembers what each optimizer step trained on: the version, and its sequences."""

    calls: list[tuple[int, list[TrainSequence]]] = field(default_factory=list)

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        self.calls.append((version, list(sequences)))
        return super().update(sequences, version=version)


def rows_of(run: Run) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.path / "metrics.jsonl") if "version" in row]


def test_every_epoch_repeats_the_same_updates_in_the_same_order_as_new_versions(tmp_path: Path):
    run = make_run(
        tmp_path, learner={"steps": 2, "updates_per_batch": 2, "epochs_per_batch": 3}, queue={"max_staleness": 5}
    )
    run.engine = engine = RecordingEngine()
    state = run.start()
    assert (state.step, state.version, run.engine.versions) == (2, 12, list(range(12)))
    ids = [[s.sequence_id for s in sequences] for _, sequences in engine.calls]
    assert ids == [[0, 1], [2, 3]] * 6
    assert run.weights.published == [0, 6, 12]
    # Two groups of two rollouts a step, three tokens each: counted once.
    ledger = run.queue_state.stats().ledger
    assert (ledger["groups"]["trained"], ledger["rollouts"]["trained"], ledger["tokens"]["trained"]) == (4, 8, 24)
    assert [(row["tokens/trained"], row["skip/steps"]) for row in rows_of(run)] == [(12, 0)] * 2
    # The first batch is sampled at 0 and trained at 0, 1, ..., 5: mean 2.5.
    assert (rows_of(run)[0]["staleness/mean"], rows_of(run)[0]["staleness/max"]) == (2.5, 5)


def test_the_proximal_policy_is_that_before_the_first_epoch(tmp_path: Path):
    run = make_run(
        tmp_path, learner={"steps": 1, "epochs_per_batch": 2}, queue={"max_staleness": 1},
        loss={"preset": "decoupled_ppo"},
    )  # fmt: skip
    run.start()
    assert run.engine.scored == [("policy", 0)]
    assert len({s.sequence_id for s in run.engine.trained_on}) * 2 == len(run.engine.trained_on)
    assert all(len(s.proximal_logprobs) for s in run.engine.trained_on)


def test_a_part_is_trained_if_the_optimizer_stepped_on_it_in_any_epoch(tmp_path: Path):
    run = make_run(
        tmp_path, learner={"steps": 1, "updates_per_batch": 2, "epochs_per_batch": 2}, queue={"max_staleness": 3}
    )
    # Part 0 steps in the second epoch, part 1 never.
    run.engine.stepped = [False, False, True, False]
    state = run.start()
    assert (state.version, run.engine.versions) == (1, [0, 0, 0, 1])
    ledger = run.queue_state.stats().ledger
    assert (ledger["rollouts"]["trained"], ledger["rollouts"]["masked"]) == (2, {"step_skipped": 2})
    assert (ledger["tokens"]["trained"], ledger["tokens"]["masked"]) == (6, {"step_skipped": 6})
    assert rows_of(run)[0]["skip/steps"] == 3


def test_a_learner_killed_between_batches_goes_on_as_if_it_had_not_been(tmp_path: Path):
    keys: dict[str, Any] = {"learner": {"steps": 4, "epochs_per_batch": 2}, "queue": {"max_staleness": 3}}
    whole, killed = make_run(tmp_path / "whole", **keys), make_run(tmp_path / "killed", **keys)
    whole.engine, killed.engine = engines = RecordingEngine(), RecordingEngine()
    whole.start()
    killed.dies("ack", 3)
    del engines[1].calls[:]
    killed.start()
    # The checkpoint of step 2 has version 4: the steps after it train the same sequences with the same versions.
    trained = [[(v, [s.token_ids.tolist() for s in seqs]) for v, seqs in engine.calls] for engine in engines]
    assert trained[1] == trained[0][4:]
    assert [row["version"] for row in rows_of(killed)] == [2, 4, 6, 8]
    assert killed.queue_state.stats().ledger["groups"]["trained"] == 8


def stats(**changes: Any) -> UpdateStats:
    plain = UpdateStats(
        stepped=True, reason="", loss=0.0, grad_norm=1.0, lr=1.0, tokens_trained=1, ratio_mean=1.0, ratio_max=1.0,
        clip_fraction=0.0, ess=1.0, entropy=0.0, mean_abs_log_ratio=0.0,
    )  # fmt: skip
    return replace(plain, **changes)


def result_of(prepared: PreparedBatch, *updates: UpdateStats | None) -> StepResult:
    group = Group("lease", "train", 0, "g", "l", 1.0, (rollout(1, 3), rollout(0, 2)))
    taken = (TakenGroup(group, Prompt(0, 0, 0, (), {}), 0.0, 5),)
    return step_result(taken, prepared, updates, version=5)


def test_sequences_and_tokens_that_some_epochs_leave_out_are_counted_once():
    # Rollouts of 3 and 2 tokens. Epoch 0 skips sequence 1 and one token of sequence 0; epoch 1 only two tokens.
    prepared = prepare([rollout(1, 3), rollout(0, 2)])
    first = stats(skipped_sequence_ids=(1,), skipped_tokens=2, out_of_range_tokens=1, rule_tokens={"far": 1})
    second = stats(out_of_range_tokens=2, rule_tokens={"far": 2})
    result = result_of(prepared, first, second)
    assert (result.facts.rollouts_trained, result.facts.tokens_trained) == (2, 4)
    assert result.facts.tokens_masked == {"token_range": 1}
    # Two tokens of two are left out of both epochs.
    both = result_of(prepared, first, first)
    assert both.facts.rollouts_masked == {"skip_threshold": 1}
    assert both.facts.tokens_masked == {"skip_threshold": 2, "token_range": 1}
    # A skipped epoch decides nothing.
    assert result_of(prepared, replace(first, stepped=False), second).facts.tokens_masked == {"token_range": 2}
    # Ages 0 and 1 of all five tokens. The rule met 3 of 10.
    assert (result.staleness.mean, result.staleness.max) == (0.5, 1)
    metrics = trained_metrics(result)
    assert (metrics["rule/far"], metrics["skip/sequences"], metrics["skip/steps"]) == (0.3, 1, 0)


def test_the_age_of_a_token_counts_in_every_epoch():
    # Sampled at 5, trained at 5 and 7 (part 0), 6 and 8 (part 1): ages 0, 1, 2, 3.
    summary = staleness_summary(prepare([rollout(1)], [rollout(1)], num_updates=2), versions=[5, 6, 7, 8])
    assert (summary.mean, summary.max) == (1.5, 3)


@given(data=st.data())
@examples(25)
def test_no_epoch_ever_trains_a_token_above_the_bound(data: st.DataObject):
    updates, epochs, sync_every = (data.draw(st.integers(1, 3), label=name) for name in ("updates", "epochs", "sync"))
    bound = sync_every + updates * epochs - 2 + data.draw(st.integers(0, 3), label="room")
    on_stale = data.draw(st.sampled_from(["drop", "mask", "wait"]), label="on_stale")
    skips = data.draw(st.lists(st.booleans(), max_size=12), label="steps")

    def late(lease: Lease, version: int) -> Group:
        # Only versions that were sent can sample: the learner knows no others.
        sent = [sent for sent in run.weights.published if lease.min_version <= sent <= version]
        return answered(lease, data.draw(st.sampled_from(sent or [version]), label="sampled at"))

    with TemporaryDirectory() as directory:
        run = make_run(
            Path(directory),
            num_rows=400,
            learner={
                "steps": 5, "groups_per_step": updates, "updates_per_batch": updates, "epochs_per_batch": epochs,
            },
            queue={"max_staleness": bound, "on_stale": on_stale},
            weights={"sync_every": sync_every},
        )  # fmt: skip
        run.engine = engine = RecordingEngine(stepped=skips)
        run.start(answer=late)
        assert len(rows_of(run)) == 5
        assert len(engine.calls) <= 5 * updates * epochs
        for version, sequences in engine.calls:
            ages = np.concatenate([version - s.versions[s.loss_mask] for s in sequences])
            assert ages.min() >= 0
            assert ages.max() <= bound
        assert run.queue_state.stats().ledger["groups"]["trained"] <= 5 * updates
