"""Attention inside packed rows: each token attends only to earlier tokens of its sequence, without a ``[T, T]`` mask.

``use_packed_attention`` makes a transformers model use this attention. Each call of the model then takes the keyword
``packed_layout=packed_layout(batch.cu_seqlens, batch.token_index, device)``, which transformers passes to the
attention function unchanged. No layout is global: threads can't mix up layouts, a recomputed layer (gradient
checkpointing) gets the same layout again, and FSDP2's hooks pass the layout through (a dataclass is a leaf to them).

On CUDA in float16 or bfloat16 this uses ``torch.nn.attention.varlen`` (flash attention, no padding). Otherwise it
gathers the row into a few padded batches of similar lengths for ``scaled_dot_product_attention``. The padding is on the
right, so under a causal mask no real token sees it. The log says once which of the two runs, and why.

A prompt that several sequences share is in the row once. All layers except attention compute it once; attention
gathers it for each sequence.

Shape letters: T = tokens of the row, E = tokens of its sequences placed end to end, S = sequences, B = sequences of one
bucket, L = tokens of the bucket's longest sequence, H = heads, K = key and value heads, D = head dimension.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from async_rl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from async_rl.learner.model.split_attention import PartLayout

logger = logging.getLogger(__name__)

ATTENTION_NAME = "async_rl_packed"

# A sequence may be padded by a quarter of its bucket's longest sequence, and always by 16 tokens: padding that much
# costs less than one more call.
_WASTE_SHARE = 4
_WASTE_TOKENS = 16
_FLASH_HEAD_DIM_MULTIPLE = 8
_FLASH_HEAD_DIM_LIMIT = 256
_QUADRATIC = "; the mask of a sliding window takes memory that is quadratic in the longest sequence"
_BUG = "this is a bug in async-rl, please report it"


class Attention(NamedTuple):
    """What a layer's attention computes: the scale of the scores, the window (None: the whole sequence up to the token)
    and the probability of dropout.
    """

    scale: float
    window: int | None = None
    dropout: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Sequences of similar length that are padded to one length and computed as one batch.

    Attributes:
        gather: int64 [B * L], indices of the batch's tokens into the row (T). Padding repeats a sequence's last token.
        num_sequences: B.
        max_length: L.
    """

    gather: Tensor
    num_sequences: int
    max_length: int


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """The places of the sequences in a packed row.

    The indices of the padded computation and those of flash attention are made, and copied to the device, when they are
    first read: a model needs one kind only, and its attention decides which.

    Attributes:
        num_tokens: T.
        max_length: tokens of the longest sequence.
    """

    num_tokens: int
    max_length: int
    _bounds: np.ndarray
    _index: np.ndarray
    _first: np.ndarray
    _device: torch.device | str
    _one_bucket: bool

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [S + 1], where each sequence begins in E, and the end."""
        return self._moved(self._bounds.astype(np.int32))

    @cached_property
    def expand(self) -> Tensor | None:
        """int64 [E], each sequence token's index into T. None if T and E are the same."""
        return None if self.num_tokens == len(self._index) else self._moved(self._index)

    @cached_property
    def first(self) -> Tensor | None:
        """int64 [T], each row token's first index into E. None if T and E are the same."""
        return None if self.num_tokens == len(self._index) else self._moved(self._first)

    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, how: Attention) -> Tensor:
        """Return each token's attention to its sequence, up to itself, [T, H, D of the values]."""
        reason = "of dropout" if how.dropout else why_padded(query_THD, value_TKD)
        is_quadratic = bool(reason) and how.window is not None
        report(query_THD, reason + (_QUADRATIC if is_quadratic else ""))
        return (_padded if reason else _flash)(query_THD, key_TKD, value_TKD, self, how)

    @cached_property
    def padding(self) -> tuple[list[Bucket], Tensor]:
        """Groups of similar length, for the padded computation, each sequence in one of them; and, int64 [T], each row
        token's index into the buckets' outputs placed end to end.
        """
        bounds, lengths = self._bounds, np.diff(self._bounds)
        buckets: list[Bucket] = []
        restore = np.empty(bounds[-1], dtype=np.int64)
        offset = 0
        by_length = np.argsort(-lengths, kind="stable")
        for members in [by_length] if self._one_bucket else _similar_lengths(lengths, by_length):
            longest = int(lengths[members[0]])
            column = np.arange(longest)
            places = bounds[members][:, None] + np.minimum(column, lengths[members][:, None] - 1)
            valid = column < lengths[members][:, None]
            restore[places[valid]] = offset + np.flatnonzero(valid)
            buckets.append(Bucket(self._moved(self._index[places.reshape(-1)]), len(members), longest))
            offset += places.size
        return buckets, self._moved(restore[self._first])

    def _moved(self, array: np.ndarray) -> Tensor:
        # Not blocking: the host goes on while the device computes the micro-batch before.
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def packed_layout(
    cu_seqlens: np.ndarray,
    token_index: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    *,
    one_bucket: bool = False,
) -> PackedLayout:
    """Return the layout of one micro-batch.

    Args:
        cu_seqlens: integers [S + 1] that rise from 0 to E: where each sequence begins.
        token_index: integers [E], each sequence token's index into the row. None: the row is the sequences end to end.
        device: where the layout's tensors are stored.
        one_bucket: put all sequences into one bucket, for models that compute the micro-batch as one padded batch.
    """
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    index = np.arange(bounds[-1]) if token_index is None else np.asarray(token_index, dtype=np.int64)
    num_tokens = int(index.max()) + 1
    # Assigned in reverse order, so that a shared token keeps its first index.
    first = np.full(num_tokens, -1, dtype=np.int64)
    first[index[::-1]] = np.arange(len(index))[::-1]
    return PackedLayout(num_tokens, int(np.diff(bounds).max()), bounds, index, first, device, one_bucket)


