"""Finds an end token that LoRA can't teach, because its row of the head was never trained.

LoRA trains layers of the decoder, not the head, where tokens that a base model only reserves have rows that are zero,
the mean of all rows (as ``resize_token_embeddings`` makes them), or equal to one another. With such a row a token is
never more likely than all others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.data.chat import load_tokenizer, model_directory, vocabulary_size
from async_rl.data.turn_end import turn_ends

_NUM_COLUMNS = 256
"""Rows are compared in this many columns, so that the check of a large model is quick."""
_NEAR = 0.01
"""Rows are equal if they differ by less than this share of the median norm of a row: bfloat16 rounds to 0.004."""


def untrained_end(config: Config) -> str:
    """Return a warning if LoRA can't teach ``model.path`` to end its answers, else an empty text.

    Without LoRA, or if the weights are not on this machine, it is empty.

    Raises:
        ModelError: the tokenizer or the model's config can't be read.
    """
    if not config.lora.is_set:
        return ""
    directory = model_directory(config.model.path)
    tokenizer, num_rows = load_tokenizer(directory, needs_template=False), vocabulary_size(directory)
    ends = turn_ends(tokenizer, directory, config.data.template_arguments)
    end = ends.eos if config.data.prompt_format == "text" or ends.of_template is None else ends.of_template
    if end is None or num_rows is None or end >= num_rows:
        return ""
    matrices = _matrices(directory, num_rows)
    # Where the embedding is the head, there is no other matrix.
    heads = {name: rows for name, rows in matrices.items() if "emb" not in name and "wte" not in name} or matrices
    if not heads or not all(_is_untrained(rows_VD, end) for rows_VD in heads.values()):
        return ""
    return (
        f"lora.rank: LoRA can't teach the model to stop: the row in {min(heads)} of {tokenizer.decode([end])} ({end}), "
        f"which ends an answer, was never trained (it is zero, the mean, or another token's), and LoRA leaves it so; "
        f"train without lora.rank, or take a model, or a chat template, with an end token that the model was trained on"
    )


def _matrices(directory: Path, num_rows: int) -> dict[str, Any]:
    """Return the first columns of all matrices with ``num_rows`` rows: tensors [V, D] of float32, by name. These are
    embeddings and heads.
    """
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if tensors.get_slice(name).get_shape()[:-1] == [num_rows]:
                    found[name] = tensors.get_slice(name)[:, :_NUM_COLUMNS].float()
    return found


def _is_untrained(rows_VD: Any, token: int) -> bool:
    """Return whether the row of ``token`` is zero, the mean row, or that of another token."""
    own_D, limit = rows_VD[token], _NEAR * rows_VD.norm(dim=1).median()
    near_V = (rows_VD - own_D).norm(dim=1) < limit
    return bool(near_V.sum() > 1 or own_D.norm() < limit or (rows_VD.mean(dim=0) - own_D).norm() < limit)
