"""A packed row equals its sequences run alone: values and gradients, through whole tiny models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from async_rl.config.loss import LossConfig
from async_rl.errors import ModelError
from async_rl.learner.data.packing import MicroBatch, pack
from async_rl.learner.losses.policy import PolicyInputs, policy_loss
from async_rl.learner.model import attention
from async_rl.learner.model.attention import (
    ATTENTION_NAME,
    packed_attention_forward,
    packed_layout,
    use_packed_attention,
)
from async_rl.learner.model.logprobs import token_logprobs
from async_rl.learner.sequences import TrainSequence

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LENGTHS = [70, 3, 1, 64, 30, 2, 40]


def tiny(name: str = "qwen2") -> PreTrainedModel:
    torch.manual_seed(0)
    match name:
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        case "qwen2_sliding":
            window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
            return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **window))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**SHAPE))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16))
    raise AssertionError(name)


def rows(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (1, n), generator=generator) for n in lengths]


def bounds(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def packed_logits(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    lengths = [s.shape[1] for s in sequences]
    return model(
        input_ids=torch.cat(sequences, dim=1),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        packed_layout=packed_layout(bounds(lengths)),
        use_cache=False,
    ).logits[0]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["qwen2", "qwen2_sliding", "llama", "qwen3"])
def test_packed_model_equals_each_sequence_alone(name: str):
    model = tiny(name)
    sequences = rows(LENGTHS)
    weights = torch.randn(sum(LENGTHS), VOCAB) / sum(LENGTHS)
    alone = torch.cat([model(input_ids=s, use_cache=False).logits[0] for s in sequences])
    (alone * weights).sum().backward()
    want = gradients(model)

    use_packed_attention(model)
    packed = packed_logits(model, sequences)
    (packed * weights).sum().backward()
    got = gradients(model)

    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    assert got.keys() == want.keys()
    for parameter, gradient in got.items():
        torch.testing.assert_close(
            gradient, want[parameter], rtol=1e-5, atol=1e-5, msg=lambda m, p=parameter: f"{p}: {m}"
        )


def test_a_token_does_not_feel_its_neighbours_or_its_future():
    model = tiny()
    use_packed_attention(model)
    sequences = rows([5, 6, 5])
    before = packed_logits(model, sequences)
    sequences[1] = sequences[1].clone()
    sequences[1][0, 3] = (sequences[1][0, 3] + 1) % VOCAB
    changed = (packed_logits(model, sequences) != before).any(-1)
    # Place 3 of the middle sequence is 5 + 3 = 8; it ends at 10.
    assert changed.nonzero().flatten().tolist() == [8, 9, 10]


def test_recomputed_layers_get_their_layout():
    model = tiny()
    use_packed_attention(model)
    sequences = rows([9, 4, 12])
    packed_logits(model, sequences).square().mean().backward()
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    loss = packed_logits(model, sequences).square().mean()
    # Another layout through the same model before the first is recomputed.
    packed_logits(model, rows([7])).sum().detach()
    loss.backward()
    torch.testing.assert_close(gradients(model), want)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_layout_passes_through_fully_sharded_layers():
    model, sequences = tiny(), rows([9, 4, 12])
    use_packed_attention(model)
    want = packed_logits(model, sequences)
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    got = packed_logits(model, sequences)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_threads_keep_their_layouts_apart():
    model = tiny().eval()
    use_packed_attention(model)
    cases = [rows(lengths) for lengths in ([8, 8], [4, 12], [16], [5, 5, 6])]
    with torch.no_grad():
        want = [packed_logits(model, case) for case in cases]
    got: dict[tuple[int, int], Tensor] = {}
    gate = threading.Barrier(len(cases))

    def run(index: int) -> None:
        gate.wait(timeout=30)
        with torch.no_grad():
            for turn in range(5):
                got[index, turn] = packed_logits(model, cases[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for index, expected in enumerate(want):
        for turn in range(5):
            torch.testing.assert_close(got[index, turn], expected)


def trained(lengths: list[int]) -> list[TrainSequence]:
    generator = np.random.default_rng(0)
    return [
        TrainSequence(
            sequence_id=i,
            token_ids=generator.integers(VOCAB, size=n, dtype=np.int32),
            loss_mask=np.arange(n) >= max(1, n // 3),
            # Near ln 64, the tiny model's; the last sequence's are far too low, so that it is skipped.
            behavior_logprobs=generator.uniform(-5, -3.5, size=n).astype(np.float32) - 4 * (i == len(lengths) - 1),
            versions=np.zeros(n, dtype=np.int32),
            advantages=np.full(n, generator.normal(), dtype=np.float32),
            temperature=0.5 + i / 8,
        )
        for i, n in enumerate(lengths)
    ]


def run_micro_batch(model: PreTrainedModel, batch: MicroBatch) -> int:
    """Backpropagate the summed loss; the number of trained tokens."""
    hidden = model.model(
        input_ids=torch.from_numpy(batch.token_ids)[None],
        position_ids=torch.from_numpy(batch.position_ids)[None],
        packed_layout=packed_layout(batch.cu_seqlens, batch.token_index),
        use_cache=False,
    ).last_hidden_state[0]
    logprobs, *_ = token_logprobs(
        hidden[torch.from_numpy(batch.predict_index)],
        model.lm_head,
        torch.from_numpy(batch.targets).long(),
        torch.from_numpy(batch.temperatures),
        chunk_bytes=16 * 4 * VOCAB,
    )
    inputs = PolicyInputs(
        logprobs=logprobs,
        entropies=torch.zeros_like(logprobs),
        sequence_index=torch.from_numpy(batch.sequence_index),
        num_sequences=len(batch.sequence_ids),
        lag=torch.zeros(len(logprobs), dtype=torch.int64),
        **batch.columns(torch.from_numpy),
    )
    out = policy_loss(inputs, LossConfig(skip_threshold=5.0), max_length=1)
    out.loss_sum.backward()
    return int(out.denominator)


@pytest.mark.parametrize(("max_tokens", "num_ranks"), [(20, 1), (33, 2), (100, 4)])
def test_step_gradient_does_not_depend_on_packing_or_ranks(max_tokens: int, num_ranks: int):
    model = tiny()
    use_packed_attention(model)
    sequences = trained([20, 3, 2, 17, 9, 12])
    # The reference: every sequence alone, by itself on one rank.
    num_tokens = sum(run_micro_batch(model, pack([s], max_tokens=20, num_ranks=1)[0][0]) for s in sequences)
    want = {name: g / num_tokens for name, g in gradients(model).items()}

    ranks = pack(sequences, max_tokens=max_tokens, num_ranks=num_ranks)
    num_packed = sum(run_micro_batch(model, batch) for rank in ranks for batch in rank)
    assert num_packed == num_tokens
    assert num_tokens == sum(int(s.loss_mask.sum()) for s in sequences[:-1])
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient / num_packed, want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("max_tokens", "num_ranks"), [(20, 1), (33, 2), (100, 1)])
def test_step_gradient_does_not_depend_on_sharing_prompts(max_tokens: int, num_ranks: int):
    model = tiny()
    use_packed_attention(model)
    group = trained([20, 17, 20, 18, 12])
    prompt = group[0].token_ids[:7]
    for sequence in group:
        sequence.token_ids[:7] = prompt
        sequence.loss_mask[:] = np.arange(len(sequence.token_ids)) >= 7
    num_tokens = sum(run_micro_batch(model, pack([s], max_tokens=20, num_ranks=1)[0][0]) for s in group)
    want = {name: g / num_tokens for name, g in gradients(model).items()}

    batches = [batch for rank in pack(group, max_tokens=max_tokens, num_ranks=num_ranks) for batch in rank]
    assert sum(run_micro_batch(model, batch) for batch in batches) == num_tokens
    # 87 tokens without their last ones are 82; one prompt for all five saves 4 x 7.
    assert max_tokens < 100 or sum(len(batch.token_ids) for batch in batches) == 54
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient / num_tokens, want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [20, 100])
def test_step_gradient_does_not_depend_on_sharing_turns(max_tokens: int):
    # Each turn begins with the earlier one, whose last tokens are trained, and a part of its answer.
    model = tiny()
    use_packed_attention(model)
    turns = trained([8, 13, 20, 18])
    for turn, earlier, num_shared in zip(turns[1:], turns, (7, 11, 16), strict=False):
        turn.token_ids[:num_shared] = earlier.token_ids[:num_shared]
    assert all(turn.loss_mask[:7].any() for turn in turns[1:])
    num_tokens = sum(run_micro_batch(model, pack([s], max_tokens=20, num_ranks=1)[0][0]) for s in turns)
    want = {name: g / num_tokens for name, g in gradients(model).items()}

    batches = pack(turns, max_tokens=max_tokens, num_ranks=1)[0]
    assert sum(run_micro_batch(model, batch) for batch in batches) == num_tokens
    # 55 computed tokens, of which 7, 11 and 16 lie in the row already.
    assert max_tokens < 100 or [len(batch.token_ids) for batch in batches] == [55 - 7 - 11 - 16]
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient / num_tokens, want[name], rtol=1e-5, atol=1e-7)


def test_row_with_a_token_that_no_sequence_holds_is_refused():
    with pytest.raises(ValueError, match=r"expected token_index \[3\] with every token of the row, got \[0, 1, 3\]"):
        packed_layout(np.array([0, 3]), np.array([0, 1, 3]))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_buckets_hold_every_token_once_and_waste_little(lengths: list[int]):
    layout = packed_layout(bounds(lengths))
    places = torch.cat([b.gather for b in layout.buckets])
    assert torch.equal(places[layout.restore], torch.arange(sum(lengths)))
    assert sum(b.num_sequences for b in layout.buckets) == len(lengths)
    assert layout.max_length == max(lengths)
    for bucket in layout.buckets:
        held = places.new_tensor([len(set(row)) for row in bucket.gather.view(bucket.num_sequences, -1).tolist()])
        assert (bucket.max_length - held).max() <= max(16, bucket.max_length // 4)


def test_a_layout_has_only_the_indices_that_its_attention_reads(monkeypatch: pytest.MonkeyPatch):
    query = torch.randn(1, 2, 6, 8)

    def made_by_attention() -> set[str]:
        layout = packed_layout(bounds([3, 5]), np.array([0, 1, 2, 0, 1, 3, 4, 5]))
        before = set(vars(layout))
        packed_attention_forward(nn.Identity(), query, query, query, None, packed_layout=layout)
        return set(vars(layout)) - before

    assert made_by_attention() == {"_padding"}
    # As on a GPU in bfloat16, with a kernel that returns its queries.
    monkeypatch.setattr(attention, "why_padded", lambda *_: "")
    monkeypatch.setattr(attention, "_varlen_attention", lambda: lambda query, *_, **__: query)
    monkeypatch.setattr(attention, "report", lambda *_: None)
    assert made_by_attention() == {"cu_seqlens", "expand", "first"}


@pytest.mark.parametrize("bad", [[0], [1, 3], [0, 3, 3], [0, 4, 2]])
def test_bounds_that_do_not_rise_from_zero_are_refused(bad: list[int]):
    with pytest.raises(ValueError, match="rise from 0"):
        packed_layout(np.array(bad))


def test_call_without_a_layout_is_refused():
    model = tiny()
    use_packed_attention(model)
    with pytest.raises(ValueError, match="expected packed_layout"):
        model(input_ids=rows([4])[0], use_cache=False)


def test_layout_of_another_row_is_refused():
    model = tiny()
    use_packed_attention(model)
    with pytest.raises(ValueError, match="one packed row of 5 tokens"):
        model(input_ids=rows([4])[0], packed_layout=packed_layout(bounds([5])), use_cache=False)


def test_soft_cap_is_refused_not_ignored():
    row = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="does not support softcap"):
        packed_attention_forward(
            nn.Identity(), row, row, row, None, softcap=30.0, packed_layout=packed_layout(bounds([4]))
        )


def test_given_scaling_is_used():
    # Keys 0 and ln 9 at scaling 1/2 give scores 0 and ln 3, so weights 1/4 and 3/4 on values 0 and 4. Then one alone.
    query, value = torch.ones(1, 1, 3, 1), torch.tensor([0.0, 4.0, 7.0]).view(1, 1, 3, 1)
    key = torch.tensor([0.0, 9.0, 9.0]).clamp(min=1).log().view(1, 1, 3, 1)
    layout = packed_layout(bounds([2, 1]))
    out, _ = packed_attention_forward(nn.Identity(), query, key, value, None, scaling=0.5, packed_layout=layout)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, 3.0, 7.0]))


def test_model_with_state_along_the_row_is_refused():
    class Stateful(Qwen2ForCausalLM):
        _is_stateful = True

    with pytest.raises(ModelError, match=r"Stateful can't be trained on packed rows.*model\.path"):
        use_packed_attention(Stateful(Qwen2Config(**SHAPE)))


def test_attention_name_stays_out_of_the_saved_config():
    model = tiny()
    use_packed_attention(model)
    assert ATTENTION_NAME not in model.config.to_json_string()
    assert ATTENTION_NAME not in str(model.config.to_dict())


def varlen_by_definition(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest_q: int, longest_k: int,
    *, scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Has the signature of torch 2.11's varlen attention that matters: heads can't be grouped."""
    assert query.shape == key.shape == value.shape
    assert bounds_q is bounds_k
    assert longest_q == longest_k == int(bounds_q.diff().max())
    outputs = []
    for start, end in pairwise(bounds_q.tolist()):
        scores = torch.einsum("thd,shd->hts", query[start:end], key[start:end]) * scale
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = distance < 0 if window_size[0] < 0 else (distance < 0) | (distance > window_size[0])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hts,shd->thd", weights, value[start:end]))
    return torch.cat(outputs)


