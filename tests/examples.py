"""How many examples a property test draws: all of them in make test-all, a share of them in make test.

The command line chooses: ``pytest --hypothesis-profile=full`` draws all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings

T = TypeVar("T")

QUICK, FULL = "quick", "full"
SHARE = 5
"""The quick profile draws one example in this many, unless a test says otherwise."""

for name in (QUICK, FULL):
    # The same examples each time; a busy machine is no failure.
    settings.register_profile(
        name,
        derandomize=True,
        deadline=None,
        max_examples=100 if name == FULL else 20,
        suppress_health_check=[HealthCheck.too_slow],
    )


def is_full() -> bool:
    """Whether the full profile is loaded."""
    return settings().max_examples == 100


def examples(num_full: int, *, num_quick: int | None = None, **others: Any) -> settings:
    """Settings of a test that draws ``num_full`` examples in the full profile. ``others`` are hypothesis's own."""
    if not is_full():
        num_full = num_quick or max(5, num_full // SHARE)
    return settings(max_examples=num_full, **others)


def some(items: Sequence[T]) -> Sequence[T]:
    """All of ``items`` in the full profile, else one in ``SHARE``."""
    return items if is_full() else items[::SHARE]
