"""Code that a config names and never carries: found here, loaded here, and known by the digest of its source.

A name is ``file.py``, ``file.py:attribute``, ``module`` or ``module:attribute``. A file is looked for from the working
directory; a module as Python does, and last in the working directory. The digest is that of the one source file that
the name leads to: what this file imports is not part of it. Called by the config's reader, and wherever the code runs.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError


def split_name(name: str, key: str) -> tuple[str, str]:
    """File or module, and attribute (empty for none).

    Raises:
        ConfigError: it is not of one of the four forms. ``key`` is named as the one at fault, here and below.
    """
    place, separator, attribute = name.partition(":")
    is_file = place.endswith(".py")
    if not place or (separator and not attribute.isidentifier()) or (not is_file and not _is_dotted(place)):
        raise ConfigError(f"{key}: expected file.py, file.py:name, module or module:name, got {name!r}")
    return place, attribute


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def source_path(name: str, key: str) -> Path:
    """The source file behind ``name``, without running it (a module's parent packages are imported).

    Raises:
        ConfigError: there is none here.
    """
    place, _ = split_name(name, key)
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ConfigError(f"{key}: no file {place} in {Path.cwd()}; custom code is never sent, put it there")
        return path
    _search_working_directory()
    try:
        spec = importlib.util.find_spec(place)
    except Exception as error:  # a parent package runs when it is imported, and may raise anything
        raise ConfigError(f"{key}: can't import {place}: {type(error).__name__}: {error}") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(
            f"{key}: no Python module {place} can be imported here; custom code is never sent, install it or put it "
            f"into the working directory {Path.cwd()}"
        )
    return Path(spec.origin)


def source_digest(name: str, key: str) -> str:
    """SHA-256, in hex, of the source file behind ``name``.

    Raises:
        ConfigError: there is none here, or it can't be read.
    """
    path = source_path(name, key)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{key}: can't read {path}: {error.strerror or error}") from error


def check_digest(name: str, digest: str, key: str) -> None:
    """Whether the code behind ``name`` is the run's.

    Raises:
        ConfigError: there is none here, or its source has another digest.
    """
    found = source_digest(name, key)
    if found != digest:
        raise ConfigError(
            f"{key}: {source_path(name, key)} is not the run's {name}: expected SHA-256 {digest[:16]}..., got "
            f"{found[:16]}...; copy the run's version here"
        )


def load_code(name: str, key: str) -> Any:
    """What ``name`` leads to: a module, or its attribute. Runs the module.

    Raises:
        ConfigError: it is not there. Whatever the module itself raises is passed on.
    """
    place, attribute = split_name(name, key)
    path = source_path(name, key)
    loaded = _load_file(path) if place.endswith(".py") else importlib.import_module(place)
    if not attribute:
        return loaded
    if not hasattr(loaded, attribute):
        raise ConfigError(f"{key}: {path} has no {attribute!r}")
    return getattr(loaded, attribute)


def _load_file(path: Path) -> Any:
    # Under a name of its own, so that a file json.py replaces nothing; in sys.modules, where dataclasses look.
    name = f"named_code_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search_working_directory() -> None:
    """Last, so that nothing there hides an installed module."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
