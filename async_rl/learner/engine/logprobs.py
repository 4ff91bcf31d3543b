"""Turns hidden states into log-probabilities of the trained tokens. All logits ``[N, V]`` are never in memory at once.

``PolicyModel`` selects the hidden states that predict a trained token and calls this. Shape letters: N = predicted
tokens, C = tokens of one chunk, d = hidden size, V = vocabulary, W = words of sampling masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from async_rl.sampling_mask import words_at_most

CHUNK_BYTES = 256 << 20
"""Default size of one chunk's float32 logits, in bytes. Peak memory is about three times that."""


class TokenLogprobs(NamedTuple):
    """The log-probabilities and entropies of ``token_logprobs``: float32 [N], nats, under the sampling distribution."""

    logprobs: Tensor
    entropies: Tensor


class MaskTensors(NamedTuple):
    """A ``SamplingMask`` on the device: for each predicted token, the tokens that top-p and top-k left. int32 [N]
    and [W].
    """

    sizes: Tensor
    words: Tensor

    def split(self, rows: int) -> list[MaskTensors]:
        """Split the masks into parts of ``rows`` predicted tokens, as ``Tensor.split`` does."""
        sizes = self.sizes.split(rows)
        num_words = [int(s.abs().sum()) for s in sizes]
        return [MaskTensors(s, w) for s, w in zip(sizes, self.words.split(num_words), strict=True)]

    def mask(self, vocab_size: int) -> Tensor:
        """Return bool [N, V]: for each predicted token, whether each token of the vocabulary could be sampled."""
        num_words_N, row_N = self.sizes.abs().long(), torch.arange(len(self.sizes), device=self.sizes.device)
        row_W = row_N.repeat_interleave(num_words_N)
        is_id_W = self.sizes[row_W] > 0
        mask_NV = (self.sizes == 0)[:, None].repeat(1, vocab_size)
        mask_NV[row_W[is_id_W], self.words[is_id_W].long()] = True
        of_bits_N = self.sizes < 0
        if bool(of_bits_N.any()):
            # Put every word of bits into its row and column. Rows without words, and the rest of short rows, stay 0.
            column_W = torch.arange(len(row_W), device=row_W.device) - (num_words_N.cumsum(0) - num_words_N)[row_W]
            words_NX = self.words.new_zeros(len(row_N), words_at_most(vocab_size))
            words_NX[row_W[~is_id_W], column_W[~is_id_W]] = self.words[~is_id_W]
            bytes_BY = words_NX[of_bits_N].view(torch.uint8)
            bits_BY8 = (bytes_BY[..., None] >> torch.arange(8, dtype=torch.uint8, device=bytes_BY.device)) & 1
            mask_NV[of_bits_N] = bits_BY8.flatten(1)[:, :vocab_size].bool()
        return mask_NV


