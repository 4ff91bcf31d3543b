"""Rows to tokens and masks, spelled out character by character; bad rows named by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from async_rl.data.chat import load_tokenizer, render_prompt
from async_rl.errors import DataError
from async_rl.learner.sft import load_sft_rows
from tests.learner.tiny import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model(tmp_path_factory.mktemp("model")))


def rows_file(directory: Path, *rows: Any) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def spelled(tokenizer: PreTrainedTokenizerBase, token_ids: np.ndarray) -> str:
    """Tokens of this tokenizer are characters and special tokens, so joining them is exact."""
    return "".join(tokenizer.convert_ids_to_tokens(token_ids.tolist()))


def test_raw_text_trains_on_the_response_and_its_end(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    (row,) = load_sft_rows(rows_file(tmp_path, {"prompt": "1+1=", "response": "2"}), tokenizer, max_length=50)
    assert spelled(tokenizer, row.token_ids) == "1+1=2<|end|>"
    assert row.loss_mask.tolist() == [False] * 4 + [True] * 2


def test_every_assistant_turn_is_trained_on_up_to_its_end_token(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    messages = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "left out"},
    ]
    (row,) = load_sft_rows(rows_file(tmp_path, {"messages": messages}), tokenizer, max_length=100)
    assert spelled(tokenizer, row.token_ids[row.loss_mask]) == "2<|end|>4<|end|>"
    assert spelled(tokenizer, row.token_ids) == (
        "<|system|>add<|end|>\n<|user|>1+1<|end|>\n<|assistant|>2<|end|>\n<|user|>2+2<|end|>\n<|assistant|>4<|end|>\n"
    )


def test_what_is_before_the_answer_is_the_prompt_that_sampling_would_use(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
):
    question = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    path = rows_file(tmp_path, {"messages": [*question, {"role": "assistant", "content": "2"}]})
    (row,) = load_sft_rows(path, tokenizer, max_length=100)
    prompt = render_prompt(tokenizer, question)
    first = int(row.loss_mask.argmax())
    assert row.token_ids[:first].tolist() == prompt.tolist()


def test_long_rows_are_cut_on_the_right(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    (row,) = load_sft_rows(rows_file(tmp_path, {"prompt": "abc", "response": "defgh"}), tokenizer, max_length=5)
    assert spelled(tokenizer, row.token_ids) == "abcde"
    assert row.loss_mask.tolist() == [False, False, False, True, True]


def test_an_empty_prompt_does_not_train_on_the_first_token(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    (row,) = load_sft_rows(rows_file(tmp_path, {"prompt": "", "response": "ab"}), tokenizer, max_length=5)
    assert row.loss_mask.tolist() == [False, True, True]


GOOD = {"prompt": "a", "response": "b"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "expected one JSON object per line"),
        ("[1, 2]", "expected a JSON object, got list"),
        ({"prompt": "a", "answer": "b"}, r"got keys \['answer', 'prompt'\]"),
        ({"messages": [{"role": "user"}]}, '"role" and "content" as text'),
        ({"messages": [{"role": "user", "content": "a"}]}, 'with the role "assistant", got the roles'),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "before the first assistant message"),
        ({"prompt": "abcdefghij", "response": "k"}, "raise sft.max_length"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: Any, message: str
):
    path = rows_file(tmp_path, GOOD, "", row)
    with pytest.raises(DataError, match=message) as caught:
        load_sft_rows(path, tokenizer, max_length=8)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    messages = [{"role": r, "content": "a"} for r in ("user", "assistant", "user", "assistant")]
    # Shows the number of messages first, so no rendering continues another.
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    kept, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        with pytest.raises(DataError, match="one row per assistant message"):
            load_sft_rows(rows_file(tmp_path, {"messages": messages}), tokenizer, max_length=50)
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize("content", [None, "\n\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, content: str | None):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=r"sft\.data"):
        load_sft_rows(path, tokenizer, max_length=8)
