"""Gradients of the head in one pass: equal to plain autograd, whatever the slopes were predicted to be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from async_rl.config.loss import LossConfig
from async_rl.learner.data.packing import pack
from async_rl.learner.losses.batch import SlopeFunction, Slopes, TokenLogprobs
from async_rl.learner.losses.objective import Objective, PolicyObjective
from async_rl.learner.model.logprobs import token_logprobs
from async_rl.learner.model.mask_tensors import MaskTensors
from async_rl.learner.model.policy_model import DeviceBatch, to_device
from async_rl.learner.sequences import TrainSequence
from tests.learner.losses.cases import SETTINGS
from tests.learner.model.logits_rows import LogitsRows
from tests.learner.model.masks import masks_around

HIDDEN, VOCAB, ROWS = 8, 40, 4
LENGTHS = (9, 2, 7, 5)


def sequences(*, bad: Callable[[int], float] | None = None) -> list[TrainSequence]:
    """Sequences of ``LENGTHS`` trained tokens each; ``bad`` gives some their first behavior logprob."""
    random = np.random.default_rng(0)

    def one(index: int, length: int) -> TrainSequence:
        size = length + 1
        behavior = random.uniform(-5, -2.5, size).astype(np.float32)
        if bad is not None and index % 2:
            behavior[1] = bad(index)
        return TrainSequence(
            sequence_id=index,
            token_ids=random.integers(0, VOCAB, size).astype(np.int32),
            loss_mask=np.arange(size) > 0,
            behavior_logprobs=behavior,
            versions=np.array([-1, *random.integers(0, 3, length)], dtype=np.int32),
            advantages=np.full(size, (-1) ** index * random.uniform(0.5, 2.0), dtype=np.float32),
            temperature=0.8 + index / 8,
            reference_logprobs=random.uniform(-5, -2.5, size).astype(np.float32),
            proximal_logprobs=random.uniform(-5, -2.5, size).astype(np.float32),
        )

    return [one(index, length) for index, length in enumerate(LENGTHS)]


def batch_of(of: list[TrainSequence]) -> DeviceBatch:
    return to_device(pack(of, max_tokens=100, num_ranks=1)[0][0], torch.device("cpu"))


def inputs(num_tokens: int) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(1)
    return torch.randn(num_tokens, HIDDEN, requires_grad=True), nn.Linear(HIDDEN, VOCAB)


def plain(hidden: Tensor, head: nn.Linear, batch: DeviceBatch, *, cap: float | None, mask: Tensor | None) -> Any:
    logits = head(hidden)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = logits / batch.temperatures[:, None]
    logprobs = (logits if mask is None else logits.masked_fill(~mask, -1e9)).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return TokenLogprobs(logprobs[range(len(hidden)), batch.targets], entropies)


def assert_as_plain_autograd(
    objective: Objective, batch: DeviceBatch, *, predict: SlopeFunction | None, cap: float | None = None,
    masks: MaskTensors | None = None,
) -> list[int]:  # fmt: skip
    """Compare the gradients of ``objective``. Return the rows of each chunk that the backward pass computed again."""
    hidden, head = inputs(len(batch.targets))
    of = (hidden, head.weight, head.bias)
    mask = None if masks is None else masks.mask(VOCAB)
    expected = plain(hidden, head, batch, cap=cap, mask=mask)
    want = torch.autograd.grad(objective(batch, expected, version=3).loss_sum, of, allow_unused=True)
    scored = token_logprobs(
        hidden, head, batch.targets, batch.temperatures, cap=cap, chunk_bytes=4 * VOCAB * ROWS, sampling_mask=masks,
        entropy_grad=objective.needs_entropy_grad, predict=predict,
    )  # fmt: skip
    torch.testing.assert_close(scored.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scored.entropies, expected.entropies, rtol=1e-5, atol=1e-5)
    loss = objective(batch, scored, version=3).loss_sum
    with LogitsRows(VOCAB) as rows:
        got = torch.autograd.grad(loss, of)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    return rows.seen


@pytest.mark.parametrize("name", SETTINGS)
def test_every_loss_has_the_gradient_of_plain_autograd(name: str):
    objective = PolicyObjective(LossConfig(**SETTINGS[name]), 3, 8)
    for bad in (None, lambda _: math.nan, lambda _: -30.0):
        batch = batch_of(sequences(bad=bad))
        assert_as_plain_autograd(objective, batch, predict=objective.predict_slopes(batch, version=3))


@pytest.mark.parametrize("loss", [{}, {"aggregation": "sequence"}, {"entropy_coef": 0.1}, {"surrogate": "cispo"}])
def test_a_loss_that_separates_by_token_computes_no_logits_again(loss: dict[str, Any]):
    objective, batch = PolicyObjective(LossConfig(**loss), 3, 8), batch_of(sequences())
    assert assert_as_plain_autograd(objective, batch, predict=objective.predict_slopes(batch, version=3)) == []
    # Without a prediction, each of the six chunks of 23 tokens again, but for the last.
    assert assert_as_plain_autograd(objective, batch, predict=None) == [4, 4, 4, 4, 4]


def test_only_the_chunks_of_a_skipped_sequence_are_computed_again():
    # Sorted from long to short, tokens 0 to 8 are the first sequence's, 9 to 15 the third's, in chunks 2 and 3 of four
    # rows. Its last token is far too likely: the mean ratio is above 20, but in chunk 2 nothing shows it.
    of = sequences()
    of[2].behavior_logprobs[-1] = -12.0
    objective, batch = PolicyObjective(LossConfig(), 3, 8), batch_of(of)
    result = objective(batch, plain(*inputs(23), batch, cap=None, mask=None), version=3)
    assert result.skipped.tolist() == [False, True, False, False]
    assert assert_as_plain_autograd(objective, batch, predict=objective.predict_slopes(batch, version=3)) == [4]


@pytest.mark.parametrize("wrong", [0.0, -3.0, 15.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_a_wrong_prediction_changes_no_gradient(wrong: float, entropy_coef: float):
    objective, batch = PolicyObjective(LossConfig(entropy_coef=entropy_coef), 3, 8), batch_of(sequences())
    right = objective.predict_slopes(batch, version=3)
    assert right is not None

    def predict(place: slice, scored: TokenLogprobs) -> Slopes:
        slopes = right(place, scored)
        if place.start == 8:  # one row of the third chunk
            slopes.logprobs[slopes.logprobs.abs().argmax()] = wrong
        return slopes

    assert assert_as_plain_autograd(objective, batch, predict=predict) == [4]


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("skip_threshold", [20.0, 1.5])
def test_masks_and_cap_have_the_gradient_of_plain_autograd_in_one_pass(entropy_coef: float, skip_threshold: float):
    loss = LossConfig(entropy_coef=entropy_coef, skip_threshold=skip_threshold)
    objective, batch = PolicyObjective(loss, 3, 8), batch_of(sequences())
    packed = masks_around(batch.targets.numpy(), (1, 3, 30, VOCAB), VOCAB)
    masks = MaskTensors(packed.sizes, torch.from_numpy(packed.words))
    predict = objective.predict_slopes(batch, version=3)
    assert_as_plain_autograd(objective, batch, predict=predict, cap=0.7, masks=masks)


def test_rejected_tokens_leave_nothing_in_a_bfloat16_heads_gradient():
    # Each chunk is computed again as it was, so what a wrong prediction added is taken off to the last bit of float32.
    torch.manual_seed(0)
    hidden, head = torch.randn(12, HIDDEN).bfloat16().requires_grad_(), nn.Linear(HIDDEN, VOCAB).bfloat16()
    out = token_logprobs(
        hidden, head, torch.arange(12), torch.ones(12), chunk_bytes=4 * VOCAB * ROWS,
        predict=lambda _, scored: Slopes(torch.full_like(scored.logprobs, 50.0)),
    )  # fmt: skip
    (out.logprobs * 0.0).sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert hidden.grad.abs().max() == 0
    assert head.weight.grad.abs().max() < 1e-4


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_other_tokens_have_the_values_and_gradients_of_plain_autograd(cap: float | None, entropy_grad: bool):
    # Among the others: the target itself, and one token twice.
    batch = batch_of(sequences())
    n = len(batch.targets)
    hidden, head = inputs(n)
    others = torch.randint(VOCAB, (n, 4), generator=torch.Generator().manual_seed(2))
    others[:, 0], others[:, 3] = batch.targets, others[:, 2]
    weights = torch.randn(n, 6, generator=torch.Generator().manual_seed(3))
    logits = head(hidden)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logprobs = (logits / batch.temperatures[:, None]).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)

    def total(target: Tensor, entropies: Tensor, found: Tensor) -> Tensor:
        of_entropies = (weights[:, 1] * entropies).sum() if entropy_grad else 0.0
        return (weights[:, 0] * target).sum() + of_entropies + (weights[:, 2:] * found).sum()

    of = (hidden, head.weight, head.bias)
    found = token_logprobs(
        hidden, head, batch.targets, batch.temperatures, cap=cap, chunk_bytes=4 * VOCAB * ROWS, others_NK=others,
        entropy_grad=entropy_grad,
    )  # fmt: skip
    assert found.others is not None
    torch.testing.assert_close(found.others, logprobs.gather(-1, others))
    want = torch.autograd.grad(total(logprobs[range(n), batch.targets], entropies, logprobs.gather(-1, others)), of)
    got = torch.autograd.grad(total(found.logprobs, found.entropies, found.others), of)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
