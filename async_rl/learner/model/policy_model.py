"""The policy as the engine trains it. Called by ``trained_model.py``.

``load_model`` loads a Hugging Face causal LM with float32 master weights. ``PolicyModel`` computes log-probabilities of
the trained tokens. It runs the decoder on packed rows, or on padded ones if the model can't compute packed rows, and
the head only where a trained token is predicted. Shape letters: T = packed tokens, N = trained tokens, B = padded rows
(one for each sequence), L = tokens of the longest, d = hidden size.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.attention_limits import caps_attention
from async_rl.config.learner import ModelConfig
from async_rl.data.chat import check_precision, model_directory
from async_rl.errors import ModelError
from async_rl.learner.data.packing import MicroBatch, Packing
from async_rl.learner.losses.batch import LossBatch, SlopeFunction, TokenLogprobs
from async_rl.learner.model.attention import PackedLayout, packed_layout, use_packed_attention
from async_rl.learner.model.heads import SCORE_WEIGHT, Head, auto_class, head_of, make_new_head, read_config
from async_rl.learner.model.logprobs import token_logprobs
from async_rl.learner.model.mask_tensors import MaskTensors
from async_rl.learner.model.recomputation import recompute
from async_rl.learner.model.routing import RouterHooks
from async_rl.learner.model.split_attention import PartLayout
from async_rl.learner.sequences import COLUMNS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config keys with which models cap the logits z after the head at c, as c * tanh(z / c)."""
_LOGIT_FACTORS: dict[str, int] = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Config keys with which models multiply (1) or divide (-1) the logits after the head, before the cap."""
_INT64_ON_DEVICE = (
    "token_ids", "position_ids", "predict_index", "targets", "sequence_index",
    *(name for name, column in COLUMNS.items() if column.is_index),
)  # fmt: skip
_LAYERS_NAMES = ("layers", "h", "decoder.layers", "blocks", "block", "transformer.blocks", "encoder.layer")
"""Where the bodies of causal LMs have their decoder layers."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceBatch(LossBatch):
    """A ``MicroBatch`` as tensors on the model's device. Fields with the same name have the same meaning there.

    ``layout`` has the places of the sequences, for attention. ``sampling_mask`` is None if all tokens could be sampled.
    ``routes`` is int32, and None if the model's routers choose. ``part`` is the layout of a part of the row, if the
    batch has only that part's tokens; None if it has the whole row.
    """

    token_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    predict_index: Tensor
    targets: Tensor
    temperatures: Tensor
    sampling_mask: MaskTensors | None
    routes: Tensor | None
    part: PartLayout | None = None


def to_device(batch: MicroBatch, device: torch.device, packing: Packing = "packed") -> DeviceBatch:
    """Return ``batch`` as tensors on ``device``, for a model that uses ``packing``. Ids, positions and indices become
    int64.
    """

    def moved(name: str) -> Tensor:
        tensor = torch.from_numpy(getattr(batch, name)).to(device, non_blocking=True)
        return tensor.long() if name in _INT64_ON_DEVICE else tensor

    same_names = {f.name for f in fields(DeviceBatch)} & {f.name for f in fields(MicroBatch)} - {"routes"}
    # torch has few operations on uint16.
    routes = torch.from_numpy(batch.routes.astype(np.int32)).to(device, non_blocking=True)
    return DeviceBatch(
        layout=packed_layout(batch.cu_seqlens, batch.token_index, device, one_bucket=packing == "padded"),
        sampling_mask=MaskTensors(batch.mask_sizes, moved("mask_words")) if len(batch.mask_sizes) else None,
        routes=routes if len(routes) else None,
        num_sequences=len(batch.sequence_ids),
        part=None,
        is_finite=bool(np.isfinite(batch.behavior_logprobs).all()),
        **{name: moved(name) for name in same_names},
    )


def check_directory(config: ModelConfig) -> Path:
    """Return the directory of the model of ``model.path``, which is downloaded first if it is on the hub.

    Raises:
        ModelError: the model is missing or quantised.
    """
    directory = model_directory(config.path, weights=True)
    check_precision(directory, config.dtype)
    return directory


