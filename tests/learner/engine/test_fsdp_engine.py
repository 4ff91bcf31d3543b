"""The engine against plain autograd, against itself cut differently, on one rank and on two real ones."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.loss import LossConfig
from async_rl.errors import ModelError, RunError
from async_rl.learner.checkpoints.digests import find_damage, write_manifest
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.data.batch import along_tokens
from async_rl.learner.engine import trained_model
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.interface import FATES, ScoredBy, UpdateStats
from async_rl.learner.losses.objective import policy_objective
from async_rl.learner.sequences import TrainSequence
from tests.learner.model.reference import (
    Tensors,
    assert_near,
    engine_of,
    gradients,
    plain_model,
    plain_scores,
    plain_step,
)
from tests.learner.rank_scenarios import (
    PLAIN,
    VARIANTS,
    batch_for,
    engine_config,
    plain_stats,
    save,
    sequences_with_a_group,
    with_reference,
)
from tests.learner.ranks import run_ranks
from tests.learner.tiny import random_sequences, tiny_config, tiny_model, trained_tokens, with_behavior


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, what one rank made of it (``one/``), and what two ranks did (``two/<variant>/``)."""
    root = tmp_path_factory.mktemp("engine")
    tiny_model(root / "model")
    engine = make_engine(root, {"learner": {"max_tokens": 4096}})
    stats = [engine.update(batch_for(0), version=0)]
    save(engine, root / "one" / "first", 1)
    stats.append(engine.update(batch_for(1)[:1], version=0))
    save(engine, root / "one" / "second", 2)
    (root / "one" / "stats.json").write_text(json.dumps([plain_stats(s) for s in stats]))
    return root


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> Path:
    run_ranks("updates", directory)
    return directory / "two"


@pytest.fixture(scope="module")
def reference(directory: Path) -> dict[str, Any]:
    """The ``[loss]`` of a run with a KL to another model."""
    tiny_model(directory / "reference", seed=1)
    return {"kl_coef": 0.1, "kl_placement": "loss", "kl_reference": str(directory / "reference")}


def make_engine(root: Path, variant: dict[str, Any] | None = None) -> FsdpEngine:
    return engine_of(engine_config(root, variant or {}))


def gradient_of(engine: FsdpEngine, sequences: list[TrainSequence], directory: Path) -> tuple[UpdateStats, Tensors]:
    stats = engine.update(sequences, version=0)
    save(engine, directory, 1)
    return stats, gradients(directory)


def assert_same_stats(left: dict[str, Any], right: dict[str, Any]) -> None:
    for key in left:
        if isinstance(left[key], float):
            assert left[key] == pytest.approx(right[key], rel=1e-4, abs=1e-6), key
        elif key == "by_lag":
            np.testing.assert_allclose(left[key], right[key], rtol=1e-4, atol=1e-5)
        else:
            assert left[key] == right[key] or list(left[key]) == list(right[key]), key


def weights_of(engine: FsdpEngine) -> Tensors:
    return {name: tensor.clone() for name, tensor in engine.gather()}


def with_turns() -> list[TrainSequence]:
    """Each begins with the earlier one, whose last tokens are trained, and a part of its answer."""
    turns = [next(iter(random_sequences(1, size, seed=size))) for size in (8, 13, 20, 18)]
    for number, (turn, earlier, num_shared) in enumerate(zip(turns[1:], turns, (7, 11, 16), strict=False), 1):
        turn.token_ids[:num_shared] = earlier.token_ids[:num_shared]
        turns[number] = replace(turn, sequence_id=number)
    assert all(turn.loss_mask[:7].any() for turn in turns[1:])
    return turns


