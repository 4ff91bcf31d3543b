"""The base class of all config sections, and the lookup of names that a config key may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from async_rl.errors import AddressError, ConfigError
from async_rl.net.address import check_address, is_wildcard

T = TypeVar("T")


class Section(BaseModel):
    """The base class of a section, which is one table of the TOML file.

    Its values are frozen. A value of another type, an unknown key, an infinite number or NaN is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def look_up(table: Mapping[str, T], name: str, key: str) -> T:
    """Return the value of ``table`` for ``name``, which is the value of the config key ``key``.

    Raises:
        ConfigError: ``table`` has no such name. The message lists the known names.
    """
    if name not in table:
        raise ConfigError(f"{key}: expected one of {', '.join(table)}, got {name!r}; set {key} to one of them")
    return table[name]


def check_served_address(address: str) -> str:
    """Return ``address`` if one process can bind it, and others can connect to it.

    Raises:
        ValueError: it is malformed, has no port, or stands for all interfaces.
    """
    try:
        host, port = check_address(address)
    except AddressError as error:
        raise ValueError(str(error)) from None
    if not port or is_wildcard(host):
        raise ValueError(
            f"expected a host and a port that others connect to, as in tcp://127.0.0.1:5570, got {address}; name them"
        )
    return address
