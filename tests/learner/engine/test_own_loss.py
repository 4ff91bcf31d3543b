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
from async_rl.errors import ConfigError, OwnCodeError
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.interface import UpdateStats
from async_rl.learner.loop.step_result import update_metrics
from async_rl.learner.losses.diagnostics import summarise
from async_rl.learner.losses.own_trial import try_loss
from async_rl.learner.losses.policy import PolicyInputs, policy_loss
from async_rl.learner.ranks import Ranks, check_same_code, init_ranks
from async_rl.net.wire import encode
from tests.examples import examples
from tests.learner.losses.cases import Case, inputs_of, ragged_cases
from tests.learner.rank_scenarios import OWN_LOSS, VERSION, off_policy_sequences
from tests.learner.tiny import tiny_config, tiny_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own_loss")
    tiny_model(root / "model")
    return root


def an_engine(root: Path, **loss: Any) -> FsdpEngine:
    config = tiny_config(root, "model", optimizer={"lr": 1e-2}, loss=loss, learner={"max_tokens": 40})
    return FsdpEngine(config, init_ranks(config))


def sum_of(by_lag: np.ndarray) -> int:
    """The number of tokens of a step, of all lags."""
    return summarise(by_lag.sum(0)).tokens


def two_steps(root: Path, **loss: Any) -> tuple[list[UpdateStats], dict[str, torch.Tensor]]:
    """Statistics of two steps of several micro-batches, and the weights after them."""
    engine = an_engine(root, **loss)
    sequences = off_policy_sequences()
    stats = [engine.update(chosen, version=VERSION) for chosen in (sequences, sequences[:4])]
    return stats, {name: tensor.clone() for name, tensor in engine.gather()}


@pytest.mark.parametrize("settings", [{}, {"clip_high": 0.05, "clip_low": 0.05, "skip_threshold": 2.0}])
def test_steps_with_the_example_are_those_of_dapo_bit_for_bit(root: Path, settings: dict[str, Any]):
    expected, weights = two_steps(root, **settings)
    got, own_weights = two_steps(root, function=f"{OWN_LOSS}:dapo", **settings)
    assert expected[0].skipped_sequence_ids
    assert expected[0].clip_fraction > 0
    for one, other in zip(expected, got, strict=True):
        assert set(other.own_metrics) == {"loss_mask/far"}
        np.testing.assert_array_equal(one.by_lag, other.by_lag)
        # What the built-in loss counts under its rule, the example counts under its own mask.
        assert one.rule_tokens["skip_threshold"] == round(other.own_metrics["loss_mask/far"] * sum_of(one.by_lag))
        plain = {"own_metrics": {}, "rule_tokens": {}, "by_lag": np.zeros(0), "padded_cost": None, "cost": None}
        rest = [replace(s, **plain) for s in (one, other)]
        assert repr(rest[0]) == repr(rest[1])
    assert all(torch.equal(tensor, own_weights[name]) for name, tensor in weights.items())


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
    stats = an_engine(root, function=f"{source}:loss").update(sequences, version=VERSION)
    lags = np.concatenate([VERSION - s.versions[s.loss_mask] for s in sequences])
    kept = lags[lags <= 1]
    assert stats.tokens_trained == len(kept)
    expected = {"loss_mask/old": 1 - len(kept) / len(lags), "loss_metric/lag": kept.mean()}
    assert stats.own_metrics == pytest.approx(expected)
    # A second update of twice as many tokens, all of age 1: the metrics of the step are weighted by tokens.
    second = replace(stats, tokens_trained=2 * len(kept), own_metrics={"loss_mask/old": 0.0, "loss_metric/lag": 1.0})
    of_step = update_metrics([stats, second])
    assert of_step["loss_metric/lag"] == pytest.approx((kept.mean() + 2) / 3)


@pytest.mark.parametrize(("num_sequences", "error"), [(4, ConfigError), (6, OwnCodeError)])
def test_an_error_is_named_with_file_and_line_in_the_trial_and_in_a_step(
    root: Path, tmp_path: Path, num_sequences: int, error: type[Exception]
):
    source = tmp_path / "late.py"
    source.write_text(
        "import torch\n"
        "from async_rl.learner.losses.own import LossInputs, LossOutput\n"
        "def loss(inputs):\n"
        f"    if inputs.num_sequences == {num_sequences}:\n"
        "        raise RuntimeError('too many')\n"
        "    return LossOutput(-(inputs.advantages * inputs.logprobs).sum(), torch.tensor(len(inputs.lag)))\n"
    )
    config = tiny_config(root, "model", loss={"function": f"{source}:loss"}, learner={"max_tokens": 4096})
    # The trial has a piece of four sequences, the step six.
    with pytest.raises(error, match=rf"loss failed: RuntimeError: too many \({source}, line 5, in loss"):
        FsdpEngine(config, init_ranks(config)).update(off_policy_sequences()[:6], version=VERSION)


def test_a_loss_that_can_not_be_imported_is_refused_when_the_engine_is_built(root: Path):
    config = tiny_config(root, "model", loss={"function": f"{root}/none.py:loss"})
    with pytest.raises(ConfigError, match=r"expected a file .*none\.py on this machine"):
        FsdpEngine(config, init_ranks(config))


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
