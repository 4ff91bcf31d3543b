"""Chunked log-probabilities: against log_softmax, in value and gradient, and at the edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from async_rl.learner.model.logprobs import token_logprobs
from async_rl.learner.model.mask_tensors import MaskTensors
from async_rl.sampling_mask import pack_ids
from tests.learner.model.logits_rows import LogitsRows

HIDDEN, VOCAB = 8, 40
ROW_BYTES = 4 * VOCAB


def inputs(n: int) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    torch.manual_seed(n)
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    return torch.randn(n, HIDDEN, requires_grad=True), head, torch.randint(VOCAB, (n,)), torch.rand(n) + 0.5


def identity(size: int, bias: list[float] | None = None) -> nn.Linear:
    """A head whose output is its input, plus ``bias``."""
    head = nn.Linear(size, size, bias=bias is not None)
    nn.init.eye_(head.weight)
    if bias is not None:
        head.bias.data = torch.tensor(bias)
    return head


def test_logprob_and_entropy_by_hand():
    # Logits [0, 2 ln 3] at temperature 2 are [0, ln 3]: probabilities 1/4 and 3/4.
    logits = torch.tensor([[0.0, 2 * math.log(3)]])
    out = token_logprobs(logits, identity(2), torch.tensor([1]), torch.tensor([2.0]))
    assert out.logprobs.item() == pytest.approx(math.log(0.75))
    assert out.entropies.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))


@pytest.mark.parametrize("rows", [1, 3, 6, 7, 100])
def test_chunks_of_any_size_equal_the_whole_in_value_and_gradient(rows: int):
    hidden, head, targets, temperatures = inputs(7)
    expected = (head(hidden) / temperatures[:, None]).log_softmax(-1)
    weights = torch.randn(7)
    want = torch.autograd.grad((expected[range(7), targets] * weights).sum(), (hidden, head.weight))

    out = token_logprobs(hidden, head, targets, temperatures, chunk_bytes=rows * ROW_BYTES)
    got = torch.autograd.grad((out.logprobs * weights).sum(), (hidden, head.weight))

    torch.testing.assert_close(out.logprobs, expected[range(7), targets], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.entropies, -(expected.exp() * expected).sum(-1).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert not out.entropies.requires_grad


@pytest.mark.parametrize("rows", [3, 100])
def test_capped_logits_are_differentiated_through_the_cap(rows: int):
    hidden, head, targets, temperatures = inputs(7)
    expected = (0.5 * torch.tanh(head(hidden) / 0.5) / temperatures[:, None]).log_softmax(-1)
    entropies = -(expected.exp() * expected).sum(-1)
    weights = torch.randn(7)
    loss = (expected[range(7), targets] * weights + entropies).sum()
    want = torch.autograd.grad(loss, (hidden, head.weight))

    out = token_logprobs(hidden, head, targets, temperatures, cap=0.5, chunk_bytes=rows * ROW_BYTES, entropy_grad=True)
    got = torch.autograd.grad((out.logprobs * weights + out.entropies).sum(), (hidden, head.weight))

    torch.testing.assert_close(out.logprobs, expected[range(7), targets], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_cap_by_hand():
    # Logits [0, 1] capped at 1 are [0, tanh 1 = 0.76159].
    out = token_logprobs(torch.tensor([[0.0, 1.0]]), identity(2), torch.tensor([0]), torch.tensor([1.0]), cap=1.0)
    assert out.logprobs.item() == pytest.approx(-math.log(1 + math.exp(0.7615942)), abs=1e-6)


def test_no_more_rows_than_a_chunk_ever_reach_the_head():
    hidden, head, targets, temperatures = inputs(11)
    with LogitsRows(VOCAB) as rows:
        out = token_logprobs(hidden, head, targets, temperatures, chunk_bytes=4 * ROW_BYTES + 1)
    assert rows.seen == [4, 4, 3]
    entropies = out.entropies.clone()
    with LogitsRows(VOCAB) as rows:
        out.logprobs.sum().backward()
    # Each chunk but the last again, once, in the backward pass, which leaves the entropies alone.
    assert rows.seen == [4, 4]
    assert torch.equal(out.entropies, entropies)


def test_a_single_chunk_is_not_computed_again():
    hidden, head, targets, temperatures = inputs(5)
    with LogitsRows(VOCAB) as rows:
        token_logprobs(hidden, head, targets, temperatures).logprobs.sum().backward()
    assert rows.seen == [5]


@pytest.mark.parametrize("num_chunks", [1, 74])
def test_a_bfloat16_heads_gradient_is_as_exact_with_many_chunks_as_with_one(num_chunks: int):
    torch.manual_seed(0)
    rows, width, vocab = 16, 32, 64
    hidden = torch.randn(74 * rows, width).bfloat16()
    head = nn.Linear(width, vocab, bias=False).bfloat16()
    targets, temperatures = torch.randint(vocab, (len(hidden),)), torch.ones(len(hidden))
    # A gradient that is not zero on average, as advantages of one sign give it: the sum grows with every chunk.
    out = token_logprobs(hidden, head, targets, temperatures, chunk_bytes=4 * vocab * len(hidden) // num_chunks)
    (got,) = torch.autograd.grad(out.logprobs.sum(), head.weight)

    exact = head.weight.detach().double().requires_grad_()
    logprobs = (hidden.double() @ exact.T).log_softmax(-1)[range(len(hidden)), targets]
    (want,) = torch.autograd.grad(logprobs.sum(), exact)
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want).norm() / want.norm()) < 0.003


def test_a_frozen_head_gets_no_gradient():
    hidden, head, targets, temperatures = inputs(5)
    head.requires_grad_(False)
    token_logprobs(hidden, head, targets, temperatures).logprobs.sum().backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_no_tokens_give_nothing_but_reach_hidden_states_and_head():
    hidden, head, targets, temperatures = inputs(3)
    out = token_logprobs(hidden[:0], head, targets[:0], temperatures[:0])
    assert out.logprobs.shape == out.entropies.shape == (0,)
    out.logprobs.sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert head.weight.grad.abs().sum() == 0


def test_bfloat16_logits_are_normalised_in_float32():
    hidden, head, targets, temperatures = inputs(5)
    head = head.bfloat16()
    hidden = hidden.detach().bfloat16()
    out = token_logprobs(hidden, head, targets, temperatures)
    expected = (head(hidden).float() / temperatures[:, None]).log_softmax(-1)[range(5), targets]
    assert out.logprobs.dtype == out.entropies.dtype == torch.float32
    torch.testing.assert_close(out.logprobs, expected, rtol=1e-6, atol=1e-6)


def test_a_bfloat16_model_may_have_a_float32_head():
    # The products of the same bfloat16 numbers, not rounded to three digits: exact but for float32.
    hidden, head, targets, temperatures = inputs(5)
    head, hidden = head.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    of = (hidden, head.weight)
    out = token_logprobs(hidden, head, targets, temperatures, dtype=torch.float32, chunk_bytes=2 * ROW_BYTES)
    exact = ((hidden.double() @ head.weight.double().T) / temperatures[:, None]).log_softmax(-1)[range(5), targets]
    torch.testing.assert_close(out.logprobs, exact.float(), rtol=1e-6, atol=1e-6)
    rounded = token_logprobs(hidden, head, targets, temperatures).logprobs
    assert (rounded - exact).abs().max() > 1e-4
    got, want = (torch.autograd.grad(logprobs.sum(), of) for logprobs in (out.logprobs, exact))
    # Of bfloat16 tensors, so they are rounded at the end.
    assert {g.dtype for g in got} == {torch.bfloat16}
    torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6)


def test_impossible_token_does_not_make_the_entropy_nan():
    hidden, head = torch.zeros(1, 3), identity(3, bias=[0.0, 0.0, -math.inf])
    out = token_logprobs(hidden, head, torch.tensor([0]), torch.tensor([1.0]))
    assert out.entropies.item() == pytest.approx(math.log(2))


def test_disagreement_about_the_number_of_tokens_is_refused():
    hidden, head, targets, temperatures = inputs(3)
    with pytest.raises(ValueError, match=r"\[3, 8\], \[2\] and \[3\]"):
        token_logprobs(hidden, head, targets[:2], temperatures)


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_entropies_carry_a_gradient_only_if_asked(rows: int):
    hidden, head, targets, temperatures = inputs(7)
    logprobs = (head(hidden) / temperatures[:, None]).log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    weights = torch.randn(7)
    loss = (expected * weights).sum() + logprobs[range(7), targets].sum()
    want = torch.autograd.grad(loss, (hidden, head.weight))

    arguments: Any = (hidden, head, targets, temperatures)
    limits: Any = {"chunk_bytes": rows * ROW_BYTES}
    out = token_logprobs(*arguments, **limits, entropy_grad=True)
    got = torch.autograd.grad((out.entropies * weights).sum() + out.logprobs.sum(), (hidden, head.weight))

    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    plain = token_logprobs(*arguments, **limits)
    assert not plain.entropies.requires_grad
    torch.testing.assert_close(out.entropies, plain.entropies, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.logprobs, plain.logprobs, rtol=1e-6, atol=1e-6)


def test_impossible_token_does_not_make_the_entropys_gradient_nan():
    # Two equal outcomes are the most uncertain there can be: gradient 0, and 0 for the impossible third.
    hidden, head = torch.zeros(1, 3, requires_grad=True), identity(3, bias=[0.0, 0.0, -math.inf])
    out = token_logprobs(hidden, head, torch.tensor([0]), torch.tensor([1.0]), entropy_grad=True)
    out.entropies.sum().backward()
    assert out.entropies.item() == pytest.approx(math.log(2))
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [pytest.approx([0.0, 0.0, 0.0], abs=1e-7)]


def test_no_tokens_with_entropy_gradient_reach_hidden_states_and_head():
    hidden, head, targets, temperatures = inputs(3)
    out = token_logprobs(hidden[:0], head, targets[:0], temperatures[:0], entropy_grad=True)
    (out.logprobs.sum() + out.entropies.sum()).backward()
    assert head.weight.grad is not None
    assert head.weight.grad.abs().sum() == 0


def mask_of(sets: list[list[int]], vocab_size: int) -> MaskTensors:
    counts, ids = np.array([len(s) for s in sets]), np.concatenate(sets).astype(np.int32)
    packed = pack_ids(counts, ids, vocab_size=vocab_size)
    return MaskTensors(packed.sizes, torch.from_numpy(packed.words))


def test_renormalised_logprob_and_entropy_by_hand():
    # Logits [0, 2 ln 3, 2 ln 6, 9] at temperature 2 are ln [1, 3, 6, e^4.5]. The mask leaves the first three, of
    # which the second has 3/10; of the first two it has 3/4; nothing else matters.
    logits = torch.tensor([[0.0, 2 * math.log(3), 2 * math.log(6), 9.0]] * 2, requires_grad=True)
    targets, temperatures = torch.tensor([1, 1]), torch.tensor([2.0, 2.0])
    sampling_mask = mask_of([[0, 1, 2], [0, 1]], 4)
    out = token_logprobs(logits, identity(4), targets, temperatures, sampling_mask=sampling_mask)
    assert out.logprobs.tolist() == [pytest.approx(math.log(0.3)), pytest.approx(math.log(0.75))]
    entropies = [-sum(p * math.log(p) for p in of) for of in ([0.1, 0.3, 0.6], [0.25, 0.75])]
    assert out.entropies.tolist() == [pytest.approx(e) for e in entropies]
    out.logprobs.sum().backward()
    # (one-hot - probability) / temperature over what was sampling_mask, and nothing for what was not.
    assert logits.grad is not None
    assert logits.grad[0].tolist() == [pytest.approx(g, abs=1e-7) for g in (-0.05, 0.35, -0.3, 0.0)]
    assert logits.grad[1].tolist() == [pytest.approx(g, abs=1e-7) for g in (-0.125, 0.125, 0.0, 0.0)]


def logprob_by_loops(
    logits: Tensor, target: int, temperature: float, sampling_mask: list[int]
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy in float64, a token at a time."""
    weights = {i: (logits[i] / temperature).exp() for i in sampling_mask}
    total = torch.stack(list(weights.values())).sum()
    entropy = -torch.stack([w / total * (w / total).log() for w in weights.values()]).sum()
    return (weights[target] / total).log(), entropy


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_renormalised_logprobs_are_those_of_a_plain_loop_in_value_and_gradient(rows: int, entropy_grad: bool):
    # 200 tokens are 7 words of bits: sets of one to five ids, of 60 and 199 in bits, and the whole vocabulary.
    vocab, random = 200, np.random.default_rng(rows)
    sets = [sorted(random.choice(vocab, size, replace=False).tolist()) for size in (1, 2, 5, 60, 199, vocab, 3, 61)]
    targets = torch.tensor([int(random.choice(s)) for s in sets])
    torch.manual_seed(rows)
    head, hidden = nn.Linear(HIDDEN, vocab), torch.randn(len(sets), HIDDEN, requires_grad=True)
    temperatures, weights = torch.rand(len(sets)) + 0.5, torch.randn(2, len(sets))
    out = token_logprobs(
        hidden, head, targets, temperatures, chunk_bytes=rows * 4 * vocab,
        sampling_mask=mask_of(sets, vocab), entropy_grad=entropy_grad,
    )  # fmt: skip
    loss = (out.logprobs * weights[0]).sum() + (out.entropies * weights[1] * entropy_grad).sum()
    got = torch.autograd.grad(loss, (hidden, head.weight, head.bias))

    double_head, double_hidden = nn.Linear(HIDDEN, vocab).double(), hidden.detach().double().requires_grad_()
    double_head.load_state_dict(head.state_dict())
    logits = double_head(double_hidden)
    by_loops = [logprob_by_loops(logits[i], int(targets[i]), float(temperatures[i]), s) for i, s in enumerate(sets)]
    logprobs, entropies = (torch.stack(column) for column in zip(*by_loops, strict=True))
    torch.testing.assert_close(out.logprobs.double(), logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.entropies.double(), entropies, rtol=1e-5, atol=2e-6)
    loss = (logprobs * weights[0]).sum() + (entropies * weights[1] * entropy_grad).sum()
    want = torch.autograd.grad(loss, (double_hidden, double_head.weight, double_head.bias))
    torch.testing.assert_close([g.double() for g in got], list(want), rtol=1e-5, atol=2e-6)


def test_keeping_everything_is_leaving_nothing_out():
    hidden, head, targets, temperatures = inputs(5)
    arguments: Any = (hidden, head, targets, temperatures)
    plain = token_logprobs(*arguments)
    sampling_mask = token_logprobs(*arguments, sampling_mask=mask_of([list(range(VOCAB))] * 5, VOCAB))
    assert torch.equal(plain.logprobs, sampling_mask.logprobs)
    assert torch.equal(plain.entropies, sampling_mask.entropies)


def test_sets_of_a_smaller_vocabulary_are_read_as_they_were_written():
    # The sampler's 40 tokens fill 2 words of bits, the learner's 200 would fill 7.
    mask = mask_of([[0, 33, 39], [7]], 40).mask(200)
    assert [row.nonzero()[:, 0].tolist() for row in mask] == [[0, 33, 39], [7]]
