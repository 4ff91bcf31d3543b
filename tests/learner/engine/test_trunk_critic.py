"""A value head on the policy: its update by plain torch, checkpoint and export, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from async_rl.config.config import Config
from async_rl.errors import RunError
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.engine.trunk_critic import TrunkCritic
from async_rl.learner.export.model import export_adapter, export_checkpoint
from async_rl.learner.sequences import TrainSequence
from tests.learner.engine.on_trunk import trunk_config, with_targets
from tests.learner.model.reference import plain_model
from tests.learner.rank_layouts import LORA, layout_model, layout_sequences
from tests.learner.rank_scenarios import PLAIN, save
from tests.learner.ranks import run_ranks
from tests.learner.saved_critic import engine_of, restored, updated_as_plain_torch
from tests.learner.tiny import tiny_config


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trunk")
    layout_model(root / "qwen2", "qwen2")
    return root


def head_of(engine: FsdpEngine) -> Tensor:
    critic = engine.models["critic"]
    assert isinstance(critic, TrunkCritic)
    return critic.head.detach()


def trained_engine(config: Config, num_updates: int = 1) -> FsdpEngine:
    """An engine whose head is no longer 0."""
    engine, sequences = engine_of(config), layout_sequences()
    assert engine.critic is not None
    for _ in range(num_updates):
        engine.critic.update(with_targets(sequences), version=0)
    return engine


def plain_values(model: Any, sequence: TrainSequence, head: Tensor) -> Tensor:
    """The head's output at the tokens before trained ones, with grad by ``head`` alone."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.from_numpy(sequence.token_ids).long()[None]).last_hidden_state[0]
    return (hidden @ head[0])[:-1][torch.from_numpy(sequence.loss_mask[1:])]


def test_the_heads_update_is_that_of_plain_torch_and_leaves_the_policy_alone_or_is_skipped(
    directory: Path, tmp_path: Path
):
    sequences, engine = layout_sequences(), trained_engine(trunk_config(directory))  # in micro-batches of 40 tokens
    assert engine.critic is not None
    head, made = head_of(engine).clone().requires_grad_(), with_targets(sequences)
    model = plain_model(directory / "qwen2")
    stats = updated_as_plain_torch(engine, made, lambda sequence: plain_values(model, sequence, head))
    save(engine, tmp_path / "saved", 1)
    assert head.grad is not None
    assert stats.grad_norm == pytest.approx(head.grad.norm().item(), rel=1e-5)
    moment = load_tensors(tmp_path / "saved" / "critic", OPTIMIZER)["exp_avg.score.weight"]  # beta1 is 0
    torch.testing.assert_close(moment, head.grad, atol=1e-5, rtol=1e-5)
    made[0].value_targets[made[0].loss_mask] = np.inf
    head = head_of(engine).clone()
    skipped = engine.critic.update(made, version=0)
    assert not skipped.stepped
    assert "gradient norm is" in skipped.reason
    assert torch.equal(head_of(engine), head)


def test_the_head_has_its_own_schedule_and_norm(directory: Path):
    config = trunk_config(
        directory,
        critic={"lr": 1e-2, "schedule": "linear", "min_lr_ratio": 0.0, "max_grad_norm": 1e-3, "freeze_steps": 2},
        learner={"steps": 4, "max_tokens": 40},
        optimizer={"lr": 1e-6, "betas": [0.0, 0.999]},
    )
    engine = engine_of(config)
    assert engine.critic is not None
    rates = [engine.critic.update(with_targets(layout_sequences()), version=0).lr for _ in range(3)]
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2])  # four steps, the frozen ones too
    optimizer: Any = engine.models["critic"]
    assert float(optimizer._optimizer.tensors()["exp_avg.score.weight"].norm()) == pytest.approx(1e-3, rel=1e-3)


def test_the_policys_update_and_what_is_published_are_the_same_with_and_without_the_head(directory: Path):
    sequences = layout_sequences()
    with_head = trained_engine(trunk_config(directory))
    alone = engine_of(tiny_config(directory, "qwen2", **PLAIN, learner={"max_tokens": 40}, loss={"skip_threshold": 0}))
    stats = [engine.update(sequences, version=0) for engine in (with_head, alone)]
    assert stats[0].grad_norm == stats[1].grad_norm
    one, other = dict(with_head.gather()), dict(alone.gather())
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_a_head_is_saved_restored_and_exported_beside_the_policy(directory: Path, tmp_path: Path, lora: bool):
    config, sequences = trunk_config(directory, **(LORA if lora else {})), layout_sequences()
    engine = trained_engine(config, 2)
    assert engine.critic is not None
    engine.update(sequences, version=0)  # the trunk moves, too: with adapters values are those of the adapted policy
    again, values = restored(engine, config, tmp_path / "saved", sequences)
    for one in (engine, again):
        one.critic.update(with_targets(sequences), version=0)  # pyright: ignore[reportOptionalMemberAccess]
    assert torch.equal(head_of(engine), head_of(again))
    export_checkpoint(tmp_path / "saved", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "critic").iterdir()] == ["value_head.safetensors"]
    head = load_file(tmp_path / "out" / "critic" / "value_head.safetensors")["score.weight"]
    exported = plain_model(tmp_path / "out")
    assert not any("score" in name for name, _ in exported.named_parameters())
    for sequence in sequences[:2]:
        expected = plain_values(exported, sequence, head)
        np.testing.assert_allclose(values[sequence.sequence_id], expected, atol=1e-5, rtol=1e-5)
    if lora:
        export_adapter(tmp_path / "saved", tmp_path / "adapter")
        assert not any("score" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


def test_checkpoints_of_the_other_trunk_are_refused(directory: Path, tmp_path: Path):
    save(trained_engine(trunk_config(directory)), tmp_path / "head", 1)
    own = trunk_config(directory, critic={"trunk": "own"})
    with pytest.raises(RunError, match="another model's"):
        engine_of(own).load(tmp_path / "head")


@pytest.mark.slow
def test_two_ranks_make_the_heads_updates_of_one(tmp_path: Path):
    """Each layout goes on from a checkpoint of one process, and then one process from each layout's."""
    names = ["shards 2", "replicas 2", "sequence 2"]
    layout_model(tmp_path / "qwen2", "qwen2")
    config, sequences = trunk_config(tmp_path, **LORA), layout_sequences()
    engine = trained_engine(config)
    save(engine, tmp_path / "begun", 1)
    assert engine.critic is not None
    values = [engine.critic.score(sequences)]
    stats = engine.critic.update(with_targets(sequences), version=0)
    head = head_of(engine).clone()
    values.append(engine.critic.score(sequences))
    norm = engine.update(sequences, version=0).grad_norm
    values.append(engine.critic.score(sequences))
    (tmp_path / "trunk.json").write_text(json.dumps(names), encoding="utf-8")
    run_ranks("on_trunk", tmp_path)
    for name in names:
        found, numbers = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        assert numbers == pytest.approx((stats.loss, stats.grad_norm, stats.tokens_trained, norm), rel=1e-5)
        for of_layout, of_one in zip(found, values, strict=True):
            for sequence_id, expected in of_one.items():
                np.testing.assert_allclose(of_layout[sequence_id], expected, rtol=1e-5, atol=1e-5)
        again = engine_of(config)
        again.load(tmp_path / f"saved {name}")
        torch.testing.assert_close(head_of(again), head, rtol=1e-5, atol=1e-5)
