"""The digest of a tokenizer's vocabulary, by which a generator knows that a teacher reads the same tokens."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LENGTH = 16


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256, in short, of a tokenizer's tokens and their ids, added ones included."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:_LENGTH]
