"""The example of a loss of the user's own, built of parts: every bit of a step is that of the preset it reproduces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import own_loss
import pytest
import torch
from hypothesis import given

from async_rl.config.loss import LossConfig
from async_rl.errors import ConfigError
from async_rl.learner.loop.step_result import update_metrics
from async_rl.learner.losses.own_trial import try_loss
from async_rl.learner.losses.policy import PolicyInputs, policy_loss
from async_rl.learner.ranks import Ranks, check_same_code, init_ranks
from async_rl.net.wire import encode
from tests.examples import examples
from tests.learner.losses.cases import Case, inputs_of, ragged_cases
from tests.learner.model.reference import engine_of
from tests.learner.rank_scenarios import OWN_LOSS, VERSION, off_policy_sequences
from tests.learner.tiny import tiny_config, tiny_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own_loss")
    tiny_model(root / "model")
    return root


@given(case=ragged_cases(nonfinite=False))
@examples(100)
def test_loss_gradient_and_masks_of_the_example_are_those_of_dapo_bit_for_bit(case: Case):
    own = try_loss("own_loss.py:dapo", own_loss.dapo, LossConfig(), max_length=8, max_lag=4)
    inputs, same = inputs_of(case), inputs_of(case)
    # In a run they are float32.
    expected = policy_loss(as_float32(inputs), LossConfig(), max_length=8)
    got, _ = own(as_float32(same), LossConfig(), max_length=8)
    expected.loss_sum.backward()
    got.loss_sum.backward()
    for name, value in expected._asdict().items():
        if name == "rule_counts":  # the example counts under its own mask
            continue
        other = getattr(got, name)
        assert torch.equal(value.detach(), other.detach().to(value.dtype)), name
    assert inputs.logprobs.grad is not None
    assert same.logprobs.grad is not None
    assert torch.equal(inputs.logprobs.grad, same.logprobs.grad)


def as_float32(inputs: PolicyInputs) -> PolicyInputs:
    names = ("logprobs", "entropies", "behavior_logprobs", "advantages", "reference_logprobs", "proximal_logprobs")
    return replace(inputs, **{name: getattr(inputs, name).float() for name in names})


def test_masks_and_metrics_become_metrics_of_the_step(root: Path, tmp_path: Path):
    source = tmp_path / "own_masks.py"
    source.write_text(
        "import torch\n"
        "from async_rl.learner.losses.own import LossInputs, LossOutput\n"
        "def loss(inputs):\n"
        "    old = inputs.lag > 1\n"
        "    out = -(inputs.advantages * inputs.logprobs).masked_fill(old, 0.0)\n"
        "    return LossOutput(out.sum(), (~old).sum(), {'old': old}, metrics={'lag': inputs.lag[~old].sum()})\n"
    )
    sequences = off_policy_sequences()
    config = tiny_config(root, "model", loss={"function": f"{source}:loss"}, learner={"max_tokens": 40})
    stats = engine_of(config).update(sequences, version=VERSION)
    lags = np.concatenate([VERSION - s.versions[s.loss_mask] for s in sequences])
    kept = lags[lags <= 1]
    assert stats.tokens_trained == len(kept)
    expected = {"loss_mask/old": 1 - len(kept) / len(lags), "loss_metric/lag": kept.mean()}
    assert stats.own_metrics == pytest.approx(expected)
    # A second update of twice as many tokens, all of age 1: the metrics of the step are weighted by tokens.
    second = replace(stats, tokens_trained=2 * len(kept), own_metrics={"loss_mask/old": 0.0, "loss_metric/lag": 1.0})
    assert update_metrics([stats, second])["loss_metric/lag"] == pytest.approx((kept.mean() + 2) / 3)


def test_ranks_with_different_sources_are_refused(root: Path):
    class TwoRanks:
        world_size = 2

        def gather(self, frame: bytes) -> list[bytes]:
            return [frame, encode("code", {"digest": "0" * 64})]

    config = tiny_config(root, "model", loss={"function": f"{OWN_LOSS}:dapo"})
    ranks: Any = TwoRanks()
    with pytest.raises(ConfigError, match=r"the same source of .*own_loss\.py:dapo on all ranks, .* on rank 1"):
        check_same_code(config, ranks)
    assert isinstance(init_ranks(config), Ranks)  # one rank has nobody to compare with
    check_same_code(config, init_ranks(config))
