"""The rows of docs/predecessors.md about how the learner trains: each setting runs, and changes what it promises.

A run here is the real trainer, engine, queue and files in this process; the groups are made up. For each row, a run
with all of its settings is compared with one that lacks a single setting, and so on for every setting. What a setting
changes is the trained weights; for a few it is a figure of ``metrics.jsonl``. Settings that say how a step is computed,
and not which step, must change no weight.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from async_rl.errors import ConfigError
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from async_rl.records import Group, Lease
from tests.config.predecessors import FEATURES, alternatives
from tests.learner.loop.scripted_run import drawn_rollout, make_run
from tests.learner.tiny import tiny_model
from tests.queue.builders import group

Settings = Mapping[str, str]
"""Key -> value in TOML."""

BASE: Settings = {
    "model.path": '"model"', "data.eval": "{}", "eval.every": "0", "checkpoint.every": "0",
    "sampling.group_size": "4", "sampling.max_new_tokens": "16", "sampling.max_prompt_tokens": "8",
    "learner.steps": "12", "learner.max_tokens": "40", "optimizer.lr": "1e-2",
    "generator.backend": '"fake"',
}  # fmt: skip
OF_CRITIC: Settings = {"critic.lr": "0.1", "learner.updates_per_batch": "2"}
"""What a critic's settings need to show their effect: ``critic.value_clip`` acts from a batch's second update on."""
REFUSED = ({"loss.kl_placement": '"loss"', "loss.kl_estimator": '"k1"'},)
"""Choices of a row that the config refuses, as the row says."""

OTHER: Mapping[str, tuple[str, ...]] = {
    "loss.preset": ('"cispo"',), "loss.advantage": ('"group_mean"', '"group_norm"'),
    "loss.aggregation": ('"sequence"', '"token"'), "loss.clip_low": ("0.01",), "loss.clip_high": ("0.01",),
    "loss.mask_truncated": ("false",), "loss.skip_threshold": ("0",),
    "loss.kl_placement": ('"advantage"', '"reward"'), "loss.kl_estimator": ('"k3"', '"k2"'),
    "loss.importance_cap": ("1.01",), "optimizer.max_grad_norm": ("0.01",), "optimizer.min_lr_ratio": ("0.9",),
    "optimizer.weight_decay": ("0.5",), "critic.path": ('"other"',), "critic.gamma": ("0.5",), "critic.lam": ("0.5",),
    "critic.whiten": ("false",), "critic.value_clip": ("0",), "queue.filter_range": ("[]", "[0.01, 0.99]"),
    "queue.max_staleness": ("1",), "queue.refill": ("false", "true"), "lora.alpha": ("1.0",),
    "lora.publish": ('"merged"', '"adapters"'), "sampling.temperature": ("0.5",), "sampling.temperature_steps": ("2",),
}  # fmt: skip
"""Key -> the values it is compared with, the first that differs from the row's. Other keys are left out."""

GO_WITH: Mapping[str, tuple[str, ...]] = {
    "loss.preset": ("critic.",),
    "loss.skip_threshold": ("loss.skip_unit",),
    "loss.anchor": ("loss.importance_cap",),
    "loss.kl_coef": ("loss.kl_",),
    "sampling.temperature_end": ("sampling.temperature_steps",),
    "lora.rank": ("lora.",),
}
"""Key -> the beginnings of those keys that have no meaning without it."""

CHANGING = (
    *OTHER, "model.dtype", "loss.skip_unit", "loss.kl_coef", "loss.entropy_coef", "loss.anchor", "loss.best_k",
    "optimizer.schedule", "optimizer.name", "critic.freeze_steps", "lora.rank", "lora.base_bits", "lora.publish",
    "sampling.group_size", "sampling.temperature_end", "queue.max_staleness", "learner.updates_per_batch",
)  # fmt: skip
"""Keys that decide which steps are taken."""

KEEPING: Settings = {
    "learner.max_tokens": "20", "learner.packing": '"padded"', "learner.reshard": '"after_backward"',
    "learner.compile": "false", "model.gradient_checkpointing": '"none"', "weights.sync_every": "1",
}  # fmt: skip
"""Keys that decide how a step is computed or sent on, each with a value to compare with: the weights stay the same."""

FIGURES: Mapping[str, str] = {"queue.max_staleness": "staleness/max"}
"""Keys whose effect is seen in a figure of the metrics and not in the weights."""


@dataclass(frozen=True)
class Trained:
    """What a run left: its weights by name, and the rows of its steps."""

    weights: Mapping[str, torch.Tensor]
    rows: list[dict[str, Any]]


Train = Callable[[Settings], Trained]


