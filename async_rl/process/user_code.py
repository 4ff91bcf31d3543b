"""Import the Python code (rewards, environments, losses) that a config names, if this machine's operator allows it.

A name has the form ``module:attribute`` or ``file.py:attribute``. The name of an environment may also be ``module`` or
``file.py``. Modules are searched on ``sys.path`` and, last, in the working directory. Code is never sent to other
machines: each machine that runs it needs a copy.

A generator imports only code that its operator listed in ``generator.allow_code`` and whose source has the same digest
as on the learner's machine. The learner sends its digests when a generator connects. It imports the loss and the
advantages that the config on its own machine names, so they need no permission.

The digest covers the named file and, from its folder, each file and each folder whose name it imports, or which these
import in turn; of a folder, all ``.py`` files. Of a module in a package it covers all ``.py`` files of the outermost
package. The names are read from ``import`` statements, also those in functions, without running code. Modules that are
imported by a computed name, files that the code opens, packages installed elsewhere and async-rl itself are not
covered.

What installed packages offer by entry points of ``CODE_KINDS`` is such code, too: ``offered_code`` has its name.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError, ExtensionError, QueueError
from async_rl.registry import find_offer, offers, package_of

logger = logging.getLogger(__name__)

DIGESTS_FILE = "code_digests.json"
"""The name of a JSON file in the run directory and of a file that the learner sends to generators. It maps each name of
user code to the SHA-256 of its source, in hex."""

REWARDS, ENVIRONMENTS = CODE_KINDS = ("async_rl.rewards", "async_rl.environments")
"""The kinds (``async_rl.registry``) of which packages offer code."""

_NAME = re.compile(r"(?P<place>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^:\0]+\.py)(?::(?P<attribute>[A-Za-z_]\w*))?")

_INSTALLED = ("site-packages", "dist-packages")
_PACKAGE_FILE = "__init__.py"
_OWN = "async_rl"


def is_code_name(text: str, *, needs_attribute: bool = True) -> bool:
    """Return whether ``text`` has the form ``module:attribute`` or ``file.py:attribute``.

    The attribute may be missing if ``needs_attribute`` is False.
    """
    found = _NAME.fullmatch(text)
    return found is not None and (not needs_attribute or found["attribute"] is not None)


def offered_code(kind: str, name: str) -> str:
    """Return the name of the code that an installed package offers as ``name``; ``name`` itself if none does.

    A name with a dot or a colon is that of code, and no metadata is read for it.

    Args:
        kind: one of ``CODE_KINDS``. Nothing of ours has this name.

    Raises:
        ExtensionError: what the package offers has no name of code.
    """
    offer = None if "." in name or ":" in name else find_offer(kind, name)
    if offer is None:
        return name
    if not is_code_name(offer.value, needs_attribute=kind != ENVIRONMENTS):
        raise ExtensionError(
            f"expected MODULE:FUNCTION from the package {package_of(offer)}, which offers {name} ({kind}), got "
            f"{offer.value}; update or uninstall the package"
        )
    return offer.value


def check_allowed(names: Iterable[str], allowed: Collection[str]) -> None:
    """Check that this machine's operator allows the user code ``names``.

    ``allowed`` is ``generator.allow_code``, the list of allowed modules and files.

    Raises:
        ConfigError: ``allowed`` does not list the module or file of a name.
    """
    for name in names:
        place, _ = _parts(name)
        if place not in allowed:
            listed = json.dumps([*allowed, place])
            raise ConfigError(
                f"{name}: the config names this code, but this machine does not allow it; if you trust it, set "
                f"generator.allow_code = {listed} (for a generator: --set 'generator.allow_code={listed}')"
            )


def check_allowed_command(command: Sequence[str], allowed: Collection[str], *, key: str) -> None:
    """Check that this machine's operator allows a command, and that its program exists. An empty command is fine.

    ``key`` is the config key that names the program.

    Raises:
        ConfigError: ``allowed`` does not list the command as one text, or the program is missing.
    """
    text = shlex.join(command)
    if command and text not in allowed:
        listed = json.dumps([*allowed, text])
        raise ConfigError(
            f"{key}: the config names {text}, but this machine does not allow it; if you trust it, set "
            f"generator.allow_code = {listed} (for a generator: --set 'generator.allow_code={listed}')"
        )
    if command and shutil.which(command[0]) is None:
        raise ConfigError(
            f"{key}: expected a program, got {command[0]}, which is not on the path of this machine; "
            f"install it, or correct the name"
        )


def code_digests(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256, in hex, of the source of each user code in ``names``, by name.

    The source is what ``source_files`` returns. The SHA-256 of a single file is that of its bytes. The SHA-256 of
    several files is that of the sorted lines ``path  SHA-256``, with paths relative to the folder of the top-level
    modules.

    Raises:
        ConfigError: a module or file does not exist, or a module has no Python source.
    """
    return {name: _digest(_sources(_spec(name), name)) for name in names}


