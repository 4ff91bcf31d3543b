"""Messages that a flag leaves out are context, on every path of sft; answers of preferences have no flags. Keys that
nobody reads are named once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from async_rl.data.chat import load_tokenizer
from async_rl.errors import DataError
from tests.extensions.offline.read import labelled_of, pairs_of, scored_pairs, sft_rows
from tests.extensions.offline.test_sft_rows import REWRITES, rows_file, spelled, write_in
from tests.learner.tiny import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASK, MORE = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
WRONG, RIGHT = {"role": "assistant", "content": "5"}, {"role": "assistant", "content": "4"}
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}so {% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>so {% endif %}"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def tokenizer(made: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerBase:
    monkeypatch.setattr(made, "chat_template", made.chat_template)  # tests may set another one
    return made


def off(message: dict[str, Any], value: Any = 0, key: str = "weight") -> dict[str, Any]:
    return {**message, key: value}


def texts(rows: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Of each sequence its text, and what of it is trained."""
    return [(spelled(tokenizer, row.token_ids), spelled(tokenizer, row.token_ids[row.loss_mask])) for row in rows]


CHAT = [ASK, off(WRONG), MORE, off(RIGHT, 1)]


@pytest.mark.parametrize("form", [".parquet", ".csv", ".json", "_saved"])
@pytest.mark.parametrize("row", [{"messages": CHAT}, {"prompt": [ASK], "completion": CHAT[1:]}])
def test_a_message_that_a_flag_leaves_out_is_context(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, form: str, row: dict[str, Any]
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
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, template: str, text: str
):
    tokenizer.chat_template = template
    found = sft_rows(rows_file(tmp_path, {"messages": CHAT}), tokenizer, max_length=100)
    assert texts(found, tokenizer) == [(text, "4<|end|>")]


def test_what_follows_the_last_trained_message_is_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    path = rows_file(tmp_path, {"messages": [ASK, RIGHT, MORE, off(WRONG)]})
    ((text, _),) = texts(sft_rows(path, tokenizer, max_length=100), tokenizer)
    assert text == "<|user|>a<|end|>\n<|assistant|>4<|end|>\n"


@pytest.mark.parametrize("weight", [0.5, None])
def test_a_flag_on_an_answer_of_the_prompt_has_no_effect(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, weight: float | None
):
    # On messages of other roles: test_public_rows.py.
    rows = [{"prompt": [ASK, wrong, MORE], "completion": [RIGHT]} for wrong in (off(WRONG, weight), WRONG)]
    found, expected = texts(sft_rows(rows_file(tmp_path, *rows), tokenizer, max_length=100), tokenizer)
    assert found == expected


def test_with_the_last_turn_alone_only_its_flag_counts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    path = rows_file(tmp_path, {"messages": [ASK, off(WRONG, 0.5), MORE, RIGHT]})
    ((_, trained),) = texts(sft_rows(path, tokenizer, max_length=100, only_last=True), tokenizer)
    assert trained == "4<|end|>"
    path = rows_file(tmp_path, {"messages": [ASK, RIGHT, off(WRONG)]})
    with pytest.raises(DataError, match="not left out by weight"):
        sft_rows(path, tokenizer, max_length=100, only_last=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ASK, off(WRONG)]}, r":1: expected at least one message .*not left out by weight, got the roles"),
        ({"messages": [ASK, off(RIGHT, 0.5)]}, r":1: message 1: expected one of the keys .*'weight': 0.5"),
        ({"messages": [ASK, off(RIGHT, 1, "mask")]}, r":1: message 1: .*disagree what mask and masked mean"),
    ],
)
def test_a_row_whose_flags_can_not_be_obeyed_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], message: str
):
    with pytest.raises(DataError, match=message):
        sft_rows(rows_file(tmp_path, row), tokenizer, max_length=100)


@pytest.mark.parametrize("value", [0, 1])
def test_flags_are_refused_in_answers_of_preferences_and_free_in_their_prompts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, value: int
):
    asked = [ASK, off(WRONG, value), MORE]
    pair = {"prompt": asked, "chosen": [RIGHT], "rejected": [WRONG]}
    whole = {"chosen": [*asked, RIGHT], "rejected": [*asked, WRONG]}
    labelled = {"prompt": asked, "completion": [off(RIGHT, value)], "label": True}
    for read in (pairs_of, scored_pairs):
        assert len(read(rows_file(tmp_path, pair, whole), tokenizer)) == 2
    for read, row in (
        *((read, {**pair, key: [off(RIGHT, value)]}) for read in (pairs_of, scored_pairs) for key in list(pair)[1:]),
        (labelled_of, labelled),
    ):
        with pytest.raises(DataError, match=f"expected an answer without flags, .*'weight': {value}"):
            read(rows_file(tmp_path, row, row), tokenizer)


NAMES = "{{ m['name'] if m['role'] == 'user' and m['name'] }}"


def test_a_key_that_nobody_reads_is_named_once_with_its_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
):
    tokenizer.chat_template = str(tokenizer.chat_template).replace("{{ m['content'] }}", NAMES + "{{ m['content'] }}")
    named = [{**ASK, "name": "z", "id": "7"}, {**RIGHT, "name": "y", "seen": False, "empty": None, "weight": 1}]
    found = sft_rows(rows_file(tmp_path, *[{"messages": named}] * 2), tokenizer, max_length=100)
    assert spelled(tokenizer, found[0].token_ids).startswith("<|user|>za")
    said = [record.getMessage().partition("rows.jsonl:")[2].partition(";")[0] for record in caplog.records]
    assert said == ["1: message 0: nothing reads id", "1: message 1: nothing reads name, seen"]


def test_the_keys_of_a_scored_answer_that_the_reward_model_does_not_see_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
):
    call = {"function": {"name": "f", "arguments": {}}}
    row = {"prompt": [ASK], "chosen": [{**RIGHT, "tool_calls": [call]}], "rejected": [{**WRONG, "tool_calls": []}]}
    scored_pairs(rows_file(tmp_path, row), tokenizer)
    (record,) = caplog.records
    assert ":1: the answer: nothing reads tool_calls" in record.getMessage()
