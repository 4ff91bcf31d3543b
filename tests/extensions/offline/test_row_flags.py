"""Messages that a flag leaves out are context, on every path of sft; answers of preferences have no flags. Keys that
nobody reads are named once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase as Tokenizer

from async_rl.errors import DataError
from tests.extensions.offline.read import labelled_of, pairs_of, scored_pairs, sft_rows
from tests.extensions.offline.test_sft_rows import REWRITES, rows_file, spelled, write_in

ASK, MORE = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
WRONG, RIGHT = {"role": "assistant", "content": "5"}, {"role": "assistant", "content": "4"}
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}so {% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>so {% endif %}"
)


def off(message: dict[str, Any], value: Any = 0, key: str = "weight") -> dict[str, Any]:
    return {**message, key: value}


def texts(rows: list[Any], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Of each sequence its text, and what of it is trained."""
    return [(spelled(tokenizer, row.token_ids), spelled(tokenizer, row.token_ids[row.loss_mask])) for row in rows]


CHAT = [ASK, off(WRONG), MORE, off(RIGHT, 1)]


@pytest.mark.parametrize("form", [".parquet", ".csv", ".json", "_saved"])
@pytest.mark.parametrize("row", [{"messages": CHAT}, {"prompt": [ASK], "completion": CHAT[1:]}])
def test_a_message_that_a_flag_leaves_out_is_context(
    tmp_path: Path, tokenizer: Tokenizer, form: str, row: dict[str, Any]
):
    ((text, trained),) = texts(sft_rows(write_in(form, tmp_path, [row]), tokenizer, max_length=100), tokenizer)
    assert text == "<|user|>a<|end|>\n<|assistant|>5<|end|>\n<|user|>b<|end|>\n<|assistant|>4<|end|>\n"
    assert trained == "4<|end|>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (REWRITES, "axb4<|end|>"),
        (MARKED, "<|user|>a<|end|><|assistant|>so 5<|end|><|user|>b<|end|><|assistant|>so 4<|end|>"),
    ],
)
def test_a_flag_is_obeyed_where_turns_are_sequences_and_where_the_template_marks_them(
    tmp_path: Path, tokenizer: Tokenizer, template: str, text: str
):
    tokenizer.chat_template = template
    found = sft_rows(rows_file(tmp_path, {"messages": CHAT}), tokenizer, max_length=100)
    assert texts(found, tokenizer) == [(text, "4<|end|>")]


def test_what_follows_the_last_trained_message_is_left_out(tmp_path: Path, tokenizer: Tokenizer):
    path = rows_file(tmp_path, {"messages": [ASK, RIGHT, MORE, off(WRONG)]})
    ((text, _),) = texts(sft_rows(path, tokenizer, max_length=100), tokenizer)
    assert text == "<|user|>a<|end|>\n<|assistant|>4<|end|>\n"


def test_a_flag_on_context_has_no_effect(tmp_path: Path, tokenizer: Tokenizer):
    plain = {"prompt": [ASK, WRONG, MORE], "completion": [RIGHT]}
    flagged = {"prompt": [off(ASK, 0.5), off(WRONG, 0.5), off(MORE, 1, "mask")], "completion": [off(RIGHT, None)]}
    found, expected = texts(sft_rows(rows_file(tmp_path, flagged, plain), tokenizer, max_length=100), tokenizer)
    assert found == expected


def test_with_the_last_turn_alone_only_its_flag_counts(tmp_path: Path, tokenizer: Tokenizer):
    path = rows_file(tmp_path, {"messages": [ASK, off(WRONG, 0.5), MORE, RIGHT]})
    ((_, trained),) = texts(sft_rows(path, tokenizer, max_length=100, only_last=True), tokenizer)
    assert trained == "4<|end|>"
    path = rows_file(tmp_path, {"messages": [ASK, RIGHT, off(WRONG)]})
    with pytest.raises(DataError, match="not left out by weight"):
        sft_rows(path, tokenizer, max_length=100, only_last=True)


def test_a_row_whose_flags_can_not_be_obeyed_is_refused(tmp_path: Path, tokenizer: Tokenizer):
    for weight, message in ((0, ":1: expected at least one message .*not left out by weight"), (0.5, "'weight': 0.5")):
        with pytest.raises(DataError, match=message):
            sft_rows(rows_file(tmp_path, {"messages": [ASK, off(WRONG, weight)]}), tokenizer, max_length=100)


def test_flags_are_refused_in_answers_of_preferences_and_free_in_their_prompts(tmp_path: Path, tokenizer: Tokenizer):
    asked = [ASK, off(WRONG), MORE]
    pair = {"prompt": asked, "chosen": [RIGHT], "rejected": [WRONG]}
    whole = {"chosen": [*asked, RIGHT], "rejected": [*asked, WRONG]}
    for read in (pairs_of, scored_pairs):
        assert len(read(rows_file(tmp_path, pair, whole), tokenizer)) == 2
        for key in ("chosen", "rejected"):
            with pytest.raises(DataError, match=r"expected an answer without flags, .*'weight': 1"):
                read(rows_file(tmp_path, {**pair, key: [off(RIGHT, 1)]}), tokenizer)
    labelled = {"prompt": asked, "completion": [off(RIGHT)], "label": True}
    with pytest.raises(DataError, match="expected an answer without flags"):
        labelled_of(rows_file(tmp_path, labelled, labelled), tokenizer)


NAMES = "{{ m['name'] if m['role'] == 'user' and m['name'] }}"


def test_a_key_that_nobody_reads_is_named_once_with_its_row(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    tokenizer.chat_template = str(tokenizer.chat_template).replace("{{ m['content'] }}", NAMES + "{{ m['content'] }}")
    named = [{**ASK, "name": "z", "id": "7"}, {**RIGHT, "name": "y", "seen": False, "empty": None, "weight": 1}]
    found = sft_rows(rows_file(tmp_path, *[{"messages": named}] * 2), tokenizer, max_length=100)
    assert spelled(tokenizer, found[0].token_ids).startswith("<|user|>za")
    said = [record.getMessage().partition("rows.jsonl:")[2].partition(";")[0] for record in caplog.records]
    assert said == ["1: message 0: nothing reads id", "1: message 1: nothing reads name, seen"]
