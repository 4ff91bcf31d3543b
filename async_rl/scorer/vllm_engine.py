"""Scores texts with a sequence-classification model that vLLM's pooling runner runs, in this process.

vLLM gets token ids and returns the output of the model's head at the last token, without an activation. It reads what
texts have in common, such as the prompt of a group, once, in whole blocks of its prefix cache. The names are those of
vLLM 0.32.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.config.scorer import ScorerConfig
from async_rl.errors import ModelError
from async_rl.generator.vllm.adapter import CPU_KV_BYTES, check_version, prepare_environment
from async_rl.scorer.transformers_engine import last_token_head, load_classifier

_MAX_RUNNING = 256
"""The most texts of one step of the engine."""


def prepare_process(key: str) -> None:
    """Prepare this process for vLLM, before anything imports it. ``key`` is the config key that chose vLLM.

    The engine shall run in this process: it starts in a tenth of the time, and no other process can outlive this one.

    Raises:
        ModelError: the supported version of vLLM is not installed.
    """
    prepare_environment(None)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    check_version(key)


class VllmEngine:
    """Scores texts with the model in ``directory``, as ``TransformersEngine`` does. Call ``prepare_process`` first.

    Raises:
        ModelError: the directory has no sequence-classification model with one label and a head for the last token, or
            vLLM can't run it.
    """

    def __init__(self, directory: Path, config: ScorerConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        check_model(directory, dtype)
        from vllm import PoolingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        self._parameters = PoolingParams(task="classify", use_activation=False)
        try:
            self._engine = _started(_arguments(directory, config, device, dtype))
            self.score([np.zeros(2, np.int32)])  # some kernels refuse a model only when it runs
        except Exception as error:  # whatever vLLM objects to: the model, the device, its memory
            raise ModelError(
                f"vLLM can't run the model in {directory} here: {type(error).__name__}: {error}; the reason is in the "
                f'lines above. Another memory_fraction or dtype, or backend = "transformers" may help'
            ) from error
        self._max_length = int(self._engine.model_config.max_model_len)

    def why_too_long(self, num_tokens: int) -> str:
        """Return why a text of ``num_tokens`` can't be scored: vLLM's cache can't hold it. Empty if it can."""
        if num_tokens <= self._max_length:
            return ""
        return (
            f"the prompt with its answer has {num_tokens} tokens, and the scorer's vLLM can hold only "
            f"{self._max_length}; raise its memory_fraction, or set its backend to transformers"
        )

    def score(self, texts: Sequence[np.ndarray]) -> list[float]:
        """Return the score of each text, token ids int32 [T]."""
        from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]

        for index, tokens in enumerate(texts):
            self._engine.add_request(str(index), tokens_input(tokens.tolist()), self._parameters)
        found: dict[str, float] = {}
        while self._engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs.data.item() for output in self._engine.step()}
        return [found[str(index)] for index in range(len(texts))]


def check_model(directory: Path, dtype: torch.dtype) -> None:
    """Check that vLLM scores the model in ``directory`` as transformers does. No weights are loaded.

    vLLM itself would load a model of which some weights are missing.

    Raises:
        ModelError: the model is incomplete, has several labels, or does not score the last token.
    """
    model = load_classifier(directory, dtype, is_described=True)
    if last_token_head(model) is None:
        raise ModelError(
            f"expected a model with a head for the last token in {directory}, because vLLM runs no other, got a "
            f'{type(model).__name__}, which pools in its own way; set backend = "transformers" in its table'
        )


def _arguments(directory: Path, config: ScorerConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``EngineArgs``."""
    from vllm.config import PoolerConfig  # pyright: ignore[reportMissingImports]

    is_cpu = device.type == "cpu"
    return {
        "model": str(directory),
        "runner": "pooling",
        "convert": "classify",
        "pooler_config": PoolerConfig(seq_pooling_type="LAST", use_activation=False),
        # transformers knows nothing of heads that are made from rows of another head.
        "hf_overrides": {"classifier_from_token": None, "method": None},
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": -1,  # the model's context, or what fits into the cache
        "max_num_seqs": min(_MAX_RUNNING, config.max_tokens),
        "max_num_batched_tokens": config.max_tokens,
        "gpu_memory_utilization": config.memory_fraction,
        **({"kv_cache_memory_bytes": CPU_KV_BYTES} if is_cpu else {}),
        "enforce_eager": is_cpu,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "seed": 0,
    }


def _started(arguments: dict[str, Any]) -> Any:
    """Return a new ``LLMEngine`` of vLLM."""
    from vllm import EngineArgs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    return LLMEngine.from_engine_args(EngineArgs(**arguments))
