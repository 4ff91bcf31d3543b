"""The forward pass of a causal LM, for the transformers backend: the protocol ``Forward`` and two implementations.

``make_forward`` chooses the faster implementation that fits the model. ``TransformersForward`` calls the model, and
works for every model that the backend accepts. ``LlamaForward`` computes Llama, Mistral, Qwen2 and Qwen3 directly from
the parameters, with the same operations in the same order as transformers' modules. It leaves out the calls from module
to module, which cost as much as the arithmetic when a step decodes one token per row. Its prefill ends as soon as the
last layer's keys and values are known.

``decode_attention`` is the attention of ``TransformersForward`` when it decodes one token per row. Where query heads
share a KV head, transformers' own sdpa attention copies the keys and values for every query head (``repeat_kv``).
Reading the cache takes most of a decode step, and this copy would take as long. ``decode_attention`` avoids the copy:
the query heads of one KV head become the query positions of one sdpa call.

Shape letters: R = rows, V = vocabulary, B = prompts, T = tokens of the longest prompt, N = tokens of the pass or cached
tokens, E = hidden size, Q = query heads, H = KV heads, G = Q / H, D = head dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from async_rl.generator.hf.slots import PrefillCache, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DECODE_ATTENTION = "async_rl_sdpa"
_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary embedding whose angles at a position do not depend on the length of the text."""
_MIN_TABLE = 64
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""Takes a layer's index, queries [N, Q, D], keys and values [N, H, D]; returns outputs [N, Q * D], or None to end."""


class Forward(Protocol):
    """A model's forward pass. It reads the model's parameters anew in every call, so it follows new weights."""

    def decode(self, ids_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:
        """Feed one token per row. Return the logits [R, V] of the tokens after them.

        ``ids_R`` are the tokens and ``positions_R`` their positions, both int64 [R]. The caller has passed the same
        positions to ``cache.begin_step``.
        """
        ...

    def prefill(self, ids_BT: Tensor) -> PrefillCache:
        """Return a cache with the keys and values of the prompts, int64 [B, T].

        Shorter prompts have any tokens on the right.
        """
        ...


def cache_name(model: PreTrainedModel) -> str:
    """Return the name of the cache in what ``model`` takes and returns: ``cache`` in newer versions of transformers.

    In older ones models with nothing but state space layers have another name for it than the others.
    """
    arguments = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in arguments), "past_key_values")


def make_forward(model: PreTrainedModel) -> Forward:
    """Return the fastest forward pass that fits ``model``. All of them give the same logits."""
    return LlamaForward(model) if LlamaForward.fits(model) else TransformersForward(model)


