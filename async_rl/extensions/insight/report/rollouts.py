"""What a page has of a run's rollouts: an index of all that are known, and chunks with the text of those recorded.

The answers of evaluations are in the same index, under the name of their set. The page filters by the index, and
unpacks a chunk when somebody opens one of its rollouts. A chunk is a header in JSON, which has the rollouts' records,
after 4 bytes that say how long it is; then the columns of their tokens. Chunks beyond the page's limit are left out,
evenly over the steps; ``async-rl report --serve`` has them all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.data.chat import stored_template
from async_rl.data.turn_parts import num_computed_again, parts_of, role_headers
from async_rl.errors import RunError
from async_rl.extensions.insight.report.figures import Plain, short
from async_rl.extensions.insight.report.page import blob, to_json
from async_rl.learner.checkpoints.files import MODEL_FILES
from async_rl.run.directory import RunDir, step_files
from async_rl.run.records.step_log import Row, iter_rows
from async_rl.run.records.token_columns import TokenTable, columns_path, read_token_columns

CHUNK_ROLLOUTS = 64
"""Rollouts of a chunk. Larger ones pack better, and take longer to open."""
_SUMMARIES = {
    "reward": "reward", "accuracy": "accuracy", "tokens": "tokens", "stale": "staleness", "finish": "finish",
    "cause": "cause",
}  # fmt: skip
"""Column of the index -> key of ``summaries.jsonl``."""
_NUMBERS = ("step", "position", "index", "row", *_SUMMARIES, "chunk", "slot", "set")
_COLUMNS = ("token", "version", "behavior", "difference", "advantage", "entropy", "outcome")
"""Columns of a chunk, float32 [T] each. ``difference`` is the learner's log-probability minus the behavior's."""
_KEPT_BITS = 9
"""Bits that are kept of a number's 23 behind the point: three decimal digits."""


@dataclass(slots=True)
class Index:
    """The summaries of rollouts, a list for each of ``_NUMBERS``.

    ``stale`` is the staleness of the oldest token, in versions. ``finish``, ``cause`` and ``set`` are places in
    ``names``; a cause is why the rollout was left out of the loss, and a set is an evaluation set, or "" of training.
    The position of an evaluation's answer is its dataset row. ``chunk`` is -1 if the text was not recorded.
    """

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _NUMBERS})
    names: list[str] = field(default_factory=lambda: [""])

    def add(self, **values: Any) -> None:
        for name in ("finish", "cause", "set"):
            if values[name] not in self.names:
                self.names.append(values[name])
            values[name] = self.names.index(values[name])
        for name, column in self.columns.items():
            column.append(values[name])

    def __len__(self) -> int:
        return len(self.columns["step"])


@dataclass(frozen=True, slots=True)
class Chunk:
    """The place of some rollouts: lines ``start`` to ``end`` of the file ``path``, of step ``step``. ``fields`` are
    what each of its records has.
    """

    path: Path
    step: int
    start: int
    end: int
    fields: frozenset[str]


def read_index(run_dir: RunDir) -> tuple[Index, list[Chunk]]:
    """Return the index of a run's rollouts and of its evaluations' answers, and the places of those with text.

    Raises:
        RunError: a file is damaged.
    """
    index, chunks = Index(), list[Chunk]()
    summaries = {row["step"]: row for row in iter_rows(run_dir.rollout_summaries, is_whole=_is_whole)}
    # A resumed run keeps the texts of later steps until it trains them again; its summaries end where it is.
    recorded = {step: path for _, step, path in step_files(run_dir.rollouts)}
    for step in sorted(summaries):
        found = _added(chunks, recorded[step], step, _FIELDS) if step in recorded else ()
        places = {(record["position"], record["index"]): place for record, place in found}
        _add_summary(index, summaries[step], places)
    for name, step, path in step_files(run_dir.eval):
        _add_answers(index, chunks, name, step, path)
    return index, chunks