def load_model(config: ModelConfig, head: Head = "tokens") -> PreTrainedModel:
    """Load the model of ``model.path`` with this ``head`` on the host, with float32 parameters and transformers'
    attention.

    Raises:
        ModelError: the model is missing, is not a causal LM or as ``read_config`` says, lacks weights, is quantised, or
            has an unsupported head.
    """
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()  # it fills log files with control characters
    directory = check_directory(config)
    try:
        loaded: Any = auto_class(head).from_pretrained(
            directory,
            config=read_config(directory, head, trust_remote_code=config.trust_remote_code),
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,  # other files are pickles
            output_loading_info=True,
        )
    except ModelError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for unfit directories
        raise ModelError(
            f"model.path: can't load a causal LM from {directory}: {type(error).__name__}: {error}; expected what "
            f"save_pretrained writes (config.json and safetensors)"
        ) from error
    model, info = loaded
    missing = [str(key) for key in (*info["missing_keys"], *info["mismatched_keys"])]
    if head == "value" and SCORE_WEIGHT in missing:
        make_new_head(model)
        missing.remove(SCORE_WEIGHT)
    if missing:
        # transformers would replace missing weights with random numbers and continue.
        raise ModelError(
            f"model.path: the weights in {directory} lack {len(missing)} tensors: {', '.join(missing[:5])}; save the "
            f"whole model there with save_pretrained"
        )
    return check_trainable(model, config)