def token_logprobs(
    hidden_Nd: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    vocab_size: int,
    chunk_bytes: int = CHUNK_BYTES,
    sampling_mask: MaskTensors | None = None,
    entropy_grad: bool = False,
) -> TokenLogprobs:
    """Compute ``log softmax(head(hidden) / temperature)[target]``, and the entropy of that distribution.

    Rows are computed in chunks. If there are several, each chunk is recomputed in the backward pass, so that only one
    chunk's logits are in memory at a time. ``head`` must run no collective (under FSDP its weight is in the root's
    group), because ranks may have different numbers of chunks. With N = 0 the result is empty but still depends on
    ``hidden`` and the head's weight, so that a rank without work joins every collective of the backward pass.

    Args:
        hidden_Nd: hidden states at the positions that predict the targets; carries grad.
        head: the language-model head, [C, d] -> [C, V], in any float dtype.
        targets_N: int64 token ids.
        temperatures_N: float, > 0; logits are divided by it in float32, before the log-softmax.
        vocab_size: V, used only for the size of the chunks.
        chunk_bytes: upper bound on one chunk's float32 logits (at least one row).
        sampling_mask: the tokens that could be sampled, with the target among them; the softmax is over these only.
        entropy_grad: whether the entropies carry a gradient, which takes the memory of about two more chunks.

    Raises:
        ValueError: the numbers of rows of the hidden states, targets and temperatures differ.
    """
    if not hidden_Nd.ndim == 2 or not len(hidden_Nd) == len(targets_N) == len(temperatures_N):
        raise ValueError(
            f"expected hidden [N, d], targets [N] and temperatures [N], got {list(hidden_Nd.shape)}, "
            f"{list(targets_N.shape)} and {list(temperatures_N.shape)}; this is a bug in async-rl, please report it"
        )
    rows = max(1, chunk_bytes // (4 * vocab_size))
    parts: list[Sequence[Any]] = [t.split(rows) for t in (hidden_Nd, targets_N, temperatures_N)]
    is_whole = len(parts[0]) == 1
    parts.append([None] * len(parts[0]) if sampling_mask is None else sampling_mask.split(rows))

    def run(chunk: Callable[..., Any]) -> list[Any]:
        if is_whole:
            return [chunk(head, *part) for part in zip(*parts, strict=True)]
        # The chunk draws no random numbers, so there is no generator state to save.
        return [
            checkpoint(chunk, head, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(*parts, strict=True)
        ]

    if entropy_grad:
        logprobs, entropies = zip(*run(_chunk_with_entropy), strict=True)
        return TokenLogprobs(torch.cat(logprobs), torch.cat(entropies))
    entropies_N = torch.zeros(len(hidden_Nd), dtype=torch.float32, device=hidden_Nd.device)
    parts.append([_Once(out) for out in entropies_N.split(rows)])
    return TokenLogprobs(torch.cat(run(_chunk)), entropies_N)


class _Once:
    """Computes a chunk's entropies only on the chunk's first run. The repeated run in the backward pass does not
    need them.
    """

    __slots__ = ("out_C",)

    def __init__(self, out_C: Tensor) -> None:
        self.out_C: Tensor | None = out_C

    def fill(self, logits_CV: Tensor) -> None:
        if self.out_C is None:
            return
        # entr is 0 at probability 0, where p * log p would be NaN.
        torch.sum(torch.special.entr(logits_CV.softmax(-1)), dim=-1, out=self.out_C)
        self.out_C = None


def _logits(
    head: Callable[[Tensor], Tensor], hidden_Cd: Tensor, temperatures_C: Tensor, sampling_mask: MaskTensors | None
) -> Tensor:
    """Return logits / temperature, float32 [C, V]; -inf, without gradient, for tokens that could not be sampled."""
    logits_CV = head(hidden_Cd).float() / temperatures_C.float()[:, None]
    if sampling_mask is None:
        return logits_CV
    return logits_CV.masked_fill(~sampling_mask.mask(logits_CV.shape[1]), -torch.inf)


def _chunk(
    head: Callable[[Tensor], Tensor], hidden_Cd: Tensor, targets_C: Tensor, temperatures_C: Tensor,
    sampling_mask: MaskTensors | None,
    entropies: _Once,
) -> Tensor:  # fmt: skip
    logits_CV = _logits(head, hidden_Cd, temperatures_C, sampling_mask)
    with torch.no_grad():
        entropies.fill(logits_CV.detach())
    return logits_CV.gather(-1, targets_C[:, None])[:, 0] - logits_CV.logsumexp(-1)


def _chunk_with_entropy(
    head: Callable[[Tensor], Tensor],
    hidden_Cd: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    sampling_mask: MaskTensors | None,
) -> tuple[Tensor, Tensor]:
    logprobs_CV = _logits(head, hidden_Cd, temperatures_C, sampling_mask).log_softmax(-1)
    # A token that could not be sampled has log p = -inf. It adds 0 to the sum and to the gradient; with
    # torch.special.entr the gradient would be infinite there.
    safe_CV = logprobs_CV.masked_fill(logprobs_CV == -torch.inf, 0.0)
    entropies_C = -(logprobs_CV.exp() * safe_CV).sum(-1)
    return logprobs_CV.gather(-1, targets_C[:, None])[:, 0], entropies_C