def digest_of(name: str, digests: Mapping[str, str] | None) -> str | None:
    """Return the SHA-256 that the source of the user code ``name`` must have on this machine; None if any will do.

    Args:
        digests: the SHA-256 of each user code on the learner's machine, by name. None if a config on this machine names
            the code, so that any source is accepted.

    Raises:
        ConfigError: the learner sent no digest for ``name``.
    """
    if digests is None:
        return None
    if name not in digests:
        raise ConfigError(
            f"{name}: the learner sent no digest of its source, so it can't be compared with the source here; start "
            f"the learner again"
        )
    return digests[name]


def load_code(name: str, *, allowed: Collection[str], digest: str | None) -> Any:
    """Import the user code ``name`` and return the named attribute, or the module if ``name`` has no attribute.

    Args:
        allowed: the modules and files that this machine's operator allows.
        digest: the SHA-256 that the source must have, from ``digest_of``. None accepts any source.

    Raises:
        ConfigError: the code is not allowed or missing, its source has another digest, or its import fails.
    """
    check_allowed([name], allowed)
    _, attribute = _parts(name)
    spec = _spec(name)
    sources = _sources(spec, name)
    source, *imported = sources.values()
    found = _digest(sources)
    if digest is not None and found != digest:
        listed = "".join(f", {path}" for path in imported[:5]) + (", ..." if imported[5:] else "")
        raise ConfigError(
            f"{name}: expected the learner's source, SHA-256 {digest[:16]}, got {found[:16]} in {source}{listed}; copy "
            f"the files that differ from the learner's machine, or start the learner again with the source of this "
            f"machine"
        )
    folder = LocalFolder(search_folder(source))
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that no module there hides an installed one
    try:
        module = sys.modules.get(spec.name)
        if module is None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            assert spec.loader is not None  # it has a source file
            spec.loader.exec_module(module)
    except Exception as error:  # user code may raise anything
        sys.modules.pop(spec.name, None)
        raise ConfigError(f"{name}: importing {source} failed: {describe_error(error)[0]}; {_fix_of(name)}") from error
    _check_origins(sources, name)
    if attribute is None:
        return module
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"{name}: expected {source} to define {attribute!r}, but it does not; correct the name"
        ) from None


def _fix_of(name: str) -> str:
    """Return what to do about the user code ``name``, which can't be imported."""
    offered = [offer for kind in CODE_KINDS for offer in offers(kind).values() if offer.value == name]
    if not offered:
        return "correct that file"
    return f"update or uninstall the package {package_of(offered[0])}, which offers it as {offered[0].name}"


def write_digests(run_dir: Path, names: Collection[str]) -> bytes:
    """Write the SHA-256 of the source of each user code in ``names`` to ``code_digests.json`` in the run directory.

    Write no file if ``names`` is empty.

    Returns:
        The file's content, which the learner sends to generators.

    Raises:
        ConfigError: a module or file does not exist, or a module has no Python source.
    """
    content = json.dumps(code_digests(names), indent=1, sort_keys=True).encode()
    if names:
        path = run_dir / DIGESTS_FILE
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_bytes(content)
        os.replace(partial, path)
    return content


