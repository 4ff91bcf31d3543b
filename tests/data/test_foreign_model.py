"""Model directories that somebody forged: their code does not run, and nobody is asked whether it may."""

from __future__ import annotations

import builtins
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from async_rl.config.learner import ModelConfig
from async_rl.data.chat import load_tokenizer, render_prompt
from async_rl.data.model_config import read_model_config
from async_rl.data.template import check_arguments
from async_rl.errors import ModelError
from async_rl.generator.hf.causal_model import build_model, describe_model
from async_rl.learner.model.policy_model import load_model
from async_rl.scorer.transformers_engine import load_classifier
from tests.learner.tiny import tiny_model

CODE = "open('MARKER', 'w').close()\n"
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "load_pretrained": True}
LOADERS: dict[str, Callable[[Path], object]] = {
    "the learner": lambda model: load_model(ModelConfig(path=str(model))),
    "a generator": lambda model: build_model(model, **CPU),
    "a check": describe_model,
    "a scorer": lambda model: load_classifier(model, torch.float32),
    "the config": read_model_config,
}


class Bomb:
    """Creates the file MARKER in the working directory when somebody unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("MARKER", "w")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's directory. Who asks on the terminal fails."""

    def ask(_: object = "") -> NoReturn:
        Path("ASKED").touch()
        raise EOFError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "input", ask)
    return tiny_model(tmp_path / "model")


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def check_nothing_ran() -> None:
    assert not Path("MARKER").exists()
    assert not Path("ASKED").exists()


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_code_beside_a_model_does_not_run_and_nobody_is_asked(model: Path, load: Callable[[Path], object]):
    (model / "own.py").write_text(CODE)
    named = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change_json(model / "config.json", model_type="own", auto_map=named)
    with pytest.raises((ModelError, ValueError), match="trust_remote_code"):
        load(model)
    check_nothing_ran()


def test_code_beside_a_tokenizer_does_not_run_and_nobody_is_asked(model: Path):
    (model / "own.py").write_text(CODE)
    change_json(
        model / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Tokenizer", None]}
    )
    load_tokenizer(model)  # as the model's family has it
    check_nothing_ran()
    change_json(model / "config.json", model_type="own")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_tokenizer(model)
    check_nothing_ran()


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_weights_that_are_a_pickle_are_not_read(model: Path, load: Callable[[Path], object]):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    if load in (LOADERS["a check"], LOADERS["the config"]):  # they read no weights
        load(model)
    else:
        with pytest.raises(ModelError, match="safetensors"):
            load(model)
    check_nothing_ran()


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_kernel_of_the_hub_is_refused(model: Path, load: Callable[[Path], object], key: str):
    change_json(model / "config.json", **{key: "somebody/kernel"})
    with pytest.raises(ModelError, match=r"config\.json: .* got 'somebody/kernel'.*delete the key"):
        load(model)


def test_a_kernel_for_a_part_of_the_model_is_refused(model: Path):
    change_json(model / "config.json", text_config={"attn_implementation": {"": "somebody/kernel@v1"}})
    with pytest.raises(ModelError, match="kernel@v1"):
        read_model_config(model)


TEMPLATES = [
    "{{ cycler.__init__.__globals__.os.mknod('MARKER') }}",
    "{{ messages.append(1) }}",
    "{% for m in messages %}{{ m.__class__.__init__.__globals__ }}{% endfor %}",
    "{{ lipsum.__globals__['os'].mknod('MARKER') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_is_rendered_in_a_sandbox(model: Path, template: str):
    (model / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(model)
    with pytest.raises(ModelError, match="template"):
        render_prompt(tokenizer, [{"role": "user", "content": "1+1="}])
    check_arguments(tokenizer, {})  # only reads it
    check_nothing_ran()
