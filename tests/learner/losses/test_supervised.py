"""The supervised loss, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from async_rl.learner.losses.objective import nll_loss


def test_nll_by_token_counts_every_token_once():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    out = nll_loss(logprobs, torch.tensor([0, 0, 1]), 2)
    out.loss_sum.backward()
    assert (out.loss_sum.item(), out.weight_sum.item(), out.num_tokens.item()) == (6.0, 3.0, 3)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, -1.0, -1.0]


def test_nll_by_sequence_is_the_sum_of_sequence_means():
    # (1 + 2) / 2 + 3; the third sequence has no tokens and no weight.
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    out = nll_loss(logprobs, torch.tensor([0, 0, 1]), 3, aggregation="sequence")
    out.loss_sum.backward()
    assert (out.loss_sum.item(), out.weight_sum.item(), out.num_tokens.item()) == (4.5, 2.0, 3)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.5, -1.0]


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_nll_of_no_tokens_is_zero_and_carries_a_gradient(aggregation: Any):
    hidden = torch.ones(2, requires_grad=True)
    out = nll_loss(hidden[:0], torch.zeros(0, dtype=torch.int64), 1, aggregation=aggregation)
    out.loss_sum.backward()
    assert (out.loss_sum.item(), out.weight_sum.item()) == (0.0, 0.0)
    assert hidden.grad is not None
