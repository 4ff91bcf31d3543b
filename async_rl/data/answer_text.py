"""Turns tokens into the text of an answer, and finds what its prompt has opened for it.

The engines, the graders, offline evaluation and the learner's records call this module, so that a reward reads the same
text everywhere. Marks such as ``<think>`` and ``<answer>`` stay in it, also if they are special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.data.vocabulary import special_ids
from async_rl.run.records.eval_records import Decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPENED = re.compile(r"(?:<([A-Za-z][\w-]*+)>\s*+(?:</\1>\s*+)?)+\Z")
_NUM_LAST = 64
"""Number of tokens at a prompt's end in which opened tags are looked for. Enough if each character is a token."""


def answer_decoder(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> Decode:
    """Return the function that turns sampled tokens, int32 [N], into the text that rewards and records read.

    It leaves out the special tokens that end a turn (``ends``, as in ``turn_end.TurnEnds``) or pad, and the unknown
    token, which stands for no text. All others stay.
    """
    without_text: Any = (tokenizer.pad_token_id, tokenizer.unk_token_id)
    left_out = special_ids(tokenizer) & {*ends, *without_text}

    def decode(token_ids: np.ndarray) -> str:
        kept = [token for token in token_ids.tolist() if token not in left_out]
        return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def prompt_opened(prompt_ids: np.ndarray, decode: Decode) -> str:
    """Return the tags, with white space, that a prompt opens at its end and the answer goes on in.

    A chat template may write ``<think>`` there, or ``<think></think>``, and so may a plain-text prompt. Empty if the
    prompt ends otherwise.

    Args:
        prompt_ids: the prompt's tokens, int32 [P].
        decode: that of ``answer_decoder``.
    """
    found = _OPENED.search(decode(prompt_ids[-_NUM_LAST:]))
    return "" if found is None else found[0]
