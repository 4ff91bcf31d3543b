"""Rows of preferences: pairs of a chosen and a rejected answer, or single answers with a label.

A pair is ``{"prompt", "chosen", "rejected"}``: all three text; or the prompt a list of messages, and the answers text
or lists of messages. Without a prompt, ``chosen`` and ``rejected`` are whole lists of messages, and the messages that
both begin with are the prompt. A labelled answer is ``{"prompt", "completion", "label"}``, with the same forms; its
label is true if the answer is good. Other keys are ignored, but for ``tools``. ``rows.py`` says how they become tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from async_rl.data.files import kind
from async_rl.errors import DataError
from async_rl.learner.offline.rows import RowEncoder, Text, load_rows, train_sequence
from async_rl.learner.packing import TrainSequence


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two answers to one prompt. ``reference`` has their summed log-probabilities under the reference model, in nats;
    0 if there is none.
    """

    chosen: TrainSequence
    rejected: TrainSequence
    reference: tuple[float, float] = (0.0, 0.0)

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


def load_pairs(source: str, key: str, encoder: RowEncoder) -> list[Pair]:
    """Read the pairs of the dataset ``source``, which the config key ``key`` names.

    Raises:
        DataError: the dataset can't be read, or has no row or a bad row. The message names the row's place.
    """

    def encode(index: int, where: str, row: Mapping[str, Any]) -> Pair:
        prompt, chosen, rejected = prompt_and_answers(row, where)
        tools = row.get("tools")
        return Pair(
            encoder.encode(index, prompt, chosen, where, tools=tools),
            encoder.encode(index, prompt, rejected, where, tools=tools),
        )

    return load_rows(source, key, encode)


def load_labelled(source: str, key: str, encoder: RowEncoder, *, max_length: int) -> list[LabelledAnswer]:
    """Read the labelled answers of the dataset ``source``, which the config key ``key`` names.

    The mismatched answer of each row is that of the next row, and of the last row that of the first.

    Raises:
        DataError: the dataset can't be read, or has less than two rows or a bad row.
    """

    def encode(index: int, where: str, row: Mapping[str, Any]) -> tuple[TrainSequence, bool]:
        match row:
            case {"prompt": (str() | list()) as prompt, "completion": (str() | list()) as completion, "label": label}:
                answer = encoder.encode(index, prompt, completion, where, tools=row.get("tools"))
                return answer, _label(label, where)
            case _:
                raise DataError(
                    f'{where}: expected "prompt" and "completion" as text or lists of messages, and "label" as true or '
                    f"false, got keys {sorted(row)}; correct the row"
                )

    rows = load_rows(source, key, encode)
    if len(rows) < 2:
        raise DataError(
            f"{key}: expected at least two rows in {source}, because kto also scores answers to other prompts, got "
            f"one; add rows to it"
        )
    others = [answer for answer, _ in [*rows[1:], rows[0]]]
    return [
        LabelledAnswer(answer, _exchanged(answer, other, max_length), is_good)
        for (answer, is_good), other in zip(rows, others, strict=True)
    ]


def _label(label: Any, where: str) -> bool:
    """Return the label of a row. In CSV it is text."""
    if isinstance(label, str) and label.lower() in ("true", "false"):
        return label.lower() == "true"
    if not isinstance(label, bool):
        raise DataError(f'{where}: expected true or false as "label", got {label!r:.40}; correct the row')
    return label


def _exchanged(of_prompt: TrainSequence, of_answer: TrainSequence, max_length: int) -> TrainSequence:
    """Return the prompt of one sequence with the answer of another one."""
    prompt_end, answer_begin = (int(s.loss_mask.argmax()) for s in (of_prompt, of_answer))

    def joined(name: str) -> np.ndarray:
        parts = getattr(of_prompt, name)[:prompt_end], getattr(of_answer, name)[answer_begin:]
        return np.concatenate(parts)[:max_length]

    return train_sequence(of_prompt.sequence_id, joined("token_ids"), joined("loss_mask"))


def prompt_and_answers(row: Mapping[str, Any], where: str) -> tuple[Text, Text, Text]:
    """Return the prompt, the chosen and the rejected answer of a row.

    Raises:
        DataError: the row at the place ``where`` has none of the forms of a pair.
    """
    match row:
        case {"chosen": list(chosen), "rejected": list(rejected)} if not isinstance(row.get("prompt"), list):
            return _split(chosen, rejected, row.get("prompt"), where)
        case {"prompt": list(prompt), "chosen": (str() | list()) as chosen, "rejected": (str() | list()) as rejected}:
            size = len(prompt)
            if all(isinstance(answer, list) and answer[:size] == prompt for answer in (chosen, rejected)):
                chosen, rejected = chosen[size:], rejected[size:]  # whole lists of messages
            return prompt, chosen, rejected
        case {"prompt": str(prompt), "chosen": str(chosen), "rejected": str(rejected)}:
            return prompt, chosen, rejected
        case _:
            shown = ", ".join(f"{key}: {kind(row[key])}" for key in ("prompt", "chosen", "rejected") if key in row)
            raise DataError(
                f'{where}: expected "prompt", "chosen" and "rejected", all as text or as lists of messages, or '
                f"whole lists of messages without a prompt, got {shown or f'keys {sorted(row)}'}; correct the row"
            )


def _split(chosen: list[Any], rejected: list[Any], prompt: Any, where: str) -> tuple[Text, Text, Text]:
    """Return the messages that both lists begin with, and what follows in each. A ``prompt`` repeats the last of
    these.
    """
    both = list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    size = len(both)
    rests = chosen[size:], rejected[size:]
    if not size or not all(rest and isinstance(rest[0], dict) and rest[0].get("role") == "assistant" for rest in rests):
        raise DataError(
            f"{where}: expected chosen and rejected to begin with the same messages and to differ from an assistant "
            f"message on, got {size} equal messages of {len(chosen)} and {len(rejected)}; correct the row, or give "
            f'these messages as "prompt"'
        )
    if isinstance(prompt, str) and both[-1][0].get("content") != prompt:
        raise DataError(
            f'{where}: expected "prompt" to be the last message that chosen and rejected have in common, got '
            f"{prompt!r:.80}; leave the prompt out, or write it as a list of messages"
        )
    return chosen[:size], *rests