def answered(lease: Lease, version: int) -> Group:
    """A group that tells the settings apart, drawn by the prompt's position.

    Every fifth group is all right. In the others answers with even numbers are right. Rewards differ in style. Answer
    3 was cut at the limit. In every third group answer 2 has become 150 times as likely.
    """
    generator = np.random.default_rng(lease.prompt.position)
    is_easy, is_odd = lease.prompt.position % 5 == 4, lease.prompt.position % 3 == 0
    rollouts = []
    for number in range(lease.group_size):
        shift = 5.0 * (is_odd and number == 2)
        made = drawn_rollout(
            generator, version, float(is_easy or number % 2 == 0), logprobs=(-4.2 - shift, -3.4 - shift),
            finish_reason="length" if number == 3 else "stop", style=0.1 * number,
        )  # fmt: skip
        rollouts.append(made)
    return structs.replace(group(lease, version), rollouts=tuple(rollouts))


def nested(settings: Settings) -> dict[str, Any]:
    return tomllib.loads("\n".join(f"{key} = {value}" for key, value in settings.items()))


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Train:
    """Train as settings say on top of ``BASE``. A choice of settings is trained once."""
    directory = tmp_path_factory.mktemp("predecessors")
    tiny_model(directory / "model")
    tiny_model(directory / "other", seed=1)
    found: dict[frozenset[tuple[str, str]], Trained] = {}

    def train(settings: Settings) -> Trained:
        key = frozenset(settings.items())
        if key not in found:
            with contextlib.chdir(directory):  # rows name files of the working directory
                found[key] = run_of(directory / f"run-{len(found)}", settings)
        return found[key]

    return train


def run_of(directory: Path, settings: Settings) -> Trained:
    run = make_run(directory, num_rows=400, **nested({**BASE, **settings}))
    engine = FsdpEngine(run.config, init_ranks(run.config))
    run.engine = engine  # pyright: ignore[reportAttributeAccessIssue]
    run.start(answer=answered)
    weights = {name: tensor.clone() for name, tensor in engine.gather()}
    engine.close()
    return Trained(weights, run.rows)


def differ(one: Trained, other: Trained) -> bool:
    return one.weights.keys() != other.weights.keys() or any(
        not torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items()
    )


def learner_settings(settings: Settings) -> dict[str, str]:
    """Those of a row that these runs read; a critic gets the learning rate that shows its effect."""
    own = {key: value for key, value in settings.items() if key in CHANGING or key in KEEPING}
    if own.get("loss.preset") == '"ppo"':
        return {**own, **OF_CRITIC}
    return {key: value for key, value in own.items() if not key.startswith("critic.")}


def without(settings: Settings, key: str) -> dict[str, str]:
    """``settings`` with another value of ``key``, or without it."""
    gone = (key, *GO_WITH.get(key, ()))
    rest = {name: value for name, value in settings.items() if not name.startswith(gone)}
    others = (*OTHER.get(key, ()), *KEEPING.get(key, "").split())
    other = next((value for value in others if value != settings[key]), None)
    return rest if other is None else rest | {key: other}


CASES = [
    (feature, key, settings)
    for feature, row in FEATURES.items()
    for settings in map(learner_settings, alternatives(row))
    if not any(refused.items() <= settings.items() for refused in REFUSED)
    for key in settings
    if key not in OF_CRITIC
]


@pytest.mark.parametrize("refused", REFUSED, ids=str)
def test_a_choice_that_a_row_calls_refused_is_refused(refused: Settings, tmp_path: Path):
    ((row, chosen),) = (
        (row, chosen) for row in FEATURES.values() for chosen in alternatives(row) if refused.items() <= chosen.items()
    )
    assert "refused" in row
    with pytest.raises(ConfigError, match=list(refused)[-1]):
        make_run(tmp_path, **nested({**BASE, **chosen}))


def test_the_same_settings_give_the_same_weights(train: Train):
    # The name of a run changes nothing, so what differs below differs by its setting alone.
    assert not differ(train({}), train({"run.name": '"again"'}))


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "settings"),
    [pytest.param(key, settings, id=f"{feature}: {key} = {settings[key]}") for feature, key, settings in CASES],
)
def test_a_setting_of_a_row_changes_what_it_promises(key: str, settings: Settings, train: Train):
    one, other = train(settings), train(without(settings, key))
    if key in FIGURES:
        assert [row[FIGURES[key]] for row in one.rows] != [row[FIGURES[key]] for row in other.rows]
    elif key in KEEPING:
        for name, tensor in one.weights.items():
            torch.testing.assert_close(tensor, other.weights[name], atol=1e-4, rtol=1e-3)
    else:
        assert differ(one, other)
