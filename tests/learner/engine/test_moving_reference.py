"""A reference that follows the policy: by hand, in an engine, after a resume. ``test_layouts.py`` has several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.config.loss import LossConfig
from async_rl.learner.checkpoints.stored_tensors import MODEL, REFERENCE, load_tensors
from async_rl.learner.engine.moving_reference import MovingReference
from tests.learner.model.reference import engine_of
from tests.learner.rank_scenarios import LORA, PLAIN, batch_for, save, with_reference
from tests.learner.tiny import tiny_config, tiny_model


def of_loss(every: int, decay: float) -> LossConfig:
    return LossConfig(kl_coef=0.1, reference_every=every, reference_decay=decay)


@pytest.mark.parametrize(
    ("decay", "dtype", "moved"),
    [(0.0, torch.bfloat16, [3.0, 1.0]), (0.75, torch.float32, [1.5, 1.75 + 0.25 / 512])],
)
def test_every_second_step_it_becomes_the_policy_or_keeps_a_share_of_itself(
    decay: float, dtype: torch.dtype, moved: list[float]
):
    # 0.75 x 1 + 0.25 x 3 and 0.75 x 2 + 0.25 (1 + 1/512), which is 1 in bfloat16.
    policy, reference = {"w": torch.tensor([3.0, 1 + 1 / 512])}, {"w": torch.tensor([1.0, 2.0], dtype=dtype)}
    moving = MovingReference(of_loss(2, decay), lambda: policy, lambda: reference)
    moving.follow(1)
    assert reference["w"].tolist() == [1.0, 2.0]
    moving.follow(2)
    assert reference["w"].tolist() == moved


def trl(model: dict[str, Tensor], target: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """The line of TRL 1.16.0's ``SyncRefModelCallback._sync_target_model``, on copies."""
    return {name: target[name].clone().mul_(1.0 - alpha).add_(model[name], alpha=alpha) for name in model}


@pytest.mark.parametrize("lora", [{}, {"lora": LORA}], ids=["all weights", "adapters"])
def test_an_engine_moves_it_as_trl_does_saves_it_and_goes_on_with_the_same_bits(tmp_path: Path, lora: dict[str, Any]):
    tiny_model(tmp_path / "model")
    moves = {"preset": "grpo", "reference_every": 2, "reference_decay": 0.4}
    config = tiny_config(tmp_path, "model", **(PLAIN | {"loss": moves} | lora))
    engine = engine_of(config)

    def saved(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        save(engine, tmp_path / name, 1)
        model, reference = (load_tensors(tmp_path / name, prefix) for prefix in (MODEL, REFERENCE))
        return model, reference

    def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
        return left.keys() == right.keys() and all(torch.equal(left[name], tensor) for name, tensor in right.items())

    model, reference = saved("0")
    assert same(reference, model)
    expected = model
    begins_as = engine.score(batch_for(0), of="policy")
    for step in range(1, 5):
        engine.update(with_reference(engine, batch_for(step)), version=step - 1)
        model, reference = saved(str(step))
        expected = trl(model, expected, 0.6) if step % 2 == 0 else expected
        assert same(reference, expected)
        if step == 1:
            scores = engine.score(batch_for(0), of="reference")
            assert all((scores[i] == begins_as[i]).all() for i in scores)
    assert not same(reference, model)
    scores = engine.score(batch_for(0), of="reference")
    engine = engine_of(config)
    engine.load(tmp_path / "3")
    engine.update(with_reference(engine, batch_for(4)), version=3)
    assert same(saved("again")[0], model)
    assert same(saved("and again")[1], reference)
    assert all((values == scores[i]).all() for i, values in engine.score(batch_for(0), of="reference").items())
    # A fork that moves none leaves it out; one that does begins with what it loaded.
    fixed = engine_of(tiny_config(tmp_path, "model", **(PLAIN | {"loss": {"preset": "grpo"}} | lora)))
    fixed.load(tmp_path / "3")
    save(fixed, tmp_path / "fixed", 1)
    engine = engine_of(config)
    engine.load(tmp_path / "fixed")
    assert same(saved("fork")[1], load_tensors(tmp_path / "0", REFERENCE))
