"""Start a child process that runs a module of this very package, wherever the package was imported from.

Called by every part that starts a Python process: launch, the queue, the weights stream, the sandbox, the verifier of
answers, the environments and doctor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
"""The directory that holds the package ``async_rl``."""


def module_command(module: str, *arguments: str, flags: Sequence[str] = ()) -> tuple[str, ...]:
    """The command that runs ``module`` in this interpreter.

    Args:
        flags: for the interpreter; ``-P`` keeps the working directory off the child's import path.
    """
    return (sys.executable, *flags, "-m", module, *arguments)


def package_path(inherited: Mapping[str, str]) -> str:
    """The value of ``PYTHONPATH`` that finds this package first, then what ``inherited`` lists."""
    return os.pathsep.join(filter(None, (PACKAGE_ROOT, inherited.get("PYTHONPATH"))))


def package_environment() -> dict[str, str]:
    """This process's environment, in which a child finds this package first."""
    return {**os.environ, "PYTHONPATH": package_path(os.environ)}
