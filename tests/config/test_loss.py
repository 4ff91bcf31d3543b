"""The [loss] section: presets fill what is not set, contradictions are refused with their reason, TOML round trips."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.loading import config_to_toml, load_config
from async_rl.config.loss import LossConfig
from async_rl.config.loss_names import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    OFF_VALUES,
    PRESETS,
    SKIP_STATISTICS,
    SURROGATES,
)
from tests.config.made import a_config, copy_of, refusal


@pytest.mark.parametrize(
    ("key", "table"),
    [("preset", PRESETS), ("advantage", ADVANTAGES), ("surrogate", SURROGATES), ("aggregation", AGGREGATIONS),
     ("skip_statistic", SKIP_STATISTICS), ("kl_estimator", KL_ESTIMATORS)],
)  # fmt: skip
def test_a_name_that_is_in_no_table_is_refused_with_those_that_are(key: str, table: Mapping[str, Any]):
    said = refusal(loss={key: "unheard_of"})
    assert f"loss.{key}: " in said
    assert all(f"'{name}'" in said for name in table)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_preset_sets_its_keys_and_only_those(preset: Any):
    loss = LossConfig(preset=preset)
    fields = LossConfig.model_fields
    for key in set(fields) - {"preset", *PRESETS[preset]} - {"kl_estimator"}:
        assert getattr(loss, key) == fields[key].default, key
    for key, value in PRESETS[preset].items():
        found = getattr(loss, key)
        assert ([rule.model_dump(exclude_defaults=True) for rule in found] if key == "rules" else found) == value
    config = a_config(loss={"preset": preset})
    assert copy_of(config) == config


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_negative_advantages_are_bounded_in_every_preset(preset: Any):
    # PPO's minimum alone has no bound there: the policy may move away from a token without limit.
    loss = LossConfig(preset=preset)
    if SURROGATES[loss.surrogate].has_dual_clip:
        assert loss.dual_clip == (3.0 if preset == "ppo_clip" else 10.0)
    else:
        assert loss.dual_clip is None
        assert loss.importance_cap is not None or loss.surrogate in ("cispo", "sapo")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"preset": "grpo", "clip_high": 0.3, "kl_coef": 0.0},
            {"clip_high": 0.3, "kl_coef": 0.0, "aggregation": "sequence"},
        ),
        ({"preset": "reinforce", "importance_cap": 0}, {"importance_cap": None}),
        ({"preset": "rloo", "advantage_function": "mine.py:loss"}, {"advantage": "group_norm"}),
        ({"surrogate": "plain"}, {"dual_clip": None}),
        ({}, {"kl_placement": None, "preset": "dapo"}),
        ({"kl_coef": 0.1}, {"is_kl_in_loss": True, "kl_estimator": "k3"}),
        ({"kl_coef": 0.1, "kl_placement": ""}, {"is_kl_in_loss": True, "kl_estimator": "k3"}),
        ({"kl_coef": 0.1, "kl_placement": "reward"}, {"is_kl_in_loss": False, "kl_estimator": "k1"}),
        ({"kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "k2"}, {"kl_estimator": "k2"}),
        ({"kl_coef": 0.0, "kl_placement": "reward"}, {"needs_reference": False}),
        ({"preset": "reinforce_pp", "kl_coef": 0.0, "kl_placement": "reward"}, {"needs_reference": False}),
    ],
    ids=str,
)
def test_what_is_set_wins_over_the_preset_and_leads_to_the_rest(settings: dict[str, Any], expected: dict[str, Any]):
    config = a_config(loss=settings)
    assert {key: getattr(config.loss, key) for key in expected} == expected
    assert copy_of(config) == config


@pytest.mark.parametrize("key", ["function", "advantage_function"])
def test_code_of_the_user_s_own_is_recorded_and_imported_by_no_generator(key: str):
    for name in ("mine.py:loss", "my.package:loss"):
        config = a_config(loss={key: name})
        assert (config.recorded_code_names, config.code_names) == ((name,), ())


def test_everything_that_can_be_off_says_so_in_toml():
    config = a_config(loss=OFF_VALUES)
    assert all(getattr(config.loss, key) is None for key in OFF_VALUES)
    written = tomllib.loads(config_to_toml(config))["loss"]
    assert {key: written[key] for key in OFF_VALUES} == dict(OFF_VALUES)
    assert a_config(loss=written) == config


def test_what_has_to_be_scored_follows_from_the_settings():
    needs = {
        preset: (LossConfig(preset=preset).needs_reference, LossConfig(preset=preset).needs_proximal)  # pyright: ignore[reportArgumentType]
        for preset in PRESETS
    }
    assert {preset for preset, (reference, _) in needs.items() if reference} == {"grpo"}
    assert {preset for preset, (_, proximal) in needs.items() if proximal} == {"decoupled_ppo", "gspo", "icepop"}
    assert not LossConfig(preset="decoupled_ppo", anchor="interpolated").needs_proximal


def test_another_preset_over_a_config_that_a_run_wrote_keeps_only_what_differed_from_the_old_one(tmp_path: Path):
    (tmp_path / "config.toml").write_text(
        config_to_toml(a_config(loss={"preset": "grpo", "clip_high": 0.3, "entropy_coef": 0.1}))
    )
    found = load_config(tmp_path / "config.toml", ["loss.preset=gspo", "loss.kl_coef=0.5"]).loss
    assert found == LossConfig(preset="gspo", clip_high=0.3, entropy_coef=0.1, kl_coef=0.5)
    # A person's own section stands as it is written, also where it says what its preset says.
    (tmp_path / "own.toml").write_text("[run]\ndir='r'\n[model]\npath='m'\n[loss]\npreset='grpo'\nclip_high=0.2\n")
    assert load_config(tmp_path / "own.toml", ["loss.preset=dapo"]).loss == LossConfig(preset="dapo", clip_high=0.2)
