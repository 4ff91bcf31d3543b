"""A compiler that Triton's table of backends must name. Interpreted kernels are never compiled."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend  # pyright: ignore[reportMissingImports]


class NoCompiler(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        return options

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> None:
        raise NotImplementedError("kernels are interpreted; set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None: ...

    def get_module_map(self) -> dict[str, Any]:
        return {}