def stored_digests(run_dir: Path) -> Mapping[str, str]:
    """Return what ``write_digests`` wrote at the run's newest start; empty if nothing, or if the file is damaged."""
    path = run_dir / DIGESTS_FILE
    found = _digests_of(path.read_bytes()) if path.exists() else {}
    if found is None:
        logger.warning("%s is damaged, so changes of code since the run's earlier start are not found", path)
    return found or {}


def changed_code(before: Mapping[str, str], names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return which user code of ``names`` has another source than ``before``, by name: the first 16 digits of both
    SHA-256.

    Raises:
        ConfigError: a module or file does not exist, or a module has no Python source.
    """
    now = code_digests(sorted(set(names) & before.keys()))
    return {name: (before[name][:16], now[name][:16]) for name in now if now[name] != before[name]}


def read_digests(content: bytes | None) -> Mapping[str, str]:
    """Return the SHA-256 of each user code, by name, from ``content``, which is JSON from ``write_digests``.

    The result is empty if ``content`` is None.

    Raises:
        QueueError: ``content``, which comes from the learner over the queue server, is malformed.
    """
    if content is None:
        return {}
    found = _digests_of(content)
    if found is None:
        raise QueueError(
            f"{DIGESTS_FILE} from the learner: expected a JSON object that maps names of code to digests, got "
            f"{bytes(content)[:80]!r}; start the learner again, with the same version of async-rl as here"
        )
    return found


def _digests_of(content: bytes) -> dict[str, str] | None:
    """Return the digests in ``content``, which should be JSON from ``write_digests``, or None if it is malformed."""
    try:
        found = json.loads(bytes(content))
    except ValueError:
        return None
    return found if isinstance(found, dict) and all(isinstance(item, str) for item in found.values()) else None


def _parts(name: str) -> tuple[str, str | None]:
    """Split the name of user code into (module or file, attribute). The attribute is None if the name has none.

    Raises:
        ConfigError: the name is malformed.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(
            f"expected the name of user code as module:attribute or file.py:attribute, got {name!r}; correct the name"
        )
    return found["place"], found["attribute"]


def _spec(name: str) -> ModuleSpec:
    place, _ = _parts(name)
    if place.endswith(".py"):
        path = Path(place).absolute()
        if not path.is_file():
            raise ConfigError(
                f"{name}: expected a file {path} on this machine, but there is none; copy it there, since code is "
                f"never sent to other machines"
            )
        digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
        spec = importlib.util.spec_from_file_location(f"async_rl_local_{path.stem}_{digest}", path)
    else:
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())  # last, so that no module there hides an installed one
        try:
            spec = importlib.util.find_spec(place)
        except Exception as error:  # the search runs parent packages, which may raise anything
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{place}.".startswith(f"{missing}."):
                raise ConfigError(
                    f"{name}: can't find module {place}: {type(error).__name__}: {error}; correct the packages that "
                    f"contain it"
                ) from error
            spec = None  # a package that should contain it is missing
    if spec is None:
        raise ConfigError(
            f"{name}: expected a module {place} on this machine, but there is none; install it, add its folder to "
            f"PYTHONPATH, start in its folder, or give its file instead: path/file.py:attribute"
        )
    return spec


def _sources(spec: ModuleSpec, name: str) -> dict[str, Path]:
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(
            f"{name}: expected a module with a Python source file, got {spec.origin or 'none'}; give a module "
            f"with source"
        )
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
    """Check that the imported modules of the user code ``name`` come from the files whose digest was compared.

    ``sources`` maps the names of these modules to the files.

    Raises:
        ConfigError: Python had already imported a module of the same name from another file.
    """
    for module_name, path in sources.items():
        loaded = getattr(sys.modules.get(module_name), "__file__", None)
        if loaded is not None and Path(loaded).resolve() != path:
            raise ConfigError(
                f"{name}: expected module {module_name} from {path}, but a module of that name is already imported "
                f"from {loaded}; rename one of them"
            )


