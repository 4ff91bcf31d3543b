"""What would stop a learner after it has loaded its model, or let it wait for ever, is refused before it starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ConfigError, ModelError, UserError
from async_rl.launch.checks import machine
from async_rl.launch.checks.data import check_lengths
from async_rl.launch.checks.models import check_critic
from async_rl.launch.checks.settings import check_division, check_offloading, check_ranks, check_stop_tokens
from async_rl.launch.checks.table import problems_of_config
from async_rl.queue.storage.payloads import in_blocks
from async_rl.records import BYTES_PER_TOKEN
from tests.learner.tiny import tiny_config, tiny_model


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"tensor": 2},
            "parallel.tensor: expected a divisor of the model's num_attention_heads, 3, got 2",
        ),
        ({"tensor": 3}, ""),
        ({"pipeline": 3}, "parallel.pipeline: expected at most 2 stages, one for each decoder layer"),
    ],
)
@pytest.mark.parametrize("key", ["model", "critic"])
def test_a_model_that_can_t_be_divided_is_refused_by_its_config_file(
    tmp_path: Path, parallel: dict[str, int], message: str, key: str
):
    tiny_model(tmp_path / "three", num_attention_heads=3, num_key_value_heads=3, hidden_size=12)
    tiny_model(tmp_path / "six", num_attention_heads=6, num_key_value_heads=6, hidden_size=12, num_hidden_layers=3)
    critic: Any = {"loss": {"preset": "ppo"}, "critic": {"path": str(tmp_path / "three")}} if key == "critic" else {}
    config = tiny_config(tmp_path, "six" if critic else "three", parallel=parallel, **critic)
    if not message:
        check_division(config)
        return
    with pytest.raises(UserError, match=message):
        check_division(config)


def test_experts_that_can_t_be_divided_are_refused_by_the_config_file(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"text_config": {"num_local_experts": 6, "num_attention_heads": 8}}')
    for key in ("tensor", "experts"):
        config = tiny_config(tmp_path, "", parallel={key: 4})
        with pytest.raises(UserError, match=rf"parallel.{key}: expected a divisor of the experts of a layer, 6, got 4"):
            check_division(config)


CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)"


@pytest.mark.parametrize(
    ("cuda", "driver", "message"),
    [
        (None, CLOSED, r"is a build for the CPU; install one for CUDA \(pip install torch==[\d.]+\), or set CUDA_VIS"),
        ("13.0", CLOSED, r"none that its CUDA 13.0 can use with the driver 535.104.05; install a driver for CUDA 13 "),
        ("13.0", OPEN, "can use with the driver 570.86.15; "),
        ("13.0", None, "can use with the driver of unknown version; "),
    ],
)
def test_a_gpu_that_torch_can_t_use_is_refused_with_the_versions_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: str | None, message: str
):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "version")
    if driver:
        (tmp_path / "version").write_text(driver)
    with pytest.raises(ConfigError, match=message):
        machine.check_devices(tiny_config(Path(), "m"), "learner")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    machine.check_devices(tiny_config(Path(), "m"), "learner")


def test_offloading_is_refused_where_the_learner_is_on_the_cpu_anyway(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_offloading(tiny_config(Path(), "m"))
    with pytest.raises(ConfigError, match=r'learner.offload: expected "none" for a learner on the CPU, got "all"'):
        check_offloading(tiny_config(Path(), "m", learner={"offload": "all"}))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    only_reference = {"learner": {"offload": "reference"}}
    with pytest.raises(ConfigError, match="expected a reference model of its own, got none"):
        check_offloading(tiny_config(Path(), "m", **only_reference))
    check_offloading(tiny_config(Path(), "m", **only_reference, loss={"kl_coef": 0.1}))


def test_a_learner_that_samples_alone_must_begin_the_groups_of_a_step():
    def alone(num_groups: int, **sections: Any) -> None:
        learner = {"generate": True, "generate_groups": num_groups, "groups_per_step": 8}
        check_ranks(tiny_config(Path(), "m", **{"learner": learner, "generator": {"count": 0}} | sections), 2)

    alone(4)
    with pytest.raises(ConfigError, match=r"learner.generate_groups: expected at least 4 .* because 2 ranks .* got 3"):
        alone(3)
    alone(3, generator={"count": 1})
    alone(3, queue={"address": "tcp://127.0.0.1:5555"})


def test_the_config_alone_says_what_no_machine_can_start():
    config = tiny_config(Path(), "m", parallel={"tensor": 2})
    (problem,) = problems_of_config(config)
    assert problem.startswith("parallel: expected a number of ranks that is a multiple of tensor 2 = 2, got 1; ")
    assert problems_of_config(tiny_config(Path(), "m", parallel={"tensor": 2}, learner={"nproc": 2})) == []


def test_stop_tokens_outside_the_vocabulary_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 40}')
    check_stop_tokens(tiny_config(tmp_path, "", sampling={"stop_token_ids": [0, 39]}))
    with pytest.raises(ConfigError, match=r"sampling\.stop_token_ids: expected ids below 40, .* got \[40, 99\]"):
        check_stop_tokens(tiny_config(tmp_path, "", sampling={"stop_token_ids": [3, 40, 99]}))


def test_a_critic_has_a_model_that_can_be_read(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for critic, states in (({}, []), ({"path": str(tmp_path)}, ["OK"])):
        config = tiny_config(tmp_path, "m", loss={"advantage": "gae"}, critic=critic)
        assert [found.state for found in check_critic(config)] == states
    nowhere = tiny_config(tmp_path, "m", loss={"advantage": "gae"}, critic={"path": str(tmp_path / "nowhere")})
    with pytest.raises(ModelError, match=r"^critic\.path: .* no directory .*nowhere"):
        list(check_critic(nowhere))


def check_rollouts(*, max_tokens: int, sequence: int = 1, max_bytes: int = 1 << 30, groups: int = 1) -> None:
    """Rollouts have up to 16 + 48 = 64 tokens."""
    config = tiny_config(
        Path(), "m", sampling={"max_prompt_tokens": 16, "max_new_tokens": 48, "group_size": 8},
        generator={"backend": "fake"}, learner={"max_tokens": max_tokens, "groups_per_step": groups},
        queue={"max_bytes": max_bytes}, parallel={"sequence": sequence},
    )  # fmt: skip
    list(check_lengths(config, []))


@pytest.mark.parametrize(("max_tokens", "sequence"), [(64, 1), (32, 2), (22, 3)])
def test_a_rollout_fits_the_ranks_of_a_micro_batch_or_is_refused_with_the_arithmetic(max_tokens: int, sequence: int):
    check_rollouts(max_tokens=max_tokens, sequence=sequence)
    # 64 / 3 is 21 and a rest.
    expected = re.escape("expected at least 64 (sampling.max_prompt_tokens + max_new_tokens = 16 + 48), got ")
    got = sequence * (max_tokens - 1)
    with pytest.raises(ConfigError, match=f"{expected}{got}; raise learner.max_tokens to {max_tokens}"):
        check_rollouts(max_tokens=max_tokens - 1, sequence=sequence)


def test_a_step_that_does_not_fit_the_queue_is_refused_before_anything_starts():
    # 256 groups of 8 rollouts, each in whole blocks of a disk.
    needed = 256 * in_blocks(8 * (64 * BYTES_PER_TOKEN + 1024) + 4096)
    check_rollouts(max_tokens=64, max_bytes=needed, groups=256)
    with pytest.raises(ConfigError, match=rf"queue\.max_bytes: expected at least {needed}, which one step of 256"):
        check_rollouts(max_tokens=64, max_bytes=needed - 1, groups=256)
