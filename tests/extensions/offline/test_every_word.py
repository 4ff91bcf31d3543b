"""Every word of a row is trained, or is context, or is refused or named as left out, or is dropped by the template as
docs/templates.md says: with every public template and role. Forms of rows: test_sft_rows.py, test_pairs.py.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from async_rl.data.template_forms import joined_text
from async_rl.errors import AsyncRLError
from async_rl.learner.sequences import TrainSequence
from tests.data.public_templates import cases, template
from tests.extensions.offline.test_public_templates import TOOLS, encoder_of, prepared, spelled

CALL = {"type": "function", "id": "c12345678", "function": {"name": "weather", "arguments": {"place": "callword"}}}
KINDS: dict[str, dict[str, Any]] = {
    "system": {"role": "system", "content": "word"},
    "developer": {"role": "developer", "content": "word"},
    "user": {"role": "user", "content": "word"},
    "parts": {"role": "user", "content": [{"type": "text", "text": "word"}, {"type": "text", "text": " partword"}]},
    "answer": {"role": "assistant", "content": "word"},
    "thought": {"role": "assistant", "content": "<think>\nthoughtword\n</think>\n\nword"},
    "reasoning": {"role": "assistant", "content": "word", "reasoning_content": "thoughtword"},
    "call": {"role": "assistant", "content": None, "tool_calls": [CALL]},
    "said and called": {"role": "assistant", "content": "besideword", "tool_calls": [CALL]},
    "tool": {"role": "tool", "content": "word", "name": "weather", "tool_call_id": "c12345678"},
    "function": {"role": "function", "content": "word", "name": "weather"},
    "critic": {"role": "critic", "content": "word"},
}
"""Messages of each role. Words that a template may drop have names of their own."""
BESIDE = ("deepseekv3", "gptoss", "llama3_1", "llama3_2", "muse_glimmer")
"""Templates that write no content beside a call, as docs/templates.md says."""
CALLS = (
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3"),
    *("llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
)
"""Those that write no call beside a content: DeepSeek R1's, and those whose row of the page's table has no tools."""


def numbered(kinds: Sequence[str]) -> list[dict[str, Any]]:
    """A chat whose words are all different."""

    def renamed(value: Any, number: int) -> Any:
        if isinstance(value, str):
            return value.replace("word", f"word{number}x")
        if isinstance(value, list):
            return [renamed(one, number) for one in value]
        return {key: renamed(one, number) for key, one in value.items()} if isinstance(value, dict) else value

    return [renamed(KINDS[kind], number) for number, kind in enumerate(kinds)]


def words_of(value: Any) -> set[str]:
    return set(re.findall(r"[a-z]*word\d+x", json.dumps(value).replace("\\n", " ")))


STEPS = [pytest.param(7, id="some"), pytest.param(1, marks=pytest.mark.slow, id="all")]


def chats(step: int) -> Iterator[list[str]]:
    """Each message in four places, and of any two messages before a question with its answer every ``step``-th."""
    yield from ([*pair, "user", "answer"] for pair in list(product(KINDS, repeat=2))[::step])
    for kind in KINDS:
        yield ["user", "answer", kind, "user", "answer"]
        yield ["user", "call", "tool", kind, "answer"]
        yield ["user", kind]
        yield ["user", "answer", kind]


def text_of(name: str, sequences: Sequence[TrainSequence], *, trained: bool = False) -> str:
    tokenizer = prepared(name)[0]
    ids = (one.token_ids[one.loss_mask] if trained else one.token_ids for one in sequences)
    return "|".join(spelled(tokenizer, one) for one in ids)


def missing(name: str, chat: Sequence[dict[str, Any]], text: str) -> set[str]:
    """Words of ``chat`` that are not in ``text`` and that the page does not let the template drop."""
    lost = words_of(chat) - words_of(text)
    lost -= {word for word in lost if word.startswith("thoughtword")}
    lost -= {word for word in lost if word.startswith("besideword") and name in BESIDE}
    beside = {word.replace("besideword", "callword") for word in words_of(chat) if word.startswith("besideword")}
    return lost - (beside if name in CALLS else set())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", cases())
def test_every_word_of_a_conversation_of_sft_is_trained_or_context_or_refused(name: str, step: int, caplog: Any):
    encoder = encoder_of(name)
    num_encoded = 0
    for kinds in chats(step):
        chat = numbered(kinds)
        has_tools = "tools" in template(name) and any("tool_calls" in one for one in chat)
        try:
            sequences = encoder.encode_turns(0, [], chat, "row", tools=TOOLS if has_tools else None)
        except AsyncRLError as error:
            assert str(error).startswith(("row: ", "data.tools: "))  # noqa: PT017
            continue
        num_encoded += 1
        last = max(place for place, one in enumerate(chat) if one["role"] == "assistant")
        text, trained = text_of(name, sequences), text_of(name, sequences, trained=True)
        assert not missing(name, chat[: last + 1], text), kinds
        assert not words_of(chat[last + 1 :]) & words_of(text), "what follows the last answer is left out"
        answers = [joined_text(one["content"] or "") for one in chat[: last + 1] if one["role"] == "assistant"]
        assert not missing(name, [{"content": answers}], trained), kinds
        others = [one for one in chat if one["role"] != "assistant"]
        assert not words_of(others) & words_of(trained), "only answers are trained"
    assert num_encoded > 8
    # What follows the last answer is named, and what the template does not write of an answer, each once.
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([one for one in said if "does not render its tool_calls" in one]) == (name in CALLS)
    assert len([one for one in said if "what follows the last answer is left out" in one]) == 1
