"""Which tokens end a turn: found from the model's files and from its chat template, and said with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from async_rl.data.turn_end import turn_ends, write_turn_ends
from async_rl.errors import ModelError
from tests.data.public_templates import cases, listed_ids, marks_of, tokenizer_of


def model_files(directory: Path, tokenizer: Any, listed: list[int] | None, config_eos: int | None = None) -> Path:
    """A directory with a model's files, without weights. ``listed`` is its generation config's list of end tokens."""
    tokenizer.save_pretrained(directory)
    Qwen2Config(vocab_size=len(tokenizer), eos_token_id=config_eos).save_pretrained(directory)
    if listed is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": listed, "top_p": 0.8}))
    return directory


@pytest.mark.parametrize("name", cases())
def test_the_end_that_a_public_template_writes_is_found_with_the_model_s_own_list(name: str, tmp_path: Path):
    tokenizer = tokenizer_of(name)
    directory = model_files(tmp_path, tokenizer, listed_ids(tokenizer, name))
    ends = turn_ends(tokenizer, directory)
    assert ends.of_template == tokenizer.convert_tokens_to_ids(marks_of(name).end)
    assert ends.ids == {*listed_ids(tokenizer, name), tokenizer.eos_token_id}


@pytest.mark.parametrize("name", cases(without=["glm4moe"]))
def test_the_end_that_a_public_template_writes_is_found_in_a_base_model_that_lists_another(name: str, tmp_path: Path):
    tokenizer = tokenizer_of(name, eos="<|base_end|>", more=["<|base_end|>"])
    base = tokenizer.convert_tokens_to_ids("<|base_end|>")
    ends = turn_ends(tokenizer, model_files(tmp_path, tokenizer, [base]))
    end = tokenizer.convert_tokens_to_ids(marks_of(name).end)
    assert ends.of_template == end
    assert ends.ids == {base, end}


def test_the_next_role_ends_a_turn_only_if_the_model_s_files_list_it(tmp_path: Path):
    tokenizer = tokenizer_of("glm4moe")
    assert turn_ends(tokenizer, model_files(tmp_path, tokenizer, [tokenizer.eos_token_id])).of_template is None


def test_what_a_template_writes_after_the_end_token_is_no_part_of_the_turn():
    tokenizer = tokenizer_of("phi3")
    answer = tokenizer("Two<|end|>\n<|endoftext|>")["input_ids"]
    assert turn_ends(tokenizer).num_to_end(answer) == 4  # T, w, o, <|end|>


def test_the_template_s_end_is_added_to_the_generation_config_and_nothing_else_changes(tmp_path: Path):
    tokenizer = tokenizer_of("qwen2_5", eos="<|endoftext|>")
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    directory = model_files(tmp_path, tokenizer, [eos])
    write_turn_ends(directory)
    path = directory / "generation_config.json"
    assert json.loads(path.read_text()) == {"eos_token_id": [eos, end], "top_p": 0.8}
    written = path.read_bytes()
    write_turn_ends(directory)
    assert path.read_bytes() == written


@pytest.mark.parametrize("text", ["{", "[2]"])
def test_a_generation_config_that_is_no_json_is_named(text: str, tmp_path: Path):
    tokenizer = tokenizer_of("qwen2_5")
    (model_files(tmp_path, tokenizer, []) / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json: expected (a )?JSON"):
        turn_ends(tokenizer, tmp_path)
