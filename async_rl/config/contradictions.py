"""``Contradiction``: settings that exclude each other, as a row of a table, and the check of such rows.

``loss_contradictions`` has the rows of the section ``loss``, ``exclusions`` those of keys of different sections.
docs/config.md lists all of them, and a test runs the example of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from async_rl.config.loss_names import OFF_VALUES
from async_rl.config.section import Section


class Contradiction(NamedTuple):
    """A combination of settings that is refused. The message is KEY: expected EXPECTED, got GOT; REASON.

    The texts are templates for ``str.format``, with ``c`` for the settings and ``x`` for what ``holds`` returned.

    Attributes:
        keys: the keys whose values the message shows; without ``section`` one, by which the message begins.
        holds: returns whether settings have this combination: None or False if not, else True or the value of ``x``.
        expected: what was expected.
        reason: why, and what to do.
        example: settings that have this combination, for tests, by key.
        got: what was got, if that is not the values of ``keys``.
        section: the section whose keys these are, if it checks the row by itself. Empty if ``Config`` checks it.
    """

    keys: tuple[str, ...]
    holds: Callable[[Any], Any]
    expected: str
    reason: str
    example: Mapping[str, Any]
    got: str = ""
    section: str = ""

    def message(self, settings: Section, x: Any) -> str:
        """Return the message about ``settings``, for which ``holds`` returned ``x``."""
        head, expected, reason, got = (
            text.format(c=settings, x=x) for text in (self.keys[0], self.expected, self.reason, self.got)
        )
        if self.section:
            got = ", ".join(f"{key} = {_shown(settings, key)}" for key in self.keys)
            return f"expected {expected}, got {got}; {reason}"
        return f"{head}: expected {expected}, got {got or _shown(settings, head)}; {reason}"


def check_contradictions(settings: Section, rows: Sequence[Contradiction]) -> None:
    """Check that ``settings`` have none of the combinations ``rows``.

    Raises:
        ValueError: they have one. The message has the keys with their values, the reason and the remedy.
    """
    for row in rows:
        if (x := row.holds(settings)) is not None and x is not False:
            raise ValueError(row.message(settings, x))


def changed_key(section: Section) -> str | None:
    """Return the first key of ``section`` that does not have its default. None if all have it."""
    fields = type(section).model_fields.items()
    return next((key for key, field in fields if getattr(section, key) != field.get_default()), None)


def value_of(settings: Section, key: str) -> Any:
    """Return the value of ``key``, whose name has a dot before each part, as in ``loss.best_k``; None if a table of
    free keys has none.
    """
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def _shown(settings: Section, key: str) -> str:
    value = value_of(settings, key)
    if value is None:
        value = OFF_VALUES.get(key.removeprefix("loss."), "none")
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)
