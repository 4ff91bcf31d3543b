"""Limits of a model's attention that self-tests must know: windows in tokens, and caps of the scores.

The self-tests of the learner and of the built-in engine run short texts. They narrow the windows meanwhile, so that
their texts are longer. The names are those of transformers' configs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NARROW_WINDOW = 4
"""Width of a narrowed window, in tokens."""

_WINDOW_KEYS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "index_topk")


def caps_attention(config: Any) -> bool:
    """Return whether the model caps its attention scores, which transformers' sdpa attention leaves out.

    Args:
        config: the model's transformers config.
    """
    settings = config.get_text_config(decoder=True).to_dict()
    return any("attn" in key and "softcap" in key and value is not None for key, value in settings.items())


@contextmanager
def narrow_windows(model: Any, *, below: int | None = None) -> Iterator[None]:
    """Narrow the attention windows of a transformers model while the ``with`` block runs.

    Args:
        model: has a ``config``; its modules may have copies of the widths.
        below: only windows of fewer tokens are narrowed. None: all are.
    """
    text = model.config.get_text_config(decoder=True)
    changed: list[tuple[Any, str, int]] = []
    for key in _WINDOW_KEYS:
        width = getattr(text, key, None)
        if type(width) is not int or width <= NARROW_WINDOW or (below is not None and width >= below):
            continue
        for owner in (text, *model.modules()):
            if type(getattr(owner, key, None)) is int and getattr(owner, key) == width:
                changed.append((owner, key, width))
                setattr(owner, key, NARROW_WINDOW)
    try:
        yield
    finally:
        for owner, key, width in changed:
            setattr(owner, key, width)
