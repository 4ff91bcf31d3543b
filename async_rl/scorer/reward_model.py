"""A reward model as a scorer: a sequence-classification model with one label.

The score of an answer is that of the last token of the prompt with the answer, both rendered by the model's own
tokenizer. An engine, which ``scorer.NAME.backend`` names, computes the scores of the tokens. A text that is longer than
the model's context is refused, never cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from async_rl.config.scorer import ScorerConfig
from async_rl.data.chat import context_length, load_tokenizer, render_answer, vocabulary_size
from async_rl.data.vocabulary import check_embedded, vocabulary_digest
from async_rl.errors import ModelError
from async_rl.scorer.client.messages import Received, TextQuestion
from async_rl.scorer.model_files import model_digest
from async_rl.scorer.server import Scored
from async_rl.scorer.transformers_engine import TransformersEngine
from async_rl.scorer.vllm_engine import VllmEngine


class RewardModel:
    """Scores answers with the model in ``directory``. ``arguments`` are those of ``render_answer``.

    Raises:
        ModelError: the directory has no sequence-classification model with one label, or no tokenizer; or the engine
            can't run the model.
    """

    def __init__(
        self, directory: Path, config: ScorerConfig, *, device: torch.device, dtype: torch.dtype,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._arguments = arguments
        self.digest = model_digest(directory)
        self._tokenizer = load_tokenizer(directory, needs_template=False)
        self.vocabulary, self._num_rows = vocabulary_digest(self._tokenizer), vocabulary_size(directory)
        engine = VllmEngine if config.backend == "vllm" else TransformersEngine
        self._engine = engine(directory, config, device=device, dtype=dtype)
        self._max_length = context_length(directory)

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
        for index, score in zip(ids, self._engine.score(list(ids.values())), strict=True):
            found[index] = (np.array([score], np.float32),)
        return found

    def _rendered(self, question: Any) -> np.ndarray | str:
        """Return the tokens of prompt and answer, int32 [T], or why there are none."""
        if not isinstance(question, TextQuestion):
            return "expected a text, because this scorer is a reward model, got tokens; correct distill.teacher"
        try:
            tokens = render_answer(self._tokenizer, question.messages, question.text, self._arguments)
            check_embedded(tokens, self._num_rows, self._tokenizer, "a prompt with its answer")
        except ModelError as error:
            return str(error)
        if self._max_length is not None and len(tokens) > self._max_length:
            return (
                f"the prompt with its answer has {len(tokens)} tokens, and the reward model's context only "
                f"{self._max_length}; lower sampling.max_new_tokens or sampling.max_prompt_tokens"
            )
        return self._engine.why_too_long(len(tokens)) or tokens
