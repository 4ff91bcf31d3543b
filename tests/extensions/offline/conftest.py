"""The tokenizer of the tiny model: a token for each character, and for the marks of its chat template."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase as Tokenizer

from async_rl.data.chat import load_tokenizer
from tests.learner.tiny import tiny_model


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def tokenizer(made: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(made, "chat_template", made.chat_template)  # a test may set another one
    return made
