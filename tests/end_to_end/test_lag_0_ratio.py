"""At lag 0 the ratio pi/mu is 1, however the tokens were sampled: the real generator's backend, the real learner.

A group goes the whole way but for the sockets: backend, sequence, codec, the queue's judgement, batch, packing, model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.generator import GeneratorConfig
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.generator.rollouts import whole_sequence
from async_rl.learner.data.batch import prepare_batch
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from async_rl.net.codec import decode_group, encode_group
from async_rl.queue.core.groups import read_summary, why_unfit
from async_rl.queue.messages import TakenGroup
from async_rl.records import Group, Lease, Rollout
from tests.generator.leases import make_lease
from tests.learner.tiny import tiny_config, tiny_model

TEMPERATURES, TOP_PS, TOP_KS = (0.6, 1.0, 1.5), (1.0, 0.9, 0.5), (0, 1, 4, 50)
COMBINATIONS = list(product(TEMPERATURES, TOP_PS, TOP_KS))
VOCABULARY = 200
"""7 words of bits: sets of up to 6 tokens are lists of ids, larger ones bits."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a model whose distributions are neither flat nor certain, so that top-p keeps few here and many there."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("ratio")
    config = Qwen2Config.from_pretrained(tiny_model(root / "model"))
    config.vocab_size, config.initializer_range = VOCABULARY, 0.4
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(root / "model")
    yield root
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def groups(root: Path) -> list[tuple[Lease, Group]]:
    """One for every combination, sampled together, so that rows of every kind stand side by side."""
    backend = TransformersBackend.from_files(root / "model", GeneratorConfig(batch_size=16), load_pretrained=True)
    leases = {
        str(i): make_lease(str(i), temperature=t, top_p=p, top_k=k, max_new_tokens=12, seed=i)
        for i, (t, p, k) in enumerate(COMBINATIONS)
    }
    for i, lease in leases.items():
        backend.submit(lease, backend.encode_prompt([{"role": "user", "content": f"what is {i} + 1"}]))
    sampled: dict[str, list[Any]] = {i: [None] * lease.group_size for i, lease in leases.items()}
    while backend.num_running:
        for sample in backend.step():
            sampled[sample.lease_id][sample.index] = sample
    return [(lease, group_of(lease, sampled[i])) for i, lease in leases.items()]


def group_of(lease: Lease, samples: list[Any]) -> Group:
    """As it comes out of the queue, which has nothing to say against it."""
    rollouts = tuple(Rollout((whole_sequence(s),), {"correct": 1.0}, 1.0, s.finish_reason) for s in samples)
    group = Group(lease.lease_id, "train", 0, "g", lease.lineage, lease.sampling.temperature, rollouts, {0: "digest"})
    body = encode_group(group)
    assert why_unfit(read_summary(body), lease, newest_version=0) == ""
    return decode_group(body)


def train_sequences(groups: list[tuple[Lease, Group]]) -> list[TrainSequence]:
    taken = [TakenGroup(group, lease.prompt, 0.0, 0, False) for lease, group in groups]
    prepared = prepare_batch(taken, mask_truncated=False, num_updates=1, known_weights=lambda _: True)
    return [replace(s, advantages=s.advantages + (-1) ** s.sequence_id) for s in prepared.mini_batches[0]]


def test_a_step_over_all_combinations_finds_no_mismatch_however_it_is_cut(
    root: Path, groups: list[tuple[Lease, Group]]
):
    sequences, found = train_sequences(groups), []
    assert any(s.sampling_mask is None for s in sequences)
    masks = [s.sampling_mask for s in sequences if s.sampling_mask is not None]
    assert {size > 0 for mask in masks for size in mask.sizes.tolist()} == {True, False}, "lists of ids, and bits"
    for max_tokens in (8192, 64):
        config = tiny_config(root, "model", learner={"max_tokens": max_tokens})
        engine = FsdpEngine(config, init_ranks(config))
        found.append((engine.score(sequences, of="policy"), engine.update(sequences, version=0)))
        engine.close()
    (whole, stats), (cut, cut_stats) = found
    for sequence in sequences:
        behavior = sequence.behavior_logprobs[sequence.loss_mask]
        np.testing.assert_allclose(np.exp(whole[sequence.sequence_id] - behavior), 1.0, atol=1e-5)
        np.testing.assert_allclose(cut[sequence.sequence_id], whole[sequence.sequence_id], atol=1e-5)
    assert (stats.ratio_mean, stats.ratio_max, stats.ess) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
    assert stats.grad_norm > 0
    assert (cut_stats.grad_norm, cut_stats.entropy) == pytest.approx((stats.grad_norm, stats.entropy), rel=1e-4)
