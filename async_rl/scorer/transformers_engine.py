"""Scores texts with a sequence-classification model that transformers runs.

Texts are batched by length, with padding on the right, which no real token of a causal model sees. ``load_classifier``
and ``last_token_head`` also check models for the vLLM engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from async_rl.attention_limits import caps_attention
from async_rl.config.scorer import ScorerConfig
from async_rl.data.model_config import read_model_config
from async_rl.errors import ModelError


class TransformersEngine:
    """Scores texts with the model in ``directory``.

    Raises:
        ModelError: the directory has no sequence-classification model with one label.
    """

    def __init__(self, directory: Path, config: ScorerConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self._model = load_classifier(directory, dtype).to(device)
        self._head = last_token_head(self._model)
        self._max_tokens, self._device = config.max_tokens, device

    def why_too_long(self, num_tokens: int) -> str:
        """Return an empty text: a batch may be of any length."""
        return ""

    def score(self, texts: Sequence[np.ndarray]) -> list[float]:
        """Return the score of each text, token ids int32 [T] with T >= 1. Their number may be 0."""
        found = [0.0] * len(texts)
        for batch in batches([len(tokens) for tokens in texts], self._max_tokens):
            for index, score in zip(batch, self._scores([texts[index] for index in batch]), strict=True):
                found[index] = score
        return found

    @torch.inference_mode()
    def _scores(self, texts: Sequence[np.ndarray]) -> list[float]:
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        mask = torch.zeros(len(texts), longest, dtype=torch.long)
        for row, tokens in enumerate(texts):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            mask[row, : len(tokens)] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        if self._head is None:
            return self._model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
        hidden = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(texts), device=self._device), mask.sum(1) - 1]
        return self._head(last)[:, 0].float().tolist()


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of ``lengths`` in batches of similar lengths: rows times the longest is at most
    ``max_tokens``, or there is one row.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda one: (lengths[one], one)):
        if batch and (len(batch) + 1) * lengths[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def load_classifier(directory: Path, dtype: torch.dtype, *, is_described: bool = False) -> Any:
    """Load the sequence-classification model in ``directory`` to the CPU, in evaluation mode.

    With ``is_described`` it is checked in the same way, but on torch's meta device: it has no weights.

    Raises:
        ModelError: there is none, it has another number of labels than one, or weights are missing.
    """
    from transformers import AutoModelForSequenceClassification

    place: dict[str, Any] = {"device_map": "meta"} if is_described else {}
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            directory, config=read_model_config(directory), dtype=dtype, output_loading_info=True,
            trust_remote_code=False, use_safetensors=True, **place,
        )  # fmt: skip
    except ModelError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for unfit directories
        raise ModelError(
            f"can't load a sequence-classification model from {directory}: {type(error).__name__}: {error}; expected "
            f"what `async-rl rm` or save_pretrained writes"
        ) from error
    model, info = loaded
    if model.config.num_labels != 1 or info["missing_keys"]:
        got = f"{model.config.num_labels} labels" if not info["missing_keys"] else f"no {min(info['missing_keys'])}"
        raise ModelError(
            f"expected a sequence-classification model with one label in {directory}, got {got}; choose a reward model"
        )
    if caps_attention(model.config):
        model.set_attn_implementation("eager")  # the default leaves the caps out
    return model.eval()


def last_token_head(model: Any) -> nn.Linear | None:
    """Return the head that causal models apply to their last token. None for other models, which pool by themselves."""
    head = getattr(model, "score", None)
    return head if isinstance(head, nn.Linear) else None
