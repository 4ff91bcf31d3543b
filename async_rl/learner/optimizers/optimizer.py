"""The optimizer of the engine, and its learning rate. Called by ``trained_model.py``.

``build_optimizer`` creates it with its whole state, so that a checkpoint can be loaded before the first step. Only this
module knows what that state is. ``Schedule`` gives the learning rate.

Parameters may be sharded on several device meshes. torch's fused operations take the tensors of one mesh at a time, so
gradients and parameters are grouped by mesh (``by_mesh``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from async_rl.config.learner import OptimizerConfig
from async_rl.learner.optimizers.compact_adamw import Bfloat16, CompactAdamW, EightBit, bitsandbytes_functions
from async_rl.learner.optimizers.muon import Muon


class Optimizer(Protocol):
    """Updates the parameters that it was built for by their gradients. Ranks call its methods together."""

    def step(self, lr: float) -> None:
        """Update the parameters with the learning rate ``lr``, which a part of them may scale."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint holds, by "<kind>.<parameter's name>", in a fixed order. A sharded
        parameter has sharded state. It is not copied: a checkpoint is loaded into it.
        """
        ...

    def resume(self, num_updates: int) -> None:
        """Continue after ``num_updates`` steps, whose state was loaded into ``tensors``."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate as a function of the number of updates done.

    Cosine and linear schedules decrease to ``min_ratio * lr`` at ``total_updates``.
    """

    kind: Literal["constant", "cosine", "linear"]
    lr: float
    warmup_updates: int
    total_updates: int
    min_ratio: float

    def lr_at(self, num_updates: int) -> float:
        """Return the learning rate of the next update after ``num_updates`` updates. The warm-up begins above 0."""
        if num_updates < self.warmup_updates:
            return self.lr * (num_updates + 1) / self.warmup_updates
        if self.kind == "constant":
            return self.lr
        span = max(1, self.total_updates - self.warmup_updates)
        progress = min(1.0, (num_updates - self.warmup_updates) / span)
        share = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.lr * (self.min_ratio + (1 - self.min_ratio) * share)


def check_optimizer(config: OptimizerConfig, device: torch.device) -> None:
    """Check that ``optimizer.name`` can be had on ``device``, before a model is loaded.

    Raises:
        ConfigError: a package is missing, or has no kernels for the device.
    """
    if config.name == "adamw_8bit":
        bitsandbytes_functions(device)


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, hidden: Collection[str] = ()
) -> Optimizer:
    """Create the optimizer of ``parameters``, which are all trained, by their names in the model. Only matrices have
    weight decay, not norms and biases. Muon trains those that ``hidden`` names.
    """
    if config.name == "adamw":
        return AdamW(parameters, config)
    chosen = {n: p for n, p in parameters.items() if (n in hidden if config.name == "muon" else p.ndim >= 2)}
    # Norms and biases are few, so their state is float32. With adapters there are none.
    others = {name: p for name, p in parameters.items() if name not in chosen}
    match config.name:
        case "adamw_bf16":
            first = CompactAdamW(chosen, config, Bfloat16())
        case "adamw_8bit":
            first = CompactAdamW(chosen, config, EightBit(next(iter(parameters.values())).device))
        case "muon":
            first = Muon(chosen, config)
    lr_ratio = (config.adamw_lr or config.lr) / config.lr
    return _Together(first, AdamW(others, config) if others else None, lr_ratio)


class _Together:
    """Two optimizers, each of other parameters. The second's learning rate is ``lr_ratio`` times the first's."""

    def __init__(self, first: Optimizer, second: Optimizer | None, lr_ratio: float) -> None:
        self._optimizers = {first: 1.0} | ({second: lr_ratio} if second else {})

    def step(self, lr: float) -> None:
        for optimizer, ratio in self._optimizers.items():
            optimizer.step(lr * ratio)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for optimizer in self._optimizers for name, tensor in optimizer.tensors().items()}

    def resume(self, num_updates: int) -> None:
        for optimizer in self._optimizers:
            optimizer.resume(num_updates)


class AdamW:
    """torch's fused AdamW, with float32 state."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self._parameters = parameters
        groups = [
            {"params": of_mesh, "weight_decay": weight_decay}
            for matrices, weight_decay in ((True, config.weight_decay), (False, 0.0))
            for of_mesh in by_mesh(p for p in parameters.values() if (p.ndim >= 2) == matrices)
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
        for parameter in parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }

    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        state = self._optimizer.state
        return {f"{k}.{n}": state[p][k] for n, p in self._parameters.items() for k in ("exp_avg", "exp_avg_sq")}

    def resume(self, num_updates: int) -> None:
        for state in self._optimizer.state.values():
            state["step"].fill_(num_updates)


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return ``tensors`` grouped by the mesh that they are sharded on. Those that are not sharded are a group, too."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def total_norm(gradients: Iterable[Tensor]) -> float:
    """Return the norm of all ``gradients`` together, over the ranks of their meshes. Tensors that are not sharded count
    once. All ranks call it.
    """
    norms = [get_total_norm(of_mesh) for of_mesh in by_mesh(gradients)]
    return math.hypot(*(float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms))
