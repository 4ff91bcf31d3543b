"""A critic beside the policy: its update by plain torch, checkpoint and export, and what the trainer does with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.config import Config
from async_rl.errors import ModelError, RunError, TrainingError
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.engine.fsdp_engine import policy_schedule
from async_rl.learner.export.model import export_checkpoint
from async_rl.learner.interface import UpdateCost, UpdateStats
from async_rl.learner.loop.critic import check_critic_skipped, critic_metrics, train_critic, with_values, without_policy
from async_rl.learner.loop.step_result import trained_counts
from async_rl.learner.losses.value import critic_sequences
from async_rl.learner.sequences import TrainSequence
from tests.learner.loop.scripted_run import PLAIN_STATS, ScriptedEngine, make_run
from tests.learner.losses.test_advantages import prepare, rollout
from tests.learner.model.test_value_model import classifier, plain_values
from tests.learner.rank_layouts import layout_model, layout_sequences
from tests.learner.rank_scenarios import PLAIN, save
from tests.learner.saved_critic import engine_of, restored, updated_as_plain_torch
from tests.learner.tiny import tiny_config
from tests.run.metric_keys import declared_key

CRITIC = {"path": "values", "lr": 1e-2, "schedule": "cosine", "max_grad_norm": 1e9, "value_clip": 0.1}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models: the policy ``qwen2``, and the reward model ``values``."""
    root = tmp_path_factory.mktemp("critic")
    layout_model(root / "qwen2", "qwen2")
    layout_model(root / "values", "qwen2")
    torch.manual_seed(1)
    classifier(root / "values", num_labels=1).save_pretrained(root / "values")
    return root


def config_of(directory: Path, critic: dict[str, Any] | None = None, **sections: Any) -> Config:
    own = dict(CRITIC if critic is None else critic)
    if "path" in own:
        own["path"] = str(directory / own["path"])
    base = PLAIN | {"learner": {"max_tokens": 40}, "loss": {"advantage": "gae", "skip_threshold": 0}, "critic": own}
    return tiny_config(directory, "qwen2", **(base | sections))


def with_targets(sequences: list[TrainSequence], values: dict[int, np.ndarray]) -> list[TrainSequence]:
    """Old values near the critic's, and random targets."""
    rng = np.random.default_rng(3)
    old = {i: of + rng.normal(0, 0.2, len(of)) for i, of in values.items()}
    targets = {i: rng.normal(0, 1, len(of)) for i, of in values.items()}
    return critic_sequences(sequences, targets, old)


def test_an_update_of_the_critic_is_that_of_plain_torch_and_leaves_the_policy_alone(directory: Path, tmp_path: Path):
    sequences, engine = layout_sequences(), engine_of(config_of(directory))
    engine.self_test()
    assert engine.critic is not None
    values = engine.critic.score(sequences)
    model = classifier(directory / "values")
    stats = updated_as_plain_torch(engine, with_targets(sequences, values), partial(plain_values, model))
    assert stats.lr == 1e-2
    save(engine, tmp_path / "saved", 1)
    moments = load_tensors(tmp_path / "saved" / "critic", OPTIMIZER)  # beta1 is 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(moments[f"exp_avg.{name}"], parameter.grad, atol=1e-5, rtol=1e-5)
    assert any((of != values[i]).any() for i, of in engine.critic.score(sequences).items())


