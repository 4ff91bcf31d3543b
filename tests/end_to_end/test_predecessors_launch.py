"""Rows of docs/predecessors.md in whole runs: rows whose settings go together share one ``async-rl launch``.

What each row promises is looked for in the files of the run. Rows about the learner's steps alone are in
``tests/learner/test_predecessors_training.py``; ``tests/config/predecessors_runs.py`` names the test of each row.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from async_rl.config.loading import parse_config
from async_rl.extensions.offline.tasks import train
from tests.config.predecessors import FEATURES, alternatives
from tests.end_to_end.harness import ROOT, check_ledger, metrics, roles, wait_until, write_config
from tests.end_to_end.test_launch_run import read_lines, write_gsm8k_model
from tests.scorer.client.scripted import free_address

pytestmark = pytest.mark.long

ASKED = [("1+2:", "3"), ("2+2:", "4"), ("3+4:", "7"), ("5+3:", "8")]
"""Questions and answers."""
LONG = "1+" * 400 + "1:"
"""A question of 802 characters, each a token."""
FAKE = {"generator": {"backend": "fake"}, "experimental": {"fake": {"mean_tokens": 6.0, "vocab_size": 64}}}
"""Answers are right half of the time, in the form of the reward."""
TRANSFORMERS = {"generator": {"backend": "transformers"}}


def settings_of_rows(*features: str, choice: int = 0) -> dict[str, Any]:
    """The sections that the rows set. Of a row with alternatives, the one with number ``choice`` counts."""
    found: dict[str, str] = {}
    for feature in features:
        choices = list(alternatives(FEATURES[feature]))
        settings = choices[choice] if len(choices) > 1 else choices[0]
        assert {**settings, **found} == {**found, **settings}, f"{feature} contradicts {features}"
        found |= settings
    return tomllib.loads("\n".join(f"{key} = {value}" for key, value in found.items()))


def in_directory(root: Path, value: Any) -> Any:
    """``value`` with every name of a file in ``root`` made a path, as if the command ran there."""
    if isinstance(value, Mapping):
        # A type is a name in a table, even if a file is called so.
        return {key: one if key == "type" else in_directory(root, one) for key, one in value.items()}
    if isinstance(value, list):
        return [in_directory(root, one) for one in value]
    return str(root / value) if isinstance(value, str) and value and (root / value).exists() else value


def merged(*sections: Mapping[str, Any]) -> dict[str, Any]:
    """Each of ``sections`` over those before it, key by key."""
    result: dict[str, Any] = {}
    for one in sections:
        for name, value in one.items():
            old = result.get(name)
            both = isinstance(value, Mapping) and isinstance(old, Mapping)
            result[name] = merged(old, value) if both else value  # pyright: ignore[reportArgumentType]
    return result


def write_files(root: Path) -> None:
    """The files that rows name: a model of bytes, rows of sums, an evaluation set."""
    write_gsm8k_model(root / "model")
    rows = [{"messages": {"role": "user", "content": question}, "gt_answer": answer} for question, answer in ASKED]
    for name, lines in (("rows.jsonl", [*rows, {"prompt": LONG, "gt_answer": "401"}]), ("math500.jsonl", rows)):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in lines))


def config_of(root: Path, of_rows: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run of two steps with the rows' settings, whose model, rows and directory are in ``root``."""
    base = {
        "model": {"path": "model"},
        "data": {"train": "rows.jsonl", "on_long_prompt": "truncate"},
        "sampling": {"group_size": 4, "max_new_tokens": 12, "max_prompt_tokens": 512},
        "queue": {"lease_timeout_s": 60.0},
        "learner": {"steps": 2, "groups_per_step": 2, "max_tokens": 8192, "num_threads": 1},
        "optimizer": {"lr": 1e-3},
        "generator": {"batch_size": 16, "num_threads": 1},
    }
    found = in_directory(root, merged(base, of_rows, *changes))
    return {**found, "run": {"dir": str(root / "run")}}


