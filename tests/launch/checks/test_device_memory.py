"""What shares a device is counted together, by hand-worked numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.parallel import Layout
from async_rl.launch.checks import device_memory
from async_rl.launch.checks.device_memory import ASLEEP_BYTES, check_device_memory
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.learner_memory import needed_bytes, shape_of
from async_rl.learner.memory_plan import ModelShape, plan_memory
from async_rl.output import size_text
from tests.launch.checks.made import made
from tests.learner.tiny import tiny_config, tiny_model

GIB = 1 << 30
QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
WEIGHTS = 2 * 494_004_224
"""Bytes in bfloat16 of Qwen2.5 0.5B, without its biases."""
SAMPLES = {"generate": True, "generate_backend": "vllm"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN))
    tiny_model(tmp_path / "model", intermediate_size=1024)
    return tmp_path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The memory of each GPU of the machine. There is none if it is empty."""
    sizes: list[float] = []
    monkeypatch.setattr(device_memory, "device_sizes", lambda: sizes)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return sizes


def qwen(root: Path, **sections: Any) -> Config:
    return tiny_config(root, "qwen", **({"generator": {"backend": "vllm"}} | sections))


def learner_bytes(config: Config) -> float:
    return needed_bytes(plan_memory(shape_of(config.model.path), config, Layout()), "cuda")


def room_of(config: Config, *, is_alone: bool = False) -> Finding:
    (room,) = check_device_memory(config, 1, is_alone=is_alone)
    return room


def check(config: Config, role: Any = "launch") -> str:
    """What is wrong; empty if nothing is."""
    return "; ".join(row.message for row in made(config, "device memory", role=role) if row.state != "OK")


def test_a_card_that_learner_and_vllm_share_is_refused_with_each_part_and_the_key_that_makes_it_fit(
    root: Path, gpus: list[float]
):
    gpus.append(80 * GIB)
    config = qwen(root)
    learner = learner_bytes(config)
    assert learner == pytest.approx(36.6 * GIB, rel=0.01)
    # vLLM has 0.8 of 80 GiB and 2 GiB beside it. What is left without the learner and these 2 GiB is for 0.51.
    room = room_of(config)
    assert room.state == "FAIL"
    assert f"processes take about 103 GiB of 80 GiB: learner {size_text(int(learner))} (weights 1.84" in room.found
    assert "generator 66 GiB (generator.memory_fraction = 0.8 of it, and 2 GiB beside that; its weights" in room.found
    fraction = int(100 * (80 - 2 - learner / GIB) / 80) / 100
    assert room.fix == f"set generator.memory_fraction = {fraction}"
    assert re.search(rf"on GPU 0 .* 103 GiB of 80 GiB.*set generator.memory_fraction = {fraction}", check(config))
    assert check(qwen(root, generator={"backend": "vllm", "memory_fraction": fraction})) == ""
    # The generators start elsewhere, or on GPUs of their own.
    assert check(config, "learner") == ""
    gpus += [80 * GIB, 80 * GIB]
    assert check(config) == ""
    # Of several devices the fullest is shown: (80 - 4) / 80 / 2, rounded down, is for each of the two on it.
    generators = {"backend": "vllm", "count": 2, "devices": [1, 1]}
    room = room_of(qwen(root, learner={"devices": [0]}, generator=generators))
    assert room.found.startswith("on GPU 1 processes take about 132 GiB of 80 GiB: generator 66 GiB")
    assert room.fix == "set generator.memory_fraction = 0.47"


def test_two_generators_a_teacher_and_a_reward_model_on_the_card_are_counted_too(root: Path, gpus: list[float]):
    gpus.append(80 * GIB)
    scorers = {
        name: {"model": str(root / "qwen"), "address": f"tcp://127.0.0.1:557{number}", **more}
        for number, (name, more) in enumerate(
            {"teacher": {}, "judge": {"backend": "vllm"}, "away": {"launch": False}}.items()
        )
    }
    config = qwen(
        root,
        generator={"backend": "vllm", "memory_fraction": 0.1, "count": 2},
        scorer=scorers,
        distill={"teacher": "teacher", "teachers": {"gsm": "away"}},
        reward={"type": "model", "model": "judge"},
        queue={"filter_range": []},
        data={"train": {"gsm": "gsm.jsonl"}},
    )
    room = room_of(config)
    # 2 x (0.1 of 80 + 2) and 0.8 of 80 + 2.
    assert room.state == "FAIL"
    assert room.found.count("generator 10 GiB") == 2
    assert "scorer.judge 66 GiB (scorer.judge.memory_fraction = 0.8 of it" in room.found
    # A batch has 16,384 tokens of 2 bytes in a layer's 4 x 896 + 896 + 2 x 128 + 3 x 4864 places.
    batch = 16384 * 2 * (4 * 896 + 896 + 2 * 128 + 3 * 4864)
    teacher = 1.1 * (WEIGHTS + batch) + 2 * GIB
    assert f"scorer.teacher {size_text(int(teacher))} (weights 942 MiB, a batch {size_text(batch)})" in room.found
    assert "away" not in room.found
    share = int(100 * (80 * GIB - learner_bytes(config) - teacher - 3 * 2 * GIB) / 3 / (80 * GIB)) / 100
    assert room.fix == f"set generator.memory_fraction = {share} and scorer.judge.memory_fraction = {share}"


