"""Turns hidden states into log-probabilities of the trained tokens. All logits ``[N, V]`` are never in memory at once.

``PolicyModel`` selects the hidden states that predict a trained token and calls this. Shape letters: N = predicted
tokens, C = tokens of one chunk, d = hidden size, V = vocabulary, or this rank's part of it (``vocabulary.py``), P =
part of V.

The head needs three matrix products: the logits, and the gradients of hidden states and weight. The gradients need the
*slopes*, the derivatives of the loss by log-probabilities and entropies, which are known only after the last chunk. If
the loss is a sum over tokens, they can be predicted from the chunk's own values (``SlopeFunction``). Then the gradients
are computed in the forward pass, while the chunk's probabilities are in memory. The backward pass compares the true
slopes with the predicted ones, computes again the chunks where they differ, and adds the difference. So the gradient is
right whatever was predicted. The last chunk needs no prediction: its probabilities are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from async_rl.learner.losses.batch import SlopeFunction, Slopes, TokenLogprobs
from async_rl.learner.memory_plan import logits_chunk_bytes
from async_rl.learner.model.mask_tensors import MaskTensors
from async_rl.learner.model.vocabulary import VocabularyPart

_ROWS_MULTIPLE = 16
"""Chunks have a multiple of this number of rows, where they can: matrix products are faster then."""
_GRADIENT_PARTS = 8
"""The product that a chunk adds to the gradient of a head in half precision is computed in this many parts: the whole
product would take as much memory as the head.
"""
_IMPOSSIBLE = -1e30
"""The logit of tokens that could not be sampled: its ``exp`` is 0, and 0 times it is 0, not NaN."""
_SLOPE_LIMIT = 16.0
"""Larger predicted slopes, and those that are not finite, are not used: if they turned out wrong, taking them off again
would leave rounding errors that other tokens' gradients feel.
"""
_SLOPE_TOLERANCE = 1e-6
"""Relative difference between predicted and true slopes that is rounding."""


def token_logprobs(
    hidden_Nd: Tensor,
    head: nn.Linear,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    cap: float | None = None,
    chunk_bytes: float | None = None,
    sampling_mask: MaskTensors | None = None,
    others_NK: Tensor | None = None,
    entropy_grad: bool = False,
    predict: SlopeFunction | None = None,
    dtype: torch.dtype | None = None,
) -> TokenLogprobs:
    """Compute ``log softmax(head(hidden) / temperature)[target]``, and the entropy of that distribution.

    With a cap c the head's output z is replaced by c * tanh(z / c), as in Gemma 2 (arXiv:2408.00118, section 2).

    Rows are computed in chunks, which share their buffers. The head's gradient is summed over the chunks in float32 and
    rounded to the head's dtype once: a sum in bfloat16 would lose more with every chunk (relative error 0.012 for 74
    chunks, as against 0.002). With N = 0 the result is empty but still depends on ``hidden`` and the head's weight, so
    that a rank without work joins every collective of the backward pass.

    If there are several chunks and a prediction, the backward pass reads once from the device which chunks were
    predicted wrongly. Otherwise the host waits for nothing.

    Args:
        hidden_Nd: hidden states at the positions that predict the targets; carries grad.
        head: the language-model head, in any float dtype. Only its weight and bias are read, the module is not called.
            They must be whole, or DTensors that are divided by tokens of the vocabulary over a group of ranks. These
            ranks call this together, with the same arguments, and get the same results.
        targets_N: int64 token ids.
        temperatures_N: float, > 0; logits are divided by it in float32, before the log-softmax.
        cap: soft cap of the head's output, > 0; None: no cap.
        chunk_bytes: upper bound on one chunk's float32 logits (at least one row). None: ``logits_chunk_bytes``.
        sampling_mask: the tokens that could be sampled, with the target among them; the softmax is over these only.
        others_NK: int64 ids of further tokens whose log-probabilities are wanted. Only for a whole head, and without
            ``predict``.
        entropy_grad: whether the entropies carry a gradient.
        predict: predicts the slopes of the loss. None: all chunks but the last are computed again in the backward pass.
        dtype: in which the head and its gradients are computed. None: the weight's. Another one takes a copy of the
            weight.
    """
    part = VocabularyPart.of(head.weight)
    assert others_NK is None or (part is None and predict is None)
    rows = _rows_per_chunk(head.weight, head.weight.shape[0] if part is None else part.largest_size, chunk_bytes)
    chunks = _chunks(targets_N, temperatures_N.float(), sampling_mask, others_NK, rows)
    settings = _Settings(chunks, cap, entropy_grad, predict if torch.is_grad_enabled() else None, part)
    own = (t.to_local() if isinstance(t, DTensor) else t for t in (hidden_Nd, head.weight, head.bias))
    tensors = (None if t is None else t.to(dtype or t.dtype) for t in own)
    logprobs_N, entropies_N, found_NK = _HeadLogprobs.apply(*tensors, settings)
    return TokenLogprobs(logprobs_N, entropies_N, None if others_NK is None else found_NK)


def _rows_per_chunk(weight: Tensor, num_logits: int, chunk_bytes: float | None) -> int:
    """Return how many rows of ``num_logits`` float32 logits a chunk has: one at least."""
    if chunk_bytes is None:
        gradient_bytes = 4 * num_logits * weight.shape[1] if weight.requires_grad else 0
        chunk_bytes = logits_chunk_bytes("cpu" if weight.device.type == "cpu" else "cuda", gradient_bytes)
    rows = max(1, int(chunk_bytes) // (4 * num_logits))
    return rows // _ROWS_MULTIPLE * _ROWS_MULTIPLE or rows


class _Chunk(NamedTuple):
    """A chunk's place in N, and what its log-probabilities depend on besides the head's output: targets and inverse
    temperatures [C, 1], masks, and the ids of other tokens [C, K].
    """

    place: slice
    targets: Tensor
    inverse: Tensor
    sampling_mask: MaskTensors | None
    others: Tensor | None


class _Settings(NamedTuple):
    """What ``_HeadLogprobs`` needs besides the tensors that have a gradient, as in ``token_logprobs``."""

    chunks: Sequence[_Chunk]
    cap: float | None
    entropy_grad: bool
    predict: SlopeFunction | None
    part: VocabularyPart | None


class _Head(NamedTuple):
    """The tensors that have a gradient: hidden states [N, d], weight [V, d], bias [V] or None."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def _chunks(
    targets_N: Tensor, temperatures_N: Tensor, mask: MaskTensors | None, others_NK: Tensor | None, rows: int
) -> list[_Chunk]:
    if not len(targets_N):
        return []
    parts = zip(targets_N[:, None].split(rows), temperatures_N.reciprocal()[:, None].split(rows), strict=True)
    masks = None if mask is None else mask.split(rows)
    others = None if others_NK is None else others_NK.split(rows)
    return [
        _Chunk(
            slice(i * rows, i * rows + len(targets)),
            targets,
            inverse,
            None if masks is None else masks[i],
            None if others is None else others[i],
        )
        for i, (targets, inverse) in enumerate(parts)
    ]


