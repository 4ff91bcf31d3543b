"""Taken groups to sequences: masks and their causes, staleness, and the facts for the ledger."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from async_rl.config.distill import DistillConfig
from async_rl.config.loss import LossConfig
from async_rl.errors import StaleRolloutError
from async_rl.learner.data.batch import PreparedBatch, prepare_batch
from async_rl.learner.data.packing import pack
from async_rl.learner.loop.staleness import StalenessSummary, check_staleness, staleness_summary
from async_rl.learner.loop.step_result import teacher_metrics, trained_counts
from async_rl.learner.losses.advantages import with_advantages
from async_rl.queue.messages import TakenGroup
from async_rl.records import FinishReason, Group, Prompt, Rollout, TeacherScores, TokenSequence
from async_rl.routes import RoutingShape
from async_rl.sampling_mask import SamplingMask, pack_ids


def rollout(reward: float, versions: list[int], finish: FinishReason = "stop", *, logprob: float = -1.0) -> Rollout:
    """Two prompt tokens, then one sampled token a version."""
    num = len(versions)
    sequence = TokenSequence(
        token_ids=np.arange(num + 2, dtype=np.int32),
        loss_mask=np.arange(num + 2) >= 2,
        behavior_logprobs=np.full(num + 2, logprob, dtype=np.float32),
        versions=np.array([-1, -1, *versions], dtype=np.int32),
    )
    return Rollout((sequence,), {"correct": reward}, reward, finish)


def taken(
    *rollouts: Rollout, arrival: int = 3, masked: bool = False, digest: str = "good", position: int = 0
) -> TakenGroup:
    group = Group("lease", "train", position, "g", "lineage", 0.7, rollouts, {0: digest})
    return TakenGroup(group, Prompt(position, 0, 0, (), {}), 0.0, arrival, masked)


def prepare(*groups: TakenGroup, **settings: Any) -> PreparedBatch:
    plain: dict[str, Any] = {
        "num_updates": 1, "mask_truncated": True, "vocab_size": None if settings.get("distill") is None else 50,
        "known_weights": lambda group: group.weights_digest[0] == "good",
    }  # fmt: skip
    return prepare_batch(groups, **plain | settings)


def test_every_masked_rollout_has_its_first_cause():
    prepared = prepare(
        taken(rollout(1, [0]), rollout(0, [0], "length")),
        taken(rollout(1, [0]), rollout(0, [0], "error"), masked=True),
        taken(rollout(1, [0], "length"), digest="bad"),
    )
    assert prepared.masked == {1: "truncated", 2: "filter", 3: "failed", 4: "unknown_weights"}
    assert [s.sequence_id for s in prepared.mini_batches[0]] == [0]


Counts = tuple[int, dict[str, int], int, dict[str, int]]


def counts(prepared: PreparedBatch, skipped: Sequence[int] = (), **keys: Any) -> Counts:
    """Rollouts and tokens that were trained, and those that were masked, by cause."""
    facts = trained_counts(prepared, skipped, stepped=keys.pop("stepped", [True]), **keys)
    return facts.rollouts_trained, dict(facts.rollouts_masked), facts.tokens_trained, dict(facts.tokens_masked)


def test_an_answer_longer_than_a_micro_batch_is_masked_and_the_rest_of_its_group_is_trained():
    # 2 prompt tokens: 4 tokens, then 5, then one answer of two sequences of which the second has 6.
    turns = Rollout((*rollout(0, [0]).sequences, *rollout(0, [0] * 4).sequences), {"correct": 0.0}, 0.0, "stop")
    prepared = prepare(taken(rollout(1, [0, 0]), rollout(0, [0, 0, 0]), turns), max_tokens=4)
    assert prepared.masked == {1: "too_long", 2: "too_long"}
    assert counts(prepared) == (1, {"too_long": 2}, 2, {"too_long": 8})
    # Their rewards count: 1, 0, 0 have the mean 1/3 and the unbiased std 0.57735; 0.66667 / 0.57745 = 1.15450.
    (trained,) = with_advantages(prepared, LossConfig()).mini_batches[0]
    np.testing.assert_allclose(trained.advantages, [0, 0, 1.15450, 1.15450], atol=1e-5)
    assert prepare(taken(rollout(0, [0] * 5, "length")), max_tokens=4).masked == {0: "truncated"}


def test_a_batch_is_cut_in_order_into_equal_updates_and_has_the_rewards_and_lengths_of_all_rollouts():
    groups = [taken(rollout(0.5, [0, 0]), rollout(0, [0])), taken(rollout(0, [0], "error"), rollout(1, [0]))]
    prepared = prepare(*groups, num_updates=2)
    assert [[s.sequence_id for s in update] for update in prepared.mini_batches] == [[0, 1], [2]]
    assert prepared.group_sizes == (2, 2)
    assert prepared.rewards.tolist() == prepared.accuracies.tolist() == [0.5, 0.0, 0.0, 1.0]
    assert prepared.rollout_tokens == (2, 1, 1, 1)
    assert {s.temperature for s in prepared.sequences} == {0.7}


@pytest.mark.parametrize(
    ("groups", "num_updates", "mean", "oldest", "in_flight", "in_queue"),
    [
        # Trained at 5: ages 4, 3, 2. It arrived at version 3, so 2 each in the queue and 2, 1, 0 in flight.
        ([[1, 2, 3]], 1, 3.0, 4, 1.0, 2.0),
        # Sampled with 4, which was not announced when it arrived: all of its age is queue time.
        ([[4]], 1, 1.0, 1, 0.0, 1.0),
        # Sampled at 3 and 3, trained at 5 and at 6.
        ([[3], [3]], 2, 2.5, 3, 0.0, 2.5),
    ],
)
def test_staleness_splits_into_flight_and_queue(
    groups: list[list[int]], num_updates: int, mean: float, oldest: int, in_flight: float, in_queue: float
):
    prepared = prepare(*(taken(rollout(1, versions)) for versions in groups), num_updates=num_updates)
    found = staleness_summary(prepared, versions=range(5, 5 + num_updates))
    assert found == StalenessSummary(mean, oldest, in_flight, in_queue)


def test_the_learner_refuses_a_token_one_version_above_the_bound_and_takes_one_at_it():
    prepared = prepare(taken(rollout(1, [2, 3])))
    check_staleness(prepared, version=6, max_staleness=4)
    with pytest.raises(StaleRolloutError, match=r"at most 4 versions .* 5 versions old \(sampled at 2, learner at 7\)"):
        check_staleness(prepared, version=7, max_staleness=4)


def test_tokens_above_the_bound_leave_the_loss_and_a_rollout_without_others_leaves_it_whole():
    # Trained at 5 with a bound of 2: tokens of versions 1 and 2 are masked. 2 of 3 tokens are left, and none of 2.
    prepared = prepare(taken(rollout(1, [2, 3, 4]), rollout(0, [1, 2])), oldest_version=3)
    assert prepared.masked == {1: "stale"}
    assert prepared.mini_batches[0][0].loss_mask.tolist() == [False, False, False, True, True]
    check_staleness(prepared, version=5, max_staleness=2)
    assert counts(prepared) == (1, {"stale": 1}, 2, {"stale": 3})
    # It still counts in the baseline: mean 0.5, unbiased std sqrt(0.5) = 0.70711; 0.5 / (0.70711 + 1e-4) = 0.70701.
    trained = with_advantages(prepared, LossConfig()).mini_batches[0][0]
    np.testing.assert_allclose(trained.advantages[3:], [0.70701, 0.70701], atol=1e-5)


def test_facts_count_every_rollout_and_token_once():
    prepared = prepare(taken(rollout(1, [0, 0, 0]), rollout(0, [0]), rollout(0, [0] * 5, "length")))
    left_out = {"truncated": 5, "skip_threshold": 1}
    assert counts(prepared, [1]) == (1, {"truncated": 1, "skip_threshold": 1}, 3, left_out)
    # Single tokens are masked, and their rollout is trained.
    _, _, *tokens = counts(prepared, [1], out_of_range=2)
    assert tokens == [1, {**left_out, "token_range": 2}]
    _, rollouts, *tokens = counts(prepared, [1], out_of_range=2, has_own_loss=True)
    assert (rollouts, tokens) == ({"truncated": 1, "loss_function": 1}, [1, {"truncated": 5, "loss_function": 3}])


def test_what_a_skipped_update_held_was_not_trained():
    groups = [taken(rollout(1, [0, 0]), rollout(0, [0], "length")), taken(rollout(1, [0] * 4), rollout(0, [0]))]
    prepared = prepare(*groups, num_updates=2)  # sequence 0, then 1 and 2
    rollouts, tokens = ({"truncated": 1, "step_skipped": of_step, "skip_threshold": 1} for of_step in (1, 4))
    assert counts(prepared, [2], stepped=[True, False]) == (1, rollouts, 2, tokens)
    assert trained_counts(prepared, [], stepped=[False, False]).tokens_trained == 0


def test_sampling_masks_go_to_the_learner_and_leave_with_stale_tokens():
    # Sampled by versions 0, 2, 2 from {2}, {2, 3} and {2, 3, 4}. From version 1 on, the first is stale.
    young = rollout(1.0, [0, 2, 2])
    kept = pack_ids(np.array([1, 2, 3]), np.array([2, 2, 3, 2, 3, 4], np.int32), vocab_size=200)
    chosen = structs.replace(young, sequences=(structs.replace(young.sequences[0], sampling_mask=kept),))
    for oldest, sizes, words in ((0, [1, 2, 3], [2, 2, 3, 2, 3, 4]), (1, [2, 3], [2, 3, 2, 3, 4])):
        (found,) = prepare(taken(chosen), oldest_version=oldest).sequences
        assert found.sampling_mask is not None
        assert (found.sampling_mask.sizes.tolist(), found.sampling_mask.words.tolist()) == (sizes, words)


@pytest.mark.parametrize(
    ("routes", "is_fit"),
    [
        (np.full((4, 2, 2), 7, np.uint8), True),
        (np.full((3, 2, 2), 7, np.uint8), False),  # of five tokens, four are computed
        (np.full((4, 1, 2), 7, np.uint8), False),
        (np.full((4, 2, 2), 8, np.uint8), False),
        (None, False),
    ],
)
def test_routes_go_to_the_learner_that_replays_them_and_must_be_its_models(routes: np.ndarray | None, is_fit: bool):
    young = rollout(1.0, [0, 2, 2])
    sent = structs.replace(young, sequences=(structs.replace(young.sequences[0], routes=routes),))
    replayed = prepare(taken(sent), routing=RoutingShape(num_layers=2, num_experts=8, top_k=2))
    assert replayed.masked == ({} if is_fit else {0: "invalid"})
    if is_fit:
        assert replayed.sequences[0].routes is routes
    (free,) = prepare(taken(sent)).sequences
    assert free.routes is None


FAULTS: dict[str, dict[str, Any]] = {
    "a token beyond the vocabulary": {"token_ids": np.array([1, 2, 50], np.int32)},
    "a negative token": {"token_ids": np.array([1, -2, 3], np.int32)},
    "a trained first token": {"loss_mask": np.array([True, True, True])},
    "a sampling mask beyond the vocabulary": {
        "sampling_mask": SamplingMask(np.array([2, 2], np.int32), np.array([2, 50, 3, 50], np.int32))
    },
    "a sampling mask without the token": {
        "sampling_mask": SamplingMask(np.array([1, 1], np.int32), np.array([7, 3], np.int32))
    },
    "no token": {name: np.zeros(0, kind) for name, kind in (
        ("token_ids", np.int32), ("loss_mask", np.bool_), ("behavior_logprobs", np.float32), ("versions", np.int32)
    )},
}  # fmt: skip


@pytest.mark.parametrize("changes", [*FAULTS.values(), {}], ids=[*FAULTS, "a reward that is no number"])
def test_a_rollout_that_cant_be_trained_is_masked_as_invalid_and_its_neighbour_is_trained(changes: dict[str, Any]):
    mask = np.array([False, True, True])
    fine = TokenSequence(
        np.array([1, 2, 3], np.int32), mask, np.where(mask, -1.0, 0.0).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32),
    )  # fmt: skip
    broken = structs.replace(fine, **changes)
    reward = {"correct": 1.0 if changes else float("nan")}
    rollouts = (Rollout((broken,), reward, 1.0, "stop"), Rollout((fine,), {"correct": 1.0}, 1.0, "stop"))
    prepared = prepare(taken(*rollouts), vocab_size=50)
    assert prepared.masked == {0: "invalid"}
    assert [sequence.token_ids.tolist() for sequence in prepared.sequences] == [[1, 2, 3]]
    assert prepared.rewards.tolist() == [0.0, 1.0]


def taught(versions: list[int], top_k: int = 2, *, top_id: int = 7, logprob: float = -0.5) -> Rollout:
    whole = rollout(1, versions)
    n = len(versions)
    scores = TeacherScores(
        np.arange(n * (1 + top_k), dtype=np.float32).reshape(n, -1) + np.float32(logprob),
        np.full((n, top_k), top_id, np.int32),
    )
    return structs.replace(whole, sequences=(structs.replace(whole.sequences[0], teacher=scores),))


def test_a_teachers_scores_lie_along_the_tokens_that_were_sampled():
    # Two prompt tokens, two sampled ones; logprobs [[-0.5, 0.5, 1.5], [2.5, 3.5, 4.5]].
    distill = DistillConfig(teacher="t", form="loss", top_k=2)
    (sequence,) = prepare(taken(taught([0, 0])), distill=distill).sequences
    assert sequence.teacher_logprobs.tolist() == [0, 0, -0.5, 2.5]
    assert sequence.teacher_top_logprobs.tolist() == [[0, 0], [0, 0], [0.5, 1.5], [3.5, 4.5]]
    assert sequence.teacher_top_ids.tolist() == [[0, 0], [0, 0], [7, 7], [7, 7]]
    # In a micro-batch they are those of the trained tokens, one after the other.
    (((micro_batch,),)) = pack([sequence], max_tokens=9, num_ranks=1)
    assert micro_batch.teacher_logprobs.tolist() == [-0.5, 2.5]
    assert micro_batch.teacher_top_logprobs.tolist() == [[0.5, 1.5], [3.5, 4.5]]
    # Without a teacher they are left out, and with one a stale token's are not trained.
    (sequence,) = prepare(taken(taught([0, 0]))).sequences
    assert (len(sequence.teacher_logprobs), len(sequence.teacher_top_ids)) == (0, 0)
    (sequence,) = prepare(taken(taught([0, 1])), distill=distill, oldest_version=1).sequences
    (((micro_batch,),)) = pack([sequence], max_tokens=9, num_ranks=1)
    assert micro_batch.teacher_top_logprobs.tolist() == [[3.5, 4.5]]


@pytest.mark.parametrize(
    "unfit", [rollout(1, [0]), taught([0], 1), taught([0], top_id=50), taught([0], logprob=math.nan)]
)
def test_a_rollout_that_its_teacher_did_not_score_is_invalid(unfit: Rollout):
    prepared = prepare(taken(taught([0]), unfit), distill=DistillConfig(teacher="t", form="loss", top_k=2))
    assert dict(prepared.masked) == {1: "invalid"}


def test_the_distance_from_the_teacher_is_the_mean_log_ratio_of_the_sampled_tokens():
    # Behavior -1 everywhere; the teacher's -0.5 and 2.5 and, alone, -0.5: mean of -0.5, -3.5, -0.5.
    metrics = teacher_metrics([taught([0, 0]), taught([0]), rollout(1, [0])])
    mass = np.exp([0.5, 1.5, 3.5, 4.5, 0.5, 1.5]).sum() / 3
    assert metrics == pytest.approx({"distill/kl": -1.5, "distill/top_k_mass": mass})
    assert teacher_metrics([rollout(1, [0])]) == {}
