"""Chunked log-probabilities: against log_softmax, in value and gradient, at the edges, and the memory they take."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from async_rl.learner.losses.batch import Slopes, TokenLogprobs
from async_rl.learner.memory_plan import CHUNK_BYTES, logits_chunk_bytes
from async_rl.learner.model.logprobs import token_logprobs
from async_rl.learner.model.mask_tensors import MaskTensors
from async_rl.sampling_mask import pack_ids
from tests.learner.engine.live_bytes import LiveBytes
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


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tokens_give_nothing_but_reach_hidden_states_and_head(entropy_grad: bool):
    hidden, head, targets, temperatures = inputs(3)
    out = token_logprobs(hidden[:0], head, targets[:0], temperatures[:0], entropy_grad=entropy_grad)
    assert out.logprobs.shape == out.entropies.shape == (0,)
    (out.logprobs.sum() + out.entropies.sum()).backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert head.weight.grad.abs().sum() == 0


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


def test_impossible_token_does_not_make_the_entropys_gradient_nan():
    # Two equal outcomes are the most uncertain there can be: gradient 0, and 0 for the impossible third.
    hidden, head = torch.zeros(1, 3, requires_grad=True), identity(3, bias=[0.0, 0.0, -math.inf])
    out = token_logprobs(hidden, head, torch.tensor([0]), torch.tensor([1.0]), entropy_grad=True)
    out.entropies.sum().backward()
    assert out.entropies.item() == pytest.approx(math.log(2))
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [pytest.approx([0.0, 0.0, 0.0], abs=1e-7)]


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


def test_sets_of_a_smaller_vocabulary_are_read_as_they_were_written():
    # The sampler's 40 tokens fill 2 words of bits, the learner's 200 would fill 7.
    mask = mask_of([[0, 33, 39], [7]], 40).mask(200)
    assert [row.nonzero()[:, 0].tolist() for row in mask] == [[0, 33, 39], [7]]


REAL_WIDTH, REAL_VOCAB = 896, 151936  # Qwen2.5-0.5B


def peak(num_tokens: int, *, dtype: torch.dtype = torch.float32, has_prediction: bool) -> int:
    """The largest number of bytes beyond hidden states and head. The backward pass runs only without a prediction,
    because with one it reads which chunks were predicted wrongly; but then it needs no more memory.
    """

    def predict(_: slice, scored: TokenLogprobs) -> Slopes:
        return Slopes(-torch.ones_like(scored.logprobs))

    hidden = torch.empty(num_tokens, REAL_WIDTH, dtype=dtype, device="meta", requires_grad=True)
    head = nn.Linear(REAL_WIDTH, REAL_VOCAB, bias=False, dtype=dtype, device="meta")
    targets, temperatures = torch.empty(num_tokens, dtype=torch.int64, device="meta"), hidden.new_ones(num_tokens)
    with LiveBytes() as live:
        out = token_logprobs(
            hidden, head, targets, temperatures.float(), chunk_bytes=CHUNK_BYTES["cpu"][0],
            predict=predict if has_prediction else None,
        )  # fmt: skip
        if not has_prediction:
            out.logprobs.sum().backward()
    return live.peak


@pytest.mark.parametrize("has_prediction", [False, True])
def test_the_head_takes_less_than_800_megabytes_at_16k_tokens(has_prediction: bool):
    # The weight's gradient is 545 MB, the gradient of hidden states 59 MB, two buffers of 128 rows 156 MB.
    assert 545e6 + 58e6 + 155e6 < peak(16384, has_prediction=has_prediction) < 0.8e9


def test_a_bfloat16_head_takes_the_memory_of_its_sum_and_its_result():
    # The sum in float32 is 545 MB, the gradient in bfloat16 half of that, those of hidden states 29 MB.
    assert peak(16384, dtype=torch.bfloat16, has_prediction=False) < 545e6 + 273e6 + 29e6 + 10e6


def test_a_chunk_on_a_gpu_is_as_large_as_the_gradient_that_each_chunk_reads_and_writes():
    # Qwen2.5: 0.5B 544 MB; 7B 2.2 GB, of which a chunk takes half; a frozen head, and any on a CPU, the least.
    sizes = [("cuda", 896 * 151936), ("cuda", 3584 * 152064), ("cuda", 0), ("cpu", 3584 * 152064)]
    found = [logits_chunk_bytes(device, 4 * weights) for device, weights in sizes]
    assert found == [544538624, 1 << 30, 256 << 20, 80 << 20]
