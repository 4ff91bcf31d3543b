"""``async-rl init --from-verl``: every setting of a script is in exactly one list, and the config means the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config.contradictions import value_of
from async_rl.config.loading import default_config, load_config, parse_config
from async_rl.config.other_trainers import TABLE
from async_rl.extensions.quickstart.from_verl import LISTS, port, read_settings, write_port

VERL = [row for row in TABLE["settings"] if row["trainer"] == "verl"]
SAMPLES = {"run.name": "a", "critic.path": "m", "data.train": "a", "data.eval": "a", "reward.type": "a.py"}
"""Key -> a value of it in verl, where 2 is none."""
SCRIPT = r"""
# data.seed=3
batch=$((64 * (1 + 3)))
mini=${MINI:-"$((batch / 4))"}
[ -n "$BIG" ] && gpus=8 || gpus=2
ACTOR=( actor_rollout_ref.actor.ppo_mini_batch_size=${mini}  # prompts
    ++actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.kl_loss_coef=0.01 )
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.lam=0.95 "${ACTOR[@]}" no.such_key=$(date) \
    "data.train_files=['$HOME/a.parquet', '/b.parquet']" data.train_batch_size=$batch trainer.n_gpus_per_node=$gpus \
    custom_reward_function.path='score.py' custom_reward_function.name=judge \
    actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.rollout.n=8 actor_rollout_ref.model.path=m
"""


def test_a_script_is_ported_with_its_variables_and_verls_defaults(tmp_path: Path):
    script, out = tmp_path / "run.sh", tmp_path / "run.toml"
    script.write_text(SCRIPT)
    said, config = write_port(out, script), load_config(out)
    assert (config.learner.groups_per_step, config.learner.updates_per_batch) == (256, 4)
    assert (config.optimizer.warmup_steps, config.queue.max_staleness) == (40, 10)  # 10 batches of 4; 2 x 4 + 2
    assert (config.loss.kl_coef, config.loss.dual_clip, config.loss.clip_high) == (0.0, 3.0, 0.2)
    assert config.reward.type == "score.py:judge"
    assert not any("data_source" in line for line in said)
    assert config.data.train == {"a": f"{Path.home()}/a.parquet", "b": "/b.parquet"}
    lists = port(settings := read_settings(script), {})
    assert {name: len(found) for name, found in lists.items()} == dict(zip(LISTS, (2, 6, 3, 3), strict=True))
    listed = [line for found in lists.values() for line in found]
    assert {f"  {line}" for line in listed} <= set(said)
    assert sorted(line.partition("=")[0] for line in listed) == sorted(settings)
    assert "n_gpus_per_node=$gpus" in lists["means something else"][-1]  # its branches differ


def test_a_yaml_of_hydra_is_read_with_its_references_and_asks_for_the_reward(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("a: {b: 1e-6, _target_: x, c: '${a.b}', d: [1, 2]}\ndefaults: [x]\n")
    assert any("data_source" in line for line in write_port(tmp_path / "run.toml", tmp_path / "run.yaml"))
    assert read_settings(tmp_path / "run.yaml") == {"a.b": 1e-6, "a.c": 1e-6, "a.d": [1, 2]}


@pytest.mark.parametrize("row", VERL, ids=lambda row: row["name"])
def test_every_value_of_a_setting_is_in_one_list_and_makes_a_config(row: dict[str, Any]):
    name, to = row["name"].replace("*", "x"), row.get("to", ["model.path"])[0]
    ours = value_of(default_config(), to)
    sample = row.get("default", SAMPLES.get(to, 2 if ours is None else ours))
    needs, _, needed = row.get("needs", "x.x=1").replace("[1-9]*", "8").replace("*", "x").partition("=")
    base = {"actor_rollout_ref.rollout.n": 8, needs: yaml.safe_load(needed)}
    for value in [*map(yaml.safe_load, (*row.get("only", ()), *row.get("choices", ()))), sample]:
        raw: dict[str, Any] = {"run": {"dir": "r"}, "model": {"path": "m"}}
        lists = port({**base, name: value}, raw)
        assert sum(line.startswith(f"{name}=") for found in lists.values() for line in found) == 1
        parse_config(raw, f"{name}={value}")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["/d/a/train.parquet"], ["train"]),
        (["/d/a/train.parquet", "/d/b/train.parquet", "/d/b/test.parquet"], ["a_train", "b_train", "b_test"]),
        (["/d/x.json", "/d/x.parquet"], ["x_json", "x_parquet"]),
    ],
)
def test_files_of_one_name_are_told_apart_by_their_folders(files: list[str], names: list[str]):
    raw: dict[str, Any] = {}
    port({"data.train_files": files}, raw)
    assert raw["data"]["train"] == dict(zip(names, files, strict=True))
