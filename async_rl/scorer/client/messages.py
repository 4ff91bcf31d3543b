"""The messages between generators and scorers. ``net.wire`` encodes them; this module checks their content.

Shape letters: T = tokens of a sequence, S = its sampled tokens, K = tokens of the teacher's choice at each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from async_rl.errors import WireError
from async_rl.net.codec import read_as
from async_rl.net.wire import SAME_VERSION, Frame, Limits, decode, encode

MAX_QUESTION_BYTES = 8 << 20
MAX_ANSWER_BYTES = 128 << 20
"""Limit on the answer to one question. Both sides check it before the question is computed."""
MAX_PEER_QUESTIONS, MAX_PEER_BYTES = 1024, 128 << 20
"""Budget of one connection: its questions without a read answer, and their bytes with those of their answers. A single
question may exceed the bytes. Clients keep within it, and scorers refuse what is above it."""
CHUNK_BYTES = 256 << 10
"""Answers travel in chunks, so that a scorer's socket holds little of what is not read."""
LIMITS = Limits(max_bytes=MAX_QUESTION_BYTES, max_header_bytes=MAX_QUESTION_BYTES, max_arrays=2)
"""Limits on a question: a text, or the tokens of one sequence."""
_ANSWER_LIMITS = Limits(max_bytes=MAX_ANSWER_BYTES, max_header_bytes=1 << 20, max_arrays=2)
_ANSWER_HEADER_BYTES = 4096
_MAX_ERROR = 2000
_CHUNK = struct.Struct("<QQ")


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
        retry_s: above 0 if the scorer refuses the question only for now; ask again after this many seconds.
    """

    request_id: int
    digest: str
    vocabulary: str
    error: str = ""
    retry_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


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


def answer_bytes(question: TextQuestion | TokensQuestion, arrays: tuple[np.ndarray, ...]) -> int:
    """Return the size that the answer to a question has at most, in bytes."""
    if isinstance(question, TextQuestion):
        return _ANSWER_HEADER_BYTES
    # Of each sampled token 1 + K log-probabilities and K ids, of 4 bytes each.
    return _ANSWER_HEADER_BYTES + int(arrays[1].sum()) * 4 * (1 + 2 * question.top_k)


def why_too_large(question_bytes: int, answer_bytes: int) -> str:
    """Return why a question can never be answered, because of its size or its answer's; empty if it can."""
    if question_bytes > MAX_QUESTION_BYTES:
        return (
            f"expected a question of at most {MAX_QUESTION_BYTES} bytes, got {question_bytes}; lower "
            f"sampling.max_new_tokens or sampling.max_prompt_tokens"
        )
    if answer_bytes > MAX_ANSWER_BYTES:
        return (
            f"expected a question whose answer has at most {MAX_ANSWER_BYTES} bytes, got one of {answer_bytes}: 4 "
            f"bytes for each sampled token, and 8 more for each of its distill.top_k likeliest tokens; lower "
            f"distill.top_k or sampling.max_new_tokens"
        )
    return ""


def encode_answer(answer: Answer, arrays: tuple[np.ndarray, ...] = ()) -> bytes:
    """Encode an answer as one frame. A long ``error`` is cut off."""
    return encode("answer", msgspec.structs.replace(answer, error=answer.error[:_MAX_ERROR]), arrays)


def chunks(frame: Frame) -> Iterator[list[Frame]]:
    """Yield an encoded answer in chunks of at most ``CHUNK_BYTES``. Each is two frames: its place, then its bytes."""
    view = memoryview(frame)
    for start in range(0, len(view), CHUNK_BYTES):
        yield [_CHUNK.pack(len(view), start), view[start : start + CHUNK_BYTES]]


class AnswerReader:
    """Joins the chunks of the answers from one scorer. What a broken connection has left incomplete is discarded."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = self._total = 0

    def feed(self, frames: Sequence[bytes]) -> Iterator[bytes]:
        """Take in the frames of one message, which has one or several chunks. Yield the answers that are complete.

        Raises:
            WireError: the frames are no chunks, or an answer is larger than ``MAX_ANSWER_BYTES``.
        """
        if len(frames) % 2:
            raise WireError(f"expected chunks of two frames each, got {len(frames)} frames; {SAME_VERSION}")
        for place, part in zip(frames[::2], frames[1::2], strict=True):
            if len(place) != _CHUNK.size:
                raise WireError(f"expected a chunk's place of {_CHUNK.size} bytes, got {len(place)}; {SAME_VERSION}")
            total, start = _CHUNK.unpack(place)
            if total > MAX_ANSWER_BYTES:
                raise WireError(f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, got {total}; {SAME_VERSION}")
            if start == 0:
                self._parts, self._num_bytes, self._total = [], 0, total
            if (start, total) != (self._num_bytes, self._total) or not part or start + len(part) > total:
                self._parts, self._num_bytes, self._total = [], 0, 0  # its begin went to an earlier connection
                continue
            self._parts.append(part)
            self._num_bytes += len(part)
            if self._num_bytes == total:
                yield self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts, self._num_bytes, self._total = [], 0, 0


def decode_answer(frame: Frame) -> Received:
    """Decode an ``Answer``.

    Raises:
        WireError: the frame is malformed.
    """
    message = decode(frame, _ANSWER_LIMITS)
    if message.type != "answer":
        raise WireError(f"expected an 'answer' message, got {message.type!r}; {SAME_VERSION}")
    return Received(read_as(message.fields, Answer), message.arrays)