class LocalFolder(str):
    """A folder that was added to ``sys.path`` so that one user module can import the modules next to it.

    The class marks such folders on ``sys.path``. The search for the local modules of other user code skips them.
    """

    __slots__ = ()


def search_folder(source: Path) -> Path:
    """Return the folder that must be on ``sys.path`` so that the file ``source`` can import its local modules.

    It is the folder that contains the outermost package of ``source``, or the file itself if it is in no package.
    """
    folder = source.resolve().parent
    while (folder / _PACKAGE_FILE).is_file():
        folder = folder.parent
    return folder


def source_files(spec: ModuleSpec, source: Path) -> dict[str, Path]:
    """Return the files that the digest of a user module covers, by module name. Import nothing.

    ``spec`` is the user module and ``source`` its file, which comes first in the result.
    """
    source = source.resolve()
    folder = search_folder(source)
    found = {spec.name: source}
    is_packaged = source.parent != folder
    if folder.name in _INSTALLED and not is_packaged:
        return found  # the module is installed as a single file; the files next to it belong to other packages
    todo = {source.relative_to(folder).parts[0]} if is_packaged else _imported(source)
    known = {_OWN, *sys.stdlib_module_names}
    while todo := todo - known:
        known |= todo
        found_in = (_files_of(name, folder).items() for name in sorted(todo))
        files = {module: path for items in found_in for module, path in items if path != source}
        found |= files
        todo = set() if is_packaged else {name for path in files.values() for name in _imported(path)}
    return found


def _files_of(name: str, folder: Path) -> dict[str, Path]:
    """Return the ``.py`` files in ``folder`` of the top-level module or package ``name``, by module name.

    Return none if ``folder`` has no such file, or if another entry of ``sys.path`` has the module. Folders that were
    added for other user code are ignored.
    """
    places = [*(place for place in sys.path if not isinstance(place, LocalFolder)), str(folder)]
    top = PathFinder.find_spec(name, places)
    if top is None or (top.origin is not None and not Path(top.origin).resolve().is_relative_to(folder)):
        return {}
    paths = [path for path in (folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))) if path.is_file()]
    parts = [path.relative_to(folder).with_suffix("").parts for path in paths]
    return {
        ".".join(part[:-1] if part[-1] == "__init__" else part): path.resolve()
        for part, path in zip(parts, paths, strict=True)
    }


def _imported(source: Path) -> set[str]:
    """Return the top-level names that the file ``source`` may import; none if it is not valid Python."""
    try:
        nodes = list(ast.walk(ast.parse(source.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def load_named_code(name: str) -> Any:
    """Import the user code ``name``, which a config on this machine names for its own use, and return it.

    Raises:
        ConfigError: the code is missing, or its import fails.
    """
    return load_code(name, allowed=[_parts(name)[0]], digest=None)


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return a sentence about an exception of user code, and its place, which is equal for equal mistakes.

    The sentence has the exception, and the file, the line and the source line of the innermost frame in the user's
    code. If no frame is in the user's code, the place is that of the innermost frame, and the sentence leaves it out.
    """
    kind, text = type(error).__name__, _text_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    innermost = (own or frames or [None])[-1]
    place = kind if innermost is None else f"{kind} at {innermost.filename}:{innermost.lineno}"
    if not own:
        return f"{kind}: {text}", place
    frame = own[-1]
    return f"{kind}: {text} ({frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line})", place


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # the exception's class may be the user's
        return f"its text can't be read ({type(second).__name__})"


def is_installed(path: Path) -> bool:
    """Return whether a source file belongs to an installed package, as pip installs them."""
    return bool(set(_INSTALLED) & set(path.parts))


def _is_users(filename: str) -> bool:
    """Return whether a source file is neither of async-rl, nor of an installed package, nor of Python."""
    path = Path(filename)
    folders = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))
    is_ours = any(path.is_relative_to(folder) for folder in folders)
    return path.is_absolute() and not is_ours and not is_installed(path)
