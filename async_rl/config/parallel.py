"""The section ``parallel``, and ``Layout``: how the learner's ranks divide the work.

The ranks are a mesh of these dimensions, from the outermost to the innermost, which has the fastest links: stages of a
pipeline, replicas, shards, parts of a sequence, parts of a layer. Their sizes multiply to the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import Field

from async_rl.config.section import OnResume, Section
from async_rl.errors import ConfigError, ModelError

HEADS = ("num_attention_heads", "num_key_value_heads")
"""What a model's config says of the heads of a layer, which tensor parallelism divides."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class ParallelConfig(Section):
    """How the learner's ranks divide the work. Weights are sharded over all ranks that no key here takes (FSDP)."""

    on_resume: ClassVar[OnResume] = OnResume.FREE

    replicas: int = Field(
        default=1,
        ge=1,
        description="Number of copies of the sharded weights (HSDP). Ranks of one copy exchange weights, and copies "
        "exchange gradients once a step, so a copy should be within one node, or within fast links.",
    )
    sequence: int = Field(
        default=1,
        ge=1,
        description="Number of ranks that compute each micro-batch together, each a part of its tokens. The longest "
        "sequence has this number times learner.max_tokens tokens.",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        description="Number of ranks that compute each layer together, each a part of its heads, columns and "
        "experts, whose numbers must be multiples of it; they should be within one node.",
    )
    experts: int = Field(
        default=1,
        ge=1,
        description="Number of ranks over which the experts of each layer are divided; it divides the ranks of a copy. "
        "They have tokens of their own, and send these to the ranks of their experts. With parallel.tensor above 1, "
        "its ranks share the experts, so leave this out.",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        description="Number of stages of a pipeline, at most one for each decoder layer: the ranks of a stage hold "
        "some of the layers, and pass hidden states on. Steps get at least as many micro-batches, if there are as many "
        "sequences; with M of them and S stages a rank is idle for (S - 1) / (M + S - 1) of a step.",
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of the mesh of the learner's ranks.

    Attributes:
        pipeline: number of stages.
        replicas: number of copies of the weights.
        shards: number of ranks over which one copy is sharded, each with micro-batches of its own.
        sequence: number of ranks that share the tokens of a micro-batch.
        tensor: number of ranks that share every layer.
        experts: number of ranks, of those with shards of one copy, over which experts are divided.
    """

    pipeline: int = 1
    replicas: int = 1
    shards: int = 1
    sequence: int = 1
    tensor: int = 1
    experts: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, num_ranks: int) -> Self:
        """Return the layout of ``num_ranks`` ranks.

        Raises:
            ConfigError: they can't be divided so.
        """
        sizes = {name: getattr(parallel, name) for name in ("pipeline", "replicas", "sequence", "tensor")}
        fixed = math.prod(sizes.values())
        if num_ranks % fixed:
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            raise ConfigError(
                f"parallel: expected a number of ranks that is a multiple of {product} = {fixed}, got {num_ranks}; "
                f"start {fixed} ranks or a multiple of it (learner.nproc, or torchrun --nproc-per-node), or lower these"
            )
        layout = cls(shards=num_ranks // fixed, experts=parallel.experts, **sizes)
        layout._check_experts()
        return layout

    def _check_experts(self) -> None:
        of_copy = self.shards * self.sequence
        if of_copy % self.experts:
            raise ConfigError(
                f"parallel.experts: expected a divisor of the ranks of a copy, shards {self.shards} x sequence "
                f"{self.sequence} = {of_copy}, got {self.experts}; start more ranks (learner.nproc, or torchrun "
                f"--nproc-per-node), or lower it"
            )
        if self.experts > 1 and self.tensor > 1:
            raise ConfigError(
                f"parallel.experts: expected 1 with parallel.tensor = {self.tensor}, whose ranks share the experts "
                f"already, got {self.experts}; set one of them"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.replicas * self.shards * self.sequence * self.tensor

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that train on different micro-batches; the others work on one of these together."""
        return self.replicas * self.shards

    @property
    def num_summed(self) -> int:
        """Number of ranks whose gradients add up, over which FSDP averages them."""
        return self.num_data_ranks * self.sequence

    def data_rank(self, rank: int) -> int:
        """Return which of the ``num_data_ranks`` lists of micro-batches ``rank`` works on."""
        return rank // (self.sequence * self.tensor) % self.num_data_ranks

    def is_reporter(self, rank: int) -> bool:
        """Return whether ``rank`` reports the results of its micro-batches. Of the ranks that compute a micro-batch
        together, one does: the first, in the last stage of a pipeline, which has the loss.
        """
        is_last_stage = rank >= self.num_ranks - self.num_ranks // self.pipeline
        return is_last_stage and rank % (self.sequence * self.tensor) == 0


def check_sizes(parallel: ParallelConfig, sizes: Mapping[str, Any]) -> None:
    """Check that a model of these sizes can be divided as ``[parallel]`` says.

    Its family may have further limits, which the learner finds when it has built the model.

    Args:
        parallel: the section.
        sizes: content of the model's config.json, or of its part about text.

    Raises:
        ConfigError: it has fewer layers than stages.
        ModelError: its heads or experts can't be divided.
    """
    check_heads(sizes, parallel.tensor)
    experts = next((sizes[key] for key in _EXPERTS if isinstance(sizes.get(key), int)), 0)
    for key in ("tensor", "experts"):
        check_divisor(f"parallel.{key}", "the experts of a layer", experts, getattr(parallel, key))
    if isinstance(layers := sizes.get("num_hidden_layers"), int):
        check_num_stages(layers, parallel.pipeline)


def check_heads(sizes: Mapping[str, Any], size: int) -> None:
    """Check that heads, whose numbers are in ``sizes`` under ``HEADS``, can be divided over ``size`` ranks.

    Raises:
        ModelError: they can't.
    """
    for key in HEADS:
        if isinstance(count := sizes.get(key), int):
            check_divisor("parallel.tensor", f"the model's {key}", count, size)


def check_divisor(key: str, what: str, count: int, size: int) -> None:
    """Check that ``count`` of ``what`` can be divided over ``size`` ranks, as the config key ``key`` asks.

    Raises:
        ModelError: they can't.
    """
    if count % size:
        raise ModelError(
            f"{key}: expected a divisor of {what}, {count}, got {size}: {count} / {size} = {count / size:.4g}; choose "
            f"another size, or leave the key out"
        )


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Check that each stage of a pipeline has a decoder layer.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"parallel.pipeline: expected at most {num_layers} stages, one for each decoder layer of the model, got "
            f"{num_stages}; lower it"
        )
