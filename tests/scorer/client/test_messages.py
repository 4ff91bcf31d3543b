"""The sizes of answers, and their way in chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import WireError
from async_rl.scorer.client import messages
from async_rl.scorer.client.messages import (
    Answer,
    AnswerReader,
    TextQuestion,
    TokensQuestion,
    answer_bytes,
    chunks,
    encode_answer,
    why_too_large,
)


@given(num_sampled=st.integers(1, 300), top_k=st.integers(0, 20), error=st.text(max_size=4000))
def test_an_answer_is_never_larger_than_was_expected_of_its_question(num_sampled: int, top_k: int, error: str):
    ids, mask = np.zeros(num_sampled + 1, "<i4"), np.ones(num_sampled + 1, "|b1")
    mask[0] = False
    expected = answer_bytes(TokensQuestion(1, 1.0, top_k), (ids, mask))
    arrays = (np.zeros((num_sampled, 1 + top_k), "<f4"), np.zeros((num_sampled, top_k), "<i4"))
    assert len(encode_answer(Answer(1 << 60, "d" * 64, "v" * 64), arrays)) <= expected
    assert answer_bytes(TextQuestion(1, [], ""), ()) >= len(encode_answer(Answer(1, "d" * 64, "v" * 64), (ids[:1],)))


def test_what_can_never_be_answered_is_refused_with_the_numbers_and_the_remedy():
    # 8,192 sampled tokens with 1,024 likeliest ones: 4 + 8 * 1024 bytes each, 67 MB. 16,384 are above 128 MiB.
    assert why_too_large(41_000, 8192 * (4 + 8 * 1024)) == ""
    assert "lower distill.top_k" in why_too_large(82_000, 16_384 * (4 + 8 * 1024))
    assert "expected a question of at most 8388608 bytes, got 8388609" in why_too_large((8 << 20) + 1, 0)


def test_an_answer_above_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(messages, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(WireError, match="expected an answer of at most 1000 bytes"):
        encode_answer(Answer(1, "d", "v"), (np.zeros(300, "<f4"),))


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.integers(1, 6), st.data())
def test_answers_arrive_whole_whatever_chunks_share_a_message(frames: list[bytes], size: int, data: st.DataObject):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "CHUNK_BYTES", size)
        pairs = [[bytes(place), bytes(part)] for frame in frames for place, part in chunks(frame)]
    reader, got = AnswerReader(), []
    while pairs:
        count = data.draw(st.integers(1, len(pairs)))
        got += reader.feed([frame for pair in pairs[:count] for frame in pair])
        del pairs[:count]
    assert got == frames


def test_what_a_broken_connection_left_is_discarded():
    reader = AnswerReader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "CHUNK_BYTES", 2)
        old, new = ([[bytes(a), bytes(b)] for a, b in chunks(text)] for text in (b"oldold", b"newnew"))
    assert list(reader.feed(old[0])) == []
    # A begin without an end, then an end without a begin.
    assert list(reader.feed([*new[0], *new[1], *new[2]])) == [b"newnew"]
    assert list(reader.feed(old[1] + old[2])) == []
    assert list(reader.feed([*new[0], *new[1], *new[2]])) == [b"newnew"]


def test_a_client_takes_no_answer_above_the_limit():
    with pytest.raises(WireError, match="expected an answer of at most 134217728 bytes, got 134217729"):
        list(AnswerReader().feed([messages._CHUNK.pack((128 << 20) + 1, 0), b"x"]))
    for frames in ([b"x"], [b"short", b"x"]):
        with pytest.raises(WireError, match="expected"):
            list(AnswerReader().feed(frames))
