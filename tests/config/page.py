"""Prints the page docs/config.md: ``python -m tests.config.page > docs/config.md``."""

from __future__ import annotations

import re
import sys

from async_rl.config.document import Key, entries, tables
from async_rl.config.exclusions import EXCLUSIONS
from async_rl.config.loss_contradictions import CONTRADICTIONS

_ANY = re.compile(r"\{[^}]*\}")
_OF_ONE_CONFIG = re.compile(rf"( =|, here[a-z ]*) {_ANY.pattern}")
_INTRO = """\
# Every key of a config

A config is a TOML file with one table for each section below; `async-rl COMMAND CONFIG --set section.key=value` sets
single keys. `async-rl config CONFIG --all` checks a file and prints every key with its value, and
`async-rl config CONFIG --explain [KEY]` prints what this page says next to the values of that file, and where each
value comes from. Unknown keys are refused. A table `[extension.NAME]` is that of an installed package, whose own model
(an entry point of the group `async_rl.config`) checks it.

*Unset* means that the key is left out; TOML has no null. Sizes are in bytes, times in seconds, as the names say.

This page is generated from the classes in `async_rl/config/`: `python -m tests.config.page > docs/config.md`.
"""

_EXCLUSIONS = """\
## What excludes what

These combinations of keys are refused when a config is read. The message has the values, the reason and the remedy.
What a backend can't do is refused in the same way ([engines.md](engines.md)).

| keys | expected |
|---|---|"""


def markdown() -> str:
    """Return the text of the page docs/config.md."""
    parts = [_INTRO]
    row_of_sft: dict[str, str] = {}
    for table in (*tables(), *entries()):
        level = "##" if "." not in table.name else "###"
        parts.append(f"{level} {table.name}\n\n{_marked(table.description)}\n")
        rows = {key.name: _row_of(key) for key in table.keys}
        if table.name == "sft":
            row_of_sft = rows
        elif table.name in ("rm", "dpo"):
            same = [name for name, row in rows.items() if row_of_sft.get(f"sft.{name.partition('.')[2]}") == row]
            parts.append("As in [sft](#sft): " + ", ".join(f"`{name}`" for name in same) + ".\n")
            rows = {name: row for name, row in rows.items() if name not in same}
        lines = [f"| `{name}` | {row} |" for name, row in rows.items()]
        parts.append("\n".join(["| key | default | values | meaning |", "|---|---|---|---|", *lines]) + "\n")
    rows = [_EXCLUSIONS, *(f"| {keys} | {expected} |" for expected, keys in _exclusions().items())]
    return "\n".join([*parts, "\n".join(rows) + "\n"])


def _row_of(key: Key) -> str:
    cells = (_code(key.shown_default), key.values, key.description)
    return " | ".join(cell.replace("|", "\\|") for cell in cells)


def _exclusions() -> dict[str, str]:
    """What is expected of which keys: those of which the same is expected stand together."""
    keys_of: dict[str, list[str]] = {}
    for row in (*CONTRADICTIONS, *EXCLUSIONS):
        prefix = f"{row.section}." if row.section else ""
        texts = (", ".join(f"`{prefix}{key}`" for key in row.keys), row.expected)
        keys, expected = (_ANY.sub("*", _OF_ONE_CONFIG.sub("", text)) for text in texts)
        keys_of.setdefault(expected, []).append(keys)
    return {expected: ", ".join(dict.fromkeys(keys)) for expected, keys in keys_of.items()}


def _marked(text: str) -> str:
    return text.replace("``", "`")


def _code(text: str) -> str:
    if text in ("required", "unset"):
        return text
    value, bracket, size = text.partition(" (") if text.endswith("iB)") else (text, "", "")
    return f"`{value}`{bracket}{size}"


if __name__ == "__main__":
    sys.stdout.write(markdown())
