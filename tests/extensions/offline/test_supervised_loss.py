"""The supervised loss: every trained token counts once."""

from __future__ import annotations

import math

import pytest
import torch

from async_rl.extensions.offline.sft import SupervisedObjective
from async_rl.learner.losses.batch import TokenLogprobs
from tests.learner.losses.test_objective import a_batch


def test_supervised_training_counts_every_token_once():
    # Log-probabilities -1, ln 2 - 1 and ln 4 - 1.
    batch, scored = a_batch([1.0, 2.0, 4.0])
    result = SupervisedObjective()(batch, scored, version=0)
    result.loss_sum.backward()
    assert result.loss_sum.item() == pytest.approx(3 - math.log(8), rel=1e-6)
    assert result.sums.tolist() == pytest.approx([3.0, 3 - math.log(8), 3.0, 1.5], rel=1e-6)
    assert scored.logprobs.grad is not None
    assert scored.logprobs.grad.tolist() == [-1.0, -1.0, -1.0]


def test_supervised_training_on_no_tokens_is_zero_and_carries_a_gradient():
    batch, _ = a_batch([])
    hidden = torch.ones(2, requires_grad=True)
    result = SupervisedObjective()(batch, TokenLogprobs(hidden[:0], torch.zeros(0)), version=0)
    result.loss_sum.backward()
    assert (result.loss_sum.item(), result.sums[0].item()) == (0.0, 0.0)
    assert hidden.grad is not None
