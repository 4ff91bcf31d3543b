"""Models with other layers than those of the quickstart learn its task, sampled by the built-in engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.family_run import learn_sums


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3 moe", {}), ("gemma 3", {}), ("gpt-oss", {}), ("granite 4 hybrid", {"mamba_n_heads": 6})],
)
def test_a_family_learns_sums(tmp_path: Path, family: str, changes: dict[str, int]):
    learned = learn_sums(tmp_path, family, backend="transformers", **changes)
    assert learned.accuracy_after > learned.accuracy_before + 0.1
    assert learned.parity < 1e-4
