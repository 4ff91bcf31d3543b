"""``async-rl launch`` as a user runs it: to the end, killed, resumed, and with the documented GPU recipes in small."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from async_rl.data.chat import load_tokenizer
from tests.end_to_end.harness import ROOT, check_ledger, processes_of, roles, steps, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.extensions.agents.byte_model import byte_model, byte_tokenizer
from tests.run.test_prometheus import free_port, scraped

NUM_STEPS = 40
"""So many that a run is in the middle when its first checkpoint is seen, on a busy machine too."""


@pytest.mark.slow
def test_nothing_is_left_when_launch_is_killed_and_the_same_command_goes_on(tmp_path: Path):
    port = free_port()  # of the queue server; those of the learner and of the first generator are the next two
    raw = tiny_config(
        tmp_path, write_tiny_task(tmp_path), learner={"steps": NUM_STEPS}, generator={"count": 2},
        log={"prometheus_port": port},
    )  # fmt: skip
    config, run_dir, marker = write_config(tmp_path / "config.toml", raw), tmp_path / "run", f"ASYNC_RL_TEST={tmp_path}"

    def figures() -> dict[str, float] | None:
        try:
            found = {key: value for one in range(3) for key, value in scraped(port + one).items()}
        except OSError:  # not yet
            return None
        wanted = {"learner_step": 3, "queue_groups_total{trained}": 8, "queue_generators": 2}
        wanted["generator_tokens_total"] = 1
        return found if all(found.get(f"async_rl_{key}", 0) >= least for key, least in wanted.items()) else None

    with roles(tmp_path / "logs") as start:
        launch = start("launch", "launch", str(config), env={"ASYNC_RL_TEST": str(tmp_path)}, is_program=True)
        wait_until("figures of all processes after a checkpoint", figures, deadline_s=150)
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
        start("export", "export", str(run_dir), str(tmp_path / "exported")).succeed()
        checkpoint = str(run_dir / "checkpoints" / "step-000002")
        start("eval", "eval", checkpoint, "--out", str(tmp_path / "offline")).succeed()
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.model_type == "qwen3"
    assert load_tokenizer(tmp_path / "exported").chat_template
    # The checkpoint is asked as the run asked it: the same rows, prompts, random numbers, and so the same answers.
    during, offline = run_dir / "eval" / "held_out-step-000002.jsonl", tmp_path / "offline" / "held_out.jsonl"
    assert [line["response"] for line in read_lines(offline)] == [line["response"] for line in read_lines(during)]
    (written,) = json.loads((tmp_path / "offline" / "figures.json").read_text())
    of_run = next(
        row for row in read_lines(run_dir / "metrics.jsonl")[::-1] if row.get("eval/held_out/accuracy") is not None
    )
    assert {key: of_run[f"eval/held_out/{key}"] for key in written["figures"]} == written["figures"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_gsm8k_model(directory: Path) -> None:
    """A tiny random model with a tokenizer of bytes, which can say anything that GSM8K says."""
    byte_model().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
