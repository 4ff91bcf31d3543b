"""Loads a dataset: a file or a hub id enters, its checked rows leave.

Called by the queue server (for training and evaluations), offline evaluation and preflight. ``files`` reads a source,
``rows`` checks one row.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Literal

from async_rl.config.config import Config
from async_rl.data.files import Source
from async_rl.data.rows import Row, RowRules, parse_row
from async_rl.errors import DataError

logger = logging.getLogger(__name__)

OnBadRow = Literal["refuse", "skip"]


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """The good rows of a dataset in file order, the number of bad rows skipped, and the source's SHA-256 in hex.

    ``first_skipped`` is the error of the first bad row; empty if there was none.
    """

    rows: tuple[Row, ...]
    num_skipped: int
    digest: str
    first_skipped: str = ""


def load_train_rows(config: Config) -> LoadedRows:
    """Load the run's training rows: those of ``data.train``, or empty ones where the environment makes its own tasks.

    Raises:
        DataError: as ``load_rows``.
    """
    if config.makes_up_rows:
        return empty_rows(config.environment.rows or 0)
    return load_rows_of(config, config.data.train)


def empty_rows(num_rows: int) -> LoadedRows:
    """Rows without content, for an environment that makes its own tasks, for example from a seed."""
    digest = hashlib.sha256(f"made up: {num_rows}".encode()).hexdigest()
    return LoadedRows((Row((), {}),) * num_rows, 0, digest)


def load_rows_of(config: Config, source: str) -> LoadedRows:
    """Load the rows of ``source`` by the rules of the run's config.

    Raises:
        DataError: as ``load_rows``.
    """
    rules = RowRules(
        system_prompt=config.system_prompt,
        needs=config.row_needs,
        needs_prompt=not config.environment.is_set,
        columns=config.data.columns,
        prompt_format=config.data.prompt_format,
    )
    loaded = load_rows(source, on_bad_row=config.data.on_bad_row, rules=rules)
    if loaded.num_skipped:
        logger.warning(
            "%s: skipped %d bad rows of %d, first: %s",
            source, loaded.num_skipped, loaded.num_skipped + len(loaded.rows), loaded.first_skipped,
        )  # fmt: skip
    return loaded


def load_rows(source: str, *, on_bad_row: OnBadRow = "refuse", rules: RowRules | None = None) -> LoadedRows:
    """Load the rows of ``source`` (see ``files``).

    Args:
        on_bad_row: ``refuse`` raises at the first bad row, ``skip`` leaves bad rows out and counts them.
        rules: how rows are read; if unset, rows with a ``gt_answer`` and without a system message.

    Raises:
        DataError: the source can't be read or has no good row; or, under ``refuse``, a row is not UTF-8, not JSON, not
            of the right shape, or lacks what its reward needs. The message names ``file:line``.
    """
    if on_bad_row not in ("refuse", "skip"):
        raise ValueError(f"on_bad_row: expected 'refuse' or 'skip', got {on_bad_row!r}")
    opened, rules = Source(source), rules or RowRules()
    rows: list[Row] = []
    num_skipped, first_skipped = 0, ""
    for where, raw in opened.records():
        try:
            if isinstance(raw, DataError):
                raise raw
            rows.append(parse_row(raw, where, rules))
        except DataError as error:
            if on_bad_row == "refuse":
                raise
            num_skipped += 1
            first_skipped = first_skipped or str(error)
    if not rows:
        cause = f"all {num_skipped} rows are bad and were skipped" if num_skipped else "the file has no rows"
        raise DataError(f"expected at least one row in {source}, got none: {cause}")
    return LoadedRows(tuple(rows), num_skipped, opened.digest, first_skipped)
