"""Turns hidden states into log-probabilities of the trained tokens. All logits ``[N, V]`` are never in memory at once.

``PolicyModel`` selects the hidden states that predict a trained token and calls this. Shape letters: N = predicted
tokens, C = tokens of one chunk, d = hidden size, V = vocabulary, P = part of the vocabulary, W = words of sampling
masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from async_rl.learner.engine.mask_tensors import MaskTensors

CHUNK_BYTES = 256 << 20
"""Default size of one chunk's float32 logits, in bytes. Peak memory is about three times that, and in the backward pass
the head's gradient in float32.
"""
_GRADIENT_PARTS = 8
"""The product that a chunk adds to the gradient of a head in half precision is computed in this many parts: the whole
product would take as much memory as the head.
"""


class TokenLogprobs(NamedTuple):
    """The log-probabilities and entropies of ``token_logprobs``: float32 [N], nats, under the sampling distribution."""

    logprobs: Tensor
    entropies: Tensor


def token_logprobs(
    hidden_Nd: Tensor,
    head: nn.Linear,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    cap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    sampling_mask: MaskTensors | None = None,
    entropy_grad: bool = False,
) -> TokenLogprobs:
    """Compute ``log softmax(head(hidden) / temperature)[target]``, and the entropy of that distribution.

    With a cap c the head's output z is replaced by c * tanh(z / c), as in Gemma 2 (arXiv:2408.00118, section 2).

    Rows are computed in chunks. If there are several, the backward pass computes each chunk's logits again, so that
    only one chunk's logits are in memory at a time. The head's gradient is summed over the chunks in float32 and
    rounded to the head's dtype once: a sum in bfloat16 would lose more with every chunk (relative error 0.012 for 74
    chunks, as against 0.002). With N = 0 the result is empty but still depends on ``hidden`` and the head's weight, so
    that a rank without work joins every collective of the backward pass.

    Args:
        hidden_Nd: hidden states at the positions that predict the targets; carries grad.
        head: the language-model head, in any float dtype. Its weight must be unsharded. Only its weight and bias are
            read, the module is not called.
        targets_N: int64 token ids.
        temperatures_N: float, > 0; logits are divided by it in float32, before the log-softmax.
        cap: soft cap of the head's output, > 0; None: no cap.
        chunk_bytes: upper bound on one chunk's float32 logits (at least one row).
        sampling_mask: the tokens that could be sampled, with the target among them; the softmax is over these only.
        entropy_grad: whether the entropies carry a gradient, which takes the memory of about one more chunk.

    Raises:
        ValueError: the numbers of rows of the hidden states, targets and temperatures differ.
    """
    if not hidden_Nd.ndim == 2 or not len(hidden_Nd) == len(targets_N) == len(temperatures_N):
        raise ValueError(
            f"expected hidden [N, d], targets [N] and temperatures [N], got {list(hidden_Nd.shape)}, "
            f"{list(targets_N.shape)} and {list(temperatures_N.shape)}; this is a bug in async-rl, please report it"
        )
    rows = max(1, chunk_bytes // (4 * head.weight.shape[0]))
    chunks = _Chunks(targets_N, temperatures_N, sampling_mask, cap, rows, entropy_grad)
    return TokenLogprobs(*_HeadLogprobs.apply(hidden_Nd, head.weight, head.bias, chunks))


class _Chunk(NamedTuple):
    """A chunk's place in N, and what its log-probabilities depend on besides hidden states and head: targets and
    temperatures [C], and masks.
    """

    place: slice
    targets: Tensor
    temperatures: Tensor
    sampling_mask: MaskTensors | None
    cap: float | None

    def logprobs(self, hidden_Nd: Tensor, weight_Vd: Tensor, bias_V: Tensor | None) -> Tensor:
        """Return log-probabilities, float32 [C, V]; -inf for tokens that could not be sampled."""
        logits_CV = linear(hidden_Nd[self.place], weight_Vd, bias_V).float()
        if self.cap is not None:
            logits_CV.div_(self.cap).tanh_().mul_(self.cap)
        logits_CV.div_(self.temperatures[:, None])
        if self.sampling_mask is not None:
            logits_CV.masked_fill_(~self.sampling_mask.mask(logits_CV.shape[1]), -torch.inf)
        return logits_CV.log_softmax(-1)

    def slopes(self, hidden_Nd: Tensor, weight_Vd: Tensor, bias_V: Tensor | None, cap: float) -> Tensor:
        """Return the derivative of the capped logits by the head's output, 1 - tanh(z / cap)^2, float32 [C, V]."""
        tanh_CV = linear(hidden_Nd[self.place], weight_Vd, bias_V).float().div_(cap).tanh_()
        return tanh_CV.square_().neg_().add_(1.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """What ``_HeadLogprobs`` needs besides the tensors that have a gradient. The fields are those of
    ``token_logprobs``; ``rows`` is C.
    """

    targets: Tensor
    temperatures: Tensor
    sampling_mask: MaskTensors | None
    cap: float | None
    rows: int
    entropy_grad: bool

    def __iter__(self) -> Iterator[_Chunk]:
        masks = None if self.sampling_mask is None else self.sampling_mask.split(self.rows)
        parts = zip(self.targets.split(self.rows), self.temperatures.float().split(self.rows), strict=True)
        for index, (targets_C, temperatures_C) in enumerate(parts):
            place = slice(index * self.rows, index * self.rows + len(targets_C))
            yield _Chunk(place, targets_C, temperatures_C, None if masks is None else masks[index], self.cap)


class _HeadLogprobs(torch.autograd.Function):
    """The log-probabilities of targets and the entropies, [N] each, from hidden states, weight and bias of the head."""

    @staticmethod
    def forward(
        ctx: Any, hidden_Nd: Tensor, weight_Vd: Tensor, bias_V: Tensor | None, chunks: _Chunks
    ) -> tuple[Tensor, Tensor]:
        out_N, entropies_N = (torch.empty(len(hidden_Nd), device=hidden_Nd.device) for _ in range(2))
        logprobs_CV = None
        for chunk in chunks:
            logprobs_CV = chunk.logprobs(hidden_Nd, weight_Vd, bias_V)
            out_N[chunk.place] = logprobs_CV.gather(-1, chunk.targets[:, None])[:, 0]
            # entr is 0 at probability 0, where p * log p would be NaN.
            entropies_N[chunk.place] = torch.special.entr(logprobs_CV.exp()).sum(-1)
        ctx.save_for_backward(hidden_Nd, weight_Vd, bias_V)
        ctx.chunks = chunks
        # A single chunk is kept, several are computed again.
        ctx.logprobs_CV = logprobs_CV if len(hidden_Nd) <= chunks.rows else None
        if not chunks.entropy_grad:
            ctx.mark_non_differentiable(entropies_N)
        return out_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the parameters' names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        out_grad_N, entropy_grad_N = grad_outputs
        hidden_Nd, weight_Vd, bias_V = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        hidden_grad_Nd = torch.empty_like(hidden_Nd) if needs_hidden else None
        weight_grad_Vd = torch.zeros_like(weight_Vd, dtype=torch.float32) if needs_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for chunk in ctx.chunks:
            logprobs_CV = ctx.logprobs_CV
            if logprobs_CV is None:
                logprobs_CV = chunk.logprobs(hidden_Nd, weight_Vd, bias_V)
            of_entropies_C = entropy_grad_N[chunk.place] if ctx.chunks.entropy_grad else None
            grad_CV = _logits_grad(logprobs_CV, chunk, out_grad_N[chunk.place], of_entropies_C)
            if chunk.cap is not None:
                grad_CV.mul_(chunk.slopes(hidden_Nd, weight_Vd, bias_V, chunk.cap))
            if bias_grad_V is not None:
                bias_grad_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_Vd.dtype)
            if hidden_grad_Nd is not None:
                torch.mm(grad_CV, weight_Vd, out=hidden_grad_Nd[chunk.place])
            if weight_grad_Vd is not None:
                _add_product(weight_grad_Vd, grad_CV, hidden_Nd[chunk.place])
        return (
            hidden_grad_Nd,
            None if weight_grad_Vd is None else weight_grad_Vd.to(weight_Vd.dtype),
            None if bias_grad_V is None else bias_grad_V.to(bias_V.dtype),
            None,
        )


