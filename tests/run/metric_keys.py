"""Which key of ``METRIC_KEYS`` describes a key of a row."""

from __future__ import annotations

import re

from async_rl.run.records.metric_table import METRIC_KEYS


def declared_key(key: str) -> str | None:
    """The key itself, or the one whose ``N`` and ``<name>`` stand for parts of it; None if nothing declares it."""
    if key in METRIC_KEYS:
        return key
    patterns = {one: re.sub(r"_N(?=/|$)", r"_\\d+", re.sub(r"<\w+>", "[^/]+", one)) for one in METRIC_KEYS}
    return next((one for one, pattern in patterns.items() if re.fullmatch(pattern, key)), None)
