"""Predicts the peak memory of a learner's rank, from the model's config.json, the run's config and the ranks' layout.

The peak is in the second micro-batch of a step, when all gradients are there: ``plan_memory`` adds weights, gradients
and the optimizer's state, which ranks divide, to the parameters that a rank has gathered, and to a micro-batch's
activations or its logits. A test compares it with the tensors that the engine has alive. Called by the doctor; the
tables of docs/scaling.md are made of it (``benchmarks/memory_table.py``).

It knows decoders of attention and a gated MLP or experts: Llama, Mistral, Qwen2, Qwen3, Gemma and the like.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.config.learner import OptimizerName
from async_rl.config.parallel import Layout
from async_rl.errors import ModelError

CHUNK_BYTES: Mapping[str, tuple[int, int]] = {"cpu": (80 << 20, 80 << 20), "cuda": (256 << 20, 1 << 30)}
"""Smallest and largest size of a chunk of the head's float32 logits in bytes, by the device's type. Two such buffers
are in memory (three if the logits are capped), in half precision half a one more, and while gradients are computed that
of the head in float32. Smaller chunks make the matrix products slower: on a CPU 20 % with a quarter of this size, at a
vocabulary of 152k.
"""
_UNKNOWN = (
    "kv_lora_rank",
    "first_k_dense_replace",
    "layers_block_type",
    "mamba_d_state",
    "ssm_cfg",
    "n_shared_experts",
)
"""Keys of models that have other layers than this module knows."""


class UnknownShapeError(ModelError, ValueError):
    """The config.json is of a kind of model whose memory can't be predicted. The message says what it lacks."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder, as config.json has them.

    Attributes:
        width: of hidden states.
        mlp: width of the MLP; of one expert, if there are experts.
        num_layers: number of layers.
        queries: heads times their width.
        keys: key and value heads times their width.
        vocab: rows of the embedding.
        is_tied: whether the head is the embedding.
        num_experts: in each layer; 0 without experts.
        experts_per_token: how many of them compute a token; 1 without experts.
        has_head_norms: whether queries and keys are normalised (Qwen3).
        num_heads: number of query heads, and
        num_key_heads: of key and value heads; 0 if they are not known.
    """

    width: int
    mlp: int
    num_layers: int
    queries: int
    keys: int
    vocab: int
    is_tied: bool
    num_experts: int = 0
    experts_per_token: int = 1
    has_head_norms: bool = False
    num_heads: int = 0
    num_key_heads: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the sizes from the content of a config.json.

        Raises:
            UnknownShapeError: it lacks one.
        """
        config = config.get("text_config") or config
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [name for name in names if not isinstance(config.get(name), int)]
        if missing:
            raise UnknownShapeError(f"config.json has no {', '.join(missing)}")
        if other := [name for name in _UNKNOWN if config.get(name)]:
            raise UnknownShapeError(f"config.json has {', '.join(other)}, of layers whose memory is not known")
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
        return cls(
            width=config["hidden_size"],
            mlp=(num_experts and config.get("moe_intermediate_size")) or config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            queries=heads * head_dim,
            keys=(config.get("num_key_value_heads") or heads) * head_dim,
            vocab=config["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings", False)),
            num_experts=num_experts,
            experts_per_token=config.get("num_experts_per_tok") or 1 if num_experts else 1,
            has_head_norms=str(config.get("model_type", "")).startswith("qwen3"),
            num_heads=heads,
            num_key_heads=config.get("num_key_value_heads") or heads,
        )

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of a layer without its MLP or experts."""
        return 2 * self.width * (self.queries + self.keys) + 2 * self.width + self.width * self.num_experts

    @property
    def mlp_parameters(self) -> int:
        """Number of parameters of a layer's MLP, or of all its experts."""
        return 3 * self.width * self.mlp * max(1, self.num_experts)

    @property
    def table_parameters(self) -> int:
        """Number of parameters of the embedding, and as many of a head that is not tied to it."""
        return self.vocab * self.width

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        tables = self.table_parameters * (1 if self.is_tied else 2)
        return self.num_layers * (self.attention_parameters + self.mlp_parameters) + tables


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Peak memory of one rank, in bytes, by what takes it.

    Attributes:
        weights: this rank's part of the parameters, those of a reference model and of a critic included, and the whole
            policy with which it samples (``learner.generate``), unless vLLM has given it up.
        gradients: its part of the gradients.
        optimizer: its part of the optimizer's state.
        gathered: parameters and gradients that the rank has whole for a while.
        activations: what the backward pass of the largest micro-batch needs.
        head: logits and gradients of the head; or the gradients inside a layer, if those take more.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    head: float

    @property
    def total(self) -> float:
        """The peak."""
        return sum(getattr(self, field.name) for field in fields(self))