def _add_product(sum_Vd: Tensor, grad_CV: Tensor, hidden_Cd: Tensor) -> None:
    """Add ``grad_CV.T @ hidden_Cd`` to the float32 ``sum_Vd``."""
    if hidden_Cd.dtype == torch.float32:
        sum_Vd.addmm_(grad_CV.T, hidden_Cd)
        return
    for sum_Pd, grad_CP in zip(sum_Vd.chunk(_GRADIENT_PARTS), grad_CV.chunk(_GRADIENT_PARTS, dim=1), strict=True):
        sum_Pd += grad_CP.T @ hidden_Cd


def _logits_grad(logprobs_CV: Tensor, chunk: _Chunk, out_grad_C: Tensor, entropy_grad_C: Tensor | None) -> Tensor:
    """Return the gradient of the (capped) head's output, float32 [C, V], from those of logprobs and entropies.

    With z = logits / temperature and p = softmax(z): d log p[target] / dz = onehot(target) - p, and
    d entropy / dz = -p (log p + entropy).
    """
    probs_CV = logprobs_CV.exp()
    scale_CV: Tensor = -out_grad_C[:, None]
    if entropy_grad_C is not None:
        # A token that could not be sampled has log p = -inf and p = 0: it has no part in the entropy.
        safe_CV = logprobs_CV.masked_fill(logprobs_CV == -torch.inf, 0.0)
        entropies_C1 = -(probs_CV * safe_CV).sum(-1, keepdim=True)
        scale_CV = scale_CV - safe_CV.add_(entropies_C1).mul_(entropy_grad_C[:, None])
    grad_CV = probs_CV.mul_(scale_CV)
    grad_CV[torch.arange(len(grad_CV), device=grad_CV.device), chunk.targets] += out_grad_C
    return grad_CV.div_(chunk.temperatures[:, None])