@pytest.mark.parametrize("sequences", [sequences_with_a_group(), with_turns()], ids=["a group", "turns"])
@pytest.mark.parametrize("max_tokens", [20, 4096])
def test_gradient_equals_plain_autograd_one_unpacked_sequence_at_a_time(
    directory: Path, tmp_path: Path, sequences: list[TrainSequence], max_tokens: int
):
    engine = make_engine(directory, {"learner": {"max_tokens": max_tokens}})
    _, ours = gradient_of(engine, sequences, tmp_path / "ours")
    _, plain = plain_step(directory / "model", sequences)
    assert_near(ours, plain)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_take_the_steps_of_one(directory: Path, two_ranks: Path, variant: str):
    # The second step has one sequence, so the second rank joins it with nothing to do.
    for step in ("first", "second"):
        assert_near(gradients(two_ranks / variant / step), gradients(directory / "one" / step))
        assert_near(load_tensors(two_ranks / variant / step), load_tensors(directory / "one" / step))
    one = json.loads((directory / "one" / "stats.json").read_text())
    two = json.loads((two_ranks / variant / "stats.json").read_text())
    for left, right in zip(one, two, strict=True):
        assert_same_stats(left, right)


def test_resharding_says_how_often_parameters_are_gathered(two_ranks: Path):
    def counts(variant: str) -> list[int]:
        return json.loads((two_ranks / variant / "gathers.json").read_text())

    # Two layers and the rest are three groups. In the backward pass only layers are gathered again.
    num_micro_batches, num_gathers = counts("small")
    assert (num_micro_batches >= 3, num_gathers) == (True, num_micro_batches * (3 + 2))
    assert counts("kept for a micro-batch") == [num_micro_batches, num_micro_batches * 3]
    assert counts("kept for a step") == [num_micro_batches, 3]


def test_every_rank_digests_its_own_shards(two_ranks: Path, tmp_path: Path):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(two_ranks / next(iter(VARIANTS)) / "first", checkpoint)
    for rank in (0, 1):
        part = json.loads((checkpoint / f"digests-part-{rank:05d}.json").read_text())
        assert set(part) == {path.name for path in checkpoint.glob(f"shard-{rank + 1:05d}-*")}
        assert part
    write_manifest(checkpoint)
    assert find_damage(checkpoint) == ""
    path = checkpoint / "shard-00002-model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path.name}: expected" in find_damage(checkpoint)


def test_an_error_of_one_rank_reaches_the_others(two_ranks: Path):
    text = (two_ranks / "write_error.txt").read_text()  # of rank 1, in the background
    assert text.startswith(f"can't write the checkpoint {two_ranks / 'small' / 'broken'}: OSError: [Errno 28] No space")
    # Of rank 0, between two commands.
    assert (two_ranks / "cause.txt").read_text() == "rank 0: StaleRolloutError: group 5f3a is too old"


FAR = [with_behavior(s, -12.0) for s in random_sequences(3, 10)]
"""Above the skip threshold."""
HUGE = [replace(s, advantages=np.full_like(s.advantages, 3e38)) for s in random_sequences(3, 10)]


@pytest.mark.parametrize(("sequences", "reason"), [(FAR, "nothing is left"), (HUGE, "gradient norm")])
def test_a_step_without_tokens_or_a_finite_gradient_is_skipped_and_the_next_one_is_clean(
    directory: Path, tmp_path: Path, sequences: list[TrainSequence], reason: str
):
    engine = make_engine(directory)
    before = weights_of(engine)
    stats = engine.update(sequences, version=0)
    assert not stats.stepped
    assert reason in stats.reason
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())
    _, ours = gradient_of(engine, random_sequences(3, 10), tmp_path / "after")
    _, fresh = gradient_of(make_engine(directory), random_sequences(3, 10), tmp_path / "fresh")
    assert_near(ours, fresh)


