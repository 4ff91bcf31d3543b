"""Hidden states to log-probabilities of the trained tokens, without ever holding ``[N, vocabulary]`` whole.

The engine picks the hidden states that predict a trained token and calls this. Shape letters: N = predicted tokens,
C = tokens of one chunk, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 256 << 20
"""Default size of one chunk's float32 logits; the peak is about three times that."""


class TokenLogprobs(NamedTuple):
    """What ``token_logprobs`` gives back: both float32 [N], in nats, of the tempered distribution."""

    logprobs: Tensor
    entropies: Tensor


def token_logprobs(
    hidden_Nd: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    vocab_size: int,
    chunk_bytes: int = CHUNK_BYTES,
    entropy_grad: bool = False,
) -> TokenLogprobs:
    """``log softmax(head(hidden) / temperature)[target]``, and the entropy of that distribution.

    Chunks of rows; if there are several, each is recomputed in the backward pass, so that only one chunk's logits
    live at a time. ``head`` must run no collective of its own (under FSDP: keep its weight in the root's group), as
    ranks need not have equally many chunks. With N = 0 the result is empty but still hangs on ``hidden`` and the
    head's weight, so that a rank with nothing to train joins every collective of the backward pass.

    Args:
        hidden_Nd: hidden states at the positions that predict the targets; carries grad.
        head: the language-model head, [C, d] -> [C, V], in any float dtype.
        targets_N: int64 token ids.
        temperatures_N: float, > 0; logits are divided by it in float32, before the log-softmax.
        vocab_size: V, only to size the chunks.
        chunk_bytes: upper bound on one chunk's float32 logits (at least one row).
        entropy_grad: entropies carry a gradient too, for about two chunks' logits more of memory.

    Returns:
        log-probabilities with grad, entropies with one only if ``entropy_grad``.

    Raises:
        ValueError: the first three tensors disagree about N.
    """
    if not hidden_Nd.ndim == 2 or not len(hidden_Nd) == len(targets_N) == len(temperatures_N):
        raise ValueError(
            f"expected hidden [N, d], targets [N] and temperatures [N], got {list(hidden_Nd.shape)}, "
            f"{list(targets_N.shape)} and {list(temperatures_N.shape)}"
        )
    rows = max(1, chunk_bytes // (4 * vocab_size))
    parts: list[Sequence[Any]] = [t.split(rows) for t in (hidden_Nd, targets_N, temperatures_N)]
    is_whole = len(parts[0]) == 1

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
    """Where a chunk's entropies go on its first run; its rerun in the backward pass has no use for them."""

    __slots__ = ("out_C",)

    def __init__(self, out_C: Tensor) -> None:
        self.out_C: Tensor | None = out_C

    def fill(self, logits_CV: Tensor) -> None:
        if self.out_C is None:
            return
        # entr is 0 at probability 0, where p * log p would be NaN.
        torch.sum(torch.special.entr(logits_CV.softmax(-1)), dim=-1, out=self.out_C)
        self.out_C = None


def _chunk(
    head: Callable[[Tensor], Tensor], hidden_Cd: Tensor, targets_C: Tensor, temperatures_C: Tensor, entropies: _Once
) -> Tensor:
    logits_CV = head(hidden_Cd).float() / temperatures_C.float()[:, None]
    with torch.no_grad():
        entropies.fill(logits_CV.detach())
    return logits_CV.gather(-1, targets_C[:, None])[:, 0] - logits_CV.logsumexp(-1)


def _chunk_with_entropy(
    head: Callable[[Tensor], Tensor], hidden_Cd: Tensor, targets_C: Tensor, temperatures_C: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs_CV = (head(hidden_Cd).float() / temperatures_C.float()[:, None]).log_softmax(-1)
    # An impossible token has log p = -inf: 0 in the sum, and in its gradient, where entr's own would be infinite.
    safe_CV = logprobs_CV.masked_fill(logprobs_CV == -torch.inf, 0.0)
    entropies_C = -(logprobs_CV.exp() * safe_CV).sum(-1)
    return logprobs_CV.gather(-1, targets_C[:, None])[:, 0], entropies_C
