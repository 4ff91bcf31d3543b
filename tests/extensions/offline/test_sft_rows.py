"""Rows to tokens and masks, spelled out character by character; bad rows named by file and line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase as Tokenizer

from async_rl.data.chat import load_tokenizer, render_prompt
from async_rl.errors import DataError, ModelError
from async_rl.records import TEXT_ROLE
from tests.extensions.offline.read import sft_rows
from tests.learner.tiny import tiny_model

ASK, SAY = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
ASKED = "<|user|>1+1<|end|>\n<|assistant|>"


def rows_file(directory: Path, *rows: Any) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def spelled(tokenizer: Tokenizer, token_ids: np.ndarray) -> str:
    """Tokens of this tokenizer are characters and special tokens, so joining them is exact."""
    return "".join(tokenizer.convert_ids_to_tokens(token_ids.tolist()))


def test_every_assistant_turn_is_trained_on_up_to_its_end_token(tmp_path: Path, tokenizer: Tokenizer):
    messages = [{"role": "system", "content": "add"}, ASK, SAY, ASK, SAY, {"role": "user", "content": "left out"}]
    (row,) = sft_rows(rows_file(tmp_path, {"messages": messages}), tokenizer, max_length=100)
    assert spelled(tokenizer, row.token_ids[row.loss_mask]) == "2<|end|>2<|end|>"
    assert spelled(tokenizer, row.token_ids) == f"<|system|>add<|end|>\n{ASKED}2<|end|>\n{ASKED}2<|end|>\n"


def test_long_rows_are_cut_on_the_right_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    path = rows_file(tmp_path, {"prompt": "abc", "response": "defgh"}, {"prompt": "abc", "response": "d"})
    row, _ = sft_rows(path, tokenizer, max_length=5)
    assert spelled(tokenizer, row.token_ids) == "abcde"
    assert row.loss_mask.tolist() == [False, False, False, True, True]
    assert "sft.data: cut the end of 1 of 2 sequences, which have more than sft.max_length = 5 tokens" in caplog.text


@pytest.mark.parametrize(
    ("row", "whole", "trained"),
    [
        ({"prompt": "1+1=", "completion": "2"}, "1+1=2<|end|>", "2<|end|>"),
        ({"prompt": [ASK], "response": "2"}, f"{ASKED}2<|end|>\n", "2<|end|>"),
        ({"prompt": ASK, "response": SAY}, f"{ASKED}2<|end|>\n", "2<|end|>"),
        ({"prompt": "1+1", "completion": [SAY]}, f"{ASKED}2<|end|>\n", "2<|end|>"),
        ({"prompt": [ASK], "completion": [ASK, SAY]}, f"{ASKED}2<|end|>\n", "2<|end|>"),
        ({"prompt": "free", "prompt_id": "z", "messages": [ASK, SAY]}, f"{ASKED}2<|end|>\n", "2<|end|>"),  # UltraChat
        ({"messages": [ASK], "completion": [SAY]}, f"{ASKED}2<|end|>\n", "2<|end|>"),
        ({"prompt": [ASK, SAY, ASK], "response": "2"}, f"{ASKED}2<|end|>\n{ASKED}2<|end|>\n", "2<|end|>"),
        ({"messages": [ASK, SAY], "prompt": "1+1", "response": "9"}, f"{ASKED}2<|end|>\n", "2<|end|>"),
        ({"prompt": None, "messages": [ASK, {**SAY, "name": None}]}, f"{ASKED}2<|end|>\n", "2<|end|>"),
        ({"text": "1+1=2", "when": None}, "1+1=2<|end|>", "+1=2<|end|>"),
        ({"text": "1+1=2<|end|>"}, "1+1=2<|end|>", "+1=2<|end|>"),
        ({"instruction": "1+1", "input": "?", "output": "2", "text": "1+1=2"}, "1+1=2<|end|>", "+1=2<|end|>"),  # alpaca
    ],
)
@pytest.mark.parametrize("form", [".jsonl", ".parquet", ".csv", ".json", "_saved"])
def test_every_form_of_a_row_says_what_is_trained(
    row: dict[str, Any], whole: str, trained: str, form: str, tmp_path: Path, tokenizer: Tokenizer
):
    if form == ".csv":
        row = {key: value for key, value in row.items() if value is not None}
    path = rows_file(tmp_path, row) if form == ".jsonl" else write_in(form, tmp_path, [row])
    (found,) = sft_rows(path, tokenizer, max_length=50)
    assert spelled(tokenizer, found.token_ids) == whole
    assert spelled(tokenizer, found.token_ids[found.loss_mask]) == trained


def test_text_has_the_start_token_that_sampling_would_use_and_no_second_one(tmp_path: Path):
    starting: Any = load_tokenizer(tiny_model(tmp_path / "model"))
    start = ("<|user|>", starting.convert_tokens_to_ids("<|user|>"))
    starting.backend_tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[start])
    starting.bos_token = "<|user|>"
    assert spelled(starting, render_prompt(starting, [{"role": TEXT_ROLE, "content": "1+"}])) == "<|user|>1+"
    for row, num_context in (
        ({"prompt": "1+", "response": "1"}, 3), ({"text": "1+1"}, 1), ({"text": "<|user|>1+1"}, 1),
    ):  # fmt: skip
        (found,) = sft_rows(rows_file(tmp_path, row), starting, max_length=50)
        assert spelled(starting, found.token_ids) == "<|user|>1+1<|end|>"
        assert found.loss_mask.tolist() == [False] * num_context + [True] * (5 - num_context)


def test_an_empty_prompt_does_not_train_on_the_first_token(tmp_path: Path, tokenizer: Tokenizer):
    (row,) = sft_rows(rows_file(tmp_path, {"prompt": "", "response": "ab"}), tokenizer, max_length=5)
    assert row.loss_mask.tolist() == [False, True, True]


GOOD = {"prompt": "a", "response": "b"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "expected one JSON object per line"),
        ({"prompt": "a", "answer": "b"}, r"got keys \['answer', 'prompt'\]"),
        ({"messages": [{"role": "user"}]}, '"role" and "content" as text'),
        ({"messages": [{"role": "user", "content": "a"}]}, 'with the role "assistant", got the roles'),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "before the first assistant message"),
        ({"prompt": "abcdefghij", "response": "k"}, "raise sft.max_length"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, tokenizer: Tokenizer, row: Any, message: str):
    path = rows_file(tmp_path, GOOD, "", row)
    with pytest.raises(DataError, match=message) as caught:
        sft_rows(path, tokenizer, max_length=8)
    assert str(caught.value).startswith(f"{path}:3: ")


REWRITES = (
    "{% for m in messages %}{{ 'x' if m['role'] == 'assistant' and not loop.last else m['content'] }}{% endfor %}"
    "{% if not add_generation_prompt %}<|end|>{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_gives_one_sequence_for_each(tmp_path: Path, tokenizer: Tokenizer):
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    path = rows_file(tmp_path, {"messages": messages}, {"messages": messages[:2]})
    tokenizer.chat_template = REWRITES
    rows = sft_rows(path, tokenizer, max_length=50)
    last = sft_rows(path, tokenizer, max_length=50, only_last=True)
    # An earlier answer is shown as x: each turn is trained as it is when it is the last.
    found = [(row.sequence_id, spelled(tokenizer, row.token_ids)) for row in rows]
    assert found == [(0, "ab<|end|>"), (0, "axcd<|end|>"), (1, "ab<|end|>")]
    assert [spelled(tokenizer, row.token_ids[row.loss_mask]) for row in rows] == ["b<|end|>", "d<|end|>", "b<|end|>"]
    assert [spelled(tokenizer, row.token_ids[row.loss_mask]) for row in last] == ["d<|end|>", "b<|end|>"]


def test_a_file_without_rows_is_refused(tmp_path: Path, tokenizer: Tokenizer):
    for path in (tmp_path / "none.jsonl", rows_file(tmp_path, "", "")):
        with pytest.raises(DataError, match=r"sft\.data"):
            sft_rows(path, tokenizer, max_length=8)


def write_in(form: str, directory: Path, rows: list[dict[str, Any]]) -> Path:
    path = directory / f"rows{form}"
    match form:
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                for row in rows:
                    writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})
        case ".json":
            path.write_text(json.dumps(rows))
        case _:
            datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def test_a_bad_row_of_a_table_is_named_by_its_number(tmp_path: Path, tokenizer: Tokenizer):
    path = write_in(".parquet", tmp_path, [GOOD, GOOD | {"response": None}])
    with pytest.raises(DataError, match=r"rows\.parquet: row 2: expected .* got keys \['prompt'\]"):
        sft_rows(path, tokenizer, max_length=8)


TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t['name'] }}{% endfor %}{% for m in messages %}{{ m['content'] }}.{% endfor %}"
    "{% if add_generation_prompt and mark %}{{ mark }}{% endif %}"
)


def test_the_template_gets_its_arguments_and_the_tools_of_the_run_or_of_the_row(tmp_path: Path, tokenizer: Tokenizer):
    tokenizer.chat_template = TOOL_TEMPLATE
    path = rows_file(tmp_path, {"messages": [ASK, SAY]}, {"messages": [ASK, SAY], "tools": [{"name": "yy"}]})
    rows = sft_rows(path, tokenizer, max_length=50, arguments={"tools": [{"name": "x"}]})
    assert [spelled(tokenizer, row.token_ids) for row in rows] == ["x1+1.2.<|end|>", "yy1+1.2.<|end|>"]
    with pytest.raises(ModelError, match=r"data\.chat_template_kwargs\.marc: "):
        sft_rows(path, tokenizer, max_length=50, arguments={"marc": "="})
