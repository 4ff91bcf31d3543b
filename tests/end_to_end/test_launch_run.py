"""``async-rl launch`` as a user runs it: to the end, killed, resumed, and with the documented GPU recipes in small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli import main as cli
from tests.end_to_end.harness import ROOT, check_ledger, metrics, processes_of, roles, steps, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task

RECIPES_DIR = ROOT / "configs/not_run_yet"
RECIPES = ("gsm8k_qwen2.5_0.5b", "one_node_8gpu")
NUM_STEPS = 40
"""So many that a run is in the middle when its first checkpoint is seen, on a busy machine too."""
MORE_RECIPES = ("math_qwen2.5_7b", "countdown_qwen2.5_3b")


@pytest.mark.slow
def test_nothing_is_left_when_launch_is_killed_and_the_same_command_goes_on(tmp_path: Path):
    config = write_config(
        tmp_path / "config.toml",
        tiny_config(tmp_path, write_tiny_task(tmp_path), learner={"steps": NUM_STEPS}, generator={"count": 2}),
    )
    run_dir = tmp_path / "run"
    marker = f"ASYNC_RL_TEST={tmp_path}"
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(config), env={"ASYNC_RL_TEST": str(tmp_path)}, is_program=True)
        wait_until("a checkpoint", (run_dir / "checkpoints" / "latest").exists, deadline_s=150)
        assert len(processes_of(marker)) >= 5  # launch, queue, learner, two generators
        launch.kill(signal.SIGKILL)
        launch.wait()
        wait_until("an empty process list", lambda: not processes_of(marker), deadline_s=30)
        again = start("again", "launch", str(config))
        again.succeed()
        assert again.log.count(f"step {NUM_STEPS}/{NUM_STEPS} |") == 1
    assert f"step {NUM_STEPS}/{NUM_STEPS} |" not in (run_dir / "logs" / "learner-0.log").read_text(), (
        "launch shows the steps"
    )
    assert steps(run_dir) == list(range(1, NUM_STEPS + 1))
    check_ledger(run_dir)


def shrunken(recipe: str, directory: Path, task: dict[str, str]) -> dict[str, Any]:
    """The recipe with a tiny model and batch, two steps, no devices and at most two ranks and generators."""
    raw = tomllib.loads((RECIPES_DIR / f"{recipe}.toml").read_text())
    tiny = tiny_config(directory, task, learner={"steps": 2}, eval={"every": 0})
    nproc, count = raw["learner"].get("nproc", 1), raw["generator"].get("count", 1)
    for section, keys in tiny.items():
        raw[section] = {**raw.get(section, {}), **keys}
    for section in ("learner", "generator"):
        del raw[section]["devices"]
    raw["learner"]["nproc"], raw["generator"]["count"] = min(nproc, 2), min(count, 2)
    return raw


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(list(arguments))
    output = capsys.readouterr()
    assert not leaving.value.code, output.err
    return output.out


@pytest.mark.parametrize("recipe", [*RECIPES, *MORE_RECIPES])
def test_a_gpu_recipe_passes_config_and_dry_run(
    tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = RECIPES_DIR / f"{recipe}.toml"
    raw = tomllib.loads(path.read_text())
    where = ["--set", f"run.dir={tmp_path / 'run'}"]
    resolved = tomllib.loads(printed(capsys, "config", str(path), *where))
    assert resolved["learner"]["groups_per_step"] == raw["learner"]["groups_per_step"]
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(path), "--dry-run", *where])
    assert leaving.value.code in (0, 2)  # 2 on a machine without the model or the devices
    lines = capsys.readouterr().out.splitlines()
    generators = [line for line in lines if " generator --connect" in line]
    assert len(generators) == raw["generator"]["count"]
    for device, line in zip(raw["generator"]["devices"], generators, strict=True):
        assert f"CUDA_VISIBLE_DEVICES={device} " in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [RECIPES[-1], *(pytest.param(name, marks=pytest.mark.long) for name in (*RECIPES[:-1], "math_qwen2.5_7b"))],
)
def test_a_shrunken_gpu_recipe_trains_two_steps_on_the_cpu(tmp_path: Path, recipe: str):
    task = write_tiny_task(tmp_path)
    config = write_config(tmp_path / "config.toml", shrunken(recipe, tmp_path, task))
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
    assert steps(tmp_path / "run") == [1, 2]
    assert [row["step"] for row in metrics(tmp_path / "run") if "version" not in row] == [0, 2]


@pytest.mark.slow
def test_real_gsm8k_rows_go_through_every_stage(tmp_path: Path):
    """Committed GSM8K rows: chat template, sampling, grading, training, evaluation, export. Sources beside the data."""
    write_gsm8k_model(tmp_path / "model")
    data = ROOT / "tests" / "data"
    task = {
        "model": str(tmp_path / "model"),
        "train": str(data / "gsm8k_train_64.jsonl"),
        "held_out": str(data / "gsm8k_test_32.jsonl"),
    }
    raw = tiny_config(
        tmp_path,
        task,
        learner={"steps": 2, "max_tokens": 4096},
        sampling={"max_prompt_tokens": 1024, "max_new_tokens": 16},
        eval={"every": 0, "max_rows": 4, "num_samples": 2, "temperature": 1.0},
    )
    config = write_config(tmp_path / "config.toml", raw)
    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(config))
        launch.succeed()
        assert "held_out" in launch.log
    run_dir = tmp_path / "run"
    assert steps(run_dir) == [1, 2]
    assert (run_dir / "eval" / "held_out-step-000002.jsonl").exists()
    assert (run_dir / "export" / "model.safetensors").exists()
    assert (run_dir / "curve.png").exists()
    assert check_ledger(run_dir)["groups"]["trained"] == 8
    with roles(tmp_path / "logs") as start:
        checkpoint = str(run_dir / "checkpoints" / "step-000002")
        start("eval", "eval", checkpoint, "--out", str(tmp_path / "offline")).succeed()
        compare = start("compare", "eval", "--compare", str(run_dir), str(tmp_path / "offline"))
        compare.succeed()
    # The checkpoint is asked as the run asked it: the same rows, prompts, random numbers, and so the same answers.
    during, offline = run_dir / "eval" / "held_out-step-000002.jsonl", tmp_path / "offline" / "held_out.jsonl"
    assert [line["response"] for line in read_lines(offline)] == [line["response"] for line in read_lines(during)]
    title, headings, *lines = compare.log.splitlines()
    assert title == "held_out: 4 rows, 2 answers a row"
    assert headings.split()[:3] == ["of", "step", "accuracy"]
    assert [line.split()[:2] for line in lines] == [[str(run_dir), "0"], [str(run_dir), "2"], [checkpoint, "-"]]
    assert lines[2].split()[2:] == lines[1].split()[2:-1]  # all figures but the versions


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_gsm8k_model(directory: Path) -> None:
    """A tiny random Qwen2 with a byte-level tokenizer, which can say anything that GSM8K says."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<|end|>", "<|user|>", "<|assistant|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=(
            "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=vocabulary["<|end|>"], pad_token_id=vocabulary["<|end|>"],
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)
    fast.save_pretrained(directory)


@pytest.mark.slow
def test_a_lone_learner_of_a_checkout_starts_its_queue_from_any_directory(tmp_path: Path):
    config = write_config(tmp_path / "config.toml", tiny_config(tmp_path, write_tiny_task(tmp_path)))
    record = tmp_path / "run" / "queue.json"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with (tmp_path / "log").open("wb") as log:
        learner = subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), "learner", str(config)],
            cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until("the queue server", lambda: record.exists() or learner.poll() is not None)
        assert learner.poll() is None, (tmp_path / "log").read_text()
    finally:
        os.killpg(learner.pid, signal.SIGKILL)
        learner.wait(10)
        if record.exists():
            os.kill(json.loads(record.read_text())["pid"], signal.SIGTERM)
