"""Name a function of the running program so that the processes of a run, which import their code, find it.

``code_name`` gets a function and returns ``file.py:function`` or ``module:function``, as a config has it
(``process.user_code``). ``async_rl.train`` calls it for each function that it gets.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.process.user_code import is_code_name, is_installed, load_code

_MAIN = "__main__"


def code_name(function: Callable[..., Any], key: str) -> str:
    """Return the name by which another process of this machine imports ``function``.

    A function of an installed module or of a package is named by its module, every other by its file: relative to the
    working directory if it lies there, as one writes it in a config.

    Args:
        key: the config key that has the function, for messages.

    Raises:
        ConfigError: it can't be imported: it is a lambda, a method, an object or a function inside another one, it was
            typed in a notebook or a prompt, or its script starts the run when it is imported.
    """
    own = inspect.unwrap(function)
    name = getattr(own, "__qualname__", "")
    shown = name or repr(function)
    if inspect.ismethod(own):
        raise _refusal(key, f"{shown}, a method of an object", _AT_TOP)
    if not inspect.isfunction(own):
        raise _refusal(key, f"{shown}, which is no Python function", _AT_TOP)
    if name == "<lambda>":
        raise _refusal(key, "a lambda, which has no name", _AT_TOP)
    if not name.isidentifier():
        raise _refusal(key, f"{shown}, which is defined inside a function or a class", _AT_TOP)
    variables = own.__globals__
    module, file = str(variables.get("__name__")), Path(variables.get("__file__") or "")
    if file.name != Path(own.__code__.co_filename).name or not file.is_file():
        raise _refusal(
            key,
            f"{name}, which was typed in a notebook or at a prompt",
            f"write it to a file (in a notebook: a cell that begins with %%writefile reward.py), then: from reward "
            f"import {name}",
        )
    if variables.get(name) is not function:
        raise _refusal(key, f"{name}, but {file} has another object of that name", "give them different names")
    if module == _MAIN:
        _refuse_unguarded_call(key, name, file)
        module = getattr(variables.get("__spec__"), "name", module)  # python -m package.script
    is_by_module = "." in module or file.name == "__init__.py" or is_installed(file)
    found = f"{module if is_by_module else _place(file)}:{name}"
    if not is_code_name(found) or file.suffix != ".py":
        raise _refusal(key, f"{name} of {file}", "move it to a file whose name ends in .py and has no colon")
    return found


def refuse_while_imported() -> None:
    """Check that no config's code is being imported, which would start a run inside a process of another run.

    Raises:
        ConfigError: the caller is the module of a reward, or is called while it is imported.
    """
    if any(frame.f_code is load_code.__code__ for frame, _ in traceback.walk_stack(None)):
        raise ConfigError(
            f"async_rl.train is called while a process of a run imports this file for its functions; call it under "
            f"{_GUARD}"
        )


_GUARD = 'if __name__ == "__main__":'
_AT_TOP = "write it with def at the top level of a file, or name it as text: file.py:function"


def _refusal(key: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{key}: expected a function that other processes can import, because generators call it, got {got}; {remedy}"
    )


def _refuse_unguarded_call(key: str, name: str, file: Path) -> None:
    """Check that importing the running script ``file`` does not start the run again."""
    stack = [
        line
        for frame, line in traceback.walk_stack(None)
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(sys.modules[_MAIN])
    ]
    line = stack[-1] if stack else 0  # what the script itself does; 0 if it only defines the function
    tree = ast.walk(ast.parse(file.read_bytes()))
    guards = [node for node in tree if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    if line and not any(node.lineno <= line <= (node.end_lineno or 0) for node in guards):
        raise ConfigError(
            f"{key}: {name} is a function of the script {file}, whose line {line} calls async_rl.train whenever it is "
            f"imported, and generators import it for {name}; put that line under {_GUARD}, or move {name} to a file "
            f"of its own"
        )


def _place(file: Path) -> str:
    """Return the path of ``file``, relative to the working directory if it lies there."""
    path, here = file.resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
