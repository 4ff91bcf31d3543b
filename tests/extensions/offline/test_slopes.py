"""Losses over whole sequences by the slopes of their tokens: by hand, and as autograd through the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from async_rl.extensions.offline.slopes import SlopeObjective, sequence_slopes, sequence_sums, with_slopes
from async_rl.learner.data.packing import pack
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.interface import PolicyScores
from async_rl.learner.losses.batch import TokenLogprobs
from async_rl.learner.losses.objective import StepOutcome, update_stats
from async_rl.learner.model.policy_model import to_device
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.rank_scenarios import PLAIN, sequences_with_a_group
from tests.learner.tiny import random_sequences, tiny_config, tiny_model

Tensors = dict[str, Tensor]


def values_of(sequences: list[TrainSequence], *values: list[float]) -> dict[int, PolicyScores]:
    arrays = [np.array(v, dtype=np.float32) for v in values]
    return {s.sequence_id: PolicyScores(a, np.zeros_like(a)) for s, a in zip(sequences, arrays, strict=True)}


def test_the_loss_sum_is_slope_times_value_and_its_gradient_the_slope():
    # Trained tokens 2 and 3 of three, slopes 2 and -3, values -1 and -0.5: 2 * -1 + -3 * -0.5 = -0.5, divided by 1.
    sequence = with_slopes(random_sequences(1, 3)[0], np.array([2.0, -3.0]))
    batch = to_device(pack([sequence], max_tokens=8, num_ranks=1)[0][0], torch.device("cpu"))
    values = torch.tensor([-1.0, -0.5], requires_grad=True)
    objective = SlopeObjective()
    result = objective(batch, TokenLogprobs(values, torch.zeros(2)), version=0)
    result.loss_sum.backward()
    assert (result.loss_sum.item(), objective.denominator(result.sums)) == (-0.5, 1.0)
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, -3.0]
    stats = update_stats(result.sums, 0.0, [], StepOutcome("", 1.0, 0.1), objective=objective)
    assert (stats.loss, stats.tokens_trained) == (-0.5, 2)
    predict = objective.predict_slopes(batch, version=0)
    assert predict(slice(1, 2), TokenLogprobs(values, values)).logprobs.tolist() == [-3.0]
    assert objective.denominator(torch.zeros(8)) == 0.0


def test_slopes_of_a_pair_by_hand():
    # Sums -2 and -1: the loss is -log sigmoid(-2 - -1) = log(1 + e) = 1.3133. Its slopes are -sigmoid(1) = -0.7311 and
    # +0.7311, for every trained token: the last two of three, and the last three of four.
    sequences = [random_sequences(1, 3)[0], replace(random_sequences(1, 4)[0], sequence_id=1)]
    sums = sequence_sums(sequences, values_of(sequences, [-1.5, -0.5], [-0.5, -0.25, -0.25]))
    assert sums.tolist() == [-2.0, -1.0]
    loss, sloped = sequence_slopes(sequences, sums, lambda sums_S: -logsigmoid(sums_S[0] - sums_S[1]))
    assert loss == pytest.approx(1.31326, abs=1e-5)
    assert sloped[0].slopes.tolist() == pytest.approx([0.0, -0.731059, -0.731059], abs=1e-6)
    assert sloped[1].slopes.tolist() == pytest.approx([0.0, 0.731059, 0.731059, 0.731059], abs=1e-6)


def pairs_loss(sums_S: Tensor) -> Tensor:
    """A loss of the sums of six sequences that no sum over sequences equals: of each half of them, and their mean."""
    return -logsigmoid(0.5 * (sums_S[:3] - sums_S[3:])).mean() + 0.01 * sums_S.mean().square()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("slopes")
    tiny_model(directory / "model")
    return directory


def plain_gradient(root: Path) -> tuple[float, Tensors]:
    """The loss and its gradient by autograd through transformers' model, one sequence after the other."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(root / "model")
    sums: list[Tensor] = []
    for sequence in sequences_with_a_group():
        ids = torch.from_numpy(sequence.token_ids).long()
        logprobs = model(ids[None, :-1]).logits[0].log_softmax(-1)
        sums.append(logprobs.gather(1, ids[1:, None])[torch.from_numpy(sequence.loss_mask[1:]), 0].sum())
    loss = pairs_loss(torch.stack(sums).double())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("max_tokens", [20, 40, 4096])
def test_a_loss_over_pairs_has_the_gradient_of_plain_autograd_however_it_is_cut(root: Path, max_tokens: int):
    config = tiny_config(root, "model", **PLAIN, learner={"max_tokens": max_tokens})
    engine = FsdpEngine(config, init_ranks(config), objective=SlopeObjective())
    sequences = sequences_with_a_group()
    loss, sloped = sequence_slopes(sequences, sequence_sums(sequences, engine.score_policy(sequences)), pairs_loss)
    assert engine.update(sloped, version=0).stepped
    gradient = {n.removeprefix("exp_avg."): t for n, t in engine.policy.optimizer.tensors().items() if "exp_avg." in n}
    want_loss, want = plain_gradient(root)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    largest = max(float(t.abs().max()) for t in want.values())
    torch.testing.assert_close(gradient, want, rtol=0, atol=1e-5 * largest)
