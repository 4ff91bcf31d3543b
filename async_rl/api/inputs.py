"""Turn what ``async_rl.train`` gets into a config and the files that it names.

``read_inputs`` merges the sections into a base config. Functions become names (``code_name``), and rows become JSON
lines in the run directory, in files whose names have their digests.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.api.code_name import code_name
from async_rl.config.config import Config
from async_rl.config.loading import config_data, parse_config, read_toml, resolve
from async_rl.config.reward import reward_named
from async_rl.errors import ConfigError, DataError
from async_rl.process.user_code import is_code_name
from async_rl.run.directory import RunDir, replaced
from async_rl.run.reuse import check_place

Base = str | os.PathLike[str] | Mapping[str, Any] | Config | None
"""The config that the sections change: its file, its sections, or itself."""
Rows = Iterable[Mapping[str, Any]]
"""Rows of a dataset: dicts, or a DataFrame of pandas."""

_MAIN_KEYS = {"run": "dir", "model": "path", "data": "train", "reward": "type"}
"""The key of a section that an argument sets if it is no dict."""
_EXAMPLES = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "data": "rows.jsonl", "run": "runs/my"}
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class RowsFile:
    """Rows that the key ``where`` of the config has, and the file for them. The file's name has their digest."""

    path: Path
    rows: Rows
    where: str

    def write(self) -> None:
        """Write the file, completely or not at all, unless it is there."""
        if self.path.exists():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(self.path) as partial, partial.open("wb") as out:
            out.writelines(_lines(self.rows, self.where))


@dataclass(frozen=True, slots=True)
class Inputs:
    """The checked config of a run, and the files that it names and that must be written first."""

    config: Config
    files: Sequence[RowsFile]

    def write(self) -> None:
        """Write the files that are not there."""
        for file in self.files:
            file.write()


def read_inputs(base: Base, sections: Mapping[str, Any]) -> Inputs:
    """Return the config of ``sections``, which change those of ``base``, and the files of its rows. Write nothing.

    The functions in it, and a reward that ``sections`` name, are added to ``generator.allow_code``, because the caller
    itself chose them.

    Raises:
        ConfigError: the config or a list of rewards is not valid, or other processes can't import a function.
        DataError: a row has other values than JSON.
    """
    given = {name: _section(name, value) for name, value in sections.items() if value is not None}
    raw, source = _read_base(base)
    _merge(raw, given)
    _refuse_missing(raw)
    run, data = raw.get("run"), raw.get("data")
    folder = RunDir(Path(str(run.get("dir", "")) if isinstance(run, dict) else "")).data
    files = _take_rows(data, folder) if isinstance(data, dict) else []
    chosen: dict[str, str] = {}  # name -> key

    def name_of(function: Callable[..., Any], key: str) -> str:
        name = code_name(function, key)
        chosen[name] = key
        return name

    reward = given.get("reward")
    named = reward.get("type") if isinstance(reward, Mapping) else None
    if isinstance(named, str) and is_code_name(named := reward_named(named)):
        chosen[named] = "reward.type"
    raw = {name: _plain(value, name, name_of) for name, value in raw.items()}
    _allow(raw, [name.rpartition(":")[0] for name, key in chosen.items() if not key.startswith(("loss.", "data."))])
    resolve(raw)
    config = parse_config(raw, f"what async_rl.train got{f' with {source}' if source else ''}")
    if isinstance(base, str | os.PathLike):
        check_place(config, Path(base), [f"run.dir={config.run.dir}"] if "run" in given else [])
    return Inputs(config, files)


def _refuse_missing(raw: Mapping[str, Any]) -> None:
    """Name all arguments of ``train`` that are missing, if the config can't be read without them."""
    tables = {name: raw.get(name, {}) for name in _EXAMPLES if name != "data" or "environment" not in raw}
    missing = [name for name, table in tables.items() if isinstance(table, dict) and _MAIN_KEYS[name] not in table]
    if {"model", "run"}.intersection(missing):
        examples = ", ".join(f'{name}="{_EXAMPLES[name]}"' for name in missing)
        raise ConfigError(f"expected model, data and run, got no {' and no '.join(missing)}; pass, say, {examples}")


