"""The layout of tensors that a test names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from async_rl.weights.manifest import Layout, LayoutPlan


def plan_layout(specs: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> Layout:
    """Return the layout of tensors given as (name, dtype, shape), in this order.

    Raises:
        WeightsError: a dtype is not in ``ITEM_SIZES``.
    """
    plan = LayoutPlan(bucket_bytes)
    for name, dtype, shape in specs:
        plan.place(name, dtype, shape)
    return plan.layout
