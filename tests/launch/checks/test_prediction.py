"""What ``doctor --on`` predicts for GPUs that are not here, by hand-worked numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import load_config, parse_config
from async_rl.config.parallel import Layout
from async_rl.errors import ConfigError
from async_rl.launch.checks.doctor import run_checks
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.learner_memory import with_changes
from async_rl.launch.checks.prediction import UNCONFIRMED, Tokens, engine_of, learner_parts, tokens_of
from async_rl.learner.cards import Card, Machines
from async_rl.learner.memory_plan import ModelShape
from benchmarks.memory_table import MODELS, decoder

RECIPES = Path(__file__).resolve().parents[3] / "configs" / "not_run_yet"
LAB: dict[str, Any] = {
    "sampling": {"group_size": 16, "max_prompt_tokens": 1024, "max_new_tokens": 16384},
    "learner": {"groups_per_step": 64, "max_tokens": 32768, "nproc": 4},
    "generator": {"count": 4, "batch_size": 256, "memory_fraction": 0.9},
}
"""Qwen2.5 7B with answers of up to 16k, as a lab writes it."""


def config_of(root: Path, model: str, **model_keys: Any) -> Config:
    (root / "config.json").write_text(json.dumps(MODELS[model]))
    return parse_config({"run": {"dir": "run"}, "model": {"path": str(root)} | model_keys, **LAB}, "the test")


def predicted(config: Config, machines: str, mean_tokens: float | None = None) -> dict[str, Finding]:
    there = Machines.parse("--on", machines)
    found = run_checks(config, insecure=False, deadline_s=60, machines=there, mean_tokens=mean_tokens)
    return {finding.check: finding for finding in found}


def test_machines_are_cards_nodes_and_memory_and_others_are_refused_with_the_known_cards():
    two = Machines.parse("--on", "2x8xh100-pcie,1500GB")
    assert (two.total_gpus, two.host_bytes, two.card.peak) == (16, 1500e9, 756e12)
    assert Machines.parse("--on", "8xH100").host_bytes == 1600e9
    for text in ("8xK80", "H100", "0xH100", "8xH100,1500"):
        with pytest.raises(ConfigError, match=r"--on: expected GPUs such as 8xH100, .* H100-PCIe, .*; name one"):
            Machines.parse("--on", text)


def test_parts_of_a_step_and_the_cache_of_a_generator_by_hand():
    shape = ModelShape.of(decoder(1000, 2000, 10, 10, 5, 10_000, tied=True))
    # 2 x 1000 x 1500 + 2000 of attention and 6e6 of the MLP in ten layers, and a table of 1e7.
    assert shape.num_parameters == 10 * (3_002_000 + 6_000_000) + 10_000_000 == 100_020_000
    card, tokens = Card((), 1e15, 20e9, 1e12), Tokens(rows=1e6, sampled=0.8e6, attended=1000, mean=800)
    machines = Machines("two", card, 1, 2, 1e12)
    config = parse_config({"run": {"dir": "run"}, "learner": {"nproc": 2}, "model": {"path": "m"}}, "the test")
    parts = learner_parts(shape, config, Layout(shards=2), machines, tokens)
    assert parts["products"] == pytest.approx((1e6 * 6 * 90_020_000 + 0.8e6 * 6 * 1e7) / 627e12 / 2)
    # Flash attention: 4 operations forward at 350 T and 10 backward at 280 T, for pairs, layers and widths of queries.
    assert parts["attention"] == pytest.approx(0.8e9 * 10 * 1000 * (4 / 350e12 + 10 / 280e12) / 2)
    judged = learner_parts(shape, with_changes(config, {"loss.kl_coef": 0.1}), Layout(shards=2), machines, tokens)
    assert judged["reference"] == pytest.approx(
        parts["products"] / 3 + 0.8e9 * 10 * 1000 * 4 / 350e12 / 2 + parts["other kernels"] / 3
    )
    assert judged["products"] == parts["products"]
    assert parts["optimizer"] == pytest.approx(40 * 100_020_000 / 806e9 / 2)
    assert parts["pause for a version"] == pytest.approx(200_040_000 * (1 / 200e9 + 1 / 40e9))
    # 0.8 of 20 GB without 4 GB and two versions, for 2 x 2 bytes x 10 layers x 500 numbers a token.
    room = (12e9 - 2 * 200_040_000) / 20_000
    engine = engine_of(shape, config, card, tokens)
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    assert (engine.held, engine.at_once) == (int(room / longest), 64)
    assert engine.tokens_per_s == pytest.approx(64 / ((200_040_000 + 64 * 20_000 * 1000) / 746e9 + 2.5e-3))


def test_answers_have_the_stated_mean_or_40_percent_of_their_limit_and_attend_to_less_the_closer_they_are_to_it():
    config = parse_config({"run": {"dir": "run"}, "model": {"path": "m"}, **LAB}, "the test")
    # 64 groups of 16 after prompts of 512. An answer of the limit attends to half of itself on average.
    assert tokens_of(config) == pytest.approx((64 * 512 + 1024 * 6553.6, 1024 * 6553.6, 512 + 6553.6 * 0.8, 6553.6))
    assert tokens_of(config, 16384) == (64 * 512 + 1024 * 16384, 1024 * 16384, 512 + 8192, 16384)
    with pytest.raises(
        ConfigError, match=r"--mean-tokens: expected at most sampling\.max_new_tokens, 16384, got 16385"
    ):
        predicted(config, "8xH100", 16385)


def test_a_lab_learns_whether_its_config_fits_a_better_split_and_the_least_that_would(tmp_path: Path):
    full = config_of(tmp_path, "Qwen2.5 7B", gradient_checkpointing="full")
    rows = predicted(full, "8xH100")
    assert {row.check for row in rows.values() if row.state != "OK"} == {"not checked"}, rows
    assert {"run.dir", "data", "own reward", "parity"} <= set(re.split(r", | for ", rows["not checked"].found))
    assert "model" not in rows["not checked"].found.split(", ")
    assert UNCONFIRMED in rows["prediction"].found
    assert "answers of 6554 tokens on average (40% of sampling.max_new_tokens; --mean-t" in rows["prediction"].found
    assert "for 1,024,000 sampled tokens" in predicted(full, "8xH100", 1000)["step"].found
    assert "holds 42 sequences of 17408 tokens" in rows["cache"].found
    assert "for 6,710,886 sampled tokens: learner" in rows["step"].found  # 64 x 16 answers of 0.4 x 16,384
    assert rows["checkpoint"].found.startswith("85.1 GiB")  # 12 bytes for each of 7.61e9 parameters
    assert not {"run.dir", "queue.address", "two ranks", "data"} & rows.keys()
    plain = predicted(config_of(tmp_path, "Qwen2.5 7B"), "8xH100")
    assert (plain["device memory"].state, plain["split"].state) == ("FAIL", "WARN")
    fix = "learner.nproc=3 --set generator.count=5 --set model.gradient_checkpointing=attention"
    assert plain["split"].fix.partition(" --set ")[2] == fix  # tensor_parallel_size stays
    large = predicted(config_of(tmp_path, "Qwen2.5 32B"), "8xH100")
    assert (large["cache"].state, large["split"].state, "step" in large) == ("FAIL", "FAIL", False)
    assert large["split"].fix == "set lora.rank = 32, or take 16 of these GPUs"
    (tmp_path / "config.json").unlink()
    assert {check: row.state for check, row in predicted(full, "8xH100").items()} == {
        "model": "FAIL", "not checked": "skip"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "machines", "model"),
    [("one_gpu", "1xH100", "1.5B"), ("one_node_8gpu", "8xH100", "3B"), ("two_nodes_16gpu", "2x8xH100", "7B")],
)
def test_a_recipe_fits_and_says_the_predicted_time(tmp_path: Path, recipe: str, machines: str, model: str):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[f"Qwen2.5 {model}"]))
    path = RECIPES / f"{recipe}.toml"
    rows = predicted(load_config(path, [f"model.path={tmp_path}"]), machines)
    assert {row.state for row in rows.values()} == {"OK", "skip"}, rows
    said = re.search(r"a step takes (.*)\.\n", path.read_text())
    assert said is not None
    assert rows["step"].found.startswith(said[1])