def check_trainable(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Check that ``model`` can be trained, and return it with the settings of ``config``.

    Raises:
        ModelError: the model has an unsupported head, or changes its weights when it scores.
    """
    if getattr(model.config, "rescale_every", 0):
        raise ModelError(
            f"model.path: {type(model).__name__} with rescale_every = {model.config.rescale_every} divides its weights "
            f"in place when it scores; set rescale_every = 0 in config.json"
        )
    head = head_of(model)
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"model.path: expected a head that is one nn.Linear, got {type(head).__name__} in "
            f"{type(model).__name__}; choose another model"
        )
    recompute(model, config.gradient_checkpointing)
    return model


def head_dtype(config: ModelConfig) -> torch.dtype | None:
    """Return the dtype in which the head is computed by ``model.head_dtype``; None: that of its weight."""
    return torch.float32 if config.head_dtype == "float32" else None


def _logit_factor(config: Any) -> float:
    """Return the factor of the logits after the head, by the model's config. 1 for most models."""
    powers = {key: power for key, power in _LOGIT_FACTORS.items() if getattr(config, key, None) is not None}
    return math.prod(float(getattr(config, key)) ** power for key, power in powers.items())


def _logit_cap(config: Any) -> float | None:
    """Return the cap of the logits, by the model's config. None for most models."""
    return next((float(cap) for key in _LOGIT_CAPS if (cap := getattr(config, key, None)) is not None), None)


class PolicyModel(nn.Module):
    """A causal LM that computes the log-probabilities of the trained tokens of a micro-batch.

    Dropout is disabled, because it would make the ratio pi/mu meaningless.

    Attributes:
        head_kind: of the models of this class.
        causal_lm: the model of transformers.
        logit_factor: by which the model multiplies the head's output.
        logit_cap: at which the model then caps the logits; None: it does not. The self-test checks both.
        vocab_size: number of token ids that have a probability, which are the rows of the head; of a model of values,
            those of its embedding.
        packing: how the decoder computes a micro-batch. Batches of ``to_device`` must have been made for it.
        head_dtype: in which the head is computed, whatever dtype its weight has; None: that of the weight.
        routers: replays the routes of a micro-batch, and counts. None: the routers choose, if there are any.
    """

    head_kind: ClassVar[Head] = "tokens"

    def __init__(
        self, causal_lm: PreTrainedModel, packing: Packing = "packed", *, head_dtype: torch.dtype | None = None
    ) -> None:
        """Wrap ``causal_lm``, whose attention is still that of transformers.

        Raises:
            ModelError: see ``use``.
        """
        super().__init__()
        self.causal_lm = causal_lm
        self.logit_factor = _logit_factor(causal_lm.config)
        self.logit_cap = _logit_cap(causal_lm.config)
        rows_of = self.head if self.head_kind == "tokens" else cast(nn.Embedding, causal_lm.get_input_embeddings())
        self.vocab_size = int(rows_of.weight.shape[0])
        self.head_dtype = head_dtype
        self.routers: RouterHooks | None = None
        native = causal_lm.config._attn_implementation or "eager"
        self._padded_attention = "eager" if caps_attention(causal_lm.config) else native
        self.eval()
        self.use(packing)
        if any(getattr(module, "gradient_checkpointing", False) for module in causal_lm.modules()):
            for layer in self.decoder_layers:
                # Not the layer's children: transformers needs only the layer in training mode to recompute activations.
                layer.training = True

    def use(self, packing: Packing) -> None:
        """Compute micro-batches as ``packing`` says from now on.

        Raises:
            ModelError: ``packing`` is "packed", and the model's attention can't be replaced (``use_packed_attention``).
        """
        if packing == "packed":
            use_packed_attention(self.causal_lm)
        else:
            self.causal_lm.set_attn_implementation(self._padded_attention)
        self.packing: Packing = packing

    @property
    def head(self) -> nn.Linear:
        """The layer after the decoder. The last stage of a pipeline has it."""
        return cast(nn.Linear, head_of(self.causal_lm))

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """The layers that FSDP shards one by one.

        Raises:
            ModelError: the model does not have one list of layers.
        """
        return cast(nn.ModuleList, self.causal_lm.base_model.get_submodule(self.layers_name))

    @property
    def layers_name(self) -> str:
        """The name of the list of layers in the model's body: ``layers``; ``h`` in GPT-2, ``decoder.layers`` in OPT.

        Raises:
            ModelError: the model does not have one list of layers.
        """
        found = [
            name
            for name, module in self.causal_lm.base_model.named_modules()
            if isinstance(module, nn.ModuleList) and not any(part.isdigit() for part in name.split("."))
        ]
        name = next((n for n in found if n in _LAYERS_NAMES), None)
        if name is None:
            raise ModelError(
                f"model.path: expected a list of decoder layers in {type(self.causal_lm).__name__}, at one of "
                f"{', '.join(_LAYERS_NAMES)}, got lists at {found}; choose another model"
            )
        return name

    def logits(self, head_output: Tensor) -> Tensor:
        """Return the model's logits for an output of its head, of any shape."""
        logits = head_output * self.logit_factor
        return logits if self.logit_cap is None else self.logit_cap * torch.tanh(logits / self.logit_cap)

    def tensor_names(self) -> list[str]:
        """Return the Hugging Face names of all parameters and persistent buffers, in a fixed order. Tied ones
        occur once.
        """
        kept = {name for name, _ in self.causal_lm.named_parameters()}
        tied = {name for name, _ in self.causal_lm.named_parameters(remove_duplicate=False)} - kept
        return [name for name in self.causal_lm.state_dict() if name not in tied]

    def forward(
        self, batch: DeviceBatch, *, entropy_grad: bool = False, predict: SlopeFunction | None = None
    ) -> TokenLogprobs:
        """Return log-probabilities (with grad) and entropies under the sampling distribution, float32 [N], nats.

        Hidden states are computed for the whole row, but logits only at ``predict_index``. ``predict`` predicts the
        slopes of the loss (``token_logprobs``). If the batch has ``teacher_top_ids``, so do the log-probabilities.
        """
        return token_logprobs(
            self.hidden_states(batch).index_select(0, batch.predict_index),
            self.head,
            batch.targets,
            batch.temperatures / self.logit_factor,
            cap=None if self.logit_cap is None else self.logit_cap / self.logit_factor,
            sampling_mask=batch.sampling_mask,
            others_NK=batch.teacher_top_ids if len(batch.teacher_top_ids) else None,
            entropy_grad=entropy_grad,
            predict=predict,
            dtype=self.head_dtype,
        )

    def hidden_states(self, batch: DeviceBatch) -> Tensor:
        """Return the decoder's output for every token of the row, [T, d].

        In padded rows a shared prompt is computed for each sequence, and the row's token gets its first copy: all
        copies have the same value. The padding is on the right. No real token sees it, because the decoder is causal,
        so no mask is needed.
        """
        with nullcontext() if self.routers is None else self._routed(self.routers, batch):
            return self.decoded(batch)

    def _routed(self, routers: RouterHooks, batch: DeviceBatch) -> AbstractContextManager[None]:
        """Compute the decoder with the batch's routes, laid out as the decoder's tokens, while the result is active."""
        routes_TLK = None if batch.routes is None else batch.routes.view(-1, routers.num_layers, routers.top_k)
        if self.packing == "packed":
            return routers.forward(routes_TLK, counted=None if batch.part is None else batch.part.real)
        (rows,), restore = batch.layout.padding
        routes_NLK = None if routes_TLK is None else routes_TLK.index_select(0, rows.gather)
        return routers.forward(routes_NLK, counted=restore)

    def route_again(self, batch: DeviceBatch) -> None:
        """Prepare to compute layers of ``batch`` again in its backward pass, if others were computed since then."""
        if self.routers is not None:
            with self._routed(self.routers, batch):
                pass

    def decoded(self, batch: DeviceBatch) -> Tensor:
        """Return what ``hidden_states`` returns, but do not look at the batch's routes."""
        if self.packing == "packed":
            return self.causal_lm.base_model(
                input_ids=batch.token_ids[None],
                position_ids=batch.position_ids[None],
                attention_mask=None,
                use_cache=False,
                packed_layout=batch.layout if batch.part is None else batch.part,
            ).last_hidden_state[0]
        (rows,), restore = batch.layout.padding
        ids_BL = batch.token_ids.index_select(0, rows.gather).view(rows.num_sequences, rows.max_length)
        output = self.causal_lm.base_model(input_ids=ids_BL, attention_mask=None, use_cache=False)
        return output.last_hidden_state.flatten(0, 1).index_select(0, restore)
