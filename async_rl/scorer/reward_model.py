"""A reward model as a scorer: a sequence-classification model with one label, run by transformers.

The score of an answer is that of the last token of the prompt with the answer, both rendered by the model's own
tokenizer. Texts are batched by length, with padding on the right, which no real token of a causal model sees. A text
that is longer than the model's context is refused, never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from async_rl.config.scorer import ScorerConfig
from async_rl.data.chat import context_length, load_tokenizer, render_answer
from async_rl.data.vocabulary import vocabulary_digest
from async_rl.errors import ModelError
from async_rl.scorer.model_files import model_digest
from async_rl.scorer.server import Scored
from async_rl.scoring.messages import Received, TextQuestion


class RewardModel:
    """Scores answers with the model in ``directory``.

    Raises:
        ModelError: the directory has no sequence-classification model with one label, or no tokenizer.
    """

    def __init__(self, directory: Path, config: ScorerConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self.digest = model_digest(directory)
        self._tokenizer = load_tokenizer(directory, needs_template=False)
        self.vocabulary = vocabulary_digest(self._tokenizer)
        self._model = _load(directory, dtype).to(device)
        self._head = _last_token_head(self._model)
        self._max_length, self._max_tokens, self._device = context_length(directory), config.max_tokens, device

    def answer(self, questions: Sequence[Received]) -> list[Scored]:
        """Return the scores of texts, float32 [1] each."""
        found: list[Scored] = [""] * len(questions)
        ids: dict[int, np.ndarray] = {}
        for index, received in enumerate(questions):
            tokens = self._rendered(received.message)
            if isinstance(tokens, str):
                found[index] = tokens
            else:
                ids[index] = tokens
        for batch in batches({index: len(tokens) for index, tokens in ids.items()}, self._max_tokens):
            scores = self._scores([ids[index] for index in batch])
            for index, score in zip(batch, scores, strict=True):
                found[index] = (np.array([score], np.float32),)
        return found

    def _rendered(self, question: Any) -> np.ndarray | str:
        """Return the tokens of prompt and answer, int32 [T], or why there are none."""
        if not isinstance(question, TextQuestion):
            return "expected a text, because this scorer is a reward model, got tokens; correct distill.teacher"
        try:
            tokens = render_answer(self._tokenizer, question.messages, question.text)
        except ModelError as error:
            return str(error)
        if self._max_length is not None and len(tokens) > self._max_length:
            return (
                f"the prompt with its answer has {len(tokens)} tokens, and the reward model's context only "
                f"{self._max_length}; lower sampling.max_new_tokens or sampling.max_prompt_tokens"
            )
        return tokens

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


def batches(lengths: dict[int, int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the keys of ``lengths`` in batches of similar lengths: rows times the longest is at most ``max_tokens``, or
    there is one row.
    """
    batch: list[int] = []
    for index in sorted(lengths, key=lambda one: (lengths[one], one)):
        if batch and (len(batch) + 1) * lengths[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _load(directory: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForSequenceClassification

    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=dtype, output_loading_info=True
        )
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
    return model.eval()


def _last_token_head(model: Any) -> nn.Linear | None:
    """Return the head that causal models apply to their last token. None for other models, which pool by themselves."""
    head = getattr(model, "score", None)
    return head if isinstance(head, nn.Linear) else None