def test_a_critic_is_saved_restored_and_exported_with_the_policy(directory: Path, tmp_path: Path):
    config = config_of(directory, {"lr": 1e-2})
    engine, sequences = engine_of(config), layout_sequences()
    assert engine.critic is not None
    first = engine.critic.score(sequences)
    assert not any(of.any() for of in first.values())  # a new head
    for _ in range(2):
        engine.critic.update(with_targets(sequences, first), version=0)
    _, values = restored(engine, config, tmp_path / "saved", sequences)
    export_checkpoint(tmp_path / "saved", tmp_path / "out")
    exported = classifier(tmp_path / "out" / "critic")
    for sequence in sequences[:2]:
        expected = plain_values(exported, sequence).detach()
        np.testing.assert_allclose(values[sequence.sequence_id], expected, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_without_a_critic_and_a_model_that_cant_be_one_are_refused(directory: Path, tmp_path: Path):
    save(engine_of(tiny_config(directory, "qwen2")), tmp_path / "saved", 1)
    with pytest.raises(RunError, match="expected a critic in the checkpoint"):
        engine_of(config_of(directory)).load(tmp_path / "saved")
    with pytest.raises(ModelError, match=r"can't use the critic's model .*none.* \(critic\.path"):
        engine_of(config_of(directory, {"path": "none"}))


class FakeCritic:
    """Its values are 0.5, and it notes what it is trained on."""

    def __init__(self) -> None:
        self.trained: list[list[TrainSequence]] = []

    def score(self, sequences: list[TrainSequence]) -> dict[int, np.ndarray]:
        return {s.sequence_id: np.full(int(s.loss_mask.sum()), 0.5, np.float32) for s in sequences}

    def update(self, sequences: list[TrainSequence], *, version: int) -> Any:
        self.trained.append(sequences)
        return SimpleNamespace(stepped=True)


def test_the_critic_is_trained_on_each_part_in_every_epoch_with_targets_and_old_values():
    step = prepare([rollout(1, 2)], [rollout(0, 1)], num_updates=2)
    critic: Any = FakeCritic()
    valued = replace(with_values(step, critic), value_targets={0: np.array([2.0, 3.0]), 1: np.array([4.0])})
    train_critic(critic, valued, num_epochs=2, version=5)
    assert [[s.sequence_id for s in part] for part in critic.trained] == [[0], [1], [0], [1]]
    (sequence,) = critic.trained[0]
    assert sequence.value_targets.tolist() == [0, 0, 2, 3]
    assert sequence.old_values.tolist() == [0, 0, 0.5, 0.5]


def test_the_metrics_of_a_critic_by_hand():
    # Values 1, 2, 3, 0 and targets 2, 2, 4, 0; the last rollout's token is of lag 0, the others' of lag 1.
    # Errors 1, 0, 1, 0: variance 1/4. Targets: mean 2, variance (0 + 0 + 4 + 4) / 4 = 2. So 1 - 1/8.
    step = prepare([rollout(1, 3), rollout(0, 1)])
    last = step.sequences[1]
    step = step.with_sequences([step.sequences[0], replace(last, versions=last.versions + 1)])
    step = replace(
        step,
        values={0: np.array([1, 2, 3], np.float32), 1: np.array([0], np.float32)},
        value_targets={0: np.array([2.0, 2.0, 4.0]), 1: np.array([0.0])},
    )
    row = critic_metrics(step, [PLAIN_STATS], version=6)
    assert row["critic/explained_variance"] == pytest.approx(1 - 1 / 8)
    assert (row["critic/value_mean"], row["critic/target_mean"]) == (1.5, 2.0)
    assert (row["critic/target_error_lag_0"], row["critic/target_error_lag_1"]) == (0.0, pytest.approx(2 / 3))
    assert None not in map(declared_key, row)
    assert critic_metrics(step, [], version=6) == {}


@dataclass
class EngineWithCritic(ScriptedEngine):
    """Its critic says 0.5, and steps, or skips if it ``fails``."""

    critic_versions: list[int] = field(default_factory=list)
    critic_cost: UpdateCost | None = None
    fails: bool = False

    @property
    def critic(self) -> Any:
        of_critic: Any = FakeCritic()

        def update(sequences: list[TrainSequence], *, version: int) -> UpdateStats:
            self.critic_versions.append(version)
            reason = "the gradient is inf" if self.fails else ""
            return replace(PLAIN_STATS, cost=self.critic_cost, stepped=not self.fails, reason=reason)

        of_critic.update = update
        return of_critic


def test_the_first_steps_train_only_the_critic_and_make_no_version_and_its_costs_count(tmp_path: Path):
    run = make_run(tmp_path, loss={"preset": "ppo"}, critic={"freeze_steps": 2}, learner={"steps": 4})
    cost = UpdateCost({}, flops=3e12, peak_flops_per_s=1e12, peak_memory_bytes=5)
    run.engine = engine = EngineWithCritic(critic_cost=cost)
    assert run.start().version == 2
    assert (engine.critic_versions, engine.versions) == ([0, 0, 0, 1], [0, 1])
    assert [row["version"] for row in run.rows] == [0, 0, 1, 2]
    # Nothing was skipped: two groups of two steps were for the critic alone.
    assert run.dropped == {"policy_frozen": 4}
    assert [row.get("masked/policy_frozen", 0) > 0 for row in run.rows] == [True, True, False, False]
    for row in run.rows:
        assert row["skip/steps"] == 0
        assert {"critic/loss", "time/critic_s"} <= row.keys()
        # The policy of a scripted engine has no costs.
        assert row["throughput/flops_per_s"] == pytest.approx(3e12 / row["time/train_s"])
        assert row["throughput/mfu"] == pytest.approx(3 / row["time/train_s"])
        assert row["memory/peak_bytes"] == 5


def test_a_critic_whose_steps_are_skipped_again_and_again_stops_the_run(tmp_path: Path):
    run = make_run(
        tmp_path, loss={"preset": "ppo"}, critic={"freeze_steps": 3}, learner={"steps": 9},
        experimental={"max_skipped_steps": 3},
    )  # fmt: skip
    run.engine = engine = EngineWithCritic(fails=True)
    with pytest.raises(TrainingError, match=r"4 optimizer steps of the critic .* at most 3\..*the gradient is inf"):
        run.start()
    assert engine.critic_versions == [0, 0, 0, 0]
    with pytest.raises(TrainingError, match="every token was masked"):
        check_critic_skipped(4, [], most=3)


def test_steps_that_train_only_the_critic_are_steps_of_its_schedule_and_not_of_the_versions():
    def annealed(**section: object) -> dict[str, object]:
        return {"schedule": "linear", "min_lr_ratio": 0.0, **section}

    config = Config.model_validate({
        "run": {"dir": "r"}, "model": {"path": "m"}, "loss": {"preset": "ppo"},
        "critic": annealed(lr=1e-2, freeze_steps=4), "optimizer": annealed(lr=1e-3, name="muon", adamw_lr=1e-4),
        "learner": {"steps": 10, "updates_per_batch": 2, "groups_per_step": 4},
        "queue": {"max_staleness": 2}, "sampling": {"temperature": 1.0, "temperature_end": 0.5},
    })  # fmt: skip
    # The policy makes 6 x 2 updates and versions, the critic 10 x 2 updates, all of whose weights have its own rate.
    assert config.temperature_steps == 12
    policy, critic = policy_schedule(config), policy_schedule(config.of_critic)
    assert [policy.lr_at(6), policy.lr_at(12)] == pytest.approx([5e-4, 0.0])
    assert [critic.lr_at(10), critic.lr_at(20)] == pytest.approx([5e-3, 0.0])
    assert config.of_critic.optimizer.adamw_lr is None


def test_a_step_that_trains_only_the_critic_masks_every_rollout_for_that_cause():
    step = without_policy(prepare([rollout(1, 2), rollout(0, 1, "length")]))
    facts = trained_counts(step, [], stepped=[False])
    assert facts.rollouts_masked == {"policy_frozen": 1, "truncated": 1}
    assert (facts.tokens_trained, facts.tokens_masked) == (0, {"policy_frozen": 2, "truncated": 1})
