"""Flash attention 3 and 4 (``model.attention``), which torch calls for ``varlen_attn`` once they are activated.

Torch has version 2 built in, and registers the others from packages that the user installs. No GPU has run them here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import NamedTuple

from async_rl.config.learner import FlashAttention
from async_rl.errors import ConfigError

logger = logging.getLogger(__name__)


class _Kernels(NamedTuple):
    """The module that torch imports, the generations of GPUs that torch admits, and how to install it."""

    module: str
    capabilities: tuple[int, ...]
    install: str


_KERNELS: dict[FlashAttention, _Kernels] = {
    "fa3": _Kernels("flash_attn_interface", (9,), "install hopper/ of github.com/Dao-AILab/flash-attention"),
    "fa4": _Kernels("flash_attn.cute.interface", (9, 10), "pip install flash-attn-4"),
}


def check_flash_attention(name: FlashAttention, devices: Sequence[int]) -> None:
    """Check that torch can activate ``name`` here, for its CUDA devices of the indices ``devices``.

    Raises:
        ConfigError: torch does not know it, its package can't be imported, or a GPU is too old or too new.
    """
    import torch
    from torch.nn import attention

    kernels, number, lacks = _KERNELS[name], name[-1], ""
    if name.upper() not in attention.list_flash_attention_impls():
        lacks = f"a torch that registers flash attention {number}, got torch {torch.__version__}; install torch 2.13"
    found = [torch.cuda.get_device_properties(index) for index in devices]
    unfit = [device.name for device in found if device.major not in kernels.capabilities]
    if not lacks and (unfit or not devices):
        generations = " or ".join(f"{major}.x" for major in kernels.capabilities)
        lacks = f"GPUs of compute capability {generations}, got {', '.join(unfit) or 'none'}; use such GPUs"
    if not lacks:
        try:
            importlib.import_module(kernels.module)
        except Exception as error:  # a build for another torch or CUDA raises anything
            lacks = f"the module {kernels.module}, got {type(error).__name__}: {error}; {kernels.install}"
    if lacks:
        raise ConfigError(f'model.attention: "{name}" needs {lacks}, or leave the key out')


def activate_flash_attention(name: FlashAttention, device: int | None) -> None:
    """Let this process compute flash attention by ``name`` from now on, on the CUDA device ``device``.

    Raises:
        ConfigError: see ``check_flash_attention``.
    """
    check_flash_attention(name, [] if device is None else [device])
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(name.upper())
    logger.info("flash attention %s is active (model.attention)", name[-1])
