"""Models with other layers than those of the quickstart learn its task, sampled by the built-in engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.family_run import learn_sums


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("qwen3 moe", {}, marks=pytest.mark.long),
        pytest.param("gemma 3", {}, marks=pytest.mark.long),
        pytest.param("gpt-oss", {}, marks=pytest.mark.long),
        pytest.param("granite 4 hybrid", {"mamba_n_heads": 6}, marks=pytest.mark.long),
    ],
)
def test_a_family_learns_sums(tmp_path: Path, family: str, changes: dict[str, Any]):
    learned = learn_sums(tmp_path, family, backend="transformers", **changes)
    assert learned.accuracy_after > learned.accuracy_before + 0.1
    assert learned.parity < 1e-4
