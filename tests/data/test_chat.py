"""Models on disk as seen from outside."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no directory .*nowhere"):
        check_model(tmp_path / "nowhere")


def test_a_directory_without_config_is_refused(directory):
    (directory / "config.json").unlink()
    for check in (check_model, model_files):
        with pytest.raises(ModelError, match=r"expected a config\.json"):
            check(directory)


def test_a_config_that_is_not_json_is_refused(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"can't read .*config\.json"):
        check_model(directory)


def test_a_reward_model_is_no_policy(directory):
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"expected a causal LM in .*, got LlamaForSequenceClassification"):
        check_model(directory)


def test_a_tokenizer_without_chat_template_is_refused_with_a_remedy(directory):
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"no chat template.*put a chat_template\.jinja"):
        check_model(directory)


def test_a_missing_tokenizer_is_refused(directory):
    for path in directory.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="expected a tokenizer in"):
        check_model(directory)


def test_an_unreadable_tokenizer_is_refused(directory):
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="can't load a tokenizer"):
        check_model(directory)


def test_a_template_that_refuses_the_messages_is_a_model_error(directory):
    (directory / "chat_template.jinja").write_text("{{ raise_exception('only monologues') }}")
    with pytest.raises(
        ModelError, match=r"fails on a prompt whose messages have the roles \['user'\]: only monologues"
    ):
        check_model(directory)


def test_importing_the_module_imports_no_torch():
    code = "import sys, async_rl.data.chat; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
