"""The driver whose presence tells vLLM that Triton works here."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.backends.driver import DriverBase  # pyright: ignore[reportMissingImports]


class InterpretingDriver(DriverBase):
    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("interpreted kernels are not timed")
