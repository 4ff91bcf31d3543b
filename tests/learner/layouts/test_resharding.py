"""A checkpoint of any number of ranks is loaded by any other, bit for bit: model, optimizer and adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.learner.checkpoints.stored_tensors import MODEL, OPTIMIZER, load_tensors
from tests.learner.rank_scenarios import RESHARDED, SOURCES, resharded
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_model


@pytest.mark.long
def test_a_checkpoint_is_the_same_after_a_load_by_another_number_of_ranks(tmp_path: Path):
    # Three ranks can't divide the 16 rows of a weight evenly.
    tiny_model(tmp_path / "model")
    resharded(tmp_path)
    for number in (4, 2, 3):
        run_ranks("resharded", tmp_path, world_size=number)
    resharded(tmp_path)
    for name in RESHARDED:
        for number, sources in SOURCES.items():
            for source in sources:
                for prefix in (MODEL, OPTIMIZER):
                    expected = load_tensors(tmp_path / name / f"of-{source}", prefix)
                    got = load_tensors(tmp_path / name / f"of-{source}-by-{number}", prefix)
                    assert got.keys() == expected.keys()
                    assert all(torch.equal(got[key], tensor) for key, tensor in expected.items())
                    assert any(tensor.abs().sum() > 0 for tensor in expected.values())