class _Rows(NamedTuple):
    """Numbers of the rows of a chunk, float32 [C, 1]. ``log_sum`` is of the exponentials, less the largest logit.
    ``share`` is the probability of this rank's part of the vocabulary, None if it has the whole.
    """

    log_sum: Tensor
    logprobs: Tensor
    entropies: Tensor
    share: Tensor | None


class _Pass:
    """The buffers that all chunks share, with what the last computed chunk left there, and the sums of gradients.

    After ``compute``, ``_probs`` has the chunk's probabilities and ``_products`` these times the logits, less the
    row's largest. If this rank has a part of the vocabulary, the probabilities are those within the part. ``add`` can
    be called once after each ``compute``, because it overwrites the probabilities.
    """

    def __init__(self, head: _Head, settings: _Settings) -> None:
        self._cap, self._part = settings.cap, settings.part
        rows = len(settings.chunks[0].targets) if settings.chunks else 0

        def buffer(dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(rows, len(head.weight), dtype=dtype, device=head.weight.device)

        self._probs, self._products = buffer(), buffer()
        self._half = None if head.weight.dtype == torch.float32 else buffer(head.weight.dtype)
        self._cap_slopes = None if settings.cap is None else buffer()
        self._rows: _Rows | None = None
        self.hidden_grad: Tensor | None = None
        self.weight_grad: Tensor | None = None
        self.bias_grad: Tensor | None = None

    def start_gradients(self, head: _Head, needs_grad: Sequence[bool]) -> None:
        """Set the gradients of those tensors of ``head`` that need one to 0."""
        needs_hidden, needs_weight, needs_bias = needs_grad[:3]
        if needs_hidden:
            self.hidden_grad = torch.zeros_like(head.hidden)
        if needs_weight:
            self.weight_grad = torch.zeros_like(head.weight, dtype=torch.float32)
        if needs_bias and head.bias is not None:
            self.bias_grad = torch.zeros_like(head.bias, dtype=torch.float32)

    def compute(self, head: _Head, chunk: _Chunk) -> TokenLogprobs:
        """Compute the chunk's probabilities. Return its log-probabilities and entropies, [C], and those of others,
        [C, K].
        """
        others_CK: Tensor | None = None
        logits_CV, probs_CV = (buffer[: len(chunk.targets)] for buffer in (self._products, self._probs))
        self._compute_logits(head, chunk, logits_CV)
        if self._cap is not None and self._cap_slopes is not None:
            # The derivative of cap * tanh(z / cap) is 1 - tanh(z / cap)^2.
            logits_CV.div_(self._cap).tanh_()
            torch.square(logits_CV, out=self._cap_slopes[: len(chunk.targets)]).neg_().add_(1.0)
            logits_CV.mul_(self._cap)
        if chunk.sampling_mask is not None:
            first = 0 if self._part is None else self._part.first
            logits_CV.masked_fill_(~chunk.sampling_mask.mask(logits_CV.shape[1], first=first), _IMPOSSIBLE)
        largest_C1 = logits_CV.amax(-1, keepdim=True)
        shift_C1 = (largest_C1 if self._part is None else self._part.maximum(largest_C1)) * -chunk.inverse
        torch.addcmul(shift_C1, logits_CV, chunk.inverse, out=logits_CV)
        torch.softmax(logits_CV, -1, out=probs_CV)
        if self._part is None:
            # The largest logit is 0 now, so the largest probability is 1 over the sum of exp.
            log_sum_C1 = probs_CV.amax(-1, keepdim=True).log_().neg_()
            logprobs_C1 = logits_CV.gather(-1, chunk.targets) - log_sum_C1
            others_CK = None if chunk.others is None else logits_CV.gather(-1, chunk.others) - log_sum_C1
            entropies_C1 = log_sum_C1 - logits_CV.mul_(probs_CV).sum(-1, keepdim=True)
            self._rows = _Rows(log_sum_C1, logprobs_C1, entropies_C1, None)
        else:
            largest_C1 = largest_C1 * chunk.inverse + shift_C1
            found = self._part.normaliser(logits_CV, probs_CV, largest_C1, chunk.targets)
            logprobs_C1, entropies_C1 = found.target - found.log_sum, found.log_sum - found.mean
            self._rows = _Rows(found.log_sum, logprobs_C1, entropies_C1, found.share)
        return TokenLogprobs(logprobs_C1[:, 0], entropies_C1[:, 0], others_CK)

    def _compute_logits(self, head: _Head, chunk: _Chunk, logits_CV: Tensor) -> None:
        out_CV = logits_CV if self._half is None else self._half[: len(chunk.targets)]
        hidden_Cd = head.hidden[chunk.place]
        if head.bias is None:
            torch.mm(hidden_Cd, head.weight.T, out=out_CV)
        else:
            torch.addmm(head.bias, hidden_Cd, head.weight.T, out=out_CV)
        if self._half is not None:
            logits_CV.copy_(out_CV)
        if head.bias is not None:
            logits_CV.clamp_(min=_IMPOSSIBLE)  # a bias of -inf makes a token impossible

    def add(self, head: _Head, chunk: _Chunk, slopes: Slopes) -> None:
        """Add what the chunk that was computed last adds to the gradients under ``slopes``."""
        grad_CV, scale_C1 = self._logits_grad(chunk, slopes)
        hidden_Cd = head.hidden[chunk.place]
        if self.bias_grad is not None:
            self.bias_grad.addmv_(grad_CV.T, scale_C1[:, 0])
        if self._half is not None:
            grad_CV = self._half[: len(grad_CV)].copy_(grad_CV)
        if self.hidden_grad is not None:
            self.hidden_grad[chunk.place] += torch.mm(grad_CV, head.weight).mul_(scale_C1)
        if self.weight_grad is not None:
            # Rows are scaled here, where they are d numbers long and not V.
            _add_product(self.weight_grad, grad_CV, (hidden_Cd * scale_C1).to(hidden_Cd.dtype))

    def _logits_grad(self, chunk: _Chunk, slopes: Slopes) -> tuple[Tensor, Tensor]:
        """Return the gradient of the head's output, float32 [C, V], but for a factor of each row, float32 [C, 1].

        With s = logits / temperature, p = softmax(s) and the entropy H: d log p[target] / ds = onehot(target) - p, and
        dH / ds = -p (log p + H). At the target the first is -expm1(log p), exact where p is nearly 1. Other tokens add
        as targets do.
        """
        assert self._rows is not None
        log_sum_C1, logprobs_C1, entropies_C1, share_C1 = self._rows
        grad_CV, slope_C1 = self._probs[: len(chunk.targets)], slopes.logprobs[:, None]
        at_target_C1 = logprobs_C1.expm1()
        if slopes.entropies is None and slopes.others is None:
            scale_C1 = -slope_C1 * chunk.inverse
            if share_C1 is not None:
                grad_CV.mul_(share_C1)
        else:
            nothing_C1 = torch.zeros_like(slope_C1)
            of_entropies_C1 = nothing_C1 if slopes.entropies is None else slopes.entropies[:, None]
            of_others_C1 = nothing_C1 if slopes.others is None else slopes.others.sum(-1, keepdim=True)
            share_C1 = 1.0 if share_C1 is None else share_C1
            factor_C1 = slope_C1 + of_others_C1 + of_entropies_C1 * (entropies_C1 - log_sum_C1)
            grad_CV.mul_(factor_C1 * share_C1)
            grad_CV.addcmul_(self._products[: len(grad_CV)], of_entropies_C1 * share_C1)
            of_probs_C1 = of_others_C1 + of_entropies_C1 * (logprobs_C1 + entropies_C1)
            at_target_C1 = at_target_C1 * slope_C1 + of_probs_C1 * logprobs_C1.exp()
            scale_C1 = -chunk.inverse
        if self._part is None:
            grad_CV.scatter_(-1, chunk.targets, at_target_C1)
            if slopes.others is not None and chunk.others is not None:
                grad_CV.scatter_add_(-1, chunk.others, -slopes.others)
        else:
            places_C1, is_own_C1 = self._part.places(chunk.targets)
            grad_CV.scatter_(-1, places_C1, torch.where(is_own_C1, at_target_C1, grad_CV.gather(-1, places_C1)))
        if self._cap_slopes is not None:
            grad_CV.mul_(self._cap_slopes[: len(grad_CV)])
        return grad_CV, scale_C1


class _HeadLogprobs(torch.autograd.Function):
    """The log-probabilities of targets and the entropies, [N] each, from hidden states, weight and bias of the head."""

    @staticmethod
    def forward(
        ctx: Any, hidden_Nd: Tensor, weight_Vd: Tensor, bias_V: Tensor | None, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, chunks, predict = _Head(hidden_Nd, weight_Vd, bias_V), settings.chunks, settings.predict
        run = _Pass(head, settings)
        if predict is not None and len(chunks) > 1:
            run.start_gradients(head, ctx.needs_input_grad)
        logprobs_N, entropies_N = (torch.empty(len(hidden_Nd), device=hidden_Nd.device) for _ in range(2))
        others: list[Tensor] = []
        predicted: list[Slopes] = []
        for chunk in chunks:
            scored = run.compute(head, chunk)
            logprobs_N[chunk.place], entropies_N[chunk.place] = scored[:2]
            if scored.others is not None:
                others.append(scored.others)
            if predict is not None and chunk is not chunks[-1]:
                predicted.append(_usable(predict(chunk.place, scored), settings.entropy_grad))
                run.add(head, chunk, predicted[-1])
        ctx.save_for_backward(hidden_Nd, weight_Vd, bias_V)
        ctx.settings, ctx.run, ctx.predicted = settings, run, predicted
        others_NK = torch.cat(others) if others else logprobs_N.new_zeros(len(logprobs_N), 0)
        ctx.has_others = bool(others)
        constant = [*([] if settings.entropy_grad else [entropies_N]), *([] if others else [others_NK])]
        ctx.mark_non_differentiable(*constant)
        return logprobs_N, entropies_N, others_NK

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the parameters' names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        head, settings = _Head(*ctx.saved_tensors), ctx.settings
        slopes = Slopes(
            grad_outputs[0],
            grad_outputs[1] if settings.entropy_grad else None,
            grad_outputs[2] if ctx.has_others else None,
        )
        # The pass of the forward pass serves once: a second backward pass computes everything again.
        run, predicted, todo = ctx.run, ctx.predicted, list(settings.chunks)
        ctx.run, ctx.predicted, is_kept = None, [], run is not None
        run = run or _Pass(head, settings)
        if not predicted:
            run.start_gradients(head, ctx.needs_input_grad)
        if todo and is_kept:
            last = todo.pop()
            run.add(head, last, _at(slopes, last.place))
        if predicted:
            slopes, todo = _difference(slopes, predicted, todo, settings.part)
        for chunk in todo:
            run.compute(head, chunk)
            run.add(head, chunk, _at(slopes, chunk.place))
        hidden_grad, weight_grad, bias_grad = run.hidden_grad, run.weight_grad, run.bias_grad
        del run  # frees the buffers before the gradient is copied
        if settings.part is not None and hidden_grad is not None:
            settings.part.add_up(hidden_grad)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(head.weight.dtype),
            None if bias_grad is None else bias_grad.to(head.weight.dtype),
            None,
        )


def _usable(slopes: Slopes, entropy_grad: bool) -> Slopes:
    """Return predicted slopes, with 0 for those that are too large or not finite."""
    logprobs_C, entropies_C = slopes[:2]
    logprobs_C = torch.where(logprobs_C.abs() <= _SLOPE_LIMIT, logprobs_C, 0.0)
    if not entropy_grad:
        return Slopes(logprobs_C)
    if entropies_C is None:
        return Slopes(logprobs_C, torch.zeros_like(logprobs_C))
    return Slopes(logprobs_C, torch.where(entropies_C.abs() <= _SLOPE_LIMIT, entropies_C, 0.0))


def _at(slopes: Slopes, place: slice) -> Slopes:
    entropies, others = (None if values is None else values[place] for values in slopes[1:])
    return Slopes(slopes.logprobs[place], entropies, others)


def _difference(
    slopes: Slopes, predicted: Sequence[Slopes], chunks: Sequence[_Chunk], part: VocabularyPart | None
) -> tuple[Slopes, list[_Chunk]]:
    """Return by how much the true slopes differ from the predicted ones, and the chunks in which some do.

    A chunk is computed again as a whole, because the products of other rows would round differently, and what is taken
    off must be what was added. Reading which chunks differ waits for the device. Ranks that have parts of the
    vocabulary compute the same chunks again.
    """
    pairs = [(slopes.logprobs, torch.cat([p.logprobs for p in predicted]))]
    if slopes.entropies is not None:
        pairs.append((slopes.entropies, torch.cat([p.entropies for p in predicted if p.entropies is not None])))
    differences = [true_N[: len(predicted_M)] - predicted_M for true_N, predicted_M in pairs]
    # Not >, which is False for NaN.
    agrees = [d.abs() <= _SLOPE_TOLERANCE * p.abs() for d, (_, p) in zip(differences, pairs, strict=True)]
    differs_M = ~torch.stack(agrees).all(0)
    if part is not None:
        differs_M = part.add_up(differs_M.int()) > 0
    differs_M = differs_M.cpu().numpy()
    return Slopes(*differences), [chunk for chunk in chunks if differs_M[chunk.place].any()]


def _add_product(sum_Vd: Tensor, grad_CV: Tensor, hidden_Cd: Tensor) -> None:
    """Add ``grad_CV.T @ hidden_Cd`` to the float32 ``sum_Vd``."""
    if hidden_Cd.dtype == torch.float32:
        sum_Vd.addmm_(grad_CV.T, hidden_Cd)
        return
    for sum_Pd, grad_CP in zip(sum_Vd.chunk(_GRADIENT_PARTS), grad_CV.chunk(_GRADIENT_PARTS, dim=1), strict=True):
        sum_Pd += grad_CP.T @ hidden_Cd
