"""What the settings of TRL and verl are here: ``other_trainers.toml``, the one table of them.

Hints for unknown keys, ``async-rl init --from-verl`` and docs/coming_from.md read it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The file, whose head describes it."""


@cache
def hints() -> Mapping[str, str]:
    """Return the last part of each setting's name, where only one has it -> a sentence on what it is here."""
    names = [row["name"].rpartition(".")[2] for row in TABLE["settings"]]
    found: dict[str, str] = {}
    for name, row in zip(names, TABLE["settings"]):
        if names.count(name) == 1:
            ours = f"{', '.join(row['to'])} here" if "to" in row else ""
            text = ": ".join(filter(None, (ours, row.get("text", "").replace("`", ""))))
            found[name] = f"{row['trainer']}'s {name} is {text} (docs/coming_from.md)"
    return found
