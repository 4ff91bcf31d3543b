"""What a page has of a run's rollouts: an index of all that are known, and chunks with the text of those recorded.

The page filters by the index, and unpacks a chunk when somebody opens one of its rollouts. A chunk is a header in JSON,
which has the rollouts' records, after 4 bytes that say how long it is. Chunks beyond the page's limit are left out,
evenly over the steps; ``async-rl report --serve`` has them all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_rl.errors import RunError
from async_rl.report.figures import Plain, short
from async_rl.report.page import blob, to_json
from async_rl.run.directory import RunDir

CHUNK_ROLLOUTS = 64
"""Rollouts of a chunk. Larger ones pack better, and take longer to open."""
_NUMBERS = (
    "step",
    "position",
    "index",
    "row",
    "reward",
    "accuracy",
    "tokens",
    "stale",
    "finish",
    "cause",
    "chunk",
    "slot",
)


@dataclass(slots=True)
class Index:
    """The summaries of rollouts, a list for each of ``_NUMBERS``.

    ``stale`` is the staleness of the oldest token, in versions. ``finish`` and ``cause`` are places in ``names``; a
    cause is why the rollout was left out of the loss. ``chunk`` is -1 if the text was not recorded.
    """

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _NUMBERS})
    names: list[str] = field(default_factory=lambda: [""])

    def add(self, **values: Any) -> None:
        for name in ("finish", "cause"):
            if values[name] not in self.names:
                self.names.append(values[name])
            values[name] = self.names.index(values[name])
        for name, column in self.columns.items():
            column.append(values[name])

    def __len__(self) -> int:
        return len(self.columns["step"])


@dataclass(frozen=True, slots=True)
class Chunk:
    """The place of some rollouts: lines ``start`` to ``end`` of the file ``path``, of step ``step``."""

    path: Path
    step: int
    start: int
    end: int


def read_index(run_dir: RunDir) -> tuple[Index, list[Chunk]]:
    """Return the index of a run's rollouts, and the places of those that are recorded.

    Raises:
        RunError: a file is damaged.
    """
    index, chunks = Index(), list[Chunk]()
    for step, path in rollout_files(run_dir):
        records = read_records(path)
        for number, record in enumerate(records):
            if number % CHUNK_ROLLOUTS == 0:
                chunks.append(Chunk(path, step, number, min(number + CHUNK_ROLLOUTS, len(records))))
            versions = record["versions"]
            index.add(
                step=step,
                position=record["position"],
                index=record["index"],
                row=record["row"],
                reward=short(record["reward"]),
                accuracy=short(record["accuracy"]),
                tokens=record["num_tokens"],
                stale=record["trained_at"] - versions[0] if versions else None,
                finish=record["finish_reason"],
                cause="filter" if record["masked"] else "",
                chunk=len(chunks) - 1,
                slot=number % CHUNK_ROLLOUTS,
            )
    return index, chunks


def rollout_files(run_dir: RunDir) -> Iterator[tuple[int, Path]]:
    """Yield the files of recorded rollouts with their steps, in order."""
    for path in sorted(run_dir.rollouts.glob("step-*.jsonl")):
        if (number := path.stem.removeprefix("step-")).isdecimal():
            yield int(number), path


def read_records(path: Path) -> list[Plain]:
    """Return the records of a file of rollouts.

    Raises:
        RunError: the file is damaged.
    """
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        if all(isinstance(record, dict) and record.keys() >= _FIELDS for record in records):
            return records
        got = "others"
    except (OSError, ValueError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"
    raise RunError(
        f"expected JSON objects with {', '.join(sorted(_FIELDS))} in {path}, got {got}; delete the file: only reports "
        f"and people read it"
    )


_FIELDS = frozenset(
    {
        "position",
        "index",
        "row",
        "reward",
        "accuracy",
        "num_tokens",
        "versions",
        "trained_at",
        "finish_reason",
        "masked",
    }
)


def chunk_bytes(chunk: Chunk) -> bytes:
    """Return a chunk as the page unpacks it.

    Raises:
        RunError: the file is damaged, or has fewer rollouts by now.
    """
    records = read_records(chunk.path)[chunk.start : chunk.end]
    if len(records) != chunk.end - chunk.start:
        raise RunError(f"{chunk.path} has changed; make the report again")
    header = to_json({"records": records})
    return struct.pack("<I", len(header)) + header


def packed_chunks(chunks: Sequence[Chunk], limit_bytes: int) -> dict[int, str]:
    """Return the chunks by their numbers as the page holds them, as many as ``limit_bytes`` allow, evenly chosen."""
    found: dict[int, str] = {}
    size = 0
    for number in _spread(len(chunks)):
        packed = blob(chunk_bytes(chunks[number]))
        size += len(packed)
        if size > limit_bytes:
            break
        found[number] = packed
    return dict(sorted(found.items()))


def _spread(count: int) -> list[int]:
    """Return 0 to ``count`` - 1 in an order whose every beginning lies evenly among them."""
    width = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{width}b}"[::-1], 2))


def index_data(index: Index, packed: Mapping[int, str] | None) -> bytes:
    """Return the index as the page's script gets it. ``packed`` are the chunks in the page; None: all can be had."""
    columns = dict(index.columns)
    if packed is not None:
        columns["chunk"] = [c if c < 0 or c in packed else -2 for c in columns["chunk"]]
    return to_json({**columns, "names": index.names})
