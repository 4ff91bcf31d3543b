"""Peak memory of the head's stage at real sizes. On the device ``meta``, so nothing is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from async_rl.learner.losses.batch import Slopes, TokenLogprobs
from async_rl.learner.memory_plan import CHUNK_BYTES, logits_chunk_bytes
from async_rl.learner.model.logprobs import token_logprobs
from tests.learner.engine.live_bytes import LiveBytes

WIDTH, VOCAB = 896, 151936  # Qwen2.5-0.5B


def peak(num_tokens: int, *, dtype: torch.dtype = torch.float32, has_prediction: bool) -> int:
    """The largest number of bytes beyond hidden states and head. The backward pass runs only without a prediction,
    because with one it reads which chunks were predicted wrongly; but then it needs no more memory.
    """

    def predict(_: slice, scored: TokenLogprobs) -> Slopes:
        return Slopes(-torch.ones_like(scored.logprobs))

    hidden = torch.empty(num_tokens, WIDTH, dtype=dtype, device="meta", requires_grad=True)
    head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype, device="meta")
    targets, temperatures = torch.empty(num_tokens, dtype=torch.int64, device="meta"), hidden.new_ones(num_tokens)
    with LiveBytes() as live:
        out = token_logprobs(
            hidden, head, targets, temperatures.float(), chunk_bytes=CHUNK_BYTES["cpu"][0],
            predict=predict if has_prediction else None,
        )  # fmt: skip
        if not has_prediction:
            out.logprobs.sum().backward()
    return live.peak


def test_the_count_is_of_what_lives_at_once():
    with LiveBytes() as live:
        kept = torch.zeros(100)
        for _ in range(3):
            kept = torch.zeros(100) + torch.zeros(100)  # two summands, a sum, and what was kept, 400 bytes each
        del kept
        torch.zeros(250)
    assert live.peak == 1600


@pytest.mark.parametrize("has_prediction", [False, True])
def test_the_head_takes_less_than_800_megabytes_at_16k_tokens(has_prediction: bool):
    # The weight's gradient is 545 MB, the gradient of hidden states 59 MB, two buffers of 128 rows 156 MB.
    assert 545e6 + 58e6 + 155e6 < peak(16384, has_prediction=has_prediction) < 0.8e9


def test_more_tokens_take_only_their_hidden_gradients_and_results():
    more = peak(16384, has_prediction=True) - peak(8192, has_prediction=True)
    # float32 gradients of 896 numbers; per token 200 bytes of log-probabilities, entropies, slopes and the like.
    assert 8192 * 4 * WIDTH <= more < 8192 * (4 * WIDTH + 200)


def test_a_bfloat16_head_takes_the_memory_of_its_sum_and_its_result():
    # The sum in float32 is 545 MB, the gradient in bfloat16 half of that, those of hidden states 29 MB.
    assert peak(16384, dtype=torch.bfloat16, has_prediction=False) < 545e6 + 273e6 + 29e6 + 10e6


def test_a_chunk_on_a_gpu_is_as_large_as_the_gradient_that_each_chunk_reads_and_writes():
    # Qwen2.5: 0.5B 544 MB; 7B 2.2 GB, of which a chunk takes half; a frozen head, and any on a CPU, the least.
    assert logits_chunk_bytes("cuda", 4 * 896 * 151936) == 544538624
    assert logits_chunk_bytes("cuda", 4 * 3584 * 152064) == 1 << 30
    assert logits_chunk_bytes("cuda", 0) == 256 << 20
    assert logits_chunk_bytes("cpu", 4 * 3584 * 152064) == 80 << 20
