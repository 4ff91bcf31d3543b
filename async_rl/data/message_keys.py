"""The keys of a message beside its role and content: flags that say whether an assistant's message is trained.

Public formats have them under several names: ``weight`` (OpenAI, Mistral, axolotl), ``loss``, ``loss_mask``,
``trainable``, ``train``, ``training``. 1 or true means that the message is trained, 0 or false that it is context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.data.values import is_absent, truth
from async_rl.errors import DataError

_TRAINED_IF = ("weight", "loss", "loss_mask", "trainable", "train", "training")
FLAGS = frozenset({*_TRAINED_IF, "mask", "masked"})
"""All flags. Formats disagree whether ``mask`` or ``masked`` as 1 means that the message is trained."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
READ_KEYS = frozenset({"role", "content", *FLAGS})
ASSISTANT_KEYS = READ_KEYS | {"tool_calls", *THOUGHT_KEYS}
"""Keys of a message, and of an assistant's, that async-rl reads. The chat template may read others."""


def is_trained(message: Mapping[str, Any], where: str) -> bool:
    """Return whether the flags of ``message``, an assistant's, let it be trained. Without a flag it is.

    Raises:
        DataError: a flag has no clear meaning, is neither 0 nor 1, or flags disagree. The message begins with
            ``where``, the place of ``message``.
    """
    flags = _flags_of(message)
    said = {truth(value) if key in _TRAINED_IF else None for key, value in flags.items()}
    if None in said or len(said) > 1:
        raise DataError(
            f"{where}: expected one of the keys {', '.join(_TRAINED_IF)} as 1 or true (trained), or as 0 or false "
            f"(only context), got {flags!s:.80}; correct it (formats disagree what mask and masked mean)"
        )
    return said != {False}


def refuse_flags(answer: str | Sequence[Any], where: str) -> None:
    """Check that no assistant's message of ``answer``, which is compared with another answer, has a flag.

    Raises:
        DataError: one has. The message begins with ``where``, the place of the row.
    """
    for message in () if isinstance(answer, str) else answer:
        if isinstance(message, dict) and message.get("role") == "assistant" and (flags := _flags_of(message)):
            raise DataError(
                f"{where}: expected an answer without flags, because the whole of it is compared with another one, got "
                f"{flags!s:.80}; leave the key out, or remove the row"
            )


def _flags_of(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key in FLAGS and not is_absent(value)}
