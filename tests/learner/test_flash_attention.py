"""Flash attention 3 and 4, with GPUs and packages that are not there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import attention

from async_rl.config.learner import FlashAttention
from async_rl.errors import ConfigError
from async_rl.launch.checks.machine import check_attention
from async_rl.learner.flash_attention import activate_flash_attention, check_flash_attention
from async_rl.learner.ranks import init_ranks
from tests.learner.tiny import tiny_config


def on_gpus(monkeypatch: pytest.MonkeyPatch, *majors: int) -> list[int]:
    """The indices of GPUs of these generations."""
    gpus = [SimpleNamespace(major=major, name=f"GPU {major}") for major in majors]
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    return list(range(len(gpus)))


@pytest.mark.parametrize(
    ("name", "majors", "message"),
    [
        ("fa3", (9,), r"the module flash_attn_interface, got ModuleNotFoundError: .*; install hopper/ of github"),
        ("fa3", (9, 10), r"GPUs of compute capability 9.x, got GPU 10; use such GPUs, or leave the key out"),
        ("fa4", (8,), r"GPUs of compute capability 9.x or 10.x, got GPU 8"),
    ],
)
def test_what_a_machine_lacks_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, name: FlashAttention, majors: tuple[int, ...], message: str
):
    with pytest.raises(ConfigError, match=rf'model.attention: "{name}" needs {message}'):
        check_flash_attention(name, on_gpus(monkeypatch, *majors))


def test_what_torch_registers_under_that_name_is_activated(monkeypatch: pytest.MonkeyPatch):
    assert attention.list_flash_attention_impls() == ["FA3", "FA4"]  # torch's own; ours stands in for its kernels
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", ModuleType("kernels"))
    handle = SimpleNamespace(remove=lambda: None)
    monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA4", lambda: handle)
    activate_flash_attention("fa4", *on_gpus(monkeypatch, 9))
    assert attention.current_flash_attention_impl() == "FA4"
    attention.restore_flash_attention_impl()


def test_the_check_and_the_ranks_read_the_key():
    config = tiny_config(Path(), "m", model={"attention": "fa3"})
    for read in (lambda: list(check_attention(config)), lambda: init_ranks(config)):
        with pytest.raises(ConfigError, match=r"compute capability 9.x, got none"):
            read()
