"""The sections ``model``, ``lora``, ``learner`` and ``optimizer``: what is trained, how, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from async_rl.config.section import Free, Recorded, Section
from async_rl.errors import ConfigError

Reshard = Literal["full", "after_backward", "none"]
"""When ranks free gathered parameters, a value of ``learner.reshard``."""

Recomputation = Literal["none", "selective", "attention", "full"]
"""Which activations are computed again, a value of ``model.gradient_checkpointing``; from the fewest to the most."""

FlashAttention = Literal["auto", "fa3", "fa4"]
"""Which flash attention the learner uses, a value of ``model.attention``."""

Offload = Literal["none", "reference", "all"]
"""What the learner keeps in the host's memory, a value of ``learner.offload``."""


OptimizerName = Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"]
"""An optimizer, a value of ``optimizer.name``."""


class ModelConfig(Section):
    """The model that is trained and sampled."""

    path: str = Field(
        min_length=1,
        description="Local directory or Hugging Face hub id of a causal language model with its tokenizer.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Precision in which learner and generators compute; auto is bfloat16 on CUDA and float32 on a CPU.",
    )
    head_dtype: Literal["auto", "float32"] = Field(
        default="auto",
        description="Precision in which the learner computes the language-model head and its gradients; auto is "
        "model.dtype's. bfloat16 rounds logits to two or three digits, which adds to the difference between learner "
        "and generators. float32 takes time and a copy of the head.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Whether the learner may execute Python code that comes with the model. Code of its tokenizer, and "
        "any in generators and scorers, is never executed.",
    )
    gradient_checkpointing: Free[Recomputation] = Field(
        default="none",
        description="Which activations the learner computes again in the backward pass, which saves memory and costs "
        "time: those of whole layers (full), all but attention's outputs (attention, for long sequences), those that "
        "are neither matrix products nor attention (selective, about half the memory at little time), or none.",
    )
    attention: Free[FlashAttention] = Field(
        default="auto",
        description="Flash attention of the learner on CUDA: that of torch (auto), or version 3 (fa3, H100 and H200) "
        "or 4 (fa4, also B200), whose packages you install. No GPU has run the last two here.",
    )
    routing_replay: bool = Field(
        default=False,
        description="Whether the learner computes each token with the experts that the generator's engine chose for "
        "it. Only for models with experts.",
    )