def grouping_varlen(
    query: Tensor, key: Tensor, value: Tensor, *places: Any, enable_gqa: bool = False, **rest: Any
) -> Tensor:
    """Has the signature of torch 2.13's, which can group heads."""
    assert enable_gqa
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    return varlen_by_definition(query, key, value, *places, **rest)


@pytest.mark.parametrize("varlen", [varlen_by_definition, grouping_varlen])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_call_of_varlen_attention_is_right_with_and_without_grouped_heads(
    varlen: Any, window: int | None, is_shared: bool, monkeypatch: pytest.MonkeyPatch
):
    # Shared: the second sequence begins with the first 5 tokens of the row.
    token_index = np.concatenate([np.arange(9), np.arange(5), np.arange(9, 12)]) if is_shared else None
    layout = packed_layout(bounds([9, 8]), token_index)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 12 if is_shared else 17, 8, generator=generator)
    key, value = (torch.randn(1, 2, query.shape[2], 8, generator=generator) for _ in range(2))
    padded, _ = packed_attention_forward(
        nn.Identity(), query, key, value, None, packed_layout=layout, sliding_window=window
    )
    monkeypatch.setattr(attention, "why_padded", lambda query, value: "")
    monkeypatch.setattr(attention, "_varlen_attention", lambda: varlen)
    flash, _ = packed_attention_forward(
        nn.Identity(), query, key, value, None, packed_layout=layout, sliding_window=window
    )
    torch.testing.assert_close(flash, padded)