def test_the_learning_rate_follows_the_effective_sample_size_of_the_sequences(directory: Path):
    scaled = make_engine(directory, {"optimizer": PLAIN["optimizer"] | {"ess_reference": 0.9}})
    free = make_engine(directory, {})
    stale, plain = (engine.update(batch_for(0), version=0) for engine in (scaled, free))
    assert 0.0 < stale.sequence_ess < 0.9
    assert stale.sequence_ess == plain.sequence_ess
    assert stale.lr == pytest.approx(plain.lr * (stale.sequence_ess / 0.9) ** 0.5)
    # The rate of one step says nothing of the next: on policy it is that of the schedule.
    logprobs = scaled.score(batch_for(1), of="policy")
    fresh = [replace(s, behavior_logprobs=along_tokens(s, logprobs[s.sequence_id])) for s in batch_for(1)]
    after = scaled.update(fresh, version=0)
    assert after.sequence_ess == pytest.approx(1.0, abs=1e-6)
    assert after.lr == pytest.approx(free.update(batch_for(1), version=0).lr)


@pytest.mark.parametrize("limit", [{"min_ess": 0.999}, {"max_kl": 1e-6}])
def test_a_step_past_a_limit_leaves_weights_optimizer_and_schedule_untouched(
    directory: Path, tmp_path: Path, limit: dict[str, float]
):
    optimizer = PLAIN["optimizer"] | {"betas": [0.9, 0.999], "warmup_steps": 4, "weight_decay": 0.1}
    guarded = make_engine(directory, {"optimizer": optimizer, "loss": limit})
    free = make_engine(directory, {"optimizer": optimizer})
    strict = guarded.policy.objective
    lenient = policy_objective(guarded.policy.config.model_copy(update={"loss": LossConfig()}))
    for engine in (guarded, free):
        engine.policy.objective = lenient
        assert engine.update(batch_for(0), version=0).stepped
    guarded.policy.objective = strict
    skipped = guarded.update(batch_for(1), version=0)
    assert not skipped.stepped
    assert f"loss.{next(iter(limit))}" in skipped.reason
    assert skipped.grad_norm > 0
    guarded.policy.objective = lenient
    after, straight = (engine.update(batch_for(2), version=0) for engine in (guarded, free))
    assert after.lr == straight.lr
    for engine, name in ((guarded, "guarded"), (free, "free")):
        save(engine, tmp_path / name, 1)
    for prefix in ("", OPTIMIZER):
        expected = load_tensors(tmp_path / "free", *([prefix] if prefix else []))
        found = load_tensors(tmp_path / "guarded", *([prefix] if prefix else []))
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("of", "model"), [("policy", "model"), ("reference", "reference")])
@pytest.mark.parametrize("max_tokens", [30, 4096])
def test_scores_are_tempered_logprobs_of_the_trained_tokens_and_the_policys_entropies(
    directory: Path, reference: dict[str, Any], of: ScoredBy, model: str, max_tokens: int
):
    engine = make_engine(directory, {"loss": reference, "learner": {"max_tokens": max_tokens}})
    sequences = [replace(s, temperature=0.7) for s in random_sequences(5, 20, spread=10)]
    sequences[2] = replace(sequences[2], loss_mask=np.zeros_like(sequences[2].loss_mask))
    scores, of_policy = engine.score(sequences, of=of), engine.score_policy(sequences)
    plain = plain_model(directory / model)
    assert scores.keys() == of_policy.keys() == set(range(5))
    for number, sequence in enumerate(sequences):
        logprobs, entropies = plain_scores(plain, sequence, 0.7)
        assert scores[number].dtype == np.float32
        np.testing.assert_allclose(scores[number], logprobs.detach(), atol=1e-5, rtol=0)
        if of == "policy":
            np.testing.assert_array_equal(of_policy[number].logprobs, scores[number])
            np.testing.assert_allclose(of_policy[number].entropies, entropies, atol=1e-5, rtol=0)


