"""Files of token columns: what was sampled and computed for each token of the recorded rollouts of a step.

``rollouts/step-NNNNNN.tokens.parquet`` belongs to ``step-NNNNNN.jsonl``. It has a row for each token sequence, whose
columns are lists with a value for each token, the prompt's and the environment's among them. Any reader of Parquet
opens it: ``pandas.read_parquet(path).explode([...])``. The learner writes the files, ``async-rl report`` reads them.
T = tokens of all sequences, S = sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from async_rl.errors import RunError
from async_rl.records import PER_TOKEN
from async_rl.run.directory import replaced

GIVEN = "given"
"""The outcome of a token that the policy did not sample. Others are ``trained``, ``clipped_low``, ``clipped_high``, or
the cause for which the token was left out of the loss (``masked/<cause>``, and ``token_range``)."""
PLACES = ("position", "index", "sequence", "learner_version")
_CARRIED = {name: PER_TOKEN[name].dtype for name in ("token_ids", "versions", "behavior_logprobs")}
_NUMBERS = _CARRIED | dict.fromkeys(("logprobs", "entropies", "advantages"), np.dtype(np.float32))
_TEXTS = ("texts", "outcomes")


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """The content of a file.

    Attributes:
        places: int64 [S] each: ``position`` of the group in the prompt stream, ``index`` of the rollout in its group,
            ``sequence`` in the rollout, ``learner_version`` before the update that trained on it.
        sizes: int64 [S], tokens of each sequence.
        numbers: [T] each. ``versions`` is -1 for tokens that the policy did not sample. Log-probabilities are in nats;
            ``logprobs`` and ``entropies`` are the learner's before its update, NaN where it computed none. Advantages
            are NaN there, too.
        texts: [T], the text of each token. If several tokens make up one character, the last of them has it.
        outcomes: [T], as ``GIVEN`` says.
    """

    places: dict[str, np.ndarray]
    sizes: np.ndarray
    numbers: dict[str, np.ndarray]
    texts: Sequence[str]
    outcomes: Sequence[str]


def columns_path(rollouts: Path) -> Path:
    """Return the file of token columns that belongs to a file of rollouts as text."""
    return rollouts.with_suffix(".tokens.parquet")


def write_token_columns(path: Path, table: TokenTable, confirm: Callable[[], None] = lambda: None) -> None:
    """Write a file, which is complete when it appears.

    ``confirm`` is called when all is written, right before the file appears. If it raises, there is no file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    offsets = pa.array(np.concatenate([[0], np.cumsum(table.sizes)]), pa.int32())

    def lists(values: pa.Array) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, values)

    columns = {name: pa.array(table.places[name], pa.int64()) for name in PLACES}
    columns |= {name: lists(pa.array(table.numbers[name].astype(dtype))) for name, dtype in _NUMBERS.items()}
    for name, values in zip(_TEXTS, (table.texts, table.outcomes), strict=True):
        # A model's tokens may decode to half a surrogate pair, which is no text to Parquet.
        clean = [value.encode("utf-8", "replace").decode("utf-8") for value in values]
        columns[name] = lists(pa.array(clean, pa.string()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, confirm) as partial:
        pq.write_table(pa.table(columns), partial, compression="zstd")


def read_token_columns(path: Path) -> TokenTable:
    """Read a file.

    Raises:
        RunError: it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=[*PLACES, *_NUMBERS, *_TEXTS]).combine_chunks()
        sizes = np.diff(table["token_ids"].combine_chunks().offsets.to_numpy())
        flat = {name: pa.chunked_array(table[name]).combine_chunks().flatten() for name in (*_NUMBERS, *_TEXTS)}
        if len({len(values) for values in flat.values()}) != 1:
            raise ValueError("columns of different lengths")
        return TokenTable(
            places={name: table[name].to_numpy() for name in PLACES},
            sizes=sizes.astype(np.int64),
            numbers={name: flat[name].to_numpy(zero_copy_only=False) for name in _NUMBERS},
            texts=flat["texts"].to_pylist(),
            outcomes=flat["outcomes"].to_pylist(),
        )
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise RunError(
            f"can't read the token columns {path}: {type(error).__name__}: {error}; delete the file, only reports and "
            f"people read it"
        ) from error
