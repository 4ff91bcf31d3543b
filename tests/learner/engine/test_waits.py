"""Within a micro-batch the host does not wait for the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.config.learner import ModelConfig
from async_rl.config.loss import LossConfig
from async_rl.learner.data.packing import pack
from async_rl.learner.losses.objective import PolicyObjective, policy_objective
from async_rl.learner.model.policy_model import PolicyModel, load_model, to_device
from async_rl.learner.sequences import TrainSequence
from async_rl.sampling_mask import pack_ids
from benchmarks.gpu_smoke.waits import Waits
from tests.learner.tiny import random_sequences, tiny_config, tiny_model


def with_masks(sequence: TrainSequence, vocab_size: int) -> TrainSequence:
    """Each trained token could be one of two, one of twenty, or any, so that the mask has all three forms."""
    targets = sequence.token_ids[sequence.loss_mask]
    counts = np.array([(2, 20, vocab_size)[i % 3] for i in range(len(targets))])
    ids = [np.sort((t + np.arange(n)) % vocab_size) for t, n in zip(targets, counts, strict=True)]
    return replace(sequence, sampling_mask=pack_ids(counts, np.concatenate(ids), vocab_size=vocab_size))


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
    sequences = [with_masks(s, policy.vocab_size) for s in random_sequences(3, 12)]
    ((micro_batch,),) = pack(sequences, max_tokens=1000, num_ranks=1)
    objective = PolicyObjective(LossConfig(), 0, 8)
    with Waits() as waits:
        batch = to_device(micro_batch, torch.device("cpu"))
        scored = policy(batch, predict=objective.predict_slopes(batch, version=0))
        objective(batch, scored, version=0).loss_sum.backward()
    assert waits.seen == []
