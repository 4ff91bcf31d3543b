"""Finds what extensions give the core: ours, and those of installed packages by their entry points.

A kind is the name of a group of entry points, such as ``async_rl.commands``. ``async_rl.extensions`` lists the kinds.
Nothing is imported before ``load``. A name of ours stays ours: no installed package can replace it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any

from async_rl.errors import ExtensionError
from async_rl.extensions import OFFERS


def our_offers(kind: str) -> dict[str, EntryPoint]:
    """Return what this package's own extensions offer of ``kind``, by name."""
    return {name: EntryPoint(name, place, kind) for name, place in OFFERS.get(kind, {}).items()}


def offers(kind: str) -> dict[str, EntryPoint]:
    """Return all that is offered of ``kind``, by name, ours first. It reads the metadata of installed packages."""
    ours = our_offers(kind)
    return ours | {entry.name: entry for entry in entry_points(group=kind) if entry.name not in ours}


def find_offer(kind: str, name: str) -> EntryPoint | None:
    """Return what is offered of ``kind`` under ``name``, or None. For a name of ours it reads no metadata."""
    return our_offers(kind).get(name) or offers(kind).get(name)


def load(offer: EntryPoint) -> Any:
    """Import and return what ``offer`` names.

    Raises:
        ExtensionError: that failed. The message names the package and the cause.
    """
    try:
        return offer.load()
    except Exception as error:  # a package's import may raise anything
        raise ExtensionError(
            f"expected {offer.value}, which the package {package_of(offer)} offers as {offer.name} ({offer.group}), "
            f"got {type(error).__name__}: {error!s:.300}; update or uninstall the package"
        ) from error


def package_of(offer: EntryPoint) -> str:
    """Return the name and the version of the package that offers ``offer``."""
    return "async-rl" if offer.dist is None else f"{offer.dist.name} {offer.dist.version}"


def packages_offers() -> dict[str, list[EntryPoint]]:
    """Return what other installed packages offer of any kind, by package and version."""
    offered: dict[str, list[EntryPoint]] = {}
    for package in distributions():
        ours = [entry for entry in package.entry_points if entry.group.startswith("async_rl.")]
        if ours:
            offered[f"{package.name} {package.version}"] = ours
    return offered
