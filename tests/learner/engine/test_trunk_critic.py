"""A value head on the policy: its update by plain torch, checkpoint and export, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.engine.ranks import init_ranks
from async_rl.learner.engine.trunk_critic import TrunkCritic
from async_rl.learner.losses.value import critic_sequences, value_loss
from async_rl.learner.packing import TrainSequence
from async_rl.learner.stored_tensors import OPTIMIZER, load_tensors
from tests.learner.layouts import layout_model, layout_sequences
from tests.learner.on_trunk import trunk_config, with_targets
from tests.learner.rank_scenarios import save


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trunk")
    layout_model(root / "qwen2", "qwen2")
    return root


def engine_of(config: Config) -> FsdpEngine:
    return FsdpEngine(config, init_ranks(config))


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


def causal_lm(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def test_the_first_update_of_a_head_on_one_token_by_hand(directory: Path, tmp_path: Path):
    # w is 0, so V = 0 everywhere. One trained token with the target 2: the loss is 2^2 / 2 = 2, its gradient -2 h.
    engine = engine_of(trunk_config(directory, critic={"value_clip": 0.0}))
    (sequence,) = layout_sequences()[-1:]
    last = replace(sequence, loss_mask=np.arange(len(sequence.token_ids)) == len(sequence.token_ids) - 1)
    assert engine.critic is not None
    assert engine.critic.score([last])[last.sequence_id].tolist() == [0.0]
    (made,) = critic_sequences([last], {last.sequence_id: np.array([2.0])}, {last.sequence_id: np.zeros(1)})
    stats = engine.critic.update([made], version=0)
    save(engine, tmp_path / "saved", 1)
    ids = torch.from_numpy(last.token_ids[:-1]).long()[None]
    hidden = causal_lm(directory / "qwen2").model(input_ids=ids).last_hidden_state[0, -1].detach()
    gradient = load_tensors(tmp_path / "saved" / "critic", OPTIMIZER)["exp_avg.score.weight"]  # beta1 is 0
    torch.testing.assert_close(gradient[0], -2 * hidden, atol=1e-5, rtol=1e-5)
    assert stats.loss == pytest.approx(2.0)
    assert stats.grad_norm == pytest.approx(2 * float(hidden.norm()), rel=1e-5)


def test_the_heads_update_is_that_of_plain_torch_and_leaves_the_policy_alone_or_is_skipped(
    directory: Path, tmp_path: Path
):
    sequences, engine = layout_sequences(), trained_engine(trunk_config(directory))  # in micro-batches of 40 tokens
    assert engine.critic is not None
    before, values = engine.score(sequences, of="policy"), engine.critic.score(sequences)
    head, made = head_of(engine).clone().requires_grad_(), with_targets(sequences)
    stats = engine.critic.update(made, version=0)
    save(engine, tmp_path / "saved", 1)
    model, losses, clipped = causal_lm(directory / "qwen2"), [], []
    for sequence in made:
        mask = sequence.loss_mask
        of_model = plain_values(model, sequence, head)
        np.testing.assert_allclose(values[sequence.sequence_id], of_model.detach(), atol=1e-5, rtol=1e-5)
        targets, old = (torch.from_numpy(a[mask]) for a in (sequence.advantages, sequence.proximal_logprobs))
        loss, is_clipped = value_loss(of_model, targets, old, 0.1)
        losses.append(loss)
        clipped.append(is_clipped)
    total = torch.cat(losses).mean()
    total.backward()
    assert head.grad is not None
    assert stats.loss == pytest.approx(total.item(), rel=1e-5)
    assert stats.own_metrics == {"critic/clip_fraction": pytest.approx(torch.cat(clipped).double().mean().item())}
    assert 0 < stats.own_metrics["critic/clip_fraction"] < 1
    assert stats.tokens_trained == len(torch.cat(losses))
    assert stats.grad_norm == pytest.approx(head.grad.norm().item(), rel=1e-5)
    moment = load_tensors(tmp_path / "saved" / "critic", OPTIMIZER)["exp_avg.score.weight"]  # beta1 is 0
    torch.testing.assert_close(moment, head.grad, atol=1e-5, rtol=1e-5)
    after = engine.score(sequences, of="policy")
    assert all((after[i] == before[i]).all() for i in before)
    made[0].advantages[made[0].loss_mask] = np.inf
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


def test_keys_that_need_a_model_of_its_own_are_refused(directory: Path):
    for sections, message in (
        ({"critic": {"path": "values"}}, r"critic\.path: expected no value with critic\.trunk"),
        ({"parallel": {"pipeline": 2}}, r"parallel\.pipeline: expected 1 with critic\.trunk"),
        ({"parallel": {"tensor": 2}}, r"parallel\.tensor: expected 1 with critic\.trunk"),
        ({"loss": {"advantage": "group_norm"}}, r"critic\.trunk: expected loss\.advantage"),
    ):
        with pytest.raises(Exception, match=message):
            trunk_config(directory, **sections)