def test_scoring_changes_nothing_and_the_reference_never_changes(
    directory: Path, tmp_path: Path, reference: dict[str, Any]
):
    engine = make_engine(directory, {"loss": reference | {"kl_placement": "reward"}})
    sequences = random_sequences(3, 10)
    policy, frozen = engine.score(sequences, of="policy"), engine.score(sequences, of="reference")
    _, ours = gradient_of(engine, sequences, tmp_path / "scored")
    _, plain = gradient_of(make_engine(directory), sequences, tmp_path / "plain")
    assert all(torch.equal(ours[name], tensor) for name, tensor in plain.items())
    assert all(not np.array_equal(p, policy[i]) for i, p in engine.score(sequences, of="policy").items())
    assert all(np.array_equal(r, frozen[i]) for i, r in engine.score(sequences, of="reference").items())
    # Neither is it published or saved.
    assert (
        load_tensors(tmp_path / "scored").keys() == load_tensors(tmp_path / "plain").keys() == weights_of(engine).keys()
    )


def test_the_reference_is_the_model_that_the_run_began_from_unless_another_is_named(directory: Path):
    engine = make_engine(directory, {"loss": {"kl_coef": 0.1, "kl_placement": "loss"}})
    engine.load(directory / "one" / "first")
    sequences = random_sequences(2, 10)
    expected = make_engine(directory).score(sequences, of="policy")
    for sequence_id, logprobs in engine.score(sequences, of="reference").items():
        np.testing.assert_array_equal(logprobs, expected[sequence_id])


def test_without_a_kl_coefficient_no_reference_is_loaded(directory: Path):
    assert make_engine(directory).policy.reference is None


def test_a_reference_that_is_missing_or_has_another_vocabulary_is_refused(
    directory: Path, tmp_path: Path, reference: dict[str, Any]
):
    with pytest.raises(ModelError, match=r"\(loss\.kl_reference, or model\.path if that is unset\)"):
        make_engine(directory, {"loss": reference | {"kl_reference": str(tmp_path / "nothing")}})
    from transformers import AutoModelForCausalLM

    model = tiny_model(tmp_path / "other")
    wider = AutoModelForCausalLM.from_pretrained(model)
    wider.resize_token_embeddings(64)
    wider.save_pretrained(model)
    with pytest.raises(ModelError, match=r"loss.kl_reference: expected a model of the policy's vocabulary, 45 tokens"):
        make_engine(directory, {"loss": reference | {"kl_reference": str(model)}})


def test_clipping_bounds_the_gradient_and_reports_the_norm_before_it(directory: Path, tmp_path: Path):
    optimizer = PLAIN["optimizer"] | {"max_grad_norm": 0.01}
    stats, ours = gradient_of(
        make_engine(directory, {"optimizer": optimizer}), random_sequences(3, 10), tmp_path / "clipped"
    )
    norm = torch.cat([g.flatten() for g in ours.values()]).norm().item()
    assert norm == pytest.approx(0.01, rel=1e-3)
    assert stats.grad_norm > 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_gather_gives_hugging_face_names_once_and_survives_a_caller_that_stops(tmp_path: Path, tied: bool):
    from safetensors.torch import load_file

    tiny_model(tmp_path / "model", tied=tied)
    engine = make_engine(tmp_path)
    for _ in engine.gather():
        break
    gathered = weights_of(engine)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert gathered.keys() == stored.keys()
    assert ("lm_head.weight" in gathered) is not tied
    assert all(torch.equal(gathered[name], tensor) for name, tensor in stored.items())


def test_a_checkpoint_that_is_missing_or_of_another_model_is_refused(directory: Path, tmp_path: Path):
    tiny_model(tmp_path / "model", hidden_size=24)
    with pytest.raises(RunError, match=r"another model's: .* has shape"):
        make_engine(tmp_path).load(directory / "one" / "first")
    with pytest.raises(RunError, match="can't read the checkpoint"):
        make_engine(directory).load(tmp_path / "nothing")


