"""Models with other layers than those of the quickstart learn its task, sampled by the built-in engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.family_run import learn_sums


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_mixture_of_experts_learns_sums(tmp_path: Path):
    learned = learn_sums(tmp_path, "qwen3 moe", backend="transformers")
    assert learned.accuracy_after > learned.accuracy_before + 0.2
    assert learned.parity < 1e-4
