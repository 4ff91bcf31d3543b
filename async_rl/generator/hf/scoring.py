"""Score the tokens of probe sequences with the transformers backend. Called by its ``score_tokens``.

``cached_decode`` does what rollouts do: prefill, then one decode step per token over a cache, then the sampler.
``full_forward`` is one forward pass over the whole text. Shape letters: R = sequences, V = vocabulary, N = scored
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from async_rl.generator.hf.forward import Forward
from async_rl.generator.hf.sampler import logprobs_of, make_plan
from async_rl.generator.hf.slot_cache import PrefillCache, SlotCache
from async_rl.queue.parity import ProbeSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def cached_decode(
    forward: Forward,
    cache: SlotCache,
    sequences: Sequence[ProbeSequence],
    temperature: float,
    *,
    vocab_size: int,
    device: torch.device,
) -> np.ndarray:
    """float32 [N], sequence after sequence. ``cache`` is empty, with a slot for each of ``sequences``."""
    # The running rows of a cache are its first ones, so those with most tokens to come lie first.
    order = sorted(range(len(sequences)), key=lambda i: -sequences[i].num_scored)
    ids = [sequences[i].token_ids.astype(np.int64) for i in order]
    starts = [len(sequences[i].token_ids) - sequences[i].num_scored for i in order]
    longest = max(map(len, ids))
    cache.reserve(longest, longest)
    for row, (tokens, start) in enumerate(zip(ids, starts, strict=True)):
        if start > 1:
            prefill = forward.prefill(torch.from_numpy(tokens[None, : start - 1]).to(device))
            cache.write_prefix(row, 1, prefill.prefix(0, start - 1))
    found: list[list[float]] = [[] for _ in sequences]
    for step in range(max(one.num_scored for one in sequences)):
        rows = [row for row, i in enumerate(order) if sequences[i].num_scored > step]
        at = np.array([starts[row] + step for row in rows])
        fed = np.array([ids[row][position - 1] for row, position in zip(rows, at, strict=True)])
        wanted = np.array([ids[row][position] for row, position in zip(rows, at, strict=True)])
        positions_R = torch.from_numpy(at - 1).to(device)
        length = cache.padded(int(at.max()))
        cache.reserve(length, longest)
        cache.begin_step(positions_R, length)
        logits_RV = forward.decode(torch.from_numpy(fed).to(device), positions_R, cache)
        values = _tempered(logits_RV, torch.from_numpy(wanted).to(device), temperature, vocab_size=vocab_size)
        for row, value in zip(rows, values.tolist(), strict=True):
            found[order[row]].append(value)
    return np.array([value for values in found for value in values], np.float32)


@torch.inference_mode()
def full_forward(
    model: PreTrainedModel, sequences: Sequence[ProbeSequence], temperature: float, *, float32_head: bool
) -> np.ndarray:
    """float32 [N], sequence after sequence; with ``float32_head`` the output head computes in float32."""
    return np.concatenate([_full_forward(model, one, temperature, float32_head=float32_head) for one in sequences])


def _full_forward(model: Any, sequences: ProbeSequence, temperature: float, *, float32_head: bool) -> np.ndarray:
    ids_T = torch.from_numpy(sequences.token_ids.astype(np.int64)).to(model.device)
    positions_T = torch.arange(len(ids_T), device=model.device)
    hidden_1Td = model.base_model(
        input_ids=ids_T[None],
        attention_mask=(positions_T[None, :] <= positions_T[:, None])[None, None],
        position_ids=positions_T[None],
        past_key_values=PrefillCache(),
        use_cache=True,
    ).last_hidden_state
    first = len(ids_T) - sequences.num_scored
    hidden_Nd, head = hidden_1Td[0, first - 1 : -1], model.get_output_embeddings()
    if float32_head:
        bias = None if head.bias is None else head.bias.float()
        logits_NV = functional.linear(hidden_Nd.float(), head.weight.float(), bias)
    else:
        logits_NV = head(hidden_Nd)
    return _tempered(logits_NV, ids_T[first:], temperature, vocab_size=logits_NV.shape[1]).cpu().numpy()


def _tempered(logits_NV: Tensor, tokens_N: Tensor, temperature: float, *, vocab_size: int) -> Tensor:
    """float32 [N]: what the sampler would have recorded of these tokens, had it sampled them."""
    rows = len(tokens_N)
    plan = make_plan(
        np.full(rows, temperature), np.ones(rows), np.zeros(rows, np.int64), vocab_size=vocab_size,
        device=logits_NV.device,
    )  # fmt: skip
    return logprobs_of(logits_NV, plan)[0].gather(1, tokens_N[:, None])[:, 0]