def test_bfloat16_rounds_neither_temperatures_nor_the_references_buffers(directory: Path, reference: dict[str, Any]):
    config = tiny_config(directory, "model", model={"dtype": "bfloat16"}, loss=reference)
    with closing(engine_of(config)) as engine:
        assert engine.policy.reference is not None
        assert {p.dtype for p in engine.policy.reference.parameters()} == {torch.bfloat16}
        assert {b.dtype for b in engine.policy.reference.buffers()} == {torch.float32}
        sequences = random_sequences(2, 10)
        models: dict[ScoredBy, str] = {"policy": "model", "reference": "reference"}
        for of, exact in models.items():
            # 1.001 is 1 in bfloat16.
            warmer = engine.score([replace(s, temperature=1.001) for s in sequences], of=of)
            for sequence_id, logprobs in engine.score(sequences, of=of).items():
                assert np.abs(warmer[sequence_id] - logprobs).max() > 0
                expected, _ = plain_scores(plain_model(directory / exact), sequences[sequence_id])
                np.testing.assert_allclose(logprobs, expected.detach(), atol=0.05)
        assert engine.update(with_reference(engine, sequences), version=0).stepped


def test_bfloat16_compute_keeps_float32_master_weights(directory: Path, tmp_path: Path):
    config = tiny_config(directory, "model", model={"dtype": "bfloat16"}, **PLAIN)
    with closing(engine_of(config)) as engine:
        _, ours = gradient_of(engine, random_sequences(3, 10), tmp_path / "bfloat16")
        assert {tensor.dtype for _, tensor in engine.gather()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in load_tensors(tmp_path / "bfloat16").values()} == {torch.float32}
    _, exact = gradient_of(make_engine(directory), random_sequences(3, 10), tmp_path / "float32")
    for name, gradient in exact.items():
        assert torch.nn.functional.cosine_similarity(ours[name].flatten(), gradient.flatten(), dim=0) > 0.99


def test_an_offloaded_engine_takes_the_same_steps(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The reference moves after each. FSDP's code for offloaded shards, without a device to move them to.
    monkeypatch.setattr(trained_model, "check_offload", lambda *_, **__: None)
    found: dict[str, tuple[UpdateStats, Tensors, Tensors]] = {}
    for offload in ("none", "reference", "all"):
        loss = {"preset": "grpo", "reference_every": 1, "reference_decay": 0.5}
        sections: Any = {"model": {"dtype": "bfloat16"}, "loss": loss, "learner": {"offload": offload}}
        with closing(engine_of(tiny_config(directory, "model", **(PLAIN | sections)))) as engine:
            engine.update(with_reference(engine, batch_for(0)), version=0)
            stats, ours = gradient_of(engine, with_reference(engine, batch_for(1)), tmp_path / offload)
            found[offload] = stats, ours, weights_of(engine)
    for offload in ("reference", "all"):
        assert found[offload][0].grad_norm == found["none"][0].grad_norm
        for left, right in zip(found[offload][1:], found["none"][1:], strict=True):
            assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


@pytest.mark.parametrize("max_tokens", [40, 4096])
def test_an_update_returns_what_it_computed_for_recorded_sequences(directory: Path, max_tokens: int):
    # Sequence 3 is above the skip threshold, so all its tokens are left out of the loss.
    engine = make_engine(directory, {"learner": {"max_tokens": max_tokens}})
    sequences = [replace(s, is_recorded=s.sequence_id in (0, 3, 5)) for s in batch_for(0)]
    scores = engine.score_policy(sequences)
    stats = engine.update(sequences, version=0)
    assert sorted(stats.tokens) == [0, 3, 5]
    assert (stats.skipped_sequence_ids, stats.skipped_tokens) == ((3,), trained_tokens(sequences[3:4]))
    assert stats.tokens_trained == trained_tokens(sequences) - stats.skipped_tokens
    for sequence_id, found in stats.tokens.items():
        np.testing.assert_allclose(found.logprobs, scores[sequence_id].logprobs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.entropies, scores[sequence_id].entropies, rtol=1e-5, atol=1e-6)
    assert set(stats.tokens[3].fates.tolist()) == {FATES.index("left_out")}
    assert FATES.index("left_out") not in stats.tokens[0].fates
    assert engine.update(batch_for(0), version=0).tokens == {}
