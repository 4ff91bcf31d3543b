"""Rows of preferences: pairs of a chosen and a rejected answer, or single answers with a label.

A pair is ``{"prompt", "chosen", "rejected"}``, in the forms of ``forms.py``; ``messages`` may be the prompt. Without a
prompt, ``chosen`` and ``rejected`` contain it: it is the messages, or the tokens of plain text, that both begin with. A
labelled answer is ``{"prompt", "completion", "label"}``; its label is true if the answer is good. ``tools`` and
``chat_template_kwargs`` are for the template. ``rows.py`` says how they become tokens. Pairs of two equal answers teach
nothing: they are left out, and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from async_rl.data.values import truth
from async_rl.errors import DataError
from async_rl.extensions.offline.forms import Text, labelled_parts, pair_parts
from async_rl.extensions.offline.rows import RowEncoder, load_rows, template_fields
from async_rl.learner.sequences import TrainSequence, train_sequence

logger = logging.getLogger(__name__)

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A better and a worse answer to one prompt.

    Attributes:
        reference: their summed log-probabilities under the reference model, in nats; 0 if there is none.
        margin: by how much a reward model's scores should differ at least; 0 if the row does not say.
    """

    chosen: TrainSequence
    rejected: TrainSequence
    reference: tuple[float, float] = (0.0, 0.0)
    margin: float = 0.0

    @property
    def sequences(self) -> tuple[TrainSequence, TrainSequence]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True, eq=False)
class LabelledAnswer:
    """An answer that is good or bad, and an answer to another prompt (``mismatched``). ``reference`` as in ``Pair``."""

    answer: TrainSequence
    mismatched: TrainSequence
    is_good: bool
    reference: tuple[float, float] = (0.0, 0.0)

    @property
    def sequences(self) -> tuple[TrainSequence, TrainSequence]:
        return self.answer, self.mismatched


def load_pairs(source: str, key: str, encoder: RowEncoder, ignore: Collection[str] = ()) -> list[Pair]:
    """Read the pairs of the dataset ``source``, which the config key ``key`` names, without the columns ``ignore``.

    Raises:
        DataError: the dataset can't be read, or has no row or a bad row. The message names the row's place.
    """
    equal = EqualAnswers(key)

    def encode(index: int, where: str, row: Mapping[str, Any]) -> Pair | None:
        prompt, *answers = pair_parts(row, where)
        if prompt is None:
            first, second = (encoder.encode_whole(index, str(answer), where) for answer in answers)
            chosen, rejected = _with_shared_prompt(first, second, where)
        else:
            chosen, rejected = (encoder.encode(index, prompt, a, where, **template_fields(row)) for a in answers)
        if equal.are_equal(answers, chosen.token_ids, rejected.token_ids):
            return None
        return Pair(chosen, rejected)

    rows = load_rows(source, key, encode, ignore)
    encoder.say_what_was_cut(key)
    return equal.left_over(rows)


class EqualAnswers:
    """Counts pairs whose answers are equal, and says so."""

    def __init__(self, key: str) -> None:
        """``key`` names the dataset in messages."""
        self._key = key
        self._num_equal = self._num_cut = 0

    def are_equal(self, answers: Sequence[Text], chosen_ids: np.ndarray, rejected_ids: np.ndarray) -> bool:
        """Return whether the tokens of a pair are equal, and count it. ``answers`` are what the row has."""
        if not np.array_equal(chosen_ids, rejected_ids):
            return False
        self._num_equal += 1
        self._num_cut += answers[0] != answers[1]
        return True

    def left_over(self, rows: Sequence[Row | None]) -> list[Row]:
        """Return ``rows`` without None, which stands for a pair of equal answers. Log how many there were.

        Raises:
            DataError: no pair is left.
        """
        cut = f", {self._num_cut} of them since they were cut or rendered" if self._num_cut else ""
        found = f"{self._num_equal} of {len(rows)} pairs have two equal answers{cut}"
        if self._num_equal == len(rows):
            raise DataError(
                f"{self._key}: expected pairs of two different answers, got none: {found}; correct the rows"
            )
        if self._num_equal:
            logger.warning("%s: %s; they teach nothing and are left out", self._key, found)
        return [row for row in rows if row is not None]


def _with_shared_prompt(
    chosen: TrainSequence, rejected: TrainSequence, where: str
) -> tuple[TrainSequence, TrainSequence]:
    """Return two sequences with no loss on the tokens that both begin with. Equal ones are returned as they are.

    Raises:
        DataError: they have no trained token in common, so there is no prompt.
    """
    size = min(len(chosen.token_ids), len(rejected.token_ids))
    differs = np.append(chosen.token_ids[:size] != rejected.token_ids[:size], True)
    begin = int(differs.argmax())
    if begin == len(chosen.token_ids) == len(rejected.token_ids):
        return chosen, rejected
    if not chosen.loss_mask[:begin].any():
        raise DataError(
            f"{where}: expected chosen and rejected, which are text without a prompt, to begin with the same text, got "
            f'two that differ from the beginning; give the question as "prompt"'
        )
    return _without_loss(chosen, begin), _without_loss(rejected, begin)


def _without_loss(sequence: TrainSequence, size: int) -> TrainSequence:
    """Return ``sequence`` without a loss on its first ``size`` tokens."""
    mask = sequence.loss_mask & (np.arange(len(sequence.loss_mask)) >= size)
    return train_sequence(sequence.sequence_id, sequence.token_ids, mask)


def load_labelled(source: str, key: str, encoder: RowEncoder, ignore: Collection[str] = ()) -> list[LabelledAnswer]:
    """Read the labelled answers of the dataset ``source``, which the config key ``key`` names, without the columns
    ``ignore``.

    The mismatched answer of each row is that of the next row, and of the last row that of the first.

    Raises:
        DataError: the dataset can't be read, or has less than two rows or a bad row.
    """

    def encode(index: int, where: str, row: Mapping[str, Any]) -> tuple[TrainSequence, bool]:
        prompt, completion, label = labelled_parts(row, where)
        return encoder.encode(index, prompt, completion, where, **template_fields(row)), _label(label, where)

    rows = load_rows(source, key, encode, ignore)
    if len(rows) < 2:
        raise DataError(
            f"{key}: expected at least two rows in {source}, because kto also scores answers to other prompts, got "
            f"one; add rows to it"
        )
    encoder.say_what_was_cut(key)
    others = [answer for answer, _ in [*rows[1:], rows[0]]]
    return [
        LabelledAnswer(answer, _exchanged(answer, other, encoder.max_length), is_good)
        for (answer, is_good), other in zip(rows, others, strict=True)
    ]


def _label(label: Any, where: str) -> bool:
    """Return the label of a row: true or false, 1 or 0, in CSV as text."""
    named = truth(label)
    if named is None:
        raise DataError(f'{where}: expected true or false (or 1 or 0) as "label", got {label!r:.40}; correct the row')
    return named


def _exchanged(of_prompt: TrainSequence, of_answer: TrainSequence, max_length: int) -> TrainSequence:
    """Return the prompt of one sequence with the answer of another one."""
    prompt_end, answer_begin = (int(s.loss_mask.argmax()) for s in (of_prompt, of_answer))

    def joined(name: str) -> np.ndarray:
        parts = getattr(of_prompt, name)[:prompt_end], getattr(of_answer, name)[answer_begin:]
        return np.concatenate(parts)[:max_length]

    return train_sequence(of_prompt.sequence_id, joined("token_ids"), joined("loss_mask"))
