"""The engine on mixture-of-experts models."""

from pathlib import Path

import pytest
import torch

from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from tests.learner.moe import moe_model
from tests.learner.tiny import random_sequences, tiny_config


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_the_routers_losses_in_the_models_config_change_nothing(tmp_path: Path, model_type: str):
    found = []
    for name, settings in (
        ("plain", {}), ("auxiliary", {"output_router_logits": True, "router_aux_loss_coef": 10.0})
    ):  # fmt: skip
        moe_model(tmp_path / name, model_type, **settings)
        config = tiny_config(tmp_path, name, learner={"max_tokens": 512})
        engine = FsdpEngine(config, init_ranks(config))
        stats = engine.update(random_sequences(4, 12), version=0)
        found.append((stats.loss, stats.grad_norm, dict(engine.gather())))
    (loss, norm, weights), (loss_beside, norm_beside, weights_beside) = found
    assert (loss, norm) == (loss_beside, norm_beside)
    assert norm > 0
    assert all(torch.equal(weights[name], weights_beside[name]) for name in weights)
