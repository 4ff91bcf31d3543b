"""Describes each key, for ``async-rl config --explain``, files with comments, the report and the page docs/config.md.

The descriptions come from the config classes.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from async_rl.config.config import Config
from async_rl.config.contradictions import value_of
from async_rl.config.loading import is_among
from async_rl.config.loss import IMPLIED_BY, LossConfig
from async_rl.config.loss_names import OFF_VALUES, PRESETS
from async_rl.config.rules import Rule
from async_rl.config.scorer import ScorerConfig
from async_rl.errors import ConfigError
from async_rl.output import size_text


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the config.

    Attributes:
        name: name of the key with its section, such as ``run.dir``.
        field: pydantic's description of the key.
        default: the default value. None if the key is required, or unset by default.
    """

    name: str
    field: FieldInfo
    default: Any

    @property
    def description(self) -> str:
        """The text that says what the key means."""
        return self.field.description or ""

    @property
    def values(self) -> str:
        """The values that the key may have, in words."""
        text = _values(self.field.annotation, _limits(self.field.metadata))
        section, _, key = self.name.partition(".")
        if section == "loss" and key in OFF_VALUES:
            off = _in_toml(self.name, None)
            is_bound = off == "0" and ", above 0" in text
            text = text.replace(", above 0", ", at least 0") if is_bound else f"{text}, or {off}"
        return self._with_sizes(text)

    @property
    def shown_default(self) -> str:
        """The default in TOML syntax. ``required`` or ``unset`` if there is none."""
        return "required" if self.field.is_required() else self._with_sizes(_in_toml(self.name, self.default))

    def _with_sizes(self, text: str) -> str:
        """Add a larger unit to each large number of bytes in ``text``, as in 1073741824 (1 GiB)."""
        if not self.name.endswith("_bytes"):
            return text
        return re.sub(r"\d{5,}", lambda size: f"{size[0]} ({size_text(int(size[0]))})", text)


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the config's TOML. ``keys`` does not contain the keys of tables inside this one."""

    name: str
    description: str
    keys: tuple[Key, ...]


def tables() -> Iterator[Table]:
    """Yield all tables of the config in the order of ``Config``. Tables inside a table follow it."""
    defaults = Config.model_validate({"run": {"dir": "."}, "model": {"path": "."}})
    for name in Config.model_fields:
        if isinstance(section := getattr(defaults, name), BaseModel):  # others are in ``entries``
            yield from _tables_of(name, section)


def _tables_of(name: str, section: BaseModel) -> Iterator[Table]:
    model = type(section)
    keys: list[Key] = []
    inner: list[tuple[str, BaseModel]] = []
    for key, field in model.model_fields.items():
        default = getattr(section, key)
        if isinstance(default, BaseModel):
            inner.append((f"{name}.{key}", default))
        else:
            keys.append(Key(f"{name}.{key}", field, default))
    yield Table(name, " ".join((model.__doc__ or "").split()), tuple(keys))
    for inner_name, inner_section in inner:
        yield from _tables_of(inner_name, inner_section)


def entries() -> Iterator[Table]:
    """Yield the tables of which a config may have any number, with the keys of one of them."""
    for table, name, model in (("[loss.rules]", "loss.rules", Rule), ("scorer.NAME", "scorer.NAME", ScorerConfig)):
        keys = [
            Key(f"{name}.{key}", field, None if field.is_required() else field.get_default())
            for key, field in model.model_fields.items()
        ]
        yield Table(table, " ".join((model.__doc__ or "").split()), tuple(keys))


def _entry_keys() -> set[str]:
    return {key.name for table in entries() for key in table.keys}


def origin_of(config: Config, name: str, overrides: Sequence[str] = ()) -> str:
    """Return where the value of the key ``name`` comes from: ``--set`` (of ``overrides``), the file, a preset, another
    key, or the default.
    """
    chosen = [override.partition("=")[0].strip() for override in overrides]
    if is_among(name, chosen) or any(one.startswith(f"{name}.") for one in chosen):
        return "--set"
    table, _, key = name.rpartition(".")
    section = value_of(config, table)
    if key in section.model_fields_set:
        return "file"
    if not isinstance(section, LossConfig):
        return "default"
    if getattr(section, key) != getattr(LossConfig(preset=section.preset), key):
        return IMPLIED_BY.get(key, "loss.advantage_function")
    return f"preset {section.preset}" if key in PRESETS[section.preset] or _differs(section, key) else "default"


def preset_line(config: Config) -> str:
    """Return in one line the values that ``loss.preset`` set and that differ from the defaults; empty if none does."""
    loss = config.loss
    names = [f"loss.{key}" for key in LossConfig.model_fields if _differs(loss, key)]
    shown = [_assignment(config, name) for name in names if origin_of(config, name).startswith("preset")]
    return f"preset {loss.preset} sets {', '.join(shown)}" if shown else ""


def _differs(loss: LossConfig, key: str) -> bool:
    return getattr(loss, key) != getattr(LossConfig(), key)


