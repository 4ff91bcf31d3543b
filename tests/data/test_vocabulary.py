"""Tokens that a tokenizer has and a model's embedding has no row for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_rl.data.chat import load_tokenizer, vocabulary_size
from async_rl.data.vocabulary import check_embedded, num_beyond
from async_rl.errors import ModelError
from tests.learner.tiny import add_token, tiny_model


def test_a_token_beyond_the_embedding_is_refused_where_it_occurs(tmp_path: Path):
    add_token(tiny_model(tmp_path), "<new>")
    tokenizer, num_rows = load_tokenizer(tmp_path), vocabulary_size(tmp_path)
    assert num_rows == 45  # 4 marks, 40 characters and the line break
    assert num_beyond(tokenizer, num_rows) == 1
    assert num_beyond(tokenizer, 64) == num_beyond(tokenizer, None) == 0
    for ids in ([], [0, 44]):
        check_embedded(np.array(ids, np.int32), num_rows, tokenizer, "sft.data")
    new = np.array([3, 45, 1], np.int32)
    check_embedded(new, 46, tokenizer, "sft.data")
    check_embedded(new, None, tokenizer, "sft.data")
    with pytest.raises(ModelError, match=r"sft\.data: .* of 45 rows has a row for, got <new> \(45\), .* resize the"):
        check_embedded(new, num_rows, tokenizer, "sft.data")