def launch(root: Path, of_rows: Mapping[str, Any], *changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Launch such a run, and return the metrics of its steps."""
    config = config_of(root, of_rows, *changes)
    with roles(root / "logs") as start:
        start("launch", "launch", str(write_config(root / "config.toml", config))).succeed()
    check_ledger(root / "run")
    return list_of_steps(root / "run")


def list_of_steps(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(run_dir) if "version" in row]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def logged(root: Path) -> list[dict[str, Any]]:
    """The rollouts that the run logged."""
    return [line for path in sorted((root / "run" / "rollouts").glob("step-*.jsonl")) for line in read_lines(path)]


def test_colossal_s_math_run(tmp_path: Path):
    write_files(tmp_path)
    of_rows = settings_of_rows(
        "reward boxed", "soft overlong punishment", "cache_length", "filter_range", "dynamic_batching",
        "evaluation in training", "rollout log", "save", "system prompt", "max_prompt_tokens", "math / code JSONL",
        "shared buffer of groups", "entropy metric, weight decay, profiling",
    )  # fmt: skip
    of_rows["queue"]["journal_dir"] = str(tmp_path / "journal")
    rows = launch(tmp_path, of_rows, FAKE, {"learner": {"steps": 25}, "sampling": {"max_new_tokens": 516}})
    # Half of the answers are right and earn 10; all are 6 tokens, of which each costs 10 / 512.
    assert [row["reward/correct"] for row in rows] == pytest.approx([10 * row["accuracy/mean"] for row in rows])
    assert [row["reward/overlong"] for row in rows] == pytest.approx([-10 * (6 - 4) / 512] * 25)
    assert all(0 < row["accuracy/mean"] < 1 and row["entropy"] > 0 for row in rows)
    assert all("learner_sampled/groups" not in row for row in rows)  # the learner only trains
    assert check_ledger(tmp_path / "run")["groups"]["trained"] == 25 * 2
    evaluated = [row for row in metrics(tmp_path / "run") if "eval/math500/accuracy" in row]
    assert [(row["step"], row["eval/math500/samples"]) for row in evaluated] == [(0, 1), (20, 1), (25, 1)]
    assert [path.name for path in sorted((tmp_path / "run").glob("eval/*"))] == [
        f"math500-step-0000{step}.jsonl" for step in ("00", "20", "25")
    ]
    assert [path.name for path in sorted((tmp_path / "run").glob("rollouts/step-*.jsonl"))] == [
        f"step-0000{step}.jsonl" for step in ("01", "21", "25")
    ]
    assert names(tmp_path / "run" / "checkpoints") == ["latest", "step-000025"]
    assert names(tmp_path / "run" / "profile") == [f"step-00000{step}.json.gz" for step in (3, 4, 5)]
    assert (tmp_path / "journal" / "index.sqlite").is_file()
    rollouts = logged(tmp_path)
    assert all(rollout["messages"][0] == {"role": "system", "content": "Think first."} for rollout in rollouts)
    # The question of 802 tokens is cut to fit, and sampled, not dropped.
    assert any(rollout["messages"][1]["content"] == LONG for rollout in rollouts)


def test_the_exact_reward_with_xml_points_and_eight_answers_a_row(tmp_path: Path):
    write_files(tmp_path)
    of_rows = settings_of_rows(
        "multiple reward functions", "eval pass@1(mean n), BoN", "eval_only, rollout dump",
        "use_wandb off, timing metrics", "MATH-500, R1 prompt, xml reward",
    )  # fmt: skip
    rows = launch(tmp_path, of_rows, FAKE, {"data": {"eval": {"math500": "math500.jsonl"}}})
    for row in rows:
        # The form, which the fake always keeps, earns 0.3, and a right answer 1.
        assert row["reward/mean"] == pytest.approx(row["reward/correct"] + 0.3)
        assert row["time/step_s"] > 0
    evaluated = [row for row in metrics(tmp_path / "run") if "eval/math500/accuracy" in row]
    assert [row["step"] for row in evaluated] == [0, 2]
    for row in evaluated:
        assert (row["eval/math500/samples"], row["eval/math500/rows"]) == (8, 4)
        assert row["eval/math500/accuracy"] == row["eval/math500/pass_at_1"] < row["eval/math500/best_of_n"]
        assert row["eval/math500/length_mean"] == 6
    rollouts = logged(tmp_path)
    assert len(rollouts) == 2 * 2 * 4  # every step, all groups
    assert all("<answer>" in rollout["messages"][0]["content"] for rollout in rollouts), (
        "the system prompt of the reward"
    )
    assert not (tmp_path / "run" / "wandb").exists()


def tuned_on(root: Path, answers: Sequence[str]) -> str:
    """The model after some steps of sft in which it gave every one of ``answers`` to every question.

    Each answer up to its last space becomes one token, because so small a model can't spell.
    """
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    tokenizer.add_tokens([answer.rpartition(" so")[0] or answer for answer in answers])
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(root / "model")
    model.save_pretrained(root / "model")
    said = [
        {"prompt": [{"role": "user", "content": question}], "response": answer}
        for question, _ in ASKED
        for answer in answers
    ]
    (root / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    data, out = str(root / "said.jsonl"), str(root / "tuned")
    sft = {"data": data, "out": out, "steps": 80, "batch_size": 8, "lr": 5e-3, "schedule": "cosine"}
    train("sft", parse_config(merged(config_of(root, {}), {"sft": sft}), "the test's config"))
    return out


def test_answers_in_tags_end_at_the_stop_string_and_keep_it(tmp_path: Path):
    write_files(tmp_path)
    model = tuned_on(tmp_path, [f"<think>sum</think><answer>{digit}</answer> so" for digit in (3, 7)])
    of_rows = settings_of_rows(
        "reward think_answer_tags", "stop strings, no_stop_trim", "transformers rollout backend",
        "eval_only, rollout dump",
    )  # fmt: skip
    (tmp_path / "rows.jsonl").write_bytes((tmp_path / "math500.jsonl").read_bytes())
    changes = {"model": {"path": model}, "data": {"system_prompt": ""}, "sampling": {"max_new_tokens": 60}}
    rows = launch(tmp_path, of_rows, changes, {"queue": {"filter_range": []}, "optimizer": {"lr": 1e-6}})
    rollouts = logged(tmp_path)
    ended = [rollout for rollout in rollouts if "</answer>" in rollout["response"]]
    assert len(ended) > len(rollouts) / 2, "the model has not learned to answer"
    for rollout in ended:
        # The model would go on with " so".
        assert rollout["response"].endswith("</answer>")
        assert rollout["finish_reason"] == "stop"
        assert rollout["accuracy"] == float(rollout["extracted"] == rollout["expected"])
    assert 0 < rows[0]["accuracy/mean"] < 1


@pytest.mark.parametrize(("choice", "role"), [(0, "text"), (1, "user")], ids=["text", "chat"])
def test_prompts_are_text_or_messages(tmp_path: Path, choice: int, role: str):
    write_files(tmp_path)
    of_rows = settings_of_rows(
        "raw text + messages formats", "w/ and w/o vLLM option", "router, bucketed weight sync", "partial rollout",
        "weight sync schedule", "use_wandb off, timing metrics", "eval_only, rollout dump", choice=choice,
    )  # fmt: skip
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2:", "gt_answer": "3"}\n')
    changes = {"queue": {"filter_range": []}, "loss": {"mask_truncated": False}, "data": {"system_prompt": ""}}
    rows = launch(tmp_path, of_rows, changes)
    # What the engine sampled after this prompt is what the learner computes after it.
    assert [row["ratio/mean"] for row in rows] == pytest.approx([1.0, 1.0], abs=1e-4)
    for rollout in logged(tmp_path):
        assert rollout["messages"] == [{"role": role, "content": "1+2:"}]


def test_programs_are_judged_by_a_verifier_over_http(tmp_path: Path):
    write_files(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes((ROOT / "tests" / "data" / "mbpp_10.jsonl").read_bytes())
    of_rows = settings_of_rows("code verifier service", "reward code", "filter_range")
    address = free_address().removeprefix("tcp://")
    of_rows["reward"]["code"]["endpoint"] = f"http://{address}"
    config = config_of(tmp_path, of_rows, FAKE, {"reward": {"code": {"packages": []}}})
    with roles(tmp_path / "logs") as start:
        verifier = start("verifier", "verifier", "--bind", address, "--set", "reward.code.packages=[]")
        wait_until("the verifier", lambda: address in verifier.log)
        path = str(write_config(tmp_path / "config.toml", config))
        start("launch", "launch", path).succeed()
        verifier.kill()
        verifier.wait()
        alone = start("alone", "launch", path, "--fresh")
        assert alone.wait() == 2
        assert address in alone.log
    (rows,) = [
        list_of_steps(directory) for directory in tmp_path.glob("run*") if (directory / "metrics.jsonl").exists()
    ]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["accuracy/mean"] < 1 for row in rows)


ENVIRONMENT = '''
"""Counts the turns; every answer is right."""

async def reset(extra_info):
    return [{"role": "user", "content": f"row {extra_info['idx']}"}]

async def step(state, action, extra_info):
    next_state = [*state, {"role": "assistant", "content": action}, {"role": "user", "content": "go on"}]
    return {"next_state": next_state, "reward": 0.25, "score": 0.125}
'''
OWN_LOOP = '''
"""Two agents of one model in two turns."""

async def generate(rollout):
    plan = await rollout.sample([{"role": "user", "content": "plan"}], max_tokens=3)
    await rollout.sample([{"role": "user", "content": f"carry out {len(plan.text)}"}], max_tokens=4)
    rollout.reward(0.5)
'''


@pytest.mark.parametrize(
    ("source", "features", "turns", "reward"),
    [
        pytest.param(
            ENVIRONMENT, ("env reset / no dataset", "env_path", "multi-turn, max_turns"), 8, 8 * 0.25, id="step"
        ),
        pytest.param(OWN_LOOP, ("env reset / no dataset", "custom generate function"), 2, 0.5, id="generate"),
    ],
)
def test_environments_are_played(tmp_path: Path, source: str, features: tuple[str, ...], turns: int, reward: float):
    write_files(tmp_path)
    (tmp_path / "my_env.py").write_text(source)
    of_rows = settings_of_rows(*features, "eval_only, rollout dump", "transformers rollout backend")
    own = {
        "generator": {"allow_code": ["my_env.py"]},
        "environment": {"max_turn_tokens": 4},
        "sampling": {"max_new_tokens": 40, "max_prompt_tokens": 200},
        "queue": {"filter_range": []},
    }
    rows = launch(tmp_path, of_rows, own, {"data": {"on_long_prompt": "drop"}, "loss": {"mask_truncated": False}})
    assert [row["version"] for row in rows] == [1, 2]
    assert all((row["turns/mean"], row["reward/mean"]) == (turns, reward) for row in rows)
    for rollout in logged(tmp_path):
        assert 0 <= rollout["row"] < 1000
        assert [turn["reward"] for turn in rollout["turns"]] == ([0.25] * 8 if turns == 8 else [0.0, 0.5])
        # The row of the environment's number begins the one text of the first, and each state is one of the second.
        if turns == 8:
            (text,) = rollout["sequences"]
            assert text.startswith(f"row {rollout['row']}")
            assert rollout["score"] == 1.0
        else:
            assert [text[:4] for text in rollout["sequences"]] == ["plan", "carr"]


def test_a_tool_is_called_as_the_template_shows_it(tmp_path: Path):
    write_files(tmp_path)
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "calculator"}}]')
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + template.read_text())
    answers = ['<tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>', "\\boxed{3}"]
    model = tuned_on(tmp_path, answers)
    of_rows = settings_of_rows("agentic tools", "eval_only, rollout dump", "transformers rollout backend")
    (tmp_path / "rows.jsonl").write_bytes((tmp_path / "math500.jsonl").read_bytes())
    name = of_rows["environment"]["name"].partition(":")[0]
    own = {
        "model": {"path": model},
        "generator": {"allow_code": [name]},
        "sampling": {"stop": ["</tool_call>"], "max_new_tokens": 320},
        "queue": {"filter_range": []},
    }
    launch(tmp_path, of_rows, own, {"data": {"on_long_prompt": "drop"}, "optimizer": {"lr": 1e-6}})
    rollouts = logged(tmp_path)
    called = [rollout for rollout in rollouts if len(rollout["turns"]) > 1]
    assert called
    for rollout in called:
        (text,) = rollout["sequences"]
        assert text.startswith('[{"type": "function", "function": {"name": "calculator"}}]')
        assert "</tool_call><|tool|>408" in text  # 12 * 34
        assert len(rollout["turns"]) <= 4
    right = [rollout for rollout in rollouts if rollout["expected"] == "3" and rollout["response"].endswith("{3}")]
    assert all(rollout["reward"] == 1 for rollout in right)


def test_ppo_with_a_critic(tmp_path: Path):
    write_files(tmp_path)
    of_rows = settings_of_rows("GAE", "freeze_steps", "value clipping", "test during PPO")
    of_rows["critic"]["path"] = "model"
    own = {"learner": {"steps": 12, "updates_per_batch": 2}, "critic": {"lr": 0.1}, "checkpoint": {"every": 6}}
    rows = launch(tmp_path, of_rows, FAKE, own, {"data": {"eval": {"math500": "math500.jsonl"}}})
    evaluated = [row["step"] for row in metrics(tmp_path / "run") if "eval/math500/accuracy" in row]
    assert evaluated == [0, 10, 12]
    # Ten steps train only the critic; then each batch makes two versions.
    assert [row["version"] for row in rows] == [0] * 10 + [2, 4]
    assert all(row["critic/loss"] > 0 and 0 <= row["critic/clip_fraction"] <= 1 for row in rows)
    assert any(row["critic/clip_fraction"] > 0 for row in rows)
    assert rows[-1]["grad_norm"] > 0
    assert "critic" in names(tmp_path / "run" / "checkpoints" / "step-000012")


def test_adapters_over_a_base_of_4_bits_with_an_8_bit_optimizer(tmp_path: Path):
    write_files(tmp_path)
    of_rows = settings_of_rows("4-bit + LoRA + 8-bit Adam", "filter_range")
    rows = launch(tmp_path, of_rows, FAKE, {"lora": {"rank": 4}})
    assert [row["version"] for row in rows] == [1, 2]
    before, after = (load_file(tmp_path / of / "model.safetensors") for of in ("model", "run/export"))
    moved = {name.split(".")[-2] for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_the_guessing_game_is_played(tmp_path: Path):
    write_files(tmp_path)
    games = [{"prompt": "1-9:", "extra_info": {"number": number}} for number in range(1, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))
    of_rows = settings_of_rows("env step", "eval_only, rollout dump", "transformers rollout backend")
    own = {
        "generator": {"allow_code": [of_rows["environment"]["name"]]},
        "environment": {"max_turns": 3, "max_turn_tokens": 2},
        "sampling": {"max_new_tokens": 8},
        "queue": {"filter_range": []},
        "data": {"on_long_prompt": "drop"},
        "loss": {"mask_truncated": False},
    }
    rows = launch(tmp_path, of_rows, own)
    assert [row["version"] for row in rows] == [1, 2]
    for rollout in logged(tmp_path):
        # Text that is no number costs half a point, and is answered with a question mark in the same text.
        for turn in rollout["turns"]:
            assert turn["reward"] in (-0.5, 0.0, 1.0)
            assert turn["score"] == float(turn["reward"] == 1.0)
        assert rollout["sequences"][0].startswith("1-9:")
    assert min(row["reward/mean"] for row in rows) < 0 <= min(row["score/mean"] for row in rows)


def test_a_game_of_gem_is_played(tmp_path: Path):
    pytest.importorskip("gem", reason="the extra [gem] is not installed")
    write_files(tmp_path)
    of_rows = settings_of_rows("GEM", "eval_only, rollout dump", "transformers rollout backend")
    own = {
        "generator": {"allow_code": ["async_rl.environments.gem"]},
        "environment": {"rows": 50, "max_turns": 4, "max_turn_tokens": 6},
        "sampling": {"max_new_tokens": 24, "max_prompt_tokens": 1800},
        "queue": {"filter_range": []},
        "data": {"train": "", "on_long_prompt": "drop"},
        "loss": {"mask_truncated": False},
    }
    rows = launch(tmp_path, of_rows, own)
    assert [row["version"] for row in rows] == [1, 2]
    for rollout in logged(tmp_path):
        assert "You are playing language games" in rollout["sequences"][0]  # the prompt "game"
        assert rollout["reward"] == sum(turn["reward"] for turn in rollout["turns"]) < 0  # no guess in a box


def test_a_reward_model_is_trained_evaluated_and_served(tmp_path: Path):
    write_files(tmp_path)
    pairs = [{"prompt": question, "chosen": answer, "rejected": "no"} for question, answer in ASKED]
    for name in ("pairs.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    of_rows = settings_of_rows("RM trainer")
    address, model = free_address(), str(tmp_path / "rm")
    own = {"rm": {"out": model, "steps": 2}, "scorer": {"judge": {"model": model, "address": address}}}
    config = config_of(tmp_path, of_rows, own, {"reward": {"soft_overlong": False}}, FAKE)
    path = str(write_config(tmp_path / "config.toml", config))
    with roles(tmp_path / "logs") as start:
        start("rm", "rm", path).succeed()
        start("launch", "launch", path).succeed()
    trained = read_lines(tmp_path / "run" / "rm" / "metrics.jsonl")
    assert "eval/held_out/loss" in trained[-1]
    assert AutoModelForSequenceClassification.from_pretrained(model).config.num_labels == 1
    assert all(row["reward/mean"] == row["reward/model"] != 0 for row in list_of_steps(tmp_path / "run"))


def test_eight_ranks_in_three_dimensions_train_as_one(tmp_path: Path):
    write_files(tmp_path)
    of_rows = settings_of_rows("Megatron 5D")
    del of_rows["parallel"]["pipeline"], of_rows["parallel"]["experts"]  # "also"
    own = {"queue": {"filter_range": [], "max_staleness": 0}, "loss": {"mask_truncated": False, "entropy_coef": 0.1}}
    rows = launch(tmp_path, of_rows, TRANSFORMERS, own)
    assert [row["version"] for row in rows] == [1, 2]
    # What one process sampled is what eight compute, before and after a step.
    assert [row["ratio/max"] for row in rows] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert len(list((tmp_path / "run" / "logs").glob("learner-*.log"))) == 8