def _similar_lengths(lengths: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
    """Cut ``order``, the indices of sequences from long to short, into buckets, so that no sequence is padded too
    much.
    """
    cuts = []
    longest = int(lengths[order[0]])
    for place, index in enumerate(order):
        if longest - int(lengths[index]) > max(_WASTE_TOKENS, longest // _WASTE_SHARE):
            cuts.append(place)
            longest = int(lengths[index])
    return np.split(order, cuts)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make ``model`` use packed attention. Each of its calls must then have the keyword ``packed_layout``, else it
    raises.

    transformers builds no attention mask, because no mask function is registered under our name.

    Raises:
        ModelError: the model's attention can't be replaced, or the model carries state along the row, which would leak
            from one sequence into the next.
    """
    from transformers import AttentionInterface

    name = type(model).__name__
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{name} can't be trained on packed rows: all mixing between tokens must be attention that runs through "
            "transformers' AttentionInterface; choose a model such as Qwen2, Qwen3 or Llama (model.path)"
        )
    AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ModelError(
            f"{name} can't be trained on packed rows: it does not accept another attention function; choose another "
            f"model (model.path)"
        )


def leave_uncompiled() -> None:
    """Make torch.compile call packed attention as it is. Layers that are compiled are divided there.

    Its calls depend on the lengths of a row's sequences, so each micro-batch would be compiled anew.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention_forward))


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | PartLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each sequence of a packed row. transformers calls this function.

    The shapes are: query [1, H, T, D], key and value [1, K, T, D], result [1, T, H, D]. T are the tokens of the row, or
    of this rank's part of it.

    Raises:
        ValueError: the layout is missing or belongs to another row; there are several rows; or a mask, soft cap or sink
            is given, which packed attention does not support.
    """
    if packed_layout is None:
        raise ValueError(f"{type(module).__name__}: expected packed_layout=... in the model's call, got none; {_BUG}")
    num_tokens = packed_layout.num_tokens
    if query.shape[0] != 1 or query.shape[2] != num_tokens or key.shape[2] != num_tokens:
        raise ValueError(
            f"expected one packed row of {num_tokens} tokens, got query {list(query.shape)} and key {list(key.shape)}; "
            "call the model with input_ids [1, T] and use_cache=False"
        )
    refused = [n for n in ("softcap", "s_aux", "position_bias", "cache") if kwargs.get(n) is not None]
    if attention_mask is not None or refused:
        refused += ["attention_mask"] if attention_mask is not None else []
        raise ValueError(
            f"{type(module).__name__}: packed attention does not support {', '.join(refused)}; choose another model "
            f"(model.path)"
        )
    # [H, T, D] -> [T, H, D]: flash attention takes this shape, and a gather can copy whole rows.
    query_THD, key_TKD, value_TKD = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and sliding_window >= packed_layout.max_length:
        sliding_window = None
    how = Attention(scale, sliding_window, dropout)
    return packed_layout.attend(query_THD, key_TKD, value_TKD, how)[None], None


def _padded(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, layout: PackedLayout, how: Attention) -> Tensor:
    outputs: list[Tensor] = []
    heads_per_key = query_THD.shape[1] // key_TKD.shape[1]
    if query_THD.is_cuda and heads_per_key > 1:
        # With grouped heads CUDA has only one kernel for float32, whose memory is quadratic in the length.
        key_TKD, value_TKD = (heads.repeat_interleave(heads_per_key, dim=1) for heads in (key_TKD, value_TKD))
    buckets, restore = layout.padding
    for bucket in buckets:
        shape = (bucket.num_sequences, bucket.max_length)
        query, key, value = (
            t.index_select(0, bucket.gather).unflatten(0, shape).transpose(1, 2)
            for t in (query_THD, key_TKD, value_TKD)
        )
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if how.window is None else _window_mask(bucket.max_length, how.window, query.device),
            dropout_p=how.dropout,
            is_causal=how.window is None,
            scale=how.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, restore)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return bool [L, L]: for each token, the ``window`` newest tokens that it attends to, including itself."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)


def report(query: Tensor, why_padded: str) -> None:
    """Log once for each device and dtype which attention runs. The self-test at load runs on the CPU."""
    kernel = "flash attention without padding (torch.nn.attention.varlen)"
    if why_padded:
        kernel = f"padded batches of scaled_dot_product_attention, because {why_padded}"
    _log_once(query.device.type, query.dtype, kernel)


@cache
def _log_once(device: str, dtype: torch.dtype, kernel: str) -> None:
    logger.info("attention on %s in %s: %s", device, dtype, kernel)


def why_padded(query: Tensor, value: Tensor) -> str:
    """Return why flash attention can't run; empty if it can."""
    head_dim = query.shape[-1]
    if not query.is_cuda:
        return "flash attention needs CUDA"
    if query.dtype not in (torch.float16, torch.bfloat16) or value.dtype != query.dtype:
        return f"flash attention needs float16 or bfloat16, the same for values, which are {value.dtype}"
    if value.shape[-1] != head_dim or head_dim % _FLASH_HEAD_DIM_MULTIPLE or head_dim > _FLASH_HEAD_DIM_LIMIT:
        return (
            f"flash attention needs heads of a multiple of {_FLASH_HEAD_DIM_MULTIPLE} and at most "
            f"{_FLASH_HEAD_DIM_LIMIT} numbers, the same for queries and values; they have {head_dim} and "
            f"{value.shape[-1]}"
        )
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return f"flash attention needs an Ampere GPU or newer, and this is {torch.cuda.get_device_name(query.device)}"
    return ""


class Places(NamedTuple):
    """Where the sequences begin among queries, or among keys, placed end to end: int32 [S + 1]; and the longest."""

    bounds: Tensor
    longest: int


def _flash(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, layout: PackedLayout, how: Attention) -> Tensor:
    if layout.expand is not None:
        query_THD, key_TKD, value_TKD = (t.index_select(0, layout.expand) for t in (query_THD, key_TKD, value_TKD))
    places = Places(layout.cu_seqlens, layout.max_length)
    out = varlen(query_THD, key_TKD, value_TKD, places, places, how)
    return out if layout.first is None else out.index_select(0, layout.first)


def varlen(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, of_queries: Places, of_keys: Places, how: Attention
) -> Tensor:
    """Return flash attention of sequences placed end to end, [T, H, D]. If a sequence has fewer queries than keys, they
    are its last tokens.
    """
    out = varlen_attn(
        query_THD.contiguous(),
        key_TKD.contiguous(),
        value_TKD.contiguous(),
        of_queries.bounds,
        of_keys.bounds,
        of_queries.longest,
        of_keys.longest,
        scale=how.scale,
        window_size=(-1 if how.window is None else how.window - 1, 0),
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    return cast(Tensor, out)  # it has more only if asked for
