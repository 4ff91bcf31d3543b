"""What ``generator.engine`` may hold: any argument of vLLM's engine but those that ``_REFUSED`` names.

The names are vLLM's. Which of them exist is known only where vLLM is (``generator.vllm.adapter``). So both tables here
have patterns, which also fit names of later releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

_REFUSED: Mapping[str, str] = {
    # What this program sets by keys of its own.
    "model.path sets it": "model model_weights model_loader_extra_config tokenizer tokenizer_mode skip_tokenizer_init "
    "hf_* config_format *load_format *revision runner convert download_dir",
    "model.dtype sets it": "dtype",
    "run.seed sets it": "seed",
    "[lora] sets it": "*lora*",
    "sampling.max_prompt_tokens and sampling.max_new_tokens set it": "max_model_len",
    "generator.batch_size sets it": "max_num_seqs",
    "generator.tensor_parallel_size sets it": "tensor_parallel_size",
    "generator.memory_fraction sets it": "gpu_memory_utilization",
    "generator.devices sets it": "device_ids",
    "experimental.vllm.kv_cache_bytes sets it": "kv_cache_memory_bytes",
    "experimental.vllm.enforce_eager sets it": "enforce_eager",
    "learner.generate_backend sets it": "enable_sleep_mode",
    "weights.transport sets it": "weight_transfer_config",
    "max_num_batched_tokens says how much of prompts is read at once": "enable_chunked_prefill",
    "async-rl sets it": "additional_config worker_extension_cls disable_log_stats",
    # What makes the log-probabilities others than those of the distribution that was sampled.
    "[sampling] sets it": "generation_config override_generation_config",
    "log-probabilities must be those of the distribution that was sampled": "logprobs_mode max_logprobs "
    "logits_processors watermark_config diffusion_config",
    "with it vLLM's CPU build samples at wrong temperatures, and no GPU has run it yet": "speculative_config spec_*",
    # What breaks a promise of this program.
    "generators run no code of models": "trust_remote_code",
    "it shares keys and values with engines whose weights may be older": "kv_transfer_config kv_offloading_backend",
    "no GPU has run it yet": "data_parallel_* *expert* *eplb* *elastic_ep* enable_ep_* "
    "pipeline_parallel_size *_context_parallel_size nnodes node_rank master_* distributed_executor_backend",
}
"""Reason -> the names for which it holds."""

_OPERATORS = "*_cls *class_overrides *_plugin *_path *_file *_dir *endpoint* *_config allowed_* media_io_kwargs"
"""Names of arguments that may run code, read or write files, or open connections. A table ``*_config`` may name any."""


def is_operators(name: str) -> bool:
    """Return whether only the operator of a generator's machine may set the engine's argument ``name`` there."""
    return _fits(name, _OPERATORS)


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the engine may not have.

    Raises:
        ValueError: there is one. The message has its name, and the reason or the key to use instead.
    """
    for name, value in arguments.items():
        for reason, names in _REFUSED.items():
            if _fits(name, names):
                raise ValueError(f"{name}: expected no value, got {value!r:.80}; leave it out: {reason}")


def shown(arguments: Iterable[tuple[str, Any]]) -> str:
    """Return the text ``name = value, ...``."""
    return ", ".join(f"{name} = {value!r}" for name, value in arguments)


def _fits(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())
