"""A tokenizer's vocabulary: its special tokens, and its digest.

By the digest a generator knows that a teacher reads the same tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
