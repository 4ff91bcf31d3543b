"""Rows in the forms of public data: every word is trained, context, refused by name, named as not read, or in a column
that is free. Columns beside the messages: test_row_columns.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from async_rl.data.chat import load_tokenizer
from async_rl.errors import DataError
from tests.extensions.offline.read import labelled_of, pairs_of, scored_pairs, sft_rows
from tests.extensions.offline.test_sft_rows import rows_file, spelled
from tests.learner.tiny import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant")
CHAT = [{"role": role, "content": f"says {role}"} for role in ROLES]
ASKED, ANSWER = CHAT[:2], CHAT[2]
WORSE = {"role": "assistant", "content": "says worse"}
KWARGS = {"custom_instructions": "kwargs one", "enable_thinking": False, "python_tools": ["kwargs two"]}

FORMS: Mapping[str, tuple[str, dict[str, Any], set[str]]] = {
    "OpenAI, Mistral, axolotl": ("sft", {"messages": CHAT}, set()),
    "TRL": ("sft", {"prompt": ASKED, "completion": [ANSWER]}, set()),
    "TRL, text": ("sft", {"prompt": "text prompt", "completion": "text answer"}, set()),
    "alpaca": (
        "sft", {"instruction": "do one", "input": "do two", "output": "do three", "text": "all text"},
        {"instruction", "input", "output"},
    ),
    "UltraChat": ("sft", {"prompt": "other", "prompt_id": "number", "messages": CHAT}, {"prompt", "prompt_id"}),
    "smoltalk2": ("sft", {"messages": CHAT, "chat_template_kwargs": KWARGS, "source": "names"}, {"source"}),
    "ultrafeedback": (
        "dpo", {"prompt": "says user", "chosen": CHAT, "rejected": [*ASKED, WORSE], "messages": CHAT, "score": 8.0},
        {"messages"},
    ),
    "pairs of rm": ("rm", {"prompt": ASKED, "chosen": [ANSWER], "rejected": [WORSE]}, set()),
    "KTO": ("kto", {"prompt": ASKED, "completion": [ANSWER], "label": True}, set()),
}  # fmt: skip
"""The command, a row, and its columns that nobody reads."""
MESSAGE_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(("weight", "loss", "loss_mask", "trainable", "train", "training", "mask", "masked"), 0),
    "name": "key name",
    "tool_call_id": "key call",
    "function_call": {"name": "key function"},
    "reasoning_content": "key thought",
    "train_detail": [{"text": "key detail"}],
    "thought_of_nobody": "key nobody",
}
FLAGS = list(MESSAGE_KEYS)[:8]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    loaded = load_tokenizer(tiny_model(tmp_path_factory.mktemp("model")))
    loaded.chat_template = "{{ mood }}" + str(loaded.chat_template)
    return loaded


def read(path: Path, command: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """All text of the sequences of a dataset, and what of it is trained."""
    match command:
        case "sft":
            found = sft_rows(path, tokenizer, max_length=1000)
        case "rm":
            found = [one for pair in scored_pairs(path, tokenizer, max_length=1000) for one in pair.sequences]
        case "dpo":
            found = [one for pair in pairs_of(path, tokenizer, max_length=1000) for one in pair.sequences]
        case _:
            found = [row.answer for row in labelled_of(path, tokenizer, max_length=1000)]
    text = "".join(spelled(tokenizer, one.token_ids) for one in found)
    return text, "".join(spelled(tokenizer, one.token_ids[one.loss_mask]) for one in found)


def leaves(value: Any, *names: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text in a value, with the names of the keys above it."""
    match value:
        case dict():
            for key, one in value.items():
                yield from leaves(one, *names, str(key))
        case list():
            for one in value:
                yield from leaves(one, *names)
        case str() if value not in ROLES:
            yield names, value
        case _:
            pass


def check_words(
    row: dict[str, Any], command: str, free: set[str], path: Path, tokenizer: PreTrainedTokenizerBase, log: Any
) -> None:
    """Every text of ``row`` is in the tokens, in a free column, or its key is named by an error or the log."""
    log.clear()
    refused, text = "", ""
    try:
        text, _ = read(rows_file(path, row, row), command, tokenizer)
    except DataError as error:
        refused = str(error).partition("rows.jsonl:1: ")[2].partition(";")[0]
    named = set(re.findall(r"\w+", refused or log.text))
    if refused:
        assert named & {*FLAGS} & {name for names in keys_of(row) for name in names}, refused
        return
    for names, word in leaves(row):
        assert word in text or names[0] in free or named & set(names), (names, word)


def keys_of(value: Any) -> Iterator[set[str]]:
    """The names of every object in a value."""
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(one)
    if isinstance(value, dict):
        yield set(value)


@pytest.mark.parametrize("form", FORMS)
def test_the_public_forms_are_accepted_as_they_are(
    form: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
):
    command, row, free = FORMS[form]
    check_words(row, command, free, tmp_path, tokenizer, caplog)
    _, trained = read(rows_file(tmp_path, row, row), command, tokenizer)
    if command != "rm":  # which has a value at the end
        assert "says assistant" in trained or "text" in trained
        assert "says user" not in trained


@pytest.mark.parametrize("form", [name for name, (_, row, _) in FORMS.items() if "text" not in str(row)])
def test_every_word_of_a_message_s_keys_is_trained_context_refused_or_named(
    form: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
):
    command, row, free = FORMS[form]
    for key, value in MESSAGE_KEYS.items():
        for role in ROLES:
            given = with_key(row, role, key, value)
            check_words(given, command, free, tmp_path, tokenizer, caplog)
            if role != "assistant" and key in FLAGS:
                assert read(rows_file(tmp_path, given, given), command, tokenizer) == (
                    read(rows_file(tmp_path, row, row), command, tokenizer)
                )


def with_key(value: Any, role: str, key: str, item: Any) -> Any:
    """A row whose messages of a role have one more key."""
    if isinstance(value, list):
        return [with_key(one, role, key, item) for one in value]
    if not isinstance(value, dict):
        return value
    found = {name: with_key(one, role, key, item) for name, one in value.items()}
    return {**found, key: item} if value.get("role") == role else found
