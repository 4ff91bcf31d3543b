"""The [loss] section: presets fill what is not set, contradictions are refused with their reason, TOML round trips."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml, load_config, parse_config
from async_rl.config.loss import LOSS_KEYS, LossConfig
from async_rl.config.loss_names import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    OFF_VALUES,
    PRESETS,
    SKIP_STATISTICS,
    SURROGATES,
)
from async_rl.errors import ConfigError


def a_config(**loss: Any) -> Config:
    return parse_config({"run": {"dir": "r"}, "model": {"path": "m"}, "loss": loss}, "test")


@pytest.mark.parametrize(
    ("key", "table"),
    [("preset", PRESETS), ("advantage", ADVANTAGES), ("surrogate", SURROGATES), ("aggregation", AGGREGATIONS),
     ("skip_statistic", SKIP_STATISTICS), ("kl_estimator", KL_ESTIMATORS)],
)  # fmt: skip
def test_a_name_that_is_in_no_table_is_refused_with_those_that_are(key: str, table: Mapping[str, Any]):
    with pytest.raises(ConfigError, match=rf"loss\.{key}") as refused:
        a_config(**{key: "unheard_of"})
    assert all(f"'{name}'" in str(refused.value) for name in table)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_preset_sets_its_keys_and_only_those(preset: Any):
    loss = LossConfig(preset=preset)
    fields = LossConfig.model_fields
    for key in set(fields) - {"preset", *PRESETS[preset]} - {"kl_estimator"}:
        assert getattr(loss, key) == fields[key].default, key
    for key, value in PRESETS[preset].items():
        found = getattr(loss, key)
        assert ([rule.model_dump(exclude_defaults=True) for rule in found] if key == "rules" else found) == value


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_negative_advantages_are_bounded_in_every_preset(preset: Any):
    # PPO's minimum alone has no bound there: the policy may move away from a token without limit.
    loss = LossConfig(preset=preset)
    if SURROGATES[loss.surrogate].has_dual_clip:
        assert loss.dual_clip == (3.0 if preset == "ppo_clip" else 10.0)
    else:
        assert loss.dual_clip is None
        assert loss.importance_cap is not None or loss.surrogate in ("cispo", "sapo")


def test_the_default_bound_gives_way_to_a_surrogate_that_has_none():
    assert LossConfig(surrogate="plain").dual_clip is None
    assert LossConfig(dual_clip=0).dual_clip is None  # pyright: ignore[reportArgumentType]


def test_the_default_is_dapo():
    loss = LossConfig()
    assert (loss.preset, loss.clip_low, loss.clip_high, loss.aggregation) == ("dapo", 0.2, 0.28, "token")
    assert (loss.advantage, loss.surrogate, loss.skip_threshold, loss.mask_truncated) == (
        "group_norm",
        "clip",
        20,
        True,
    )


def test_keys_that_are_set_win_over_the_preset():
    loss = LossConfig(preset="grpo", clip_high=0.28, kl_coef=0.0)
    assert (loss.clip_high, loss.kl_coef, loss.aggregation) == (0.28, 0.0, "sequence")


def test_off_values_win_over_the_preset_too():
    assert LossConfig(preset="reinforce", importance_cap=0).importance_cap is None  # pyright: ignore[reportArgumentType]


def test_kl_estimator_follows_its_placement_unless_it_is_set():
    assert LossConfig(kl_coef=0.1, kl_placement="loss").kl_estimator == "k3"
    assert LossConfig(kl_coef=0.1, kl_placement="reward").kl_estimator == "k1"
    assert LossConfig(kl_coef=0.1, kl_placement="loss", kl_estimator="k2").kl_estimator == "k2"


def test_a_kl_coefficient_alone_is_a_k3_in_the_loss():
    for unset in ({}, {"kl_placement": ""}):
        loss = LossConfig.model_validate({"kl_coef": 0.1, **unset})
        assert (loss.is_kl_in_loss, loss.kl_estimator) == (True, "k3")
    assert LossConfig().kl_placement is None


def test_a_kl_coefficient_of_0_may_be_written_beside_its_placement():
    for preset in ("dapo", "reinforce_pp"):
        off = a_config(preset=preset, kl_coef=0.0, kl_placement="reward")
        assert not off.loss.needs_reference
        assert Config.model_validate(tomllib.loads(config_to_toml(off))) == off


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_resolved_config_reads_back_as_it_was(preset: str):
    config = a_config(preset=preset)
    assert Config.model_validate(tomllib.loads(config_to_toml(config))) == config


def test_everything_that_can_be_off_says_so_in_toml():
    config = a_config(**OFF_VALUES)
    assert all(getattr(config.loss, key) is None for key in OFF_VALUES)
    written = tomllib.loads(config_to_toml(config))["loss"]
    assert {key: written[key] for key in OFF_VALUES} == dict(OFF_VALUES)
    assert a_config(**written) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip_low", 1.5), ("dual_clip", 1.0), ("importance_cap", 0.5), ("min_ess", 1.0), ("preset", "trpo"),
     ("skip_threshold", True), ("best_k", -1), ("kl_coef", -0.1), ("token_range", [0.5])],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_key(key: str, value: Any):
    with pytest.raises(ConfigError, match=rf"loss\.{key}"):
        a_config(**{key: value})


def test_what_has_to_be_scored_follows_from_the_settings():
    needs = {
        preset: (LossConfig(preset=preset).needs_reference, LossConfig(preset=preset).needs_proximal)  # pyright: ignore[reportArgumentType]
        for preset in PRESETS
    }
    assert {preset for preset, (reference, _) in needs.items() if reference} == {"grpo"}
    assert {preset for preset, (_, proximal) in needs.items() if proximal} == {"decoupled_ppo", "gspo", "icepop"}
    assert not LossConfig(preset="decoupled_ppo", anchor="interpolated").needs_proximal


@pytest.mark.parametrize("key", ["function", "advantage_function"])
def test_code_of_the_user_s_own_is_named_as_file_or_module_and_function(key: str):
    for name in ("mine.py:loss", "my.package:loss"):
        assert a_config(**{key: name}).recorded_code_names == (name,)
        assert a_config(**{key: name}).code_names == ()  # no generator imports it
    with pytest.raises(ConfigError, match=rf"loss\.{key}: expected module:function or file\.py:function, got 'x\.py'"):
        a_config(**{key: "x.py"})


def test_own_advantages_replace_those_of_the_preset():
    assert LossConfig(preset="rloo", advantage_function="mine.py:loss").advantage == "group_norm"


def test_every_key_of_the_loss_is_one():
    assert set(LOSS_KEYS) <= LossConfig.model_fields.keys()


def test_an_unhashable_preset_is_refused_by_its_field():
    with pytest.raises(ValidationError, match="preset"):
        LossConfig(preset=["dapo"])  # pyright: ignore[reportArgumentType]


def test_another_preset_over_a_config_that_a_run_wrote_keeps_only_what_differed_from_the_old_one(tmp_path: Path):
    (tmp_path / "config.toml").write_text(config_to_toml(a_config(preset="grpo", clip_high=0.3, entropy_coef=0.1)))
    found = load_config(tmp_path / "config.toml", ["loss.preset=gspo", "loss.kl_coef=0.5"]).loss
    assert found == a_config(preset="gspo", clip_high=0.3, entropy_coef=0.1, kl_coef=0.5).loss
    # A person's own section stands as it is written, also where it says what its preset says.
    (tmp_path / "own.toml").write_text("[run]\ndir='r'\n[model]\npath='m'\n[loss]\npreset='grpo'\nclip_high=0.2\n")
    assert load_config(tmp_path / "own.toml", ["loss.preset=dapo"]).loss == a_config(preset="dapo", clip_high=0.2).loss
