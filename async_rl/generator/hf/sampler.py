"""Choose tokens from logits, and compute the log-probabilities (logprobs) of sampled and of given tokens.

``sample`` treats each row with its own temperature, top-p, top-k and min-p. ``cached_decode`` and ``full_forward``
score the tokens of probe sequences. ``cached_decode`` does the same as a rollout: prefill, one decode step per token
with a cache, the sampler's distribution. ``full_forward`` runs one forward pass over the whole text.

Called by the transformers backend under inference mode. Shape letters: R = rows or sequences, V = vocabulary, F = rows
with top-p, top-k or min-p, N = scored tokens, T = tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from async_rl.generator.hf.rows import Rows
from async_rl.queue.parity import ProbeSequence
from async_rl.sampling_mask import SamplingMask, pack_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class SamplingPlan:
    """How to sample each row, as tensors. It is rebuilt only when the rows change.

    Attributes:
        temperatures: float32 [R, 1], 1 for greedy rows; None if all are 1.
        greedy: bool [R], True for rows that take the most likely token; None if there are none.
        filtered: the rows with top-k, top-p or min-p, as row numbers (int64 [F]), top_k (int64 [F, 1], V for off),
            top_p (float64 [F, 1]) and min_p (float64 [F, 1]); None if there are none.
        samples: whether any row is not greedy.
    """

    temperatures: Tensor | None
    greedy: Tensor | None
    filtered: tuple[Tensor, Tensor, Tensor, Tensor] | None
    samples: bool


def make_plan(
    temperatures: npt.NDArray[np.float64],
    top_ps: npt.NDArray[np.float64],
    top_ks: npt.NDArray[np.int64],
    *,
    min_ps: npt.NDArray[np.float64] | None = None,
    vocab_size: int,
    device: torch.device,
) -> SamplingPlan:
    """Return the tensors that ``sample`` needs for R rows with these settings. Each array has the shape [R].

    A ``top_ks`` of 0 means no top-k, a ``top_ps`` of 1 no top-p, a ``min_ps`` of 0 (or None) no min-p, and a
    temperature of 0 greedy decoding.
    """
    if min_ps is None:
        min_ps = np.zeros(len(temperatures))
    greedy = temperatures == 0
    scales = np.where(greedy, 1.0, temperatures)
    # Greedy rows stay unfiltered: their logprobs are of the whole distribution at temperature 1.
    rows = np.flatnonzero(~greedy & ((top_ps < 1) | (top_ks > 0) | (min_ps > 0)))
    filtered = None
    if len(rows):
        sizes = np.where(top_ks[rows] > 0, np.minimum(top_ks[rows], vocab_size), vocab_size)
        filtered = (
            torch.as_tensor(rows, device=device),
            torch.as_tensor(sizes, device=device)[:, None],
            torch.as_tensor(top_ps[rows], device=device)[:, None],
            torch.as_tensor(min_ps[rows], device=device)[:, None],
        )
    return SamplingPlan(
        temperatures=(
            None if (scales == 1).all() else torch.as_tensor(scales, dtype=torch.float32, device=device)[:, None]
        ),
        greedy=torch.as_tensor(greedy, device=device) if greedy.any() else None,
        filtered=filtered,
        samples=not greedy.all(),
    )


def sample(logits_RV: Tensor, plan: SamplingPlan, uniforms_R: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """Choose one token per row by inverse CDF.

    Args:
        logits_RV: any float dtype; upcast to float32 before anything else.
        plan: the result of ``make_plan`` for these rows.
        uniforms_R: float64 [R] in [0, 1 - 2**-52], on the logits' device.

    Returns:
        The columns of the chosen tokens, [R] each, by their names in ``backend.Sampled``: token_ids int32; logprobs
        float32, in nats, of the sampled distribution (after temperature, min-p, top-k and top-p, renormalised; NaN if a
        row's logits are not a distribution). And bool [F, V], the tokens that these kept in the plan's filtered rows,
        or None without such rows.
    """
    logits_RV, allowed_FV = _processed(logits_RV, plan)
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    tokens_R1 = _inverse_cdf(logprobs_RV, uniforms_R) if plan.samples else logits_RV.argmax(-1, keepdim=True)
    if plan.samples and plan.greedy is not None:
        tokens_R1 = torch.where(plan.greedy[:, None], logits_RV.argmax(-1, keepdim=True), tokens_R1)
    columns = {"token_ids": tokens_R1[:, 0].int(), "logprobs": logprobs_RV.gather(1, tokens_R1)[:, 0]}
    return columns, allowed_FV


def logprobs_of(logits_RV: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities, float32 [R, V], of the distribution that ``sample`` draws from.

    Also return bool [F, V], the tokens that min-p, top-k and top-p kept in the filtered rows; None without such rows.
    """
    logits_RV, allowed_FV = _processed(logits_RV, plan)
    return torch.log_softmax(logits_RV, dim=-1), allowed_FV


def _processed(logits_RV: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor | None]:
    """Apply temperature, min-p, top-k and top-p to the logits. Return the new ones, float32 [R, V].

    Also return bool [F, V], the tokens that min-p, top-k and top-p kept in the filtered rows; None without such rows.
    """
    allowed_FV = None
    logits_RV = logits_RV.float()
    if plan.temperatures is not None:
        logits_RV = logits_RV / plan.temperatures
    if plan.filtered is not None:
        rows_F, top_ks_F1, top_ps_F1, min_ps_F1 = plan.filtered
        logits_RV = logits_RV.clone()
        allowed_logits_FV = _allowed_logits(logits_RV[rows_F], top_ks_F1, top_ps_F1, min_ps_F1)
        allowed_FV = allowed_logits_FV > -torch.inf
        logits_RV[rows_F] = allowed_logits_FV
    return logits_RV, allowed_FV


def pack_masks(allowed_FV: Tensor) -> SamplingMask:
    """Return one sampling mask for F tokens. ``allowed_FV``, bool [F, V], is True for the ids in each token's set."""
    counts_F, ids = allowed_FV.sum(-1).cpu(), allowed_FV.nonzero()[:, 1].int().cpu()
    return pack_ids(counts_F.numpy(), ids.numpy(), vocab_size=allowed_FV.shape[1])


def _inverse_cdf(logprobs_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    cumulative_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64)
    targets_R1 = uniforms_R[:, None] * cumulative_RV[:, -1:]
    # right=True: the first index whose cumulative is *above* the target, which never has probability 0.
    tokens_R1 = torch.searchsorted(cumulative_RV, targets_R1, right=True)
    # Only rows of NaN exceed the last index; the caller refuses them by their logprob.
    return tokens_R1.clamp_max_(logprobs_RV.shape[1] - 1)


def _allowed_logits(logits_FV: Tensor, top_ks_F1: Tensor, top_ps_F1: Tensor, min_ps_F1: Tensor) -> Tensor:
    """Set the logits of all tokens to -inf that min-p, top-k or top-p excludes.

    Min-p keeps the tokens whose probability is at least that share of the largest (Nguyen et al., arXiv:2407.01082,
    section 3). Of these, top-k keeps the most likely ones, and top-p the smallest set that reaches its probability,
    after renormalisation. vLLM has the same order.
    """
    ordered_FV, order_FV = logits_FV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(logits_FV.shape[1], device=logits_FV.device)
    shares_FV = (ordered_FV.double() - ordered_FV[:, :1].double()).exp()
    ordered_FV = ordered_FV.masked_fill((ranks_V >= top_ks_F1) | (shares_FV < min_ps_F1), -torch.inf)
    probabilities_FV = ordered_FV.double().softmax(-1)
    before_FV = probabilities_FV.cumsum(-1) - probabilities_FV
    ordered_FV = ordered_FV.masked_fill((before_FV >= top_ps_F1) & (ranks_V > 0), -torch.inf)
    return torch.empty_like(logits_FV).scatter_(1, order_FV, ordered_FV)


@torch.inference_mode()
def cached_decode(rows: Rows, sequences: Sequence[ProbeSequence], temperature: float, *, vocab_size: int) -> np.ndarray:
    """Return the logprobs of all scored tokens, float32 [N], computed with a cache as in a rollout.

    They are in the order of ``sequences``. ``rows`` are empty, with room for each sequence.
    """
    # The running rows are always the first ones, so sequences with more scored tokens come first.
    order = sorted(range(len(sequences)), key=lambda i: -sequences[i].num_scored)
    ids = [sequences[i].token_ids.astype(np.int64) for i in order]
    starts = [len(sequences[i].token_ids) - sequences[i].num_scored for i in order]
    longest = max(map(len, ids))
    for row, (tokens, start) in enumerate(zip(ids, starts, strict=True)):
        (prefix,) = rows.prefixes([tokens[: start - 1]]) if start > 1 else (None,)
        rows.add(row, 1, prefix, length=longest, max_length=longest)
    found: list[list[float]] = [[] for _ in sequences]
    num_running = len(sequences)
    for step in range(max(one.num_scored for one in sequences)):
        running = [row for row, i in enumerate(order) if sequences[i].num_scored > step]
        if len(running) < num_running:
            rows.remove(range(len(running), num_running), [], [])
            num_running = len(running)
        at = np.array([starts[row] + step for row in running])
        fed = np.array([ids[row][position - 1] for row, position in zip(running, at, strict=True)])
        wanted = np.array([ids[row][position] for row, position in zip(running, at, strict=True)])
        logits_RV = rows.decode(fed, at - 1, max_length=longest)
        wanted_R = torch.from_numpy(wanted).to(logits_RV.device)
        values = _tempered(logits_RV, wanted_R, temperature, vocab_size=vocab_size)
        for row, value in zip(running, values.tolist(), strict=True):
            found[order[row]].append(value)
    return np.array([value for values in found for value in values], np.float32)


@torch.inference_mode()
def full_forward(
    model: PreTrainedModel, sequences: Sequence[ProbeSequence], temperature: float, *, float32_head: bool
) -> np.ndarray:
    """Return the logprobs of all scored tokens, float32 [N], from one pass over each whole sequence.

    With ``float32_head`` the output head computes in float32.
    """
    return np.concatenate([_full_forward(model, one, temperature, float32_head=float32_head) for one in sequences])


def _full_forward(model: Any, sequence: ProbeSequence, temperature: float, *, float32_head: bool) -> np.ndarray:
    ids_T = torch.from_numpy(sequence.token_ids.astype(np.int64)).to(model.device)
    first = len(ids_T) - sequence.num_scored
    head = model.get_output_embeddings()

    def of_scored(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        # Here, and not after the model's call, because some models scale or cap the logits after their head.
        if not float32_head:
            return output[:, first - 1 : -1]
        bias = None if head.bias is None else head.bias.float()
        return functional.linear(inputs[0][:, first - 1 : -1].float(), head.weight.float(), bias)

    hook = head.register_forward_hook(of_scored)
    try:
        logits_NV = model(input_ids=ids_T[None], use_cache=False).logits[0]
    finally:
        hook.remove()
    return _tempered(logits_NV, ids_T[first:], temperature, vocab_size=logits_NV.shape[1]).cpu().numpy()


def _tempered(logits_NV: Tensor, tokens_N: Tensor, temperature: float, *, vocab_size: int) -> Tensor:
    """Return the logprobs of ``tokens_N``, float32 [N], as the sampler would have recorded them at this temperature."""
    rows = len(tokens_N)
    plan = make_plan(
        np.full(rows, temperature), np.ones(rows), np.zeros(rows, np.int64), vocab_size=vocab_size,
        device=logits_NV.device,
    )  # fmt: skip
    return logprobs_of(logits_NV, plan)[0].gather(1, tokens_N[:, None])[:, 0]
