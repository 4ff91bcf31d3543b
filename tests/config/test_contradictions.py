"""Every row of settings that exclude each other: its example is refused with its message, and needs all it sets."""

import re
from typing import Any

from async_rl.config.config import Config
from async_rl.config.contradictions import Contradiction
from async_rl.config.exclusions import EXCLUSIONS
from async_rl.config.loading import parse_config
from async_rl.config.loss_contradictions import CONTRADICTIONS
from async_rl.errors import ConfigError

ROWS = (*CONTRADICTIONS, *EXCLUSIONS)


def configured(settings: dict[str, Any]) -> Config:
    raw: dict[str, Any] = {"run": {"dir": "r"}, "model": {"path": "m"}}
    for key, value in settings.items():
        *path, last = key.split(".")
        table = raw
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return parse_config(raw, "test")


def refusal(settings: dict[str, Any]) -> str:
    try:
        configured(settings)
    except ConfigError as error:
        return str(error).partition("\n  ")[2]
    return ""


def pattern_of(row: Contradiction) -> re.Pattern[str]:
    head = "loss: " if row.section else f"{row.keys[0]}: "
    got = "got " + ", ".join(f"{key} = {{x}}" for key in row.keys) if row.section else f"got {row.got or '{x}'}"
    text = f"{head}expected {row.expected}, {got}; {row.reason}"
    return re.compile(".+".join(re.escape(part) for part in re.split(r"\{[^}]*\}", text)))


def test_each_example_is_refused_by_its_row_and_needs_all_its_settings():
    wrong: list[str] = []
    for row in ROWS:
        example = {f"{row.section}.{key}" if row.section else key: value for key, value in row.example.items()}
        pattern, found = pattern_of(row), refusal(example)
        if not pattern.fullmatch(found) or "{x" in found or "{c." in found:
            wrong.append(f"{example}: expected {pattern.pattern}, got {found}")
        for key in example:
            if pattern.fullmatch(refusal({one: value for one, value in example.items() if one != key})):
                wrong.append(f"{example}: refused without {key} too")
    assert not wrong, "\n".join(wrong)
