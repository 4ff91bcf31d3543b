"""Prompts above ``sampling.max_prompt_tokens``, under ``data.on_long_prompt = "truncate"``. Called by ``rollouts``.

What is cut is the end of the last user message, never the template around it: the model must still be told that it is
its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Encode = Callable[[Sequence[Mapping[str, str]]], np.ndarray]


def fitted_prompt(
    encode: Encode, messages: Sequence[Mapping[str, str]], prompt_ids: np.ndarray, max_tokens: int
) -> np.ndarray:
    """Token ids of as much of the prompt as fits, or ``prompt_ids`` where no cut makes it fit.

    Args:
        encode: renders messages to token ids, int32 [P].
        prompt_ids: what ``messages`` render to.
        max_tokens: what may be kept.
    """
    if len(prompt_ids) <= max_tokens:
        return prompt_ids
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    cut = users[-1] if users else len(messages) - 1
    content = messages[cut]["content"]

    def rendered(num_kept: int) -> np.ndarray:
        shortened = {"role": messages[cut]["role"], "content": content[:num_kept]}
        return encode([*messages[:cut], shortened, *messages[cut + 1 :]])

    best, fits, too_many = prompt_ids, 0, len(content)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        shorter = rendered(middle)
        if len(shorter) <= max_tokens:
            best, fits = shorter, middle
        else:
            too_many = middle
    return best
