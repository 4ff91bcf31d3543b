"""The messages between generators and scorers. ``net.wire`` encodes them; this module checks their content.

Shape letters: T = tokens of a sequence, S = its sampled tokens, K = tokens of the teacher's choice at each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from async_rl.errors import WireError
from async_rl.net.codec import read_as
from async_rl.net.wire import SAME_VERSION, Frame, Limits, decode, encode

LIMITS = Limits(max_bytes=64 << 20, max_header_bytes=16 << 20, max_arrays=2)
"""Limits on a question: a text, or the tokens of one sequence."""
_ANSWER_LIMITS = Limits(max_bytes=1 << 30, max_header_bytes=1 << 20, max_arrays=2)


class TextQuestion(msgspec.Struct, frozen=True, tag="text"):
    """Asks a reward model for the score of one answer.

    Attributes:
        request_id: chosen by the client; the answer has the same.
        messages: the messages of the prompt, as in ``records.Prompt``.
        text: the model's answer.
    """

    request_id: int
    messages: list[dict[str, str]]
    text: str


class TokensQuestion(msgspec.Struct, frozen=True, tag="tokens"):
    """Asks a teacher for the log-probabilities of the sampled tokens of one sequence, whose arrays follow.

    The arrays are token_ids, int32 [T], and loss_mask, bool [T], as in ``records.TokenSequence``.

    Attributes:
        request_id: chosen by the client; the answer has the same.
        temperature: by which the teacher's logits are divided, above 0.
        top_k: K, the number of the teacher's likeliest tokens to return at each sampled token.
    """

    request_id: int
    temperature: Annotated[float, msgspec.Meta(gt=0)]
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0


class Answer(msgspec.Struct, frozen=True):
    """What a scorer answers.

    Its arrays are, to a text, the score, float32 [1]; to tokens, the log-probabilities, float32 [S, 1 + K] in nats: of
    the sampled token, then of the teacher's likeliest tokens; and the ids of the latter, int32 [S, K].

    Attributes:
        request_id: that of the question.
        digest: the digest of the scorer's model, with its tokenizer.
        vocabulary: the digest of its tokenizer's vocabulary.
        error: why the question has no answer; empty if it has one.
    """

    request_id: int
    digest: str
    vocabulary: str
    error: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A message with its arrays, as it came."""

    message: Any
    arrays: tuple[np.ndarray, ...]


def encode_question(question: TextQuestion | TokensQuestion, arrays: tuple[np.ndarray, ...] = ()) -> bytes:
    """Encode a question as one frame."""
    return encode("question", msgspec.to_builtins(question), arrays)


def decode_question(frame: Frame) -> Received:
    """Decode a question, a ``TextQuestion`` or ``TokensQuestion``.

    Raises:
        WireError: the frame is malformed.
    """
    message = decode(frame, LIMITS)
    if message.type != "question":
        raise WireError(f"expected a 'question' message, got {message.type!r}; {SAME_VERSION}")
    question: Any = read_as(message.fields, TextQuestion | TokensQuestion)  # pyright: ignore[reportArgumentType]
    if isinstance(question, TokensQuestion):
        _check_tokens(message.arrays)
    return Received(question, message.arrays)


def _check_tokens(arrays: tuple[np.ndarray, ...]) -> None:
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    length = arrays[0].shape if arrays else (0,)
    if shapes != [("<i4", length), ("|b1", length)] or len(length) != 1 or not length[0]:
        raise WireError(
            f"expected token_ids int32 [T] and loss_mask bool [T] in a question, got {shapes}; {SAME_VERSION}"
        )
    if arrays[1][0]:
        raise WireError("expected a first token outside the loss mask in a question, because nothing predicts it")


def encode_answer(answer: Answer, arrays: tuple[np.ndarray, ...] = ()) -> bytes:
    """Encode an answer as one frame."""
    return encode("answer", answer, arrays)


def decode_answer(frame: Frame) -> Received:
    """Decode an ``Answer``.

    Raises:
        WireError: the frame is malformed.
    """
    message = decode(frame, _ANSWER_LIMITS)
    if message.type != "answer":
        raise WireError(f"expected an 'answer' message, got {message.type!r}; {SAME_VERSION}")
    return Received(read_as(message.fields, Answer), message.arrays)
