"""Reads the tables of docs/predecessors.md: their rows, and the settings that a row names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from async_rl.config.config import Config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "predecessors.md").read_text(encoding="utf-8")

Setting = tuple[str, str | None]
"""A key, and its value in TOML if the row has one."""


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if " | " in line and not line.startswith("feature")]


def feature_of(row: str) -> str:
    """Return a row's first cell."""
    return row.split(" | ")[0]


ROWS = _rows(PAGE)
"""The rows of all tables."""
FEATURES = {feature_of(row): row for row in ROWS}
"""The features, in their order."""


def settings_of(row: str) -> list[Setting]:
    """Return the settings that the last cell of a row names in backticks."""
    cell = row.split(" | ")[-1]
    found = re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?: ?= ?([^`]+))?`", cell)
    unknown = [key for key, value in found if value and key.split(".")[0] not in Config.model_fields]
    assert unknown == [], f"no such section: {unknown}"
    return [(key, value or None) for key, value in found if key.split(".")[0] in Config.model_fields]


def alternatives(row: str) -> Iterator[dict[str, str]]:
    """Yield every choice of a row's settings: two values of one key are alternatives, a key without one is left out."""
    values: dict[str, list[str]] = {}
    for key, value in settings_of(row):
        if value is not None:
            values.setdefault(key, []).append(value)
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))