def test_the_built_in_engine_takes_its_weights_and_the_cache_of_its_longest_sequences(root: Path, gpus: list[float]):
    engine = {"backend": "transformers", "batch_size": 10}
    config = qwen(root, generator=engine, sampling={"max_prompt_tokens": 100, "max_new_tokens": 900})
    # Keys and values of 2 bytes, 24 layers x 128, for 10 x 1000 tokens.
    cache = 2 * 2 * 24 * 128 * 10 * 1000
    generator = 1.1 * (WEIGHTS + cache) + 2 * GIB
    gpus.append(learner_bytes(config) + generator + 1)
    assert room_of(config).state == "OK"
    gpus[0] -= 2
    room = room_of(config)
    assert (room.state, f"its cache {size_text(cache)}" in room.found) == ("WARN", True)
    plan = plan_memory(ModelShape.of(QWEN), config, Layout())
    assert room.found.endswith(f"; only {size_text(int(0.85 * plan.total + WEIGHTS))} of that are sure, so it may fit")
    assert "it fits with 1 ranks --set model.gradient_checkpointing=selective" in room.fix
    # The learner's prediction may be 15 % too high; weights are sure.
    gpus[0] = 0.85 * plan.total + WEIGHTS - 1
    assert room_of(config).state == "FAIL"


def test_settings_of_the_learner_are_proposed_with_a_share_for_vllm(root: Path, gpus: list[float]):
    gpus.append(24 * GIB)  # less than the learner alone
    room = room_of(qwen(root))
    assert (room.state, room.fix[:42]) == ("FAIL", "it fits with 1 ranks --set model.gradient_")
    fraction = room.fix.rpartition(", and generator.memory_fraction = ")[2]
    settings = [pair.split("=") for pair in room.fix.partition(", and")[0].split("--set ")[1:]]
    sections: dict[str, Any] = {"generator": {"backend": "vllm", "memory_fraction": float(fraction)}}
    for key, value in settings:
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = int(value) if value.strip().isdigit() else value.strip()
    assert check(qwen(root, **sections)) == ""
    gpus[0] = 4 * GIB
    assert room_of(qwen(root)).fix.startswith("give them GPUs of their own (learner.devices, generator.devices")


def test_what_a_learner_alone_takes_and_how_it_fits(root: Path, gpus: list[float]):
    config = tiny_config(root, "model", sampling={"max_prompt_tokens": 1000, "max_new_tokens": 1000})
    gpus.append(learner_bytes(config))
    room = room_of(config, is_alone=True)
    assert (room.state, room.fix) == ("OK", "")
    assert room.found.endswith("; with 10% for gaps and 2 GiB for CUDA")
    gpus[0] = 1000
    room = room_of(config, is_alone=True)
    assert (room.state, "take a smaller model" in room.fix) == ("FAIL", True)
    assert check(config, "learner").startswith("device memory: on GPU 0")


def test_on_a_cpu_the_ranks_share_the_memory_and_too_little_is_a_warning(
    root: Path, gpus: list[float], monkeypatch: pytest.MonkeyPatch
):
    config = tiny_config(root, "model", generator={"backend": "transformers"})
    plan = plan_memory(shape_of(root / "model"), config, Layout(), device="cpu")
    available = 2 * int(1.1 * plan.total)
    monkeypatch.setattr(device_memory, "available_memory", lambda with_swap: available)
    assert room_of(config).state == "OK"
    available = int(plan.total / 2)
    room = room_of(config)
    assert (room.state, "--set model.gradient_checkpointing=" in room.fix) == ("WARN", True)
    assert check(config).startswith("device memory: on this machine the learner takes about")
    assert gpus == []


def test_vllm_beside_a_rank_fits_while_it_sleeps_and_while_the_rank_waits(root: Path, gpus: list[float]):
    gpus.append(8 * GIB)  # 2 GiB are for CUDA's context of each of both, and the model takes nothing to speak of
    for fraction, state in ((0.49, "OK"), (0.51, "FAIL")):
        engine = {"count": 0, "backend": "transformers", "memory_fraction": fraction}
        config = tiny_config(root, "model", learner=SAMPLES, generator=engine)
        trains, waits = check_device_memory(config, 1, is_alone=False)
        assert (trains.state, waits.check, waits.state) == ("OK", "memory to sample", state)
        assert "its vLLM 2 GiB (while it sleeps)" in trains.found
        assert waits.fix == ("" if state == "OK" else "set generator.memory_fraction = 0.49")
    gpus[0] = learner_bytes(config) + ASLEEP_BYTES - 1
    assert check_device_memory(config, 1, is_alone=False)[0].state != "OK"


def test_no_share_is_proposed_that_is_too_small_for_the_model(root: Path, gpus: list[float]):
    config = qwen(root, learner=SAMPLES, generator={"count": 0, "memory_fraction": 0.01})
    plan = plan_memory(ModelShape.of(QWEN), config, Layout())
    waiting = plan.weights + plan.optimizer + 4 * GIB
    gpus.append(waiting + 0.5 * WEIGHTS)
    assert check_device_memory(config, 1, is_alone=False)[1].fix == "shard the learner over more GPUs"
    gpus[0] = 80 * GIB  # 0.01 of it is less than the weights
    small = check_device_memory(config, 1, is_alone=False)[1]
    assert small.fix == f"set generator.memory_fraction = {int(100 * (1 - waiting / gpus[0])) / 100}"


def test_what_is_not_known_is_said(root: Path, gpus: list[float]):
    (root / "odd").mkdir()
    (root / "odd" / "config.json").write_text('{"model_type": "odd"}')
    odd = tiny_config(root, "odd", generator={"backend": "vllm"})
    gpus.append(80 * GIB)
    room = room_of(odd)
    assert (room.state, "the generator takes about 66 GiB" in room.found) == ("WARN", True)
    assert "config.json has no hidden_size" in room.found
    alone = room_of(odd, is_alone=True)
    assert (alone.state, alone.found[:13]) == ("WARN", "not predicted")