@pytest.mark.parametrize("num_key_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_torchs_own_varlen_attention_takes_our_call_forwards_and_backwards(num_key_heads: int, window: int | None):
    # On "meta" torch's function checks its arguments and makes results without values; its kernels need a GPU.
    shapes = [(17, 4, 8), (17, num_key_heads, 8), (17, num_key_heads, 8)]
    inputs = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    query, key, value = inputs
    places = attention.Places(torch.empty(3, device="meta", dtype=torch.int32), 9)
    out = attention.varlen(query, key, value, places, places, attention.Attention(0.5, window))
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert [gradient.shape for gradient in torch.autograd.grad(out.sum(), inputs)] == [x.shape for x in inputs]


def test_the_log_says_once_which_attention_runs_and_why(caplog: pytest.LogCaptureFixture):
    attention._log_once.cache_clear()
    query = torch.zeros(1, 1, 3, 8)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            packed_attention_forward(nn.Identity(), query, query, query, None, packed_layout=packed_layout(bounds([3])))
    assert [record.getMessage() for record in caplog.records] == [
        "attention on cpu in torch.float32: padded batches of scaled_dot_product_attention, because flash attention "
        "needs CUDA"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        packed_attention_forward(
            nn.Identity(), query, query, query, None, packed_layout=packed_layout(bounds([3])), sliding_window=2
        )
    assert caplog.messages[0].endswith(
        "needs CUDA; the mask of a sliding window takes memory that is quadratic in the longest sequence"
    )


@pytest.mark.parametrize(
    ("varlen", "num_key_heads", "ending"),
    [
        (varlen_by_definition, 2, "; each key and value head is repeated 2 times, which takes memory and time, because "
         f"torch {torch.__version__} can't group heads here"),
        (grouping_varlen, 2, "; each key and value head serves 2 query heads and is not repeated"),
        (varlen_by_definition, 4, ""),
    ],
)  # fmt: skip
def test_the_log_says_whether_flash_attention_repeats_grouped_heads(
    varlen: Any, num_key_heads: int, ending: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    attention._log_once.cache_clear()
    monkeypatch.setattr(attention, "why_padded", lambda query, value: "")
    monkeypatch.setattr(attention, "_varlen_attention", lambda: varlen)
    query, key = torch.zeros(1, 4, 3, 8), torch.zeros(1, num_key_heads, 3, 8)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            packed_attention_forward(nn.Identity(), query, key, key, None, packed_layout=packed_layout(bounds([3])))
    flash = "attention on cpu in torch.float32: flash attention without padding (torch.nn.attention.varlen)"
    assert caplog.messages == [flash + ending]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_shared", [False, True])
def test_flash_path_agrees_with_the_padded_path(is_shared: bool, monkeypatch: pytest.MonkeyPatch):
    reasons: list[str] = []
    monkeypatch.setattr(attention, "report", lambda query, key, why: reasons.append(why))
    torch.manual_seed(0)
    # Shared: the second and the third sequence begin with the first 5 tokens of the row.
    index = np.concatenate([np.arange(300), np.arange(5), np.arange(300, 302), np.arange(5), np.arange(302, 426)])
    lengths = [300, 7, 129]
    token_index = index if is_shared else None
    num_tokens = 426 if is_shared else 436
    layout = packed_layout(bounds(lengths), token_index, "cuda")
    query = torch.randn(1, 8, num_tokens, 64, device="cuda", requires_grad=True)
    key, value = (torch.randn(1, 2, num_tokens, 64, device="cuda", requires_grad=True) for _ in range(2))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (t.to(dtype) for t in (query, key, value))
        out, _ = packed_attention_forward(nn.Identity(), q, k, v, None, packed_layout=layout)
        results.append((out.float(), *torch.autograd.grad(out.float().square().sum(), (query, key, value))))
    for exact, flash in zip(*results, strict=True):
        assert ((exact - flash).norm() / exact.norm()).item() < 2e-2
    assert [bool(why) for why in reasons] == [True, False]  # padded in float32, flash in bfloat16
