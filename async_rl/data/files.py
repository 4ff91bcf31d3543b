"""Reads the raw rows of a dataset, each with its place in the file. The module ``dataset`` checks the rows afterwards.

A dataset is named in one of three ways: the path of a file with an ending of ``_READERS`` (any other file is read as
JSONL, and one with the ending ``.gz`` is unpacked first), a directory that the package
``datasets`` reads, or ``[split@]owner/name[:config]`` of the Hugging Face hub. Packages for formats other than JSONL,
JSON and CSV are imported only when they are needed.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from async_rl.data.values import kind
from async_rl.errors import DataError

_SPLIT = re.compile(r"(?P<split>[A-Za-z0-9_.\-]+(?:\[[^\]]*\])?)@(?P<place>.+)", re.DOTALL)
_HUB_ID = re.compile(r"[A-Za-z0-9_\-][\w.\-]*/[\w.\-]+(?::[\w.\-]+)?")
_SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")
_BATCH_ROWS = 1024
_PACKED = ".gz"
_FIELD_LIMIT = 1 << 27
"""Maximum number of characters in one CSV cell. Python's default is too small for a row's test cases."""


class Source:
    """Reads one dataset, once.

    ``records`` yields the rows. After the last row, ``digest`` is the SHA-256 of the file's bytes. It is that of the
    rows if the dataset is not a single file.
    """

    def __init__(self, name: str) -> None:
        """Find the dataset ``name``, without reading it.

        Raises:
            DataError: there is no such file and ``name`` is not a hub id, or ``name`` has a split before a single file.
        """
        self.name = name
        self._hash = hashlib.sha256()
        found = None if Path(name).exists() else _SPLIT.fullmatch(name)
        self._split = None if found is None else found["split"]
        self._place = name if found is None else found["place"]
        path = Path(self._place)
        self._is_dataset = path.is_dir() or (not path.exists() and _HUB_ID.fullmatch(self._place) is not None)
        if not path.exists() and (not self._is_dataset or path.suffix in (*_READERS, _PACKED)):
            raise DataError(
                f"no dataset at {name}; check the path, or the split before @ (`async-rl quickstart` makes the data of "
                f"the quickstart, `python examples/gsm8k.py` that of the mathematics recipes)"
            )
        if self._split is not None and not self._is_dataset and self._split != "train":
            raise DataError(
                f"expected no split before a single file, because a file has only the split train, got {name}; leave "
                f"out {self._split}@"
            )

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def records(self) -> Iterator[tuple[str, Any | DataError]]:
        """Yield a pair (place, row) for every row of the dataset.

        The place is ``file:line``, or ``file: row N`` with N counted from 1. If a row can't be read, the pair has a
        DataError in place of the row.

        Raises:
            DataError: the whole dataset can't be read.
        """
        if self._is_dataset:
            yield from self._from_datasets()
            return
        try:
            content = Path(self._place).read_bytes()
        except OSError as error:
            raise DataError(
                f"can't read the dataset {self.name}: {error.strerror or error}; check the file and its permissions"
            ) from error
        self._hash.update(content)
        path = Path(self._place)
        if path.suffix.lower() == _PACKED:
            path, content = path.with_suffix(""), _unpacked(content, self._place)
        if path.suffix.lower() in (".xlsx", ".xls", ".ods"):
            raise DataError(
                f"{path}: expected {', '.join(_READERS)}, got a spreadsheet; save it as CSV, or in Python pass "
                f"data=pandas.read_excel({str(path)!r})"
            )
        yield from _READERS.get(path.suffix.lower(), _jsonl)(content, self._place)

    def _from_datasets(self) -> Iterator[tuple[str, Any]]:
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"reading {self.name} needs the package datasets; install it with: pip install datasets"
            ) from error
        place, _, config = self._place.partition(":") if not Path(self._place).exists() else (self._place, "", "")
        try:
            if any((Path(place) / name).is_file() for name in _SAVED_BY_DATASETS):
                rows: Any = _split_of(datasets.load_from_disk(place), self._split or "train")
            else:
                rows = datasets.load_dataset(place, config or None, split=self._split or "train")
        except Exception as error:  # offline, no such name, split or config, no permission: all the same to the user
            cause = str(error).splitlines()[0] if str(error) else ""
            raise DataError(
                f"can't load the dataset {self.name} (split {self._split or 'train'!r}): {type(error).__name__}: "
                f"{cause}; expected a file, a directory of data files, or [split@]owner/name[:config] of the hub"
            ) from error
        batches = (
            batch
            for table in rows.with_format("arrow").iter(batch_size=_BATCH_ROWS)  # images and the like stay undecoded
            for batch in table.to_batches()
        )
        for where, row in _from_batches(batches, self.name):
            self._hash.update(_packed(row))
            yield where, row


def _unpacked(content: bytes, path: str) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: expected a file packed by gzip, got other content ({error}); pack it again, or remove {_PACKED} "
            f"from its name"
        ) from error


def _packed(row: Any) -> bytes:
    """Return bytes that depend on the values of ``row``, for a digest."""
    try:
        return msgpack.packb(row, default=str) or b""
    except (OverflowError, ValueError):  # integers beyond 64 bits, or text that is not Unicode, in a column of JSON
        return json.dumps(row, default=str).encode()


def _split_of(saved: Any, split: str) -> Any:
    """Return the rows of one split of ``saved``, a dataset that ``datasets.load_from_disk`` returned.

    ``split`` is a name with an optional range, such as ``test`` or ``train[:60%]``. A dataset that was saved without a
    split's name counts as ``train``. Raises ValueError if there is no such split.
    """
    import datasets

    parts = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    instructions = datasets.ReadInstruction.from_spec(split).to_absolute(
        {name: len(rows) for name, rows in parts.items()}
    )
    return datasets.concatenate_datasets(
        [parts[part.splitname].select(range(part.from_, part.to)) for part in instructions]
    )


def _jsonl(content: bytes, path: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(io.BytesIO(content), start=1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                yield where, _without_nulls(parse_json(line, where, "one JSON object per line"))
            except DataError as error:
                yield where, error


def _json(content: bytes, path: str) -> Iterator[tuple[str, Any]]:
    rows = parse_json(content, path, "a JSON list of objects")
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: expected a JSON list of objects, got {kind(rows)}; for one object per line use the ending .jsonl"
        )
    yield from ((f"{path}: row {number}", _without_nulls(row)) for number, row in enumerate(rows, start=1))


def _csv(content: bytes, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a pair (place, row) for each record of a CSV file. All values are text. Empty cells are left out."""
    csv.field_size_limit(_FIELD_LIMIT)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: expected UTF-8, got byte 0x{content[error.start]:02x} at offset {error.start}; save the file as "
            f"UTF-8"
        ) from None
    delimiter = "\t" if ".tsv" in Path(path).suffixes else ","
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 2
    try:
        for row in reader:
            where, line = f"{path}:{line}", reader.line_num + 1
            if None in row or None in row.values():
                width, found = len(reader.fieldnames or ()), "more" if None in row else "fewer"
                yield where, DataError(f"{where}: expected {width} cells, as many as the header has, got {found}")
            else:
                yield where, {key: cell for key, cell in row.items() if cell != ""}
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num}: expected CSV with a header line, got a line that can't be read: {error}; "
            f"correct the line, or give the file the ending of its format"
        ) from None


