"""Routes: the experts that the routers of a mixture-of-experts model chose. Numpy only.

With ``model.routing_replay`` generators record the routes of every token that they compute, ``records.TokenSequence``
carries them, and the learner computes the token with the same experts (R3, arXiv:2510.11370).

Routes are an array [P, L, K] for the first P tokens of a sequence: for each of the L layers with experts (dense layers
are left out) the K experts of the token, in the order in which the router chose them. They are uint8 if the model has
at most 256 experts, else uint16. The last token of an answer is never fed to the engine, so it has none.

``FAMILIES`` lists the models whose routers are understood, by ``model_type``. ``routing_shape`` reads L, K and the
number of experts from a model's ``config.json``, so that the queue can check routes without loading the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from async_rl.errors import ModelError

RouteArray = npt.NDArray[np.unsignedinteger[Any]]
Gates = Literal["softmax", "chosen_softmax", "sigmoid"]
"""How a router computes the weights of the chosen experts from its logits.

- ``softmax``: the softmax over all experts, at the chosen ones; divided by its sum if the router has
  ``norm_topk_prob``, or no such setting.
- ``chosen_softmax``: the softmax over the logits of the chosen ones.
- ``sigmoid``: the sigmoid of each logit; divided by the sum under ``norm_topk_prob``; times ``routed_scaling_factor``.
"""


@dataclass(frozen=True, slots=True)
class Family:
    """The routers of one ``model_type`` of transformers.

    Attributes:
        router: the name of their class. A router returns its logits [T, E], the weights [T, K] and the experts [T, K].
        gates: how it computes the weights.
    """

    router: str
    gates: Gates


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_moe": Family("Qwen2MoeTopKRouter", "softmax"),
        "qwen3_moe": Family("Qwen3MoeTopKRouter", "softmax"),
        "mixtral": Family("MixtralTopKRouter", "softmax"),
        "olmoe": Family("OlmoeTopKRouter", "softmax"),
        "gpt_oss": Family("GptOssTopKRouter", "chosen_softmax"),
        "granitemoe": Family("GraniteMoeTopKRouter", "chosen_softmax"),
        "deepseek_v3": Family("DeepseekV3TopkRouter", "sigmoid"),
        "glm4_moe": Family("Glm4MoeTopkRouter", "sigmoid"),
    }
)
"""The models whose routes can be recorded and replayed, by ``model_type``."""
BALANCE_KEY = "loss.load_balancing_coef"
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The number of layers with experts, of experts in each, and of experts for each token."""

    num_layers: int
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize


def in_order(output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return logits, weights and experts of a router's ``output``, which has the experts, integers, at either end.

    Granite's end depends on the version of transformers.
    """
    return output if output[0].is_floating_point() else output[::-1]


def family_of(model_type: str, key: str = "model.routing_replay") -> Family:
    """Return the family of a ``model_type``, for the setting ``key``.

    Raises:
        ModelError: its routers are not understood, or it has none.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"{key}: expected a model with experts whose routers are understood "
            f"({', '.join(FAMILIES)}), got {model_type!r}; leave the key out, or choose another model"
        )
    return FAMILIES[model_type]


def check_balanced(model_type: str) -> None:
    """Check that a loss can balance the experts of a ``model_type`` (``loss.load_balancing_coef``).

    Raises:
        ModelError: see ``family_of``; or its routers have a bias instead of such a loss.
    """
    if family_of(model_type, BALANCE_KEY).gates == "sigmoid":
        raise ModelError(
            f"{BALANCE_KEY}: expected a model whose routers compute a softmax, got {model_type!r}, whose experts are "
            f"balanced by a bias of its routers, which stays as it is; leave the key out"
        )


def routing_shape(model_config: Mapping[str, Any]) -> RoutingShape:
    """Return the shape of the routes of the model whose ``config.json`` has the content ``model_config``.

    Raises:
        ModelError: the model has no experts, its routers are not understood, or a number is missing.
    """
    family_of(str(model_config.get("model_type")))
    num_experts = next((model_config[key] for key in _NUM_EXPERTS if model_config.get(key)), None)
    top_k, num_layers = model_config.get("num_experts_per_tok"), model_config.get("num_hidden_layers")
    if not all(isinstance(number, int) and number > 0 for number in (num_experts, top_k, num_layers)):
        raise ModelError(
            f"model.routing_replay: expected config.json of model.path to have num_hidden_layers, num_experts_per_tok "
            f"and one of {', '.join(_NUM_EXPERTS)}, each above 0, got {num_layers}, {top_k} and {num_experts}; leave "
            f"the key out, or correct the file"
        )
    assert num_layers is not None
    first, step = model_config.get("first_k_dense_replace") or 0, model_config.get("decoder_sparse_step") or 1
    dense = model_config.get("mlp_only_layers") or ()
    sparse = [i for i in range(num_layers) if i >= first and (i + 1) % step == 0 and i not in dense]
    return RoutingShape(len(sparse), int(num_experts or 0), int(top_k or 0))


def why_misfit(routes: RouteArray | None, shape: RoutingShape | None, num_computed: int) -> str:
    """Return why routes can't be replayed by a model of ``shape`` for ``num_computed`` tokens; empty if they can.

    Without ``shape`` nothing is replayed, and nothing checked.
    """
    if shape is None:
        return ""
    if routes is None or routes.shape[1:] != (shape.num_layers, shape.top_k) or len(routes) < num_computed:
        got = "none" if routes is None else list(routes.shape)
        return (
            f"expected routes of {num_computed} tokens, {shape.num_layers} layers and {shape.top_k} experts, got {got}"
        )
    if (largest := int(routes.max(initial=0))) >= shape.num_experts:
        return f"expected experts below {shape.num_experts} in its routes, got {largest}"
    return ""


def has_routers(model: Any) -> bool:
    """Return whether ``model``, a model of transformers, has routers that are understood."""
    family = FAMILIES.get(model.config.model_type)
    return family is not None and any(type(module).__name__ == family.router for module in model.modules())


def routers_of(model: Any, model_type: str) -> list[Any]:
    """Return the router modules of ``model``, a model of transformers, in the order of its layers.

    Raises:
        ModelError: see ``family_of``; or the model has none, because its modules are others than expected.
    """
    name = family_of(model_type).router
    found = [module for module in model.modules() if type(module).__name__ == name]
    if not found:
        raise ModelError(
            f"model.routing_replay: expected routers of the class {name} in {type(model).__name__}, got none; leave "
            f"the key out, or install the version of transformers that async-rl requires"
        )
    return found