class LoraConfig(Section):
    """Low-rank adapters: a layer's W becomes W + alpha / rank * B A, and only A and B are trained."""

    rank: int | None = Field(
        default=None,
        ge=1,
        description="Rank of the low-rank adapters; if unset, there are none and every weight is trained.",
    )
    alpha: float = Field(
        default=16.0, gt=0, description="Scale of the low-rank adapters, which are multiplied by alpha / rank."
    )
    rank_stabilized: bool = Field(
        default=False,
        description="Whether the adapters are multiplied by alpha / sqrt(rank) instead, so that a higher rank does not "
        "make steps smaller (rsLoRA).",
    )
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        strict=False,
        min_length=1,
        description="Linear layers of the decoder that get a low-rank adapter, each given by the last part of its "
        "name.",
    )
    publish: Literal["merged", "adapters"] = Field(
        default="merged",
        description="What a version for the generators holds: all of the model's weights with the adapters merged into "
        "them (merged), or only the adapters, for generators that load model.path themselves (adapters).",
    )

    base_bits: Literal[4, 8] | None = Field(
        default=None,
        description="Bits per frozen weight of the decoder's linear layers in the learner: 4 (NF4, needs bitsandbytes) "
        "or 8; if unset, these are stored in model.dtype as the other weights are.",
    )

    @field_validator("targets")
    @classmethod
    def _are_last_parts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unfit = [name for name in names if not name or "." in name]
        if unfit or len(set(names)) < len(names):
            raise ValueError(
                f"expected each layer once, by the last part of its name, such as q_proj, got {list(names)}; "
                f"correct the list"
            )
        return names

    @property
    def is_set(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.rank is not None

    @property
    def publishes_adapters(self) -> bool:
        """Whether a version for the generators holds only the adapters."""
        return self.is_set and self.publish == "adapters"

    @property
    def scale(self) -> float:
        """The factor of B A. 0 without adapters."""
        return 0.0 if self.rank is None else self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


class LearnerConfig(Section):
    """The learner: how much it trains, and on which processes and devices."""

    steps: Recorded[int] = Field(
        default=1000,
        ge=1,
        description="Number of steps, each of which trains on one batch; the run ends after the last one.",
    )
    groups_per_step: int = Field(
        default=32,
        ge=1,
        description="Number of groups in a batch, over all ranks; the last batch of data.epochs may have fewer.",
    )
    updates_per_batch: int = Field(
        default=1,
        ge=1,
        description="Number of optimizer steps on each batch; each trains on another part of the batch and makes a "
        "version. A smaller last batch makes fewer.",
    )
    epochs_per_batch: int = Field(
        default=1,
        ge=1,
        description="Number of passes over each batch, each with learner.updates_per_batch optimizer steps on the same "
        "parts in the same order.",
    )
    fixed_lag: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="Train on rollouts that are exactly this many versions old, for measurements; if unset, on "
        "rollouts that are as fresh as possible.",
    )
    max_tokens: Free[int] = Field(
        default=16384,
        ge=1,
        description="Maximum number of tokens in one micro-batch of one rank, with the padding of padded rows; it "
        "determines the memory that training uses. Ranks that share a micro-batch (parallel.sequence) have as many "
        "times more. Answers with a sequence that is longer than a micro-batch are left out of the loss.",
    )
    packing: Free[Literal["auto", "packed", "padded"]] = Field(
        default="auto",
        description="How the model computes a micro-batch: its sequences end to end in one row (packed), or as rows of "
        "one batch padded to the longest (padded), which more models can compute but costs more; auto is padded "
        "only for models that compute other values when packed.",
    )
    nproc: Free[int] = Field(default=1, ge=1, description="Number of learner processes (ranks) that launch starts.")
    devices: Free[tuple[int, ...] | None] = Field(
        default=None,
        strict=False,
        description="CUDA devices of the ranks, one for each; if unset, the first devices of the machine.",
    )
    reshard: Free[Reshard] = Field(
        default="full",
        description="When ranks free gathered parameters: after each use (full, as in ZeRO-3), after the backward pass "
        "of each micro-batch (after_backward), or after the last one of the step (none). Later is faster and takes "
        "memory: with after_backward and none, each rank holds the whole model's parameters and gradients.",
    )
    compile: Free[bool] = Field(
        default=False,
        description="Whether torch.compile compiles the decoder layers. The first steps take up to minutes longer, and "
        "a machine with a C++ compiler and Python's headers is needed. The compiler chooses what the backward pass "
        "computes again, so model.gradient_checkpointing must be none or full.",
    )
    offload: Free[Offload] = Field(
        default="none",
        description="What ranks keep in the host's memory and move to the device layer by layer: the reference model "
        "of the KL (reference), or also the policy's parameters, gradients and optimizer, whose step then runs on the "
        "CPU (all). It saves memory of the device and costs time.",
    )
    num_threads: Free[int | None] = Field(
        default=None,
        ge=1,
        description="CPU threads of each rank; if unset, the cores divided by the processes of the run.",
    )

    generate: Free[bool] = Field(
        default=False,
        description="Whether the learner samples, too: while a rank waits for groups, its device samples as another "
        "generator, with the policy's own weights. With generator.count = 0 it is the only one that launch starts.",
    )
    generate_backend: Free[Literal["transformers", "vllm"]] = Field(
        default="transformers",
        description="Engine with which the learner samples: transformers, the built-in one, in the rank's own process; "
        "or vllm, beside each rank, which gives its GPU memory up while the rank computes (generator.memory_fraction, "
        "docs/engines.md).",
    )
    generate_groups: Free[int | None] = Field(
        default=None,
        ge=0,
        description="Maximum number of groups that each rank begins to sample in one step; if unset, as many as fit "
        "into its time.",
    )

    def num_updates(self, num_groups: int) -> int:
        """Return the number of optimizer steps on a batch of ``num_groups`` groups in one epoch.

        It is ``updates_per_batch`` for a whole batch. The last batch of data that has ended may be smaller: its steps
        are fewer, so that they train on about as many groups as those before.
        """
        return -(-num_groups * self.updates_per_batch // self.groups_per_step)

    @property
    def versions_per_batch(self) -> int:
        """Number of optimizer steps on each batch, in all its epochs. Each makes a version."""
        return self.updates_per_batch * self.epochs_per_batch


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: OptimizerName = Field(
        default="adamw",
        description="How weights are updated: by AdamW with 8 bytes of state for each trained parameter (adamw), "
        "with 4, in bfloat16, rounded at random (adamw_bf16), or with 2, in codes of 8 bits (adamw_8bit, which needs "
        "bitsandbytes); or by Muon with 4 for the matrices of the layers, and AdamW for the rest (muon).",
    )
    lr: Recorded[float] = Field(
        default=1e-6,
        gt=0,
        description="Highest learning rate, reached at the end of the warm-up. 1e-6 suits models of 0.5 "
        "billion weights and more, 1e-5 those of 0.1 to 0.4 billion; LoRA needs 10 to 100 times as much, and a model "
        "of at most a few million weights 1e-5 to 1e-3.",
    )
    adamw_lr: float | None = Field(
        default=None,
        gt=0,
        description="With muon, the highest learning rate of what AdamW trains: embedding, head, norms and biases; if "
        "unset, optimizer.lr, because Muon's updates are scaled to the size of AdamW's.",
    )
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay of matrices.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999),
        strict=False,
        description="Decay rates of AdamW's running means of the gradient and of its square, both below 1.",
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Norm to which gradients of a larger norm are scaled down."
    )
    ess_reference: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Above 0, the learning rate of a step is multiplied by sqrt(ratio/sequence_ess / this), at most 1: "
        "steps on stale samples are smaller (VCPO). 0 scales nothing.",
    )
    schedule: Recorded[Literal["constant", "cosine", "linear"]] = Field(
        default="constant", description="How the learning rate changes from the end of the warm-up to the last step."
    )
    min_lr_ratio: Recorded[float] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Learning rate at the last step with the schedules cosine and linear, as a factor of optimizer.lr.",
    )
    warmup_steps: Recorded[int] = Field(
        default=0,
        ge=0,
        description="Optimizer steps over which the learning rate rises linearly to optimizer.lr.",
    )

    @field_validator("betas")
    @classmethod
    def _are_rates(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"expected two numbers from 0 to below 1, got {list(value)}; correct them")
        return value


def check_offload(offload: Offload, device: str, *, has_reference: bool) -> None:
    """Check that ``learner.offload`` means something on a ``device``, "cpu" or "cuda".

    Raises:
        ConfigError: it does not.
    """
    if offload != "none" and device == "cpu":
        raise ConfigError(
            f'learner.offload: expected "none" for a learner on the CPU, got "{offload}"; everything is in the '
            f"host's memory already, so leave the key out"
        )
    if offload == "reference" and not has_reference:
        raise ConfigError(
            'learner.offload = "reference": expected a reference model of its own, got none; a KL needs loss.kl_coef '
            "above 0, and with lora.rank its reference is the policy without adapters unless loss.kl_reference names "
            'another; leave the key out, or set "all"'
        )