def explain(config: Config, name: str | None, *, width: int, overrides: Sequence[str] = ()) -> list[str]:
    """Return lines of text that show each key of ``config``: its value, its meaning, its possible values, its default,
    and where the value comes from.

    Args:
        config: the config whose values are shown.
        name: a section, a table or a key. None shows all keys.
        width: columns of the terminal.
        overrides: the ``--set`` options with which ``config`` was read.

    Raises:
        ConfigError: there is no such section or key.
    """
    lines: list[str] = []
    for key in _keys_of(name):
        facts = f"Values: {key.values}. Default: {key.shown_default}."
        # A key of [[loss.rules]] has a value in each entry, and these stand above. So has a key of [scorer.NAME].
        head = f"{key.name} (in each entry)"
        if key.name not in _entry_keys():
            head = _assignment(config, key.name)
            facts = f"{facts} From: {origin_of(config, key.name, overrides)}."
        lines += [head, *_wrapped(key.description, width), *_wrapped(facts, width), ""]
    return lines[:-1]


def explain_json(config: Config, name: str | None, overrides: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Return what ``explain`` shows as plain data, by the name of the key. ``value`` is TOML, or ``unset``.

    Keys of the entries of ``loss.rules`` and of ``scorer`` are left out: they have no single value.

    Raises:
        ConfigError: there is no such section or key.
    """
    return {
        key.name: {
            "value": _in_toml(key.name, value_of(config, key.name)),
            "meaning": key.description,
            "values": key.values,
            "default": key.shown_default,
            "from": origin_of(config, key.name, overrides),
        }
        for key in _keys_of(name)
        if key.name not in _entry_keys()
    }


def commented_toml(values: Mapping[str, Mapping[str, Any]]) -> str:
    """Return ``values`` (a dict for each section) as TOML in which the meaning of each key stands above it."""
    known = {key.name: key for table in tables() for key in table.keys}
    lines: list[str] = []
    for section, keys in values.items():
        lines += ["", f"[{section}]"]
        for name, value in keys.items():
            key = f"{section}.{name}"
            lines += [*_commented(known[key].description), f"{name} = {_in_toml(key, value)}"]
    return "\n".join(lines[1:]) + "\n"


def _commented(text: str) -> Sequence[str]:
    return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _keys_of(name: str | None) -> list[Key]:
    """Return the keys that the section, table or key ``name`` contains; all keys if it is None."""
    keys = [key for table in (*tables(), *entries()) for key in table.keys]
    chosen = [key for key in keys if name is None or key.name == name or key.name.startswith(f"{name}.")]
    if not chosen:
        known = [key.name for key in keys]
        near = difflib.get_close_matches(str(name), [*Config.model_fields, *known], n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; the sections are {', '.join(Config.model_fields)}"
        raise ConfigError(f"--explain: expected a section or a key of the config, got {name!r}{hint}")
    return chosen


def _wrapped(text: str, width: int) -> Sequence[str]:
    return textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _assignment(config: Config, name: str) -> str:
    shown = _in_toml(name, value_of(config, name))
    return f"{name} (unset)" if shown == "unset" else f"{name} = {shown}"


def _in_toml(name: str, value: Any) -> str:
    section, _, key = name.partition(".")
    if value is None and section == "loss":
        value = OFF_VALUES.get(key)
    if value is None and name == "queue.filter_range":
        value = []
    if value is None:
        return "unset"
    if isinstance(value, dict) and not value:
        return "{}"
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, list) and any(isinstance(one, BaseModel) for one in value):
        return f"[{', '.join(_in_toml('', one.model_dump(exclude_defaults=True)) for one in value)}]"
    text = tomli_w.dumps({"v": value}, multiline_strings=False)
    if isinstance(value, dict):
        pairs = (line for line in text.splitlines()[1:] if line)
        return "{ " + ", ".join(pairs) + " }"
    return " ".join(text.removeprefix("v = ").split()).replace("[ ", "[").replace(", ]", "]")


def _values(annotation: Any, limits: str) -> str:
    """Return the values of the type ``annotation`` in words, followed by ``limits``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0], _limits(arguments[1:]))
    if origin in (Union, UnionType):
        return " or ".join(_values(one, limits) for one in arguments if one is not NoneType)
    if origin is Literal:
        return ", ".join(f'"{one}"' for one in arguments)
    if origin is tuple and get_origin(arguments[0]) is Literal:
        return f"list of {_values(arguments[0], limits)}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_PLURALS[arguments[0]]}"
    if origin is tuple:
        return f"list of {len(arguments)} {_PLURALS[arguments[0]]}"
    if origin is dict:
        return "table"
    words = {bool: "true or false", int: "integer", float: "number", str: "text"}[annotation]
    return f"{words}{limits}"


_PLURALS = {int: "integers", float: "numbers", str: "texts", Rule: "tables"}


_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _limits(metadata: Sequence[Any]) -> str:
    """Return the bounds in ``metadata`` in words, such as ``, at least 0, below 1``. Empty if there are none."""
    found = ((words, getattr(one, name, None)) for name, words in _LIMITS.items() for one in metadata)
    return "".join(f", {words} {_number(value)}" for words, value in found if value is not None)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
