"""Models on disk as seen from outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from async_rl.data.chat import check_model, load_tokenizer, model_files, render_prompt
from async_rl.errors import ModelError
from tests.generator.tiny_model import CHARACTERS, write_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_a_prompt_ends_with_the_opening_of_the_answer(directory):
    messages = [{"role": "system", "content": "add "}, {"role": "user", "content": "1+1"}]
    ids = render_prompt(load_tokenizer(directory), messages)
    assert ids.dtype == np.int32
    assert ids.tolist() == [CHARACTERS.index(c) + 3 for c in "add 1+1="]


def test_the_files_of_a_model_rebuild_its_tokenizer_elsewhere_and_hold_no_weights(directory, tmp_path):
    files = model_files(directory)
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert not any(name.endswith("safetensors") for name in files)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, content in files.items():
        (elsewhere / name).write_bytes(content)
    messages = [{"role": "user", "content": "1+1"}]
    expected = render_prompt(load_tokenizer(directory), messages)
    assert render_prompt(load_tokenizer(elsewhere), messages).tolist() == expected.tolist()
    check_model(elsewhere)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", None, r"expected a config\.json"),
        ("config.json", "{", r"can't read .*config\.json"),
        ("chat_template.jinja", None, r"no chat template.*put a chat_template\.jinja"),
        ("chat_template.jinja", "{{ raise_exception('only monologues') }}", r"roles \['user'\]: only monologues"),
        ("tokenizer.json", None, "expected a tokenizer in"),
        ("tokenizer.json", "{", "can't load a tokenizer"),
    ],
)
def test_a_directory_without_a_usable_file_is_refused_by_its_name(directory, name: str, content: str | None, told: str):
    if content is not None:
        (directory / name).write_text(content)
    else:
        for path in directory.glob("tokenizer*" if name == "tokenizer.json" else name):
            path.unlink()
    with pytest.raises(ModelError, match=told):
        check_model(directory)


def test_what_is_no_policy_is_refused(directory, tmp_path):
    with pytest.raises(ModelError, match=r"no directory .*nowhere"):
        check_model(tmp_path / "nowhere")
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"expected a causal LM in .*, got LlamaForSequenceClassification"):
        check_model(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"expected a config\.json"):
        model_files(directory)
