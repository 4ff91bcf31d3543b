"""The digest of a scorer's model, so that no run goes on with another one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from async_rl.errors import ModelError

_LENGTH = 16


def model_digest(directory: Path) -> str:
    """Return the SHA-256, in short, of the files of a model: weights, configs and tokenizer. Reading them takes a while
    for a large model.

    Raises:
        ModelError: there are no weights as safetensors.
    """
    files = sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt"))
    if not any(path.suffix == ".safetensors" for path in files):
        raise ModelError(
            f"expected the weights of a model as safetensors in {directory}, got none; write them there with "
            f"save_pretrained"
        )
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()[:_LENGTH]
