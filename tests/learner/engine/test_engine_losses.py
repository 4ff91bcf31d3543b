"""The gradient of a step under every kind of loss: the same however the batch is cut, ordered, packed or spread.

fp32 to 1e-5 of the largest entry. Gradients are read where AdamW keeps them (``rank_scenarios.PLAIN``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.interface import UpdateStats
from async_rl.learner.losses.objective import policy_objective
from async_rl.learner.losses.step_masks import judge_step
from async_rl.learner.sequences import TrainSequence
from tests.examples import examples
from tests.learner.engine.test_fsdp_engine import assert_same_stats
from tests.learner.model.reference import Tensors, assert_near, engine_of
from tests.learner.rank_scenarios import (
    LOSSES,
    VERSION,
    loss_config,
    off_policy_sequences,
    plain_stats,
    with_reference,
)
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_model

ON_RANKS = [pytest.param(where, marks=pytest.mark.long if where == "ranks_4" else pytest.mark.slow)
            for where in ("ranks_2", "parts_2", "ranks_4")]  # fmt: skip
"""Folders of what ranks wrote: their number, and whether they share every sequence."""


def gradient_of(state: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in state.items() if name.startswith("exp_avg.")}


class OneRank:
    """One engine with a reference, whose loss and budget of tokens are exchanged; no step moves its weights."""

    def __init__(self, root: Path) -> None:
        self.root = root
        config = loss_config(root, LOSSES["grpo with KL in the loss"])
        self.engine = engine_of(config)
        self.sequences = with_reference(self.engine, off_policy_sequences())
        self.whole = cache(self._whole)

    def gradient(self, loss: str, sequences: list[TrainSequence], *, max_tokens: int = 4096) -> Tensors:
        config = loss_config(self.root, LOSSES[loss], max_tokens=max_tokens)
        self.engine.policy.config, self.engine.policy.objective = config, policy_objective(config)
        self.stats = self.engine.update(sequences, version=VERSION)
        assert self.stats.stepped, self.stats.reason
        return gradient_of(self.engine.policy.optimizer.tensors())

    def _whole(self, loss: str) -> Tensors:
        """Of all sequences in one micro-batch."""
        return self.gradient(loss, self.sequences)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("losses")
    tiny_model(root / "model")
    tiny_model(root / "reference", seed=1)
    return root


@pytest.fixture(scope="module")
def one(root: Path) -> OneRank:
    return OneRank(root)


@pytest.fixture(scope="module")
def on_ranks(root: Path) -> Any:
    """A folder of ``ON_RANKS``, written once."""

    @cache
    def run(where: str) -> Path:
        run_ranks("losses" if "ranks" in where else "split_losses", root, world_size=int(where[-1]))
        return root / where

    return run


def optimizer_state(directory: Path, name: str) -> Tensors:
    with np.load(directory / f"{name}.npz") as stored:
        return {key: torch.from_numpy(stored[key]) for key in stored}


@pytest.mark.parametrize("loss", LOSSES)
@given(order=st.permutations(range(7)), max_tokens=st.integers(30, 160))
@examples(6)
def test_gradient_is_the_same_in_any_order_and_any_cut(one: OneRank, loss: str, order: list[int], max_tokens: int):
    ours = one.gradient(loss, [one.sequences[i] for i in order], max_tokens=max_tokens)
    assert_near(ours, one.whole(loss))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_masked_sequence_and_a_skipped_one_change_nothing(one: OneRank, loss: str):
    # Number 3 is far above the skip threshold, number 5 has no trained token.
    assert_near(one.gradient(loss, [one.sequences[i] for i in (0, 1, 2, 4, 6)]), one.whole(loss))


def test_a_step_that_is_judged_as_a_whole_has_one_gradient_however_it_is_cut(one: OneRank):
    rules = [
        {"level": "step", "statistic": "k2", "above": 0.05, "when": "outward", "action": "clip"},
        {"name": "far", "level": "step", "statistic": "k3", "above": 0.1, "action": "mask"},
    ]
    loss = {"preset": "dapo", "rules": rules, "entropy_quantile": 0.3}
    found: list[tuple[Tensors, UpdateStats, dict[str, int]]] = []
    for max_tokens in (4096, 40):
        config = loss_config(one.root, loss, max_tokens=max_tokens)
        one.engine.policy.config, one.engine.policy.objective = config, policy_objective(config)
        step = judge_step(one.sequences, one.engine.score_policy(one.sequences), config.loss)
        stats = one.engine.update(step.sequences, version=VERSION)
        found.append((gradient_of(one.engine.policy.optimizer.tensors()), stats, step.counts))
    (whole, stats, counts), (cut, cut_stats, cut_counts) = found
    assert_near(cut, whole)
    assert counts == cut_counts
    assert all(counts.values())
    assert stats.tokens_trained == cut_stats.tokens_trained > 0


def test_the_losses_differ(one: OneRank):
    # Else the invariances would say little.
    flat = [torch.cat([t.flatten() for t in one.whole(loss).values()]) for loss in LOSSES]
    for left, right in combinations(flat, 2):
        assert float((left - right).norm()) > 1e-3 * float(right.norm())


@pytest.mark.parametrize("where", ON_RANKS)
@pytest.mark.parametrize("loss", LOSSES)
def test_ranks_have_the_gradient_and_the_statistics_of_one(one: OneRank, on_ranks: Any, where: str, loss: str):
    directory = on_ranks(where)
    # One trained sequence and a masked one: other ranks have nothing to do, and join.
    two = one.gradient(loss, [one.sequences[0], one.sequences[5]])
    assert_near(gradient_of(optimizer_state(directory, f"{loss}, 2")), two)
    assert_near(gradient_of(optimizer_state(directory, f"{loss}, 7")), one.gradient(loss, one.sequences))
    theirs = json.loads((directory / f"{loss}, 7.json").read_text())
    assert_same_stats(json.loads(json.dumps(plain_stats(one.stats))), theirs)


@pytest.mark.parametrize("where", ON_RANKS)
def test_ranks_score_and_skip_as_one(one: OneRank, on_ranks: Any, where: str):
    # A step that is skipped leaves the optimizer as the last step did.
    directory = on_ranks(where)
    entropies = {i: scores.entropies for i, scores in one.engine.score_policy(one.sequences).items()}
    policy, reference = (one.engine.score(one.sequences, of=of) for of in ("policy", "reference"))
    for name, expected in (("policy", policy), ("reference", reference), ("entropies", entropies)):
        with np.load(directory / f"{name}.npz") as stored:
            assert {int(number) for number in stored} == expected.keys()
            for number in stored:
                np.testing.assert_allclose(stored[number], expected[int(number)], atol=1e-5, rtol=0)
    stats = json.loads((directory / "guarded, 7.json").read_text())
    assert not stats["stepped"]
    assert "loss.min_ess = 0.999" in stats["reason"]
    before, after = (optimizer_state(directory, name) for name in (f"{list(LOSSES)[-1]}, 2", "guarded, 7"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