def plan_memory(
    shape: ModelShape, config: Config, sizes: Layout, *, device: str = "cuda", has_reference: bool = False
) -> MemoryPlan:
    """Predict the peak memory of a rank of the learner of ``config``, in the layout ``sizes``.

    With ``learner.offload = "all"`` weights, gradients and state are on the host, and not in the plan. A critic counts
    as a second model of this shape.

    Args:
        shape: the model's.
        config: the run's.
        sizes: of the ranks' layout.
        device: "cuda" or "cpu".
        has_reference: whether a second model of this shape is loaded.
    """
    weights, gradients, state = _stored(shape, config, sizes, device, has_reference=has_reference)
    copies = num_sampling_copies(config, sizes.num_ranks, device)
    weights += copies * shape.num_parameters * compute_bytes(config, device)
    if config.loss.has_critic:  # gradients are those of one model at a time
        of_critic = _stored(shape, config.of_critic, sizes, device, has_reference=False)
        weights, state = weights + of_critic[0], state + of_critic[2]
    layers, inside, last = _activations(shape, config, sizes, device)
    gathered, gradient = _gathered(shape, config, sizes, device)
    # When a layer's gradient is there, its activations are gone.
    freed = layers / shape.num_layers
    gathered += max(0.0, gradient - freed)
    return MemoryPlan(weights, gradients, state, gathered, layers, max(inside, last))


def num_sampling_copies(config: Config, num_ranks: int, device: str) -> int:
    """Return how many copies of the whole policy each rank of the learner has on its device so that it can sample.

    The built-in engine needs one, unless the rank holds the policy whole, in the dtype that it computes in. vLLM gives
    a GPU's memory up while the rank trains. On a CPU it keeps its copy; and it loads a version from a second one in
    shared memory, into which the rank copies what the built-in engine would use. Adapters alone need no such copies.
    """
    if not config.learner.generate or not has_model(config.generator.backend):
        return 0
    if config.learner_uses_vllm and device != "cpu":
        return 0
    if config.learner_uses_vllm and config.lora.publishes_adapters:
        return 1
    holds_it = num_ranks == 1 and device == "cpu" and compute_bytes(config, device) == 4 and not config.lora.is_set
    return 2 * config.learner_uses_vllm + (not holds_it)


def compute_bytes(config: Config, device: str) -> int:
    """Return the bytes of a number that the model computes with."""
    return 2 if config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and device == "cuda") else 4


def logits_chunk_bytes(device: str, gradient_bytes: float) -> float:
    """Return the upper bound on the float32 logits of one chunk, in bytes.

    Args:
        device: ``cpu`` or ``cuda``.
        gradient_bytes: of the gradient of the head's weight in float32; 0 if it has none. Each chunk reads and writes
            it once, so chunks are as large as it is, within ``CHUNK_BYTES``. Where that is the size, this costs as
            much as reading and writing the chunk's logits once.
    """
    smallest, largest = CHUNK_BYTES[device]
    return min(max(gradient_bytes, smallest), largest)


def micro_batch_tokens(config: Config, sizes: Layout) -> int:
    """Return the number of tokens of a rank's largest micro-batch: ``learner.max_tokens``, or all that its part of an
    optimizer step can have. How long an environment's rollouts are, and the rows of sft, rm and dpo, is not known.
    """
    if config.environment.is_set or config.is_offline_only:
        return config.learner.max_tokens
    groups = config.learner.groups_per_step // config.learner.updates_per_batch
    rollouts = math.ceil(groups * config.sampling.group_size / sizes.num_data_ranks)
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    return min(config.learner.max_tokens, math.ceil(rollouts * longest / sizes.sequence))


def _parts(shape: ModelShape, sizes: Layout) -> tuple[float, float]:
    """Return the number of a stage's parameters in layers and in tables, whole for all but tensor parallelism.

    A stage of several has the embedding or the head.
    """
    layers = math.ceil(shape.num_layers / sizes.pipeline) * (shape.attention_parameters + shape.mlp_parameters)
    num_tables = 1 if shape.is_tied or sizes.pipeline > 1 else 2
    return layers / sizes.tensor, num_tables * shape.table_parameters / sizes.tensor


def _adapters(shape: ModelShape, config: Config) -> int:
    """Return the number of parameters of a layer's adapters."""
    rank, names = config.lora.rank or 0, set(config.lora.targets)
    ends = {
        "q_proj": (shape.width, shape.queries), "o_proj": (shape.queries, shape.width),
        "k_proj": (shape.width, shape.keys), "v_proj": (shape.width, shape.keys),
        "gate_proj": (shape.width, shape.mlp), "up_proj": (shape.width, shape.mlp),
        "down_proj": (shape.mlp, shape.width),
    }  # fmt: skip
    return rank * sum(sum(ends[name]) for name in names & ends.keys())


