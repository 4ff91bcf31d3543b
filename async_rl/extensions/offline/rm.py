"""Reward models: ``async-rl rm CONFIG`` trains a model that scores answers on pairs of a better and a worse one.

The model is a causal LM whose head becomes one number, or a sequence classification model with one label. The score of
an answer is the value at the last token of prompt and answer. The loss is that of Bradley and Terry on the difference
of the scores (InstructGPT, arXiv:2203.02155, equation 1), with a margin if rows have one (Llama 2, arXiv:2307.09288,
equation 2).

A row of ``rm.data`` is a pair as in ``pairs.py``. The chat template renders messages, answer included, as the scorer of
``reward.type = "model"`` renders them: it gets no variables of ``data.chat_template_kwargs`` and no tools, but the
variables of the row's own column ``chat_template_kwargs``. Text is used without a template, and the end-of-sequence
token follows it. An optional number ``margin`` says how much better the chosen answer is. A pair with a sequence of
more than ``rm.max_length`` tokens is left out, because its end has the score, and so is one of two equal answers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from async_rl.config.offline import RmConfig
from async_rl.data.chat import load_tokenizer
from async_rl.errors import DataError
from async_rl.extensions.offline.forms import pair_parts
from async_rl.extensions.offline.pairs import EqualAnswers, Pair
from async_rl.extensions.offline.rows import RowEncoder, load_rows
from async_rl.extensions.offline.run import Metrics, OfflineTask
from async_rl.extensions.offline.scores import numbered, summed_in_chunks
from async_rl.extensions.offline.slopes import sequence_slopes
from async_rl.learner.interface import Engine, UpdateStats
from async_rl.learner.sequences import TrainSequence, train_sequence

logger = logging.getLogger(__name__)


class RewardModel(OfflineTask[Pair]):
    """``async-rl rm``: the loss of Bradley and Terry, the mean over pairs."""

    name, head = "rm", "value"

    @property
    def section(self) -> RmConfig:
        return self.config.rm

    def encoder(self) -> RowEncoder:
        tokenizer = load_tokenizer(self.config.model.path, needs_template=False)
        arguments = self.config.data.content_argument
        return RowEncoder(tokenizer, arguments, max_length=self.section.max_length, section=self.name)

    def load_rows(self, source: str, key: str) -> list[Pair]:
        return load_scored_pairs(source, key, self.encoder(), self.config.data.ignore)

    def sequences(self, row: Pair) -> Sequence[TrainSequence]:
        return row.sequences

    def figure(self, row: Pair) -> float:
        return row.margin

    def step(self, engine: Engine, batch: Sequence[Pair]) -> tuple[UpdateStats, Metrics]:
        sequences = numbered([sequence for pair in batch for sequence in self.sequences(pair)])
        scores_S, margins_P = self._scores(engine, batch), _margins(batch)
        _, with_slopes = sequence_slopes(
            sequences, scores_S, lambda scores_S: bradley_terry_loss(*_sides(scores_S), margins_P)
        )
        stats = engine.update(with_slopes, version=0)
        return stats, pair_metrics(*_sides(scores_S), margins_P)

    def evaluate(self, engine: Engine, rows: Sequence[Pair]) -> Metrics:
        return pair_metrics(*_sides(self._scores(engine, rows)), _margins(rows))

    def _scores(self, engine: Engine, pairs: Sequence[Pair]) -> Tensor:
        """Return the scores of both answers of each pair, which take turns, float64 [S]."""
        scores = summed_in_chunks(engine, [pair.sequences for pair in pairs])
        return torch.tensor(scores, dtype=torch.float64).reshape(-1)


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor) -> Tensor:
    """Return the mean of -log sigmoid(chosen - rejected - margin).

    Args:
        chosen_P: scores of the better answers, float [P].
        rejected_P: scores of the worse ones.
        margins_P: margins, 0 for the plain loss.
    """
    return -logsigmoid(chosen_P - rejected_P - margins_P).mean()


@torch.no_grad()
def pair_metrics(chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor) -> dict[str, float]:
    """Return the loss, the share of pairs in the right order, where a tie counts half, and means of the scores."""
    difference_P = chosen_P - rejected_P
    right_P = (difference_P.sign() + 1) / 2
    return {
        "loss": bradley_terry_loss(chosen_P, rejected_P, margins_P).item(),
        "accuracy": right_P.mean().item(),
        "margin": difference_P.mean().item(),
        "chosen": chosen_P.mean().item(),
        "rejected": rejected_P.mean().item(),
    }


def _sides(scores_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of the chosen and of the rejected answers, which take turns."""
    return scores_S[0::2], scores_S[1::2]


def _margins(pairs: Sequence[Pair]) -> Tensor:
    return torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)


def load_scored_pairs(source: str, key: str, encoder: RowEncoder, ignore: Collection[str] = ()) -> list[Pair]:
    """Read the pairs of the dataset ``source``, which the config key ``key`` names, without the columns ``ignore``. The
    only trained token of a sequence stands for its end.

    Raises:
        DataError: the dataset can't be read, or has no row, a bad row, or no pair that is short enough.
    """
    max_length, too_long, equal = encoder.max_length, set[int](), EqualAnswers(key)

    def encode(index: int, where: str, row: Mapping[str, Any]) -> Pair | None:
        prompt, *answers = pair_parts(row, where)
        sides = [encoder.scored(prompt or "", one, where, row.get("chat_template_kwargs")) for one in answers]
        margin = _margin(row.get("margin", 0.0), where)
        if any(len(side) > max_length for side in sides):
            too_long.add(index)
            return None
        if equal.are_equal(answers, *sides):
            return None
        chosen, rejected = (_with_end(2 * index + place, side) for place, side in enumerate(sides))
        return Pair(chosen, rejected, margin=margin)

    rows = load_rows(source, key, encode, ignore)
    if too_long:
        logger.warning(
            "%d of %d pairs of %s are left out, because a sequence has more than rm.max_length = %d tokens",
            len(too_long), len(rows), key, max_length,
        )  # fmt: skip
    if len(too_long) == len(rows):
        raise DataError(f"{key}: expected a pair of at most rm.max_length = {max_length} tokens, got none; raise it")
    return equal.left_over([row for index, row in enumerate(rows) if index not in too_long])


def _margin(value: Any, where: str) -> float:
    """Return the margin of a row. In CSV it is text."""
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(margin := float(0.0 if value is None else value)):
            return margin
    raise DataError(f"{where}: margin: expected a finite number, got {value!r:.80}; correct the row")


def _with_end(index: int, token_ids: np.ndarray) -> TrainSequence:
    """Return a sequence with one more token, the only trained one: its value is that of the last token before it, and
    it is not computed itself.
    """
    loss_mask = np.zeros(len(token_ids) + 1, dtype=np.bool_)
    loss_mask[-1] = True
    return train_sequence(index, [*token_ids.tolist(), token_ids[-1]], loss_mask)
