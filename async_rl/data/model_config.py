"""Reads the config of a model directory, which may come from anybody, without running code that it names.

Called by everything that loads a model or its config with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_model_config(directory: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the config of the model in ``directory``.

    Args:
        trust_remote_code: execute Python code that the model brings along, if its config asks for it. If False,
            transformers neither executes it nor asks on the terminal whether to.

    Raises:
        ModelError: the config can't be read, is unfit, as transformers finds, or names code of the hub, a kernel, that
            was not allowed.
    """
    from transformers import AutoConfig

    if not trust_remote_code:
        _refuse_kernels(directory / "config.json")
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for unreadable files
        raise ModelError(
            f"can't read the model config in {directory}: {type(error).__name__}: {error}; correct model.path"
        ) from error


def _refuse_kernels(path: Path) -> None:
    try:
        plain: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"can't read the model config {path}: {error}; expected what save_pretrained writes"
        ) from error
    for key, value in _settings(plain):
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise ModelError(
                f"{path}: expected the name of an implementation in {key}, got {value!r}, which transformers would "
                f"fetch from the hub and execute; delete the key"
            )


def _settings(plain: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys of a config and of the configs in it, with their values."""
    if isinstance(plain, dict):
        for key, value in plain.items():
            yield str(key), value
            yield from _settings(value)
