"""Prompts that are too long lose the end of the question, never the template around it."""

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rl.generator.rollouts import fitted_prompt

OPENING = "[assistant]"


def encode(messages: Sequence[Mapping[str, str]]) -> np.ndarray:
    """A character a token; every message in brackets of its role, then the assistant's opening."""
    text = "".join(f"[{m['role']}]{m['content']}" for m in messages) + OPENING
    return np.array([ord(character) for character in text], np.int32)


def decode(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


def fitted(messages: Sequence[Mapping[str, str]], max_tokens: int) -> str:
    return decode(fitted_prompt(encode, messages, encode(messages), max_tokens))


SYSTEM = {"role": "system", "content": "S"}
ASKED = [SYSTEM, {"role": "user", "content": "0123456789"}]


def test_the_end_of_the_question_is_cut_and_the_opening_stays():
    assert fitted(ASKED, 35) == "[system]S[user]012345678[assistant]"
    assert fitted(ASKED, 27) == "[system]S[user]0[assistant]"


def test_the_last_user_message_is_the_one_that_is_cut():
    chat = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "ef"},
    ]
    assert fitted(chat, len(encode(chat)) - 1) == "[user]ab[assistant]cd[user]e[assistant]"


@given(st.text("ab", max_size=40), st.integers(1, 60))
def test_as_much_is_kept_as_fits(question: str, max_tokens: int):
    messages = [{"role": "user", "content": question}]
    around = len(encode([{"role": "user", "content": ""}]))
    kept = min(len(question), max_tokens - around)
    expected = question[:kept] if kept > 0 else question
    assert fitted(messages, max_tokens) == f"[user]{expected}{OPENING}"