class TransformersForward:
    """A forward pass that calls the Hugging Face model. It works for every model that the backend accepts.

    It is slow for small models, where most of a step's time goes into the calls from module to module.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._cache_name = model, cache_name(model)

    def decode(self, ids_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:
        output = self._model(
            input_ids=ids_R[:, None],
            attention_mask=~cache.hidden_RN[:, None, None],
            position_ids=positions_R[:, None],
            use_cache=True,
            **{self._cache_name: cache},
        )
        return output.logits[:, -1]

    def prefill(self, ids_BT: Tensor) -> PrefillCache:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        # Padding is on the right, where the causal mask hides it from all tokens that are kept.
        mask_TT = positions_T[None, :] <= positions_T[:, None]
        cache = PrefillCache()
        self._model.base_model(
            input_ids=ids_BT,
            attention_mask=mask_TT[None, None].expand(len(ids_BT), -1, -1, -1),
            position_ids=positions_T.expand(len(ids_BT), -1),
            use_cache=True,
            **{self._cache_name: cache},
        )
        return cache


def register_decode_attention() -> str:
    """Register ``decode_attention`` with transformers. Return its name, the value for ``attn_implementation``."""
    AttentionInterface.register(DECODE_ATTENTION, decode_attention)
    return DECODE_ATTENTION


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a decode step, with the arguments that transformers passes to attention functions.

    The shapes are query [R, H * G, 1, D], key and value [R, H, N, D], mask [R, 1, 1, N]. Longer queries (a prefill) go
    to transformers' own sdpa.

    Returns:
        The output [R, 1, H * G, D], and None in place of attention weights.
    """
    num_groups = query.shape[1] // key.shape[1]
    if query.shape[2] != 1 or num_groups == 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    grouped_RHGD = query.view(query.shape[0], key.shape[1], num_groups, query.shape[3])
    output_RHGD = torch.nn.functional.scaled_dot_product_attention(
        grouped_RHGD, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output_RHGD.reshape(query.shape[0], 1, query.shape[1], value.shape[3]), None


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    """Computes root mean square norm with the same roundings as transformers' modules.

    It normalises in float32 and scales in the model's dtype.
    """

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == torch.float32:
            # Here torch's own function takes more operations.
            return (x * x.square().mean(-1, keepdim=True).add_(self.epsilon).rsqrt_()).mul_(self.weight)
        return self.weight * functional.rms_norm(x.float(), self.weight.shape, None, self.epsilon).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The parameters of one decoder layer.

    They are the model's own objects, so they follow new weights by themselves.
    """

    attention_norm: _Norm
    query: _Linear
    key: _Linear
    value: _Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: _Linear
    mlp_norm: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear
    activation: Callable[[Tensor], Tensor]


class _Rotation:
    """Returns the cosines and sines of the rotary position embedding, from a table where possible.

    The sines have the sign of the rotation, so the caller only swaps the halves of each head. Embeddings whose
    frequencies depend on the length of the text are computed in every pass.
    """

    def __init__(self, module: Any, head_dim: int) -> None:
        self._module = module
        self._half = head_dim // 2
        self._has_table = module.rope_type in _FIXED_ROPE_TYPES
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, x_NE: Tensor, positions_N: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [N, 1, D] of these positions (all below ``length``), in the dtype of ``x_NE``."""
        if not self._has_table:
            return self._computed(x_NE, positions_N)
        if self._table is None or len(self._table[0]) < length:
            size = max(_MIN_TABLE, 1 << (length - 1).bit_length())
            self._table = self._computed(x_NE, torch.arange(size, device=x_NE.device))
        cos_P1D, sin_P1D = self._table
        return cos_P1D.index_select(0, positions_N), sin_P1D.index_select(0, positions_N)

    def _computed(self, x_NE: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        cos_N1D, sin_N1D = self._module(x_NE, positions_N[:, None])
        # A rotation negates one half of the head; here the sine has that sign.
        return cos_N1D, torch.cat((-sin_N1D[..., : self._half], sin_N1D[..., self._half :]), dim=-1)


class LlamaForward:
    """A fast forward pass for Llama, Mistral, Qwen2 and Qwen3, straight from the model's parameters.

    It implements ``Forward``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.base_model
        attention = body.layers[0].self_attn
        self._embedding: Tensor = body.embed_tokens.weight
        self._rotation = _Rotation(body.rotary_emb, attention.head_dim)
        self._layers = [_layer(module) for module in body.layers]
        self._norm = _norm(body.norm)
        self._head = _linear(model.get_output_embeddings())
        self._head_dim: int = attention.head_dim
        self._num_kv_heads: int = attention.k_proj.out_features // self._head_dim
        self._num_groups: int = attention.num_key_value_groups
        self._scale: float = attention.scaling

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Return whether ``LlamaForward`` can compute ``model``.

        The model must be of one of the four classes, with one dtype and one device, and without quantisation and
        adapters.
        """
        from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

        if type(model) not in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM):
            return False
        # Adapters and quantisers replace the linear modules.
        plain = all(type(m) is nn.Linear for name, m in model.named_modules() if name.endswith(("_proj", "lm_head")))
        return plain and len({(p.dtype, p.device) for p in model.parameters()}) == 1

    def decode(self, ids_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:
        """Return the logits [R, V] of the tokens after ``ids_R``. See ``Forward.decode``."""
        num_rows, num_slots = cache.hidden_RN.shape
        # Convert to floats once per step, because sdpa would convert booleans in every layer.
        mask_RN = torch.zeros_like(cache.hidden_RN, dtype=self._embedding.dtype)
        mask = mask_RN.masked_fill_(cache.hidden_RN, -torch.inf)[:, None, None]

        def attend(layer: int, queries_RQD: Tensor, keys_RHD: Tensor, values_RHD: Tensor) -> Tensor:
            keys, values = cache.update(keys_RHD.unsqueeze(2), values_RHD.unsqueeze(2), layer)
            # The query heads of one KV head become the query positions of one attention.
            queries_RHGD = queries_RQD.view(num_rows, self._num_kv_heads, self._num_groups, self._head_dim)
            output = functional.scaled_dot_product_attention(
                queries_RHGD, keys, values, attn_mask=mask, scale=self._scale
            )
            return output.reshape(num_rows, -1)

        hidden_RE = self._hidden(ids_R, positions_R, num_slots, attend)
        if hidden_RE is None:
            raise RuntimeError(
                "expected hidden states after a decoding step, got none; this is a bug in async-rl, please report it"
            )
        return self._head(self._norm(hidden_RE))

    def prefill(self, ids_BT: Tensor) -> PrefillCache:
        """Return a cache with the keys and values of the prompts. See ``Forward.prefill``."""
        cache = PrefillCache()
        num_prompts, length = ids_BT.shape
        last = len(self._layers) - 1

        def attend(layer: int, *heads_ND: Tensor) -> Tensor | None:
            queries, keys, values = (h.unflatten(0, (num_prompts, length)).transpose(1, 2) for h in heads_ND)
            cache.update(keys, values, layer)
            if layer == last:
                return None
            output = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self._scale, enable_gqa=self._num_groups > 1
            )
            return output.transpose(1, 2).reshape(num_prompts * length, -1)

        positions_T = torch.arange(length, device=ids_BT.device)
        self._hidden(ids_BT.flatten(), positions_T.repeat(num_prompts), length, attend)
        return cache

    def _hidden(self, ids_N: Tensor, positions_N: Tensor, length: int, attend: Attend) -> Tensor | None:
        """Return the last layer's output [N, E], before the final norm.

        ``attend`` computes the attention of a layer. If it returns None, the pass ends there and the result is None.
        """
        x_NE = functional.embedding(ids_N, self._embedding)
        cos_N1D, sin_N1D = self._rotation(x_NE, positions_N, length)
        half = self._head_dim // 2
        num_heads = self._num_kv_heads * self._num_groups
        for index, layer in enumerate(self._layers):
            h_NE = layer.attention_norm(x_NE)
            queries_ND, keys_ND, values_ND = layer.query(h_NE), layer.key(h_NE), layer.value(h_NE)
            if layer.query_norm is not None and layer.key_norm is not None:
                queries_ND = layer.query_norm(queries_ND.unflatten(1, (-1, self._head_dim))).flatten(1)
                keys_ND = layer.key_norm(keys_ND.unflatten(1, (-1, self._head_dim))).flatten(1)
            heads_NXD = torch.cat((queries_ND, keys_ND), dim=1).view(len(x_NE), -1, self._head_dim)
            heads_NXD = (heads_NXD * cos_N1D).add_(heads_NXD.roll(half, -1).mul_(sin_N1D))
            values_NHD = values_ND.view(len(x_NE), -1, self._head_dim)
            attended_ND = attend(index, heads_NXD[:, :num_heads], heads_NXD[:, num_heads:], values_NHD)
            if attended_ND is None:
                return None
            x_NE = layer.output(attended_ND).add_(x_NE)
            h_NE = layer.mlp_norm(x_NE)
            x_NE = layer.down(layer.activation(layer.gate(h_NE)).mul_(layer.up(h_NE))).add_(x_NE)
        return x_NE


def _layer(module: Any) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        attention_norm=_norm(module.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        query_norm=None if query_norm is None else _norm(query_norm),
        key_norm=None if key_norm is None else _norm(key_norm),
        output=_linear(attention.o_proj),
        mlp_norm=_norm(module.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        activation=mlp.act_fn.forward,
    )


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)


def _linear(module: Any) -> _Linear:
    return _Linear(module.weight, module.bias)
