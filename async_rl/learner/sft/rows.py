"""Supervised rows to token sequences, once, before training. Called by ``train.py`` on rank 0.

A row of the JSONL file is one of

- ``{"prompt": text, "response": text}``: raw text, no template and no special tokens but the end-of-sequence token
  after the response; the loss is on the response and that token.
- ``{"messages": [{"role": ..., "content": ...}, ...]}``: rendered by the chat template turn by turn; the loss is on
  every assistant turn up to its end token. What the template writes in front of a turn (``add_generation_prompt``) is
  tokenised in one piece with the messages before it, as at sampling time. Rows are taken as they are: no system
  message is added.

Other keys are ignored. Rows longer than ``sft.max_length`` are cut on the right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.errors import DataError
from async_rl.learner.packing import TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_sft_rows(path: Path, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[TrainSequence]:
    """Every row of the file, tokenised; ``sequence_id`` is the row's index.

    Raises:
        DataError: no such file, no rows, or a bad row; the message names file and line.
    """
    sequences: list[TrainSequence] = []
    for where, row in _read_rows(path):
        token_ids, loss_mask = _encode_row(row, tokenizer, where)
        token_ids, loss_mask = token_ids[:max_length], loss_mask[:max_length]
        if not loss_mask.any():
            raise DataError(
                f"{where}: no token to train on within the first {max_length} tokens; raise sft.max_length, or remove "
                f"the row"
            )
        sequences.append(_train_sequence(len(sequences), token_ids, loss_mask))
    if not sequences:
        raise DataError(f"sft.data: expected at least one row in {path}, got none")
    return sequences


def _read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """``file:line`` and the object there; blank lines are skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"sft.data: can't read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: expected one JSON object a line: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}")
        yield where, row


def _encode_row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[list[int], np.ndarray]:
    match row:
        case {"messages": list(messages)}:
            segments = _chat_segments(messages, tokenizer, where)
        case {"prompt": str(prompt), "response": str(response)}:
            end = tokenizer.eos_token_id
            if not isinstance(end, int):
                raise DataError(f"{where}: the tokenizer has no end-of-sequence token to close the response with")
            segments = [(_encode(tokenizer, prompt), False), ([*_encode(tokenizer, response), end], True)]
        case _:
            raise DataError(
                f'{where}: expected "prompt" and "response" as text, or "messages" as a list, got keys {sorted(row)}'
            )
    token_ids = [token for tokens, _ in segments for token in tokens]
    loss_mask = np.array([trained for tokens, trained in segments for _ in tokens], dtype=np.bool_)
    loss_mask[:1] = False  # nothing predicts a first token
    return token_ids, loss_mask


def _chat_segments(
    messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, where: str
) -> list[tuple[list[int], bool]]:
    """(tokens, trained on) in order; what follows the last assistant turn is left out."""
    for message in messages:
        match message:
            case {"role": str(), "content": str()}:
                pass
            case _:
                raise DataError(f'{where}: expected messages with "role" and "content" as text, got {message!r:.80}')
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(f"{where}: expected at least one assistant message")
    segments: list[tuple[list[int], bool]] = []
    done = ""
    for turn in turns:
        opened = _render(messages[:turn], tokenizer, where, open_turn=True)
        closed = _render(messages[: turn + 1], tokenizer, where, open_turn=False)
        if not opened.startswith(done) or not closed.startswith(opened):
            raise DataError(
                f"{where}: the chat template does not render message {turn} as a continuation of those before it (some "
                f"rewrite earlier turns); write one row per assistant message"
            )
        segments.append((_encode(tokenizer, opened[len(done) :]), False))
        answer = _encode(tokenizer, closed[len(opened) :])
        end = _end_of_turn(answer, tokenizer)
        segments += [(answer[:end], True), (answer[end:], False)]
        done = closed
    return segments


def _end_of_turn(answer: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens up to and with the turn's end token; what the template puts behind it is never sampled."""
    special = set(tokenizer.all_special_ids)
    ends = [place for place, token in enumerate(answer) if token in special]
    return ends[-1] + 1 if ends else len(answer)


def _render(
    messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, where: str, *, open_turn: bool
) -> str:
    if not messages:
        raise DataError(f"{where}: expected a message before the first assistant message")
    try:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=open_turn
        )
    except (
        Exception
    ) as error:  # a template raises whatever its author wrote; without one transformers raises ValueError
        raise DataError(f"{where}: the chat template can't render the messages: {error}") from error
    return str(text)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def _train_sequence(index: int, token_ids: Sequence[int], loss_mask: np.ndarray) -> TrainSequence:
    size = len(token_ids)
    return TrainSequence(
        sequence_id=index,
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=np.zeros(size, dtype=np.float32),
        versions=np.zeros(size, dtype=np.int32),
        advantages=np.zeros(size, dtype=np.float32),
        temperature=1.0,
    )
