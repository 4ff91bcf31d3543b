"""Columns beside the messages of rows to train on: read where a template renders the row, refused by name, or free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.data.chat import load_tokenizer
from async_rl.errors import DataError
from async_rl.extensions.offline.dpo import LabelledAnswers, Pairs
from async_rl.extensions.offline.rm import RewardModel
from async_rl.extensions.offline.sft import Supervised
from tests.extensions.offline.read import sft_rows
from tests.extensions.offline.test_sft_rows import rows_file, spelled, write_in
from tests.learner.tiny import TEMPLATE, tiny_config, tiny_model

ASK, SAY, OTHER = (
    {"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)
TASKS = {"sft": Supervised, "dpo": Pairs, "kto": LabelledAnswers, "rm": RewardModel}
OF_MESSAGES: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"messages": [ASK, SAY]}),
    ("sft", {"prompt": [ASK], "response": "b"}),
    ("sft", {"prompt": "a", "completion": [SAY]}),
    ("dpo", {"prompt": [ASK], "chosen": "b", "rejected": "c"}),
    ("dpo", {"chosen": [ASK, SAY], "rejected": [ASK, OTHER]}),
    ("kto", {"prompt": [ASK], "completion": [SAY], "label": True}),
    ("rm", {"prompt": [ASK], "chosen": [SAY], "rejected": [OTHER]}),
]
OF_TEXT: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"prompt": "a", "response": "b"}),
    ("sft", {"text": "ab"}),
    ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ("dpo", {"chosen": "aab", "rejected": "aac"}),
    ("kto", {"prompt": "a", "completion": "b", "label": True}),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c"}),
]
CONTEXT = {"system": "be brief", "history": [["q", "r"]]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template reads the variables ``mood`` and ``tone``."""
    directory = tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = "{{ mood }}{{ tone }}" + TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def first_text(model: Path, directory: Path, command: str, row: dict[str, Any], **data: Any) -> str:
    """The text of the first sequence of a dataset that has ``row`` twice, as the command reads it."""
    section = {"data": str(rows_file(directory, row, row)), **({"loss": "kto"} if command == "kto" else {})}
    config = tiny_config(directory, model, data=data, **{"dpo" if command == "kto" else command: section})
    task = TASKS[command](config)
    first = task.sequences(task.load_rows(section["data"], "key")[0])[0]
    tokens = first.token_ids[:-1] if command == "rm" else first.token_ids
    return spelled(load_tokenizer(model), tokens).replace("<|end|>", "").replace("\n", "")


@pytest.mark.parametrize(("command", "row"), OF_MESSAGES)
def test_system_history_and_variables_are_read_where_a_template_renders_the_row(
    tmp_path: Path, model: Path, command: str, row: dict[str, Any]
):
    of_config = {"mood": "y", "tone": "z"}
    given = {**row, **CONTEXT, "chat_template_kwargs": {"mood": "x", "tone": None}}
    begin = "x" if command == "rm" else "xz"  # a reward model renders as scorers do, without those of the config
    assert first_text(model, tmp_path, command, given, chat_template_kwargs=of_config) == (
        f"{begin}<|system|>be brief<|user|>q<|assistant|>r<|user|>a<|assistant|>b"
    )
    assert first_text(model, tmp_path, command, row | CONTEXT, ignore=["history", "system"]) == (
        "<|user|>a<|assistant|>b"
    )


@pytest.mark.parametrize(("command", "row"), [*OF_MESSAGES, *OF_TEXT])
def test_columns_that_would_be_lost_are_refused_by_name_and_others_are_free(
    tmp_path: Path, model: Path, command: str, row: dict[str, Any]
):
    refused = dict.fromkeys(("documents", "images", "completion_mask"), "it is not read")
    if (command, row) in OF_TEXT:
        refused |= dict.fromkeys(CONTEXT, "no template renders it")
    if "prompt" in row:
        refused |= dict.fromkeys(("instruction", "input"), "the prompt does not have its text")
    for name, reason in refused.items():
        given = {**row, name: CONTEXT.get(name, "z")}
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: {name}: {reason}.*'{name}' into data\.ignore"):
            first_text(model, tmp_path, command, given)
        assert first_text(model, tmp_path, command, given, ignore=[name]).endswith("b")
    free = {"source": "z", "problem": "z", "score": 1.0, "documents": [], "images": None, "tags": ["z"]}
    for same in ("", " a\n", None):
        assert first_text(model, tmp_path, command, {**row, **free, "instruction": same, "input": same}).endswith("b")


@pytest.mark.parametrize("form", [".csv", ".parquet", "_saved"])
def test_every_form_of_a_dataset_has_these_columns_which_are_not_trained(tmp_path: Path, model: Path, form: str):
    row = {"messages": [ASK, SAY], **CONTEXT, "chat_template_kwargs": {"mood": "z"}, "images": []}
    tokenizer = load_tokenizer(model)
    (found,) = sft_rows(write_in(form, tmp_path, [row]), tokenizer, max_length=100)
    assert spelled(tokenizer, found.token_ids).startswith("z<|system|>be brief<|end|>\n<|user|>q")
    assert spelled(tokenizer, found.token_ids[found.loss_mask]) == "b<|end|>"


def test_a_variable_that_the_template_does_not_read_is_named_once(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
):
    variables: list[Any] = [{"zebra": True, "mood": "x"}, {"zebra": False, "messages": 1, "python_tools": []}]
    rows = [{"messages": [ASK, SAY], "chat_template_kwargs": one} for one in variables]
    sft_rows(rows_file(tmp_path, *rows), load_tokenizer(model), max_length=50)
    said = [record.getMessage().partition("jsonl:")[2].partition(";")[0] for record in caplog.records]
    assert said == [
        "1: chat_template_kwargs: nothing reads zebra",
        "2: chat_template_kwargs: nothing reads messages, python_tools",
    ]
    row = {"messages": [ASK, SAY], "chat_template_kwargs": ["mood"]}
    with pytest.raises(DataError, match="1: chat_template_kwargs: expected an object of variables"):
        sft_rows(rows_file(tmp_path, row), load_tokenizer(model), max_length=50)
