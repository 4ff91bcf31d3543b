"""Which activations of the decoder the backward pass computes again (``model.gradient_checkpointing``).

``full`` keeps a layer's input only, and computes the layer again: a third more computation. ``attention`` also keeps
attention's outputs, which cost most to compute in long sequences. ``selective`` also keeps the outputs of matrix
products, and computes the rest again (norms, activation functions, rotations): about half the memory of ``none``. Both
name operations of torch. One that is missing here is computed again, which is right and slower.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from async_rl.config.learner import Recomputation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = frozenset({
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "torch_attn::_varlen_attn",
})  # fmt: skip
_KEPT = {"attention": _ATTENTION, "selective": _ATTENTION | {"aten::mm", "aten::addmm", "aten::_grouped_mm"}}
"""Operations whose outputs are kept. Not bmm: the scores of eager attention grow with the square of the length."""


def recompute(model: PreTrainedModel, how: Recomputation) -> None:
    """Let the backward pass of ``model`` compute activations again as ``how`` says."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if how == "none":
        return
    if how in _KEPT:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, _KEPT[how]))
    enable: Any = getattr(model, "activation_checkpointing_enable", None)  # its name in newer versions
    (enable or model.gradient_checkpointing_enable)(settings)


def _policy(kept: frozenset[str], context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    is_kept = operation.name().partition(".")[0] in kept
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
