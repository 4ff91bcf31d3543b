"""Columns beside the messages of rows to train on: read where a template renders the row, refused by name, or free."""

from __future__ import annotations

from collections.abc import Sequence
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
from tests.learner.tiny import tiny_config, tiny_model

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def first_text(model: Path, directory: Path, command: str, row: dict[str, Any], **data: Any) -> str:
    """The text of the first sequence of a dataset that has ``row`` twice, as the command reads it."""
    section = {"data": str(rows_file(directory, row, row)), **({"loss": "kto"} if command == "kto" else {})}
    config = tiny_config(directory, model, data=data, **{"dpo" if command == "kto" else command: section})
    task = TASKS[command](config)
    first = task.sequences(task.load_rows(section["data"], "key")[0])[0]
    tokens = first.token_ids[:-1] if command == "rm" else first.token_ids
    return spelled(load_tokenizer(model), tokens).replace("<|end|>", "").replace("\n", "")


CONTEXT = {"system": "be brief", "history": [["q", "r"]]}
SHOWN = "<|system|>be brief<|user|>q<|assistant|>r<|user|>a<|assistant|>b"


@pytest.mark.parametrize(("command", "row"), OF_MESSAGES)
def test_system_and_history_are_read_where_a_template_renders_the_row(
    tmp_path: Path, model: Path, command: str, row: dict[str, Any]
):
    assert first_text(model, tmp_path, command, row | CONTEXT) == SHOWN
    assert first_text(model, tmp_path, command, row | CONTEXT, ignore=["history", "system"]) == (
        "<|user|>a<|assistant|>b"
    )


def test_history_is_context_and_is_not_trained(tmp_path: Path, model: Path):
    tokenizer = load_tokenizer(model)
    (row,) = sft_rows(rows_file(tmp_path, {"messages": [ASK, SAY]} | CONTEXT), tokenizer, max_length=100)
    assert spelled(tokenizer, row.token_ids[row.loss_mask]) == "b<|end|>"


@pytest.mark.parametrize(("command", "row"), OF_TEXT)
@pytest.mark.parametrize("name", CONTEXT)
def test_system_and_history_beside_text_are_refused_by_name(
    tmp_path: Path, model: Path, command: str, row: dict[str, Any], name: str
):
    given = {**row, name: CONTEXT[name]}
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: {name}: no template renders it.*'{name}' into data\.ignore"):
        first_text(model, tmp_path, command, given)
    assert first_text(model, tmp_path, command, given, ignore=[name]).endswith("ab")


BY_PROMPT = [(command, row) for command, row in (*OF_MESSAGES, *OF_TEXT) if "prompt" in row]


@pytest.mark.parametrize(("command", "row"), BY_PROMPT)
@pytest.mark.parametrize("name", ["instruction", "input"])
def test_instruction_and_input_beside_prompt_are_refused_unless_the_prompt_has_them(
    tmp_path: Path, model: Path, command: str, row: dict[str, Any], name: str
):
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: {name}: the prompt does not have its text"):
        first_text(model, tmp_path, command, {**row, name: "z"})
    for same in ("", " a\n", None):
        assert first_text(model, tmp_path, command, {**row, name: same}).endswith("b")


@pytest.mark.parametrize(("command", "row"), [*OF_MESSAGES, *OF_TEXT])
def test_documents_images_and_masks_are_refused_and_other_columns_are_free(
    tmp_path: Path, model: Path, command: str, row: dict[str, Any]
):
    for name in ("documents", "images", "completion_mask"):
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: {name}: it is not read"):
            first_text(model, tmp_path, command, {**row, name: ["z"]})
    free = {"source": "z", "problem": "z", "score": 1.0, "documents": [], "images": None, "tags": ["z"]}
    assert first_text(model, tmp_path, command, row | free).endswith("b")


@pytest.mark.parametrize("form", [".csv", ".parquet", "_saved"])
def test_every_form_of_a_dataset_has_these_columns(tmp_path: Path, model: Path, form: str):
    row = {"messages": [ASK, SAY], **CONTEXT, "chat_template_kwargs": {"mood": "z"}, "images": []}
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{{ mood }}" + str(tokenizer.chat_template)
    found = sft_rows(write_in(form, tmp_path, [row]), tokenizer, max_length=100)
    assert spelled(tokenizer, found[0].token_ids).startswith("z<|system|>be brief<|end|>\n<|user|>q")


MOOD = "{{ mood }}{{ tone }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


@pytest.fixture
def moody(tmp_path: Path) -> Path:
    directory = tiny_model(tmp_path / "moody")
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = MOOD + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("command", "row"), OF_MESSAGES)
def test_a_row_s_variables_reach_the_template_over_those_of_the_config(
    tmp_path: Path, moody: Path, command: str, row: dict[str, Any]
):
    given = {**row, "chat_template_kwargs": {"mood": "x", "tone": None}}
    data = {"chat_template_kwargs": {"mood": "y", "tone": "z"}}
    of_config = "" if command == "rm" else "z"  # as scorers render
    assert first_text(moody, tmp_path, command, given, **data).startswith(f"x{of_config}<|user|>a<|assistant|>b")


def test_a_variable_that_the_template_does_not_read_is_named_once(
    tmp_path: Path, moody: Path, caplog: pytest.LogCaptureFixture
):
    variables: Sequence[Any] = ({"zebra": True, "mood": "x"}, {"zebra": False, "messages": 1, "python_tools": []})
    rows = [{"messages": [ASK, SAY], "chat_template_kwargs": one} for one in variables]
    sft_rows(rows_file(tmp_path, *rows), load_tokenizer(moody), max_length=50)
    assert [record.getMessage().partition("jsonl:")[2] for record in caplog.records] == [
        "1: chat_template_kwargs: nothing reads zebra; the same in other rows is not said",
        "2: chat_template_kwargs: nothing reads messages, python_tools; the same in other rows is not said",
    ]
    row = {"messages": [ASK, SAY], "chat_template_kwargs": ["mood"]}
    with pytest.raises(DataError, match="1: chat_template_kwargs: expected an object of variables"):
        sft_rows(rows_file(tmp_path, row), load_tokenizer(moody), max_length=50)