def state_bytes(name: OptimizerName, *, is_table: bool = False) -> float:
    """Return the bytes of optimizer state for a parameter of a layer's matrix, or of a table: embedding or head."""
    match name:  # pyright finds a name that has no case
        case "adamw":
            return 8.0
        case "adamw_bf16":
            return 4.0
        case "adamw_8bit":
            return 2 + 8 / 64
        case "muon":
            return 8.0 if is_table else 4.0


def _stored(
    shape: ModelShape, config: Config, sizes: Layout, device: str, *, has_reference: bool
) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer state that this rank keeps."""
    layers, tables = _parts(shape, sizes)
    num_ranks = sizes.shards * sizes.sequence
    size, name = compute_bytes(config, device), config.optimizer.name
    reference = (layers + tables) * 4 if has_reference and config.learner.offload == "none" else 0
    if config.learner.offload == "all":
        return reference / num_ranks, 0.0, 0.0
    # Gradients that stay unsharded are among what is gathered.
    is_whole = config.learner.reshard != "full" and num_ranks > 1
    if config.lora.is_set:
        trained = _adapters(shape, config) * math.ceil(shape.num_layers / sizes.pipeline) / sizes.tensor
        weights = (layers + tables) * size + 4 * trained + reference
        return weights / num_ranks, 4 * trained / num_ranks, state_bytes(name) * trained / num_ranks
    state = state_bytes(name) * layers + state_bytes(name, is_table=True) * tables
    gradients = 0 if is_whole else 4 * (layers + tables)
    return (4 * (layers + tables) + reference) / num_ranks, gradients / num_ranks, state / num_ranks


def _gathered(shape: ModelShape, config: Config, sizes: Layout, device: str) -> tuple[float, float]:
    """Return the bytes of what is whole on this rank at the peak, and of the gradient of a layer that ranks add up.

    Nothing is gathered by one rank that computes in float32, on the CPU.
    """
    num_ranks, size = sizes.shards * sizes.sequence, compute_bytes(config, device)
    if num_ranks == 1 and sizes.num_ranks == 1 and device == "cpu" and size == 4:
        return 0.0, 0.0
    layers, tables = _parts(shape, sizes)
    mlp = shape.mlp_parameters / sizes.experts
    layer = (shape.attention_parameters + mlp) / sizes.tensor
    # A table's gradient is among the head's.
    if config.learner.reshard == "full":
        # The layer and the next one; and the layer's gradient, which becomes float32 before it is added up.
        return size * tables + 2 * size * layer, 0.0 if config.lora.is_set else (size + 4) * layer
    held = size * (layers + tables)
    return held + (0 if config.lora.is_set else 4 * (layers + tables)), 0.0


def _activations(shape: ModelShape, config: Config, sizes: Layout, device: str) -> tuple[float, float, float]:
    """Return the bytes that a micro-batch keeps for its backward pass, the most that a layer's backward pass adds, and
    what the head adds.
    """
    size, tokens, tensor = compute_bytes(config, device), micro_batch_tokens(config, sizes), sizes.tensor
    queries, keys, width = shape.queries / tensor, shape.keys / tensor, shape.width
    mlp = shape.mlp * shape.experts_per_token / tensor
    # Of a norm: its input in float32, the normalised input for its own gradient, the output.
    norm = 4 + (1 if config.lora.is_set else 2) * size
    routed = shape.num_experts * 12 + 2 * size * width * shape.experts_per_token if shape.num_experts else 0
    head_norms = norm * (queries + keys) if shape.has_head_norms else 0
    whole = 2 * norm * width + size * (3 * queries + 2 * keys + 4 * mlp) + routed + head_norms
    if config.lora.is_set:
        # The inputs of frozen matrices are kept for A. The products with A are narrow.
        whole += 7 * size * (config.lora.rank or 0)
    kept = {
        "none": whole,
        "selective": size * (3 * width + 2 * queries + 2 * keys + 2 * mlp),
        "attention": size * (width + queries),
        "full": size * width,
    }[config.model.gradient_checkpointing]
    # A first stage has as many micro-batches under way as there are stages.
    num_layers = math.ceil(shape.num_layers / sizes.pipeline) * sizes.pipeline
    inside = whole - kept + size * (2.5 * mlp + width)
    trained = 0 if config.lora.is_set else shape.table_parameters / tensor
    chunk = min(logits_chunk_bytes(device, 4 * trained), 4 * tokens * shape.vocab / tensor)
    table = trained * (4 if size == 4 else 6)
    head = (2 if size == 4 else 2.5) * chunk + table + tokens * width * (norm + size)
    return tokens * kept * num_layers, tokens * inside, head
