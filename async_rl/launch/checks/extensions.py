"""What installed packages offer to async-rl, and whether it can be used."""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.errors import ExtensionError
from async_rl.launch.checks.finding import Finding
from async_rl.registry import load, packages_offers


def find_packages() -> Iterator[Finding]:
    """Yield what each package offers. Commands are imported, as by ``--help``; all else when a config names it."""
    for package, offers in packages_offers().items():
        texts = [f"{offer.group.removeprefix('async_rl.')}: {offer.name}" for offer in offers]
        yield Finding("packages", "OK", f"{package} offers {', '.join(sorted(texts))}")
        for offer in offers:
            if offer.group == "async_rl.commands":
                try:
                    load(offer)
                except ExtensionError as error:
                    yield Finding.of_message("packages", error, "WARN")
