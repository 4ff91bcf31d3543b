"""Code of the user's own that a config names, and that is never shipped: it must be on each machine that runs it.

A name is ``module:attribute``, importable there (the working directory is searched last), or ``file.py:attribute``; an
environment's may do without the attribute, and then is the module itself. A machine runs only what its operator allowed
by name (``generator.allow_code``), and only if its source has the digest that the learner's has: the learner sends
digests with the handshake, whoever loads code compares (``rewards.registry``, ``environments.fork_server``). The source
is the named file and the modules beside it that it imports (``user_imports`` finds them).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError, QueueError
from async_rl.process.user_imports import LocalFolder, search_folder, source_files

logger = logging.getLogger(__name__)

DIGESTS_FILE = "code_digests.json"
"""Among the files of the handshake, and in the run directory: name -> SHA-256 in hex of its source."""

_NAME = re.compile(r"(?P<place>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^:\0]+\.py)(?::(?P<attribute>[A-Za-z_]\w*))?")


def is_code_name(text: str, *, needs_attribute: bool = True) -> bool:
    """Whether ``text`` has the form of a name of code."""
    found = _NAME.fullmatch(text)
    return found is not None and (not needs_attribute or found["attribute"] is not None)


def check_allowed(names: Iterable[str], allowed: Collection[str]) -> None:
    """Whether the modules and files of ``names`` are all among those ``allowed`` here.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        place, _ = _parts(name)
        if place not in allowed:
            listed = json.dumps([*allowed, place])
            raise ConfigError(
                f"the run asks for {name}, which is code that this machine has not allowed; if you trust it, set "
                f"generator.allow_code = {listed} (for a generator: --set 'generator.allow_code={listed}')"
            )


def code_digests(names: Iterable[str]) -> dict[str, str]:
    """Of each name, the SHA-256 in hex of its source.

    That of a single file is the file's own. Of several it is that of lines ``path  SHA-256``, in order, with paths from
    where their top-level modules lie.

    Raises:
        ConfigError: there is no such module or file, or it has no source.
    """
    return {name: _digest(_sources(_spec(name), name)) for name in names}


def digest_of(name: str, digests: Mapping[str, str] | None) -> str | None:
    """What the source of ``name`` must hash to; None, for anything, where there are no ``digests``.

    Args:
        digests: what the learner sent; none: the code is the caller's own, and nobody else's word.

    Raises:
        ConfigError: the learner sent none of it.
    """
    if digests is None:
        return None
    if name not in digests:
        raise ConfigError(
            f"{name}: the learner sent no digest of it, so this machine can't tell whether it has the same"
        )
    return digests[name]


def load_code(name: str, *, allowed: Collection[str], digest: str | None) -> Any:
    """Import what ``name`` names: an attribute, or a module.

    Args:
        allowed: modules and files that this machine may import.
        digest: as ``digest_of`` says.

    Raises:
        ConfigError: it is not allowed, not there, not the source that was meant, or fails to be imported.
    """
    check_allowed([name], allowed)
    _, attribute = _parts(name)
    spec = _spec(name)
    sources = _sources(spec, name)
    source, *imported = sources.values()
    found = _digest(sources)
    if digest is not None and found != digest:
        listed = "".join(f", {path}" for path in imported)
        raise ConfigError(
            f"{name}: expected the learner's source, SHA-256 {digest[:16]}, got {found[:16]} in {source}{listed}; copy "
            f"what differs from the learner's machine, or start the learner again with this"
        )
    folder = LocalFolder(search_folder(source))
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that nothing there hides an installed module
    try:
        module = sys.modules.get(spec.name)
        if module is None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            assert spec.loader is not None  # it has a source file
            spec.loader.exec_module(module)
    except Exception as error:  # the user's own code raises whatever it likes
        sys.modules.pop(spec.name, None)
        raise ConfigError(f"{name}: importing {source} failed: {type(error).__name__}: {error}") from error
    _check_origins(sources, name)
    if attribute is None:
        return module
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{name}: {source} has no {attribute!r}") from None


def write_digests(run_dir: Path, names: Collection[str]) -> bytes:
    """The digests of ``names`` as JSON, written into the run directory too; a change since an earlier start is logged.

    Raises:
        ConfigError: as ``code_digests``.
    """
    digests = code_digests(names)
    content = json.dumps(digests, indent=1, sort_keys=True).encode()
    path = run_dir / DIGESTS_FILE
    if path.exists():
        before = read_digests(path.read_bytes())
        for name in sorted(digests.keys() & before.keys()):
            if digests[name] != before[name]:
                logger.warning("%s is not what it was when this run started: %s", name, digests[name][:16])
    if names:
        path.write_bytes(content)
    return content


def read_digests(content: bytes | None) -> Mapping[str, str]:
    """The inverse of ``write_digests``; nothing from nothing.

    Raises:
        QueueError: it is malformed (it came over a socket, so it is not trusted).
    """
    if content is None:
        return {}
    try:
        found = json.loads(bytes(content))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(item, str) for item in found.values()):
        raise QueueError(f"expected {DIGESTS_FILE} to map names to digests, got {bytes(content)[:80]!r}")
    return found


def _parts(name: str) -> tuple[str, str | None]:
    """Module or file, and attribute."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f"expected module:name or file.py:name, got {name!r}")
    return found["place"], found["attribute"]


def _spec(name: str) -> ModuleSpec:
    place, _ = _parts(name)
    if place.endswith(".py"):
        path = Path(place).absolute()
        if not path.is_file():
            raise ConfigError(f"{name}: no file {path} on this machine; your code is never sent, put it there")
        digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
        spec = importlib.util.spec_from_file_location(f"async_rl_local_{path.stem}_{digest}", path)
    else:
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())  # last, so that nothing there hides an installed module
        try:
            spec = importlib.util.find_spec(place)
        except Exception as error:  # a parent package runs when it is looked into, and may raise anything
            raise ConfigError(f"{name}: can't import {place}: {type(error).__name__}: {error}") from error
    if spec is None:
        raise ConfigError(
            f"{name}: no module {place} can be imported on this machine; install it, put it on PYTHONPATH or into the "
            f"working directory, or name its file: path/file.py"
        )
    return spec


def _sources(spec: ModuleSpec, name: str) -> dict[str, Path]:
    """As ``source_files``; the named file first."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"{name}: expected a module with a Python source file, got {spec.origin or 'none'}")
    return source_files(spec, Path(spec.origin))


def _digest(sources: Mapping[str, Path]) -> str:
    paths = set(sources.values())
    if len(paths) == 1:
        return hashlib.sha256(paths.pop().read_bytes()).hexdigest()
    folder = search_folder(next(iter(sources.values())))
    lines = sorted(
        f"{path.relative_to(folder).as_posix()}  {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _check_origins(sources: Mapping[str, Path], name: str) -> None:
    """Whether what was imported is what the digest was taken of: one process has one module of a name.

    Raises:
        ConfigError: a module of the same name was imported from elsewhere before.
    """
    for module_name, path in sources.items():
        loaded = getattr(sys.modules.get(module_name), "__file__", None)
        if loaded is not None and Path(loaded).resolve() != path:
            raise ConfigError(
                f"{name}: expected {module_name} from {path}, got the one of that name that was imported from {loaded} "
                f"before; rename one of them"
            )