def _parquet(content: bytes, path: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(pyarrow.BufferReader(content)).iter_batches(batch_size=_BATCH_ROWS)
        yield from _from_batches(batches, path)
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path}: expected a Parquet file, got other content ({error}); give the file the ending of its format, or "
            f"write it again"
        ) from error


def _arrow(content: bytes, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a pair (place, row) for each row of an Arrow file. Both Arrow formats are read: file and stream."""
    import pyarrow
    from pyarrow import ipc

    buffer = pyarrow.BufferReader(content)
    try:
        if content.startswith(b"ARROW1"):
            reader = ipc.open_file(buffer)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            batches = ipc.open_stream(buffer)
        yield from _from_batches(batches, path)
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path}: expected an Arrow IPC file or stream, got other content ({error}); give the file the ending of "
            f"its format, or write it again"
        ) from error


def _from_batches(batches: Any, path: str) -> Iterator[tuple[str, Any]]:
    from async_rl.data.tables import rows_of

    rows = (_without_nulls(row) for batch in batches for row in rows_of(batch))
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))


_READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".arrow": _arrow}


def _without_nulls(row: Any) -> Any:
    """Return ``row`` without columns whose value is null, and its messages without keys whose value is null.

    JSON from a table has such nulls where a row has no value. Nulls deeper inside, as in the arguments of a tool call,
    may have a meaning and stay.
    """
    if not isinstance(row, dict):
        return row
    return {key: messages_without_nulls(value) for key, value in row.items() if value is not None}


def messages_without_nulls(value: Any) -> Any:
    """Return ``value``, a message or a list of messages, without message keys whose value is null.

    A value of another form is returned as it is.
    """
    if isinstance(value, dict) and isinstance(value.get("role"), str):
        return {key: item for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return [messages_without_nulls(one) for one in value]
    return value


def parse_json(content: bytes, where: str, expected: str) -> Any:
    """Parse ``content``, which is JSON text in UTF-8, and return its value.

    ``where`` is the place of ``content`` in the data, and ``expected`` is what ``content`` should be, such as ``a JSON
    list of objects``. Both are used in error messages.

    Raises:
        DataError: ``content`` is not UTF-8, is not JSON, or repeats a key in one object. NaN and infinity, which Python
            writes, are numbers here as in tables; whoever reads such a value refuses it.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: expected UTF-8, got byte 0x{content[error.start]:02x} at offset {error.start}; save the file as "
            f"UTF-8"
        ) from None
    try:
        return json.loads(text.strip(), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        cause = f"{error.msg.removesuffix(' at')} at {place}"  # some of Python's messages end in " at"
        raise DataError(f"{where}: expected {expected}, got text that is not JSON: {cause}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected {expected}, got JSON that can't be used: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice in one object")
    return found
