"""The base class of all config sections, what may change when a run resumes, and the lookup of names of a key."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict

from async_rl.errors import AddressError, ConfigError
from async_rl.net.address import check_address, is_wildcard
from async_rl.process.user_code import is_code_name

T = TypeVar("T")


class OnResume(Enum):
    """Whether a key may have another value when a run is resumed.

    ``FREE``: it changes where and how fast the run computes and what it records, but not what it learns.
    ``RECORDED``: it changes what the run learns from the next step on, not what it has learned, so the learner records
    the change with its step (``run.config_changes``). ``NEVER``: another value makes another run.
    """

    NEVER = "never"
    RECORDED = "recorded"
    FREE = "free"


Free = Annotated[T, OnResume.FREE]
Recorded = Annotated[T, OnResume.RECORDED]


class Section(BaseModel):
    """The base class of a section, which is one table of the TOML file.

    Its values are frozen. A value of another type, an unknown key, an infinite number or NaN is refused. ``on_resume``
    is that of all its keys that are not ``Free`` or ``Recorded`` themselves.
    """

    on_resume: ClassVar[OnResume] = OnResume.NEVER
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def on_resume(section: type[BaseModel], key: str) -> OnResume:
    """Return whether ``key``, a dotted name in ``section``, may change. The innermost field that says so decides."""
    found = OnResume.NEVER
    model: type[BaseModel] | None = section
    for name in key.split("."):
        if model is None or (field := model.model_fields.get(name)) is None:
            break
        inner = field.annotation
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
        of_section = getattr(model, "on_resume", OnResume.NEVER)
        marks = (mark for mark in (*field.metadata, of_section) if isinstance(mark, OnResume))
        found = next((mark for mark in marks if mark is not OnResume.NEVER), found)
    return found


def look_up(table: Mapping[str, T], name: str, key: str) -> T:
    """Return the value of ``table`` for ``name``, which is the value of the config key ``key``.

    Raises:
        ConfigError: ``table`` has no such name. The message lists the known names.
    """
    if name not in table:
        raise ConfigError(f"{key}: expected one of {', '.join(table)}, got {name!r}; set {key} to one of them")
    return table[name]


def _checked_code(value: str) -> str:
    if not is_code_name(value):
        raise ValueError(f"expected module:function or file.py:function, got {value!r}; correct it")
    return value


CodeName = Annotated[str, AfterValidator(_checked_code)]
"""The name of a function of the user's own (``process.user_code``)."""


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