def _read_base(base: Base) -> tuple[dict[str, Any], str]:
    """Return the content of the base config, and its name for messages."""
    if isinstance(base, str | os.PathLike):
        return read_toml(Path(base)), str(base)
    if isinstance(base, Config):
        return config_data(base), "a config"
    raw: dict[str, Any] = {}
    _merge(raw, {name: _section(name, value) for name, value in (base or {}).items()})
    return raw, ""


def _section(name: str, value: Any) -> Any:
    """Return the argument ``name`` as a section: what is no dict is the section's main key.

    Raises:
        ConfigError: the argument is a list of rewards that is empty or has other elements than different rewards.
    """
    if name == "reward" and isinstance(value, list | tuple):
        return _summed(value)
    return {_MAIN_KEYS[name]: value} if name in _MAIN_KEYS and not isinstance(value, Mapping) else value


def _summed(rewards: Sequence[Any]) -> Any:
    """Return the section for ``rewards``, functions or names that are summed, each with weight 1."""
    is_list_of_rewards = all(callable(one) or isinstance(one, str) for one in rewards)
    if not rewards or not is_list_of_rewards or len(set(rewards)) < len(rewards):
        raise ConfigError(
            f"reward: expected a list of different functions or names, got {rewards!r}; for weights other than 1 pass "
            f'{{"type": first, "extra": {{second: 0.5}}}}'
        )
    main, *others = rewards
    return {"type": main, "extra": dict.fromkeys(others, 1.0)}


def _merge(raw: dict[Any, Any], changes: Mapping[Any, Any]) -> None:
    """Set the keys of ``changes`` in ``raw``, table by table. The tables of ``changes`` are copied."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            table = raw.get(key)
            raw[key] = dict(table) if isinstance(table, Mapping) else {}
            _merge(raw[key], value)
        else:
            raw[key] = value


def _take_rows(data: dict[str, Any], folder: Path) -> list[RowsFile]:
    """Replace rows in the section ``data`` by the paths of files in ``folder``, and return these files."""
    files: list[RowsFile] = []

    def source(value: Any, where: str) -> Any:
        if hasattr(value, "iterrows"):  # a DataFrame of pandas, where a missing value is NaN
            value = value.astype(object).where(value.notna(), None).to_dict("records")
        if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable):
            return value
        value = list(value) if isinstance(value, Iterator) else value  # which can be read once
        digest = hashlib.sha256()
        for line in _lines(value, where):
            digest.update(line)
        path = folder / f"{where.rpartition('.')[2]}-{digest.hexdigest()[:_DIGITS]}.jsonl"
        files.append(RowsFile(path, value, where))
        return str(path)

    for key in data.keys() & {"train", "eval"}:
        value, where = data[key], f"data.{key}"
        is_table = isinstance(value, Mapping)
        data[key] = {k: source(v, f"{where}.{k}") for k, v in value.items()} if is_table else source(value, where)
    return files


def _lines(rows: Rows, where: str) -> Iterator[bytes]:
    """Yield each row as a line of JSON."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{where}: expected rows that are dicts, got {str(row)[:80]!r} as row {number}; pass a list of "
                f"dicts, a DataFrame of pandas, a datasets.Dataset or the path of a file"
            )
        try:
            yield f"{json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_as_list)}\n".encode()
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{where}: expected rows that are dicts of values that JSON has, got {str(row)[:80]} as row {number}: "
                f"{error}; convert the values, or leave the column out"
            ) from None


def _as_list(value: Any) -> Any:
    """Return an array or a number of numpy or torch as JSON has it."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"JSON has no {type(value).__name__}")
    return value.tolist()


def _plain(value: Any, key: str, name_of: Callable[[Callable[..., Any], str], str]) -> Any:
    """Return a value of the config as TOML has it. ``name_of`` gets a function and its key, and returns its name."""
    if isinstance(value, Mapping):
        return {_plain(k, key, name_of): _plain(v, f"{key}.{k}", name_of) for k, v in value.items()}
    if callable(value):
        return name_of(value, key)
    if isinstance(value, list | tuple):
        return [_plain(item, key, name_of) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _allow(raw: dict[str, Any], places: Iterable[str]) -> None:
    """Add modules and files to ``generator.allow_code``."""
    generator = raw.setdefault("generator", {})
    allowed = generator.get("allow_code", []) if isinstance(generator, dict) else None
    if isinstance(allowed, list):  # else the config is not valid
        generator["allow_code"] = list(dict.fromkeys([*allowed, *places]))
