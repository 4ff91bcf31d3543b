"""A teacher as a scorer: a causal LM that says how likely it finds the tokens that the policy sampled.

It runs the learner's model class on padded rows, with transformers' own attention, and the head only where a sampled
token is predicted. Shape letters: N = sampled tokens of a batch, C = those of a chunk, V = vocabulary, K = the
teacher's likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.config.learner import ModelConfig
from async_rl.config.scorer import ScorerConfig
from async_rl.data.chat import context_length, load_tokenizer
from async_rl.data.vocabulary import vocabulary_digest
from async_rl.learner.data.packing import MicroBatch, by_sequence, pack
from async_rl.learner.model.policy_model import PolicyModel, load_model, to_device
from async_rl.learner.sequences import train_sequence
from async_rl.scorer.client.messages import Received, TokensQuestion
from async_rl.scorer.model_files import model_digest
from async_rl.scorer.server import Scored

_CHUNK_BYTES = 256 << 20
"""Size of one chunk's float32 logits."""


class Teacher:
    """Scores sampled tokens with the causal LM in ``directory``.

    Raises:
        ModelError: the directory has no causal LM, or no tokenizer.
    """

    def __init__(self, directory: Path, config: ScorerConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self.digest = model_digest(directory)
        self.vocabulary = vocabulary_digest(load_tokenizer(directory, needs_template=False))
        causal_lm: Any = load_model(ModelConfig(path=str(directory)))
        self._model = PolicyModel(causal_lm.to(dtype), "padded").to(device)
        self._model.requires_grad_(False)
        self._head = cast(nn.Linear, self._model.causal_lm.get_output_embeddings())
        self._max_length, self._max_tokens, self._device = context_length(directory), config.max_tokens, device

    def answer(self, questions: Sequence[Received]) -> list[Scored]:
        """Return log-probabilities, float32 [S, 1 + K], and the likeliest tokens, int32 [S, K], of each question."""
        found: list[Scored] = [self._fault(received) for received in questions]
        by_top_k: dict[int, list[int]] = {}
        for index, received in enumerate(questions):
            if not found[index]:
                by_top_k.setdefault(received.message.top_k, []).append(index)
        for top_k, indices in by_top_k.items():
            sequences = [
                train_sequence(index, *questions[index].arrays, temperature=questions[index].message.temperature)
                for index in indices
            ]
            longest = max(len(sequence.token_ids) for sequence in sequences)
            parts = pack(sequences, max_tokens=max(longest, self._max_tokens), num_ranks=1, packing="padded")
            scored = [self._scored(micro_batch, top_k) for micro_batch in parts[0]]
            logprobs, ids = (by_sequence(parts, [np.concatenate(values)]) for values in zip(*scored, strict=True))
            for index in indices:
                found[index] = (logprobs[index], ids[index])
        return found

    def _fault(self, received: Received) -> str:
        """Return why a question can't be answered; empty if it can."""
        question = received.message
        if not isinstance(question, TokensQuestion):
            return "expected tokens, because this scorer is a teacher, got a text; correct reward.model"
        length, size = len(received.arrays[0]), self._model.vocab_size
        if self._max_length is not None and length > self._max_length:
            return (
                f"the sequence has {length} tokens, and the teacher's context only {self._max_length}; lower "
                f"sampling.max_new_tokens or sampling.max_prompt_tokens"
            )
        lowest, highest = int(received.arrays[0].min()), int(received.arrays[0].max())
        if lowest < 0 or max(highest + 1, question.top_k) > size:
            return f"expected token ids and top_k within the teacher's {size} logits, got {lowest} to {highest}"
        return ""

    @torch.inference_mode()
    def _scored(self, micro_batch: MicroBatch, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return float32 [N, 1 + K] and int32 [N, K]."""
        batch = to_device(micro_batch, self._device, "padded")
        hidden_Nd = self._model.hidden_states(batch).index_select(0, batch.predict_index)
        rows = max(1, _CHUNK_BYTES // (4 * self._model.vocab_size))
        logprobs: list[Tensor] = []
        top_ids: list[Tensor] = []
        for hidden_Cd, targets_C, temperatures_C in zip(
            hidden_Nd.split(rows), batch.targets.split(rows), batch.temperatures.split(rows), strict=True
        ):
            logits_CV = self._model.logits(self._head(hidden_Cd)).float() / temperatures_C[:, None]
            logprobs_CV = logits_CV.log_softmax(-1)
            top = logprobs_CV.topk(top_k, dim=-1)
            logprobs.append(torch.cat([logprobs_CV.gather(-1, targets_C[:, None]), top.values], dim=-1))
            top_ids.append(top.indices.int())
        return torch.cat(logprobs).cpu().numpy(), torch.cat(top_ids).cpu().numpy()
