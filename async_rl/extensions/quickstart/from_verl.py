"""``async-rl init --from-verl``: ports a script of verl, or a Hydra YAML of it, by ``config/other_trainers.toml``.

``read_settings`` reads the ``key=value`` words of the file, and runs nothing. ``port`` makes a config of them and of
verl's own defaults, and puts each of them into one of four lists.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from async_rl.config.document import commented_toml
from async_rl.config.loading import apply_override, flat
from async_rl.config.other_trainers import TABLE
from async_rl.errors import ConfigError
from async_rl.extensions.quickstart.init import next_commands, write_new

SAME, RENAMED, DIFFERS, NONE = LISTS = ("same", "renamed", "means something else", "no counterpart")
_WORD = re.compile(r"[+~]*([A-Za-z_][\w./@]*)=(.*)", re.DOTALL)
_SETTING = re.compile(r"\w.*\.[^_].*")
_VARIABLE = re.compile(r"\$\{([\w.]+)(?::?-([^{}]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\((.*?)\)\)(?!\))")


def read_settings(path: Path) -> dict[str, Any]:
    """Return verl's settings in the script or YAML file ``path``, in which known variables are replaced.

    Raises:
        ConfigError: the file can't be read, or has no settings.
    """
    try:
        text = path.read_text(encoding="utf-8")
        words = list(flat(yaml.safe_load(text)).items() if path.suffix in (".yaml", ".yml") else _words(text))
        if not any(_SETTING.fullmatch(name) for name, _ in words):
            raise ValueError("no settings in it")
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"--from-verl: expected verl's script or YAML, got {path}: {error}; correct it") from None
    known: dict[str, Any] = {"HOME": Path.home()}
    for name, value in words:
        new = _typed(_expanded(value, known)) if isinstance(value, str) else value
        known[name] = new if "." in name or known.get(name, new) == new else f"${name}"  # its branches differ
    return {name: value for name, value in known.items() if _SETTING.fullmatch(name)}


def _words(text: str) -> Iterable[tuple[str, str]]:
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for line in _SUM.sub(lambda found: found[0].replace(" ", ""), text).splitlines():
        words = line.split()
        with suppress(ValueError):  # a quotation of several lines
            words = shlex.split(line, comments=True)
        yield from ((found[1], found[2]) for word in words if (found := _WORD.fullmatch(word)))


def _expanded(text: str, known: Mapping[str, Any]) -> str:
    """Return ``text`` with the variables and sums in it replaced by their values. What is not known stays."""

    def value_of(found: re.Match[str]) -> str:
        terms = re.sub(r"[A-Za-z_]\w*", lambda name: str(known.get(name[0], name[0])), found[1]).replace("/", "//")
        # Only numbers, signs and brackets are evaluated, and no powers, which may take for ever.
        return str(int(eval(terms))) if re.fullmatch(r"(?!.*\*\*)[\d\s.()+*/-]+", terms) else found[0]

    for _ in range(4):  # a variable may stand in the default of another
        text = _VARIABLE.sub(lambda m: str(known.get(m[1] or m[3], m[0] if m[2] is None else m[2])), text)
    with suppress(ArithmeticError, SyntaxError, TypeError, ValueError):
        return _SUM.sub(value_of, text)
    return text


def _typed(text: str) -> Any:
    """Return the value that Hydra reads in ``text``."""
    with suppress(yaml.YAMLError):
        return yaml.safe_load(re.sub(r"^(-?\d+)(?=e)", r"\1.0", text))  # YAML alone takes 1e-6 for a text
    return text


def port(settings: Mapping[str, Any], raw: dict[str, Any]) -> dict[str, list[str]]:
    """Set in the config ``raw``, a dict for each section, what verl's ``settings`` and its defaults are here, and
    return the lines of each of ``LISTS``, one for each of ``settings``.
    """
    rows = [row for row in TABLE["settings"] if row["trainer"] == "verl"]
    known = {row["name"]: row["default"] for row in rows if "default" in row} | dict(settings)
    row_of = {name: next(row for row in rows if fnmatchcase(name, row["name"])) for name in known}
    lists: dict[str, list[str]] = {name: [] for name in LISTS}
    for override in TABLE["unset"]["verl"]:
        apply_override(raw, override)
    for name, row in sorted(row_of.items(), key=lambda item: rows.index(item[1])):
        ours = _ours(name, row, known)
        notes = [words + row[key] for key, words in (("text", ""), ("needs", "only with ")) if key in row]
        # Its last part and its value are the same.
        is_same = f".{name}={_json(known[name])}".endswith(f".{''.join(ours or ()).partition('.')[2]}")
        differs = row.get("differs") is True or _shown(known[name]) in (row.get("differs") or ())
        which = NONE if ours is None else DIFFERS if differs else SAME if is_same else RENAMED
        if "$" in "".join(ours or ()):
            which, notes, ours = DIFFERS, [f"the script alone does not say it: set {', '.join(row['to'])} by hand"], []
        for override in ours or ():
            apply_override(raw, override)
        said = [", ".join(ours or ()) or "nothing to set"] * (ours is not None) + notes * (which in (DIFFERS, NONE))
        if name in settings:
            lists[which].append(f"{name}={settings[name]}: {'; '.join(said)}".replace("`", ""))
    return lists


def _ours(name: str, row: Mapping[str, Any], known: Mapping[str, Any]) -> list[str] | None:
    """Return, as ``--set`` options, what the setting ``name`` is here; None if it has no counterpart."""
    value, shown = known[name], {one: _shown(value) for one, value in known.items()}
    if not any(fnmatchcase(f"{one}={text}", row.get("needs", "*")) for one, text in shown.items()):
        return None
    if (chosen := row.get("only", row.get("choices", {})).get(shown[name])) is not None:
        return [chosen] if isinstance(chosen, str) else chosen
    if "only" in row or "to" not in row:
        return None
    if "set" in row:
        return [_expanded(one, {**known, "it": value}) for one in row["set"]]
    if "files" in row:
        value = _named([value] if isinstance(value, str) else value)
    part = name[len(row["name"]) - 2 :] if row["name"].endswith(".*") else ""
    return [] if value is None else [f"{row['to'][0]}{part}={_json(value)}"]


def _named(files: Iterable[str]) -> dict[str, str]:
    """Return the ``files`` by their names, with as many of their folders as tell them apart."""
    parts = {file: Path(file).with_suffix("").parts for file in files}
    if len(set(parts.values())) < len(parts):  # their endings alone differ
        parts = {file: Path(file.replace(".", "_")).parts for file in parts}
    depth = 1
    while len({part[-depth:] for part in parts.values()}) < len(parts):
        depth += 1
    return {"_".join(part[-depth:]).strip("/"): file for file, part in parts.items()}


def _shown(value: Any) -> str:
    """Return a value as the table of settings writes it: as JSON, and text without quotes."""
    return _json(value).strip('"')


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def write_port(config: Path, script: Path) -> list[str]:
    """Write ``config``, the port of verl's ``script``, and return the lines that say what became of each setting.

    Raises:
        ConfigError: the script can't be read, or the config can't be written.
    """
    raw: dict[str, Any] = {"run": {"dir": f"runs/{config.stem}"}}
    lists = port(read_settings(script), raw)
    write_new({config: f"# Ported from {script.name} by `async-rl init --from-verl`.\n\n{commented_toml(raw)}"})
    lines = [f"wrote {config}"]
    for name, found in lists.items():
        lines += [f"{name} ({len(found)}):", *(f"  {line}" for line in found)]
    chosen = flat(raw)
    lines.append("verl does by itself, and this config does not:")
    lines += [f"  {row['text']}" for row in TABLE["silent"]["verl"] if row.get("unless") not in chosen]
    return [*lines, "next:", *(f"  {command}" for command in next_commands(config))]
