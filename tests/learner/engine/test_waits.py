"""Within a micro-batch the host does not wait for the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_rl.config.learner import ModelConfig
from async_rl.config.loss import LossConfig
from async_rl.learner.data.packing import pack
from async_rl.learner.losses.objective import PolicyObjective, policy_objective
from async_rl.learner.model.policy_model import PolicyModel, load_model, to_device
from benchmarks.gpu_smoke.waits import Waits
from tests.learner.model.masks import masks_around
from tests.learner.tiny import random_sequences, tiny_config, tiny_model


def test_the_search_finds_waits():
    numbers = torch.tensor([1, 2])
    with Waits() as waits:
        assert bool((numbers > 1).any())
        assert len(numbers[numbers > 1]) == 1
        numbers.repeat_interleave(numbers)
    assert len(waits.seen) == 3


def test_a_micro_batch_with_a_loss_of_the_users_own_has_no_wait(tmp_path: Path):
    tiny_model(tmp_path)
    policy = PolicyModel(load_model(ModelConfig(path=str(tmp_path))))
    ((micro_batch,),) = pack(random_sequences(3, 12), max_tokens=1000, num_ranks=1)
    function = f"{Path(__file__).resolve().parents[3] / 'examples' / 'own_loss.py'}:dapo"
    objective = policy_objective(tiny_config(tmp_path, "", loss={"function": function}), device=torch.device("cpu"))
    with Waits() as waits:
        batch = to_device(micro_batch, torch.device("cpu"))
        objective(batch, policy(batch), version=0).loss_sum.backward()
    assert waits.seen == []


@pytest.mark.parametrize("chunk_rows", [4, 1000])
def test_a_micro_batch_with_sampling_masks_has_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
):
    # With several chunks there is one: a copy of which slopes were predicted wrongly, which is no wait on a CPU.
    tiny_model(tmp_path)
    policy = PolicyModel(load_model(ModelConfig(path=str(tmp_path))))
    chunk_bytes = 4 * policy.vocab_size * chunk_rows
    monkeypatch.setattr("async_rl.learner.memory_plan.CHUNK_BYTES", {"cpu": (chunk_bytes, chunk_bytes)})
    counts = (2, 20, policy.vocab_size)  # so that the mask has all three forms
    sequences = [
        replace(s, sampling_mask=masks_around(s.token_ids[s.loss_mask], counts, policy.vocab_size))
        for s in random_sequences(3, 12)
    ]
    ((micro_batch,),) = pack(sequences, max_tokens=1000, num_ranks=1)
    objective = PolicyObjective(LossConfig(), 0, 8)
    with Waits() as waits:
        batch = to_device(micro_batch, torch.device("cpu"))
        scored = policy(batch, predict=objective.predict_slopes(batch, version=0))
        objective(batch, scored, version=0).loss_sum.backward()
    assert waits.seen == []
