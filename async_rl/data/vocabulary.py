"""A tokenizer's vocabulary: its special tokens, those that a model has no row for, and its digest.

By the digest a generator knows that a teacher reads the same tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LENGTH = 16


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256, in short, of a tokenizer's tokens and their ids, added ones included."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:_LENGTH]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokens that decoding leaves out of a text.

    The end token of a turn may be one without a role such as that of ``eos_token`` (Gemma, Phi), so
    ``all_special_ids`` has too few.
    """
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    return frozenset({*tokenizer.all_special_ids, *(token for token, how in added.items() if how.special)})


def num_beyond(tokenizer: PreTrainedTokenizerBase, num_rows: int | None) -> int:
    """Return how many tokens of a tokenizer a model's embedding of ``num_rows`` rows has no row for. 0 if that is None.

    Such a model can be used as long as no text contains one of them.
    """
    return 0 if num_rows is None else sum(token >= num_rows for token in tokenizer.get_vocab().values())


def check_embedded(ids: np.ndarray, num_rows: int | None, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Check that a model's embedding of ``num_rows`` rows, None if unknown, has one for each of ``ids``, int32 [T].

    ``what`` is what has these tokens, for messages.

    Raises:
        ModelError: it has not.
    """
    if num_rows is None or not len(ids) or (largest := int(np.max(ids))) < num_rows:
        return
    raise ModelError(
        f"{what}: expected tokens that the model's embedding of {num_rows} rows has a row for, got "
        f"{tokenizer.convert_ids_to_tokens(largest)} ({largest}), which only the tokenizer knows; resize the model "
        f"(resize_token_embeddings, then save_pretrained), or use a tokenizer and a chat template without such tokens"
    )
