"""Versions that hold only LoRA adapters (``lora.publish = "adapters"``): their names, and the weights below them.

The learner publishes the matrices A and B under peft's names. A generator has the frozen weights already: it loads the
files of ``model.path`` itself, after it has compared their digest with the learner's. Called by both. No torch.
Shape letters: O, I = a layer's outputs and inputs, R = rank.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from async_rl.data.chat import model_directory
from async_rl.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_BASE = "adapter_base.json"
"""Name of the file that describes the frozen weights, in checkpoints and among the files that generators get."""

_PREFIX = "base_model.model."
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The frozen weights that adapters belong to: their directory or hub id, and the digest of all safetensors
    files there. ``base_bits`` is ``lora.base_bits`` if generators sample with weights that were quantised, else None.
    """

    path: str
    digest: str
    base_bits: int | None = None

    @classmethod
    def of(cls, path: str) -> BaseWeights:
        """Compute the digest of the model at ``path``. Every byte is read, which takes seconds for 15 GB.

        Raises:
            ModelError: there is no such model.
        """
        directory = model_directory(path, weights=True)
        hasher = xxhash.xxh3_128()
        for file in sorted(directory.glob("*.safetensors")):
            hasher.update(file.name.encode())
            with file.open("rb") as content:
                while piece := content.read(_PIECE_BYTES):
                    hasher.update(piece)
        # The path is absolute, because the checkpoint may be used from another working directory. A hub id stays as is.
        return cls(str(Path(path).resolve()) if Path(path).is_dir() else path, hasher.hexdigest())

    def to_json(self) -> bytes:
        """Return the content of the file ``ADAPTER_BASE``."""
        return json.dumps(asdict(self)).encode()


def peft_name(module: str, letter: str) -> str:
    """Return peft's name of the matrix ``letter`` (A or B) in the adapter of the linear layer ``module``."""
    return f"{_PREFIX}{module}.lora_{letter}.weight"


def merge(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, *, scale: float) -> Tensor:
    """Return ``W + scale * B A``, float32 [O, I]."""
    return weight_OI.float() + scale * (b_OR.float() @ a_RI.float())


def link_base(directory: Path, path: str) -> None:
    """Link the weights' files of the model at ``path`` into a generator's ``directory``, if they are the learner's.

    ``directory`` has the files that the learner sent, ``ADAPTER_BASE`` among them.

    Raises:
        ModelError: the learner sent no such file; there is no model at ``path``; or it is another one than the
            learner's.
    """
    try:
        expected = str(json.loads((directory / ADAPTER_BASE).read_bytes())["digest"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f'lora.publish = "adapters": expected {ADAPTER_BASE} from the learner, with the digest of its frozen '
            f"weights, got none that can be read: {error}; run learner and generators with one version of async-rl"
        ) from error
    found = BaseWeights.of(path)
    if found.digest != expected:
        raise ModelError(
            f'lora.publish = "adapters": the weights in {found.path} on this machine are not those that the learner '
            f"froze: expected digest {expected}, got {found.digest}; copy the learner's model.path to this machine, or "
            f'set lora.publish = "merged"'
        )
    for file in model_directory(path, weights=True).glob("*.safetensors*"):
        link = directory / file.name
        if not link.exists():
            link.symlink_to(file.resolve())