def _added(
    chunks: list[Chunk], path: Path, step: int, fields: frozenset[str]
) -> Iterator[tuple[Plain, tuple[int, int]]]:
    """Add the chunks of a file to ``chunks``. Yield its records without texts, each with its chunk and place there."""
    records, first = _brief(path, fields), len(chunks)
    for start in range(0, len(records), CHUNK_ROLLOUTS):
        chunks.append(Chunk(path, step, start, min(start + CHUNK_ROLLOUTS, len(records)), fields))
    for number, record in enumerate(records):
        yield record, (first + number // CHUNK_ROLLOUTS, number % CHUNK_ROLLOUTS)


def _add_answers(index: Index, chunks: list[Chunk], name: str, step: int, path: Path) -> None:
    """Add the answers of one evaluation of the set ``name``."""
    for record, (chunk, slot) in _added(chunks, path, step, _ANSWER_FIELDS):
        index.add(
            step=step, position=record["row"], index=record["index"] or 0, row=record["row"],
            reward=short(record["reward"]), accuracy=short(record["accuracy"]), tokens=record["num_tokens"], stale=None,
            finish=record["finish_reason"], cause="", chunk=chunk, slot=slot, set=name,
        )  # fmt: skip


def _brief(path: Path, fields: frozenset[str]) -> tuple[Plain, ...]:
    """Return the records in a file without texts. A server asks again and again, of files that don't change."""
    found = path.stat()
    return _brief_once(path, found.st_mtime_ns, found.st_size, fields)


@lru_cache(maxsize=10_000)
def _brief_once(path: Path, mtime_ns: int, size: int, fields: frozenset[str]) -> tuple[Plain, ...]:
    return tuple({key: record.get(key) for key in _BRIEF} for record in read_records(path, fields))


def _add_summary(index: Index, row: Row, places: Mapping[tuple[int, int], tuple[int, int]]) -> None:
    number = 0
    for position, dataset_row, size in zip(row["positions"], row["rows"], row["sizes"], strict=True):
        for of_group in range(size):
            chunk, slot = places.get((position, of_group), (-1, 0))
            values = {name: row[key][number] for name, key in _SUMMARIES.items()}
            index.add(
                step=row["step"], position=position, index=of_group, row=dataset_row, chunk=chunk, slot=slot, set="",
                **values,
            )  # fmt: skip
            number += 1


def _is_whole(row: Row) -> bool:
    """Return whether a row of ``summaries.jsonl`` has all its lists, in their lengths."""
    try:
        count = sum(row["sizes"])
        whole = len(row["positions"]) == len(row["rows"]) == len(row["sizes"])
        return whole and all(len(row[key]) == count for key in _SUMMARIES.values())
    except (KeyError, TypeError):
        return False


def read_records(path: Path, fields: frozenset[str], lines: slice = slice(None)) -> list[Plain]:
    """Return the records of a file, or of ``lines`` of it. Each has ``fields``: those of rollouts, or of answers.

    Raises:
        RunError: the file is damaged.
    """
    try:
        written = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
        records = [json.loads(line) for line in written[lines]]
        if all(isinstance(record, dict) and record.keys() >= fields for record in records):
            return records
        got = "others"
    except (OSError, ValueError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"
    raise RunError(
        f"expected JSON objects with {', '.join(sorted(fields))} in {path}, got {got}; delete the file: only reports "
        f"and people read it"
    )


_BRIEF = ("position", "index", "row", "reward", "accuracy", "num_tokens", "finish_reason")
_FIELDS = frozenset({*_BRIEF, "versions", "trained_at", "masked"})
_ANSWER_FIELDS = frozenset({"row", "messages", "response", "accuracy", "finish_reason"})


def chunk_bytes(chunk: Chunk) -> bytes:
    """Return a chunk as the page unpacks it: the header, then its columns, the bytes of equal weight together.

    Raises:
        RunError: a file is damaged, or has fewer rollouts by now.
    """
    # An evaluation has many chunks in one file: to read all its records for each of them would take minutes.
    records = read_records(chunk.path, chunk.fields, slice(chunk.start, chunk.end))
    if len(records) != chunk.end - chunk.start:
        raise RunError(f"{chunk.path} has changed; make the report again")
    header: Plain = {"records": records}
    columns = np.zeros((0, 0), np.float32)
    path = columns_path(chunk.path)
    if path.is_file():
        columns = _with_tokens(header, read_token_columns(path), _headers(RunDir(chunk.path.parent.parent)))
    encoded = to_json(header)
    planes = np.ascontiguousarray(_rounded(columns).reshape(-1, 1).view(np.uint8).T)
    return struct.pack("<I", len(encoded)) + encoded + planes.tobytes()


def _headers(run_dir: RunDir) -> Mapping[str, str]:
    """Return the headers of the messages in a run's rollouts; none without a checkpoint, which has the template."""
    name = run_dir.latest_checkpoint
    return role_headers(stored_template(run_dir.checkpoints / name / MODEL_FILES)) if name else {}


def _with_tokens(header: Plain, table: TokenTable, headers: Mapping[str, str]) -> np.ndarray:
    """Give the records in ``header`` the places of their tokens, and their parts. Return these tokens' columns,
    float32 [C, T].
    """
    wanted = {(record["position"], record["index"]): record for record in header["records"]}
    bounds = np.concatenate([[0], np.cumsum(table.sizes)])
    kept: list[slice] = []
    size = 0
    for number, key in enumerate(zip(table.places["position"], table.places["index"], strict=True)):
        if (record := wanted.get(key)) is None:
            continue
        place = slice(int(bounds[number]), int(bounds[number + 1]))
        kept.append(place)
        for text in ("response", "sequences"):
            record.pop(text, None)  # the tokens are the text
        learner = int(table.places["learner_version"][number])
        record.setdefault("columns", []).append([size, size + place.stop - place.start, learner])
        parts = parts_of(table.texts[place], table.outcomes[place], headers)
        record.setdefault("parts", []).append(parts)
        record["again"] = num_computed_again(record["parts"])
        size += place.stop - place.start
    if not kept:
        return np.zeros((0, 0), np.float32)
    vocabulary: dict[tuple[int, str], int] = {}
    outcomes: dict[str, int] = {}
    tokens, codes = [], []
    for place in kept:
        ids, texts = table.numbers["token_ids"][place].tolist(), table.texts[place]
        tokens += [vocabulary.setdefault(pair, len(vocabulary)) for pair in zip(ids, texts, strict=True)]
        codes += [outcomes.setdefault(outcome, len(outcomes)) for outcome in table.outcomes[place]]
    header |= {"columns": _COLUMNS, "vocabulary": list(vocabulary), "outcomes": list(outcomes), "size": size}
    numbers = {name: np.concatenate([values[place] for place in kept]) for name, values in table.numbers.items()}
    behavior = numbers["behavior_logprobs"]
    computed = [behavior, numbers["logprobs"] - behavior, numbers["advantages"], numbers["entropies"]]
    return np.array([tokens, numbers["versions"], *computed, codes], np.float32)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Return the columns with fewer bits of what is no whole number, so that they pack better."""
    drop = 23 - _KEPT_BITS
    bits = np.ascontiguousarray(values[2:-1]).view(np.uint32)
    rounded = (bits + np.uint32(1 << (drop - 1))) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
    is_number = np.isfinite(values[2:-1])
    return np.concatenate([values[:2], np.where(is_number, rounded.view(np.float32), np.nan), values[-1:]])


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
