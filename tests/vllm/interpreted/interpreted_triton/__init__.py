"""A backend "cpu" of Triton that interprets kernels, so that vLLM's model runner v2 runs on a machine without a GPU.

Both packages that look for it, Triton and vLLM, look into the metadata of packages on ``sys.path``, here the folder
beside this one. ``make test-vllm-v2`` puts the folder that holds both on ``PYTHONPATH``, and has Triton interpret
kernels (``TRITON_INTERPRET=1``). A decode step takes a quarter of a second then.
"""

from __future__ import annotations

import builtins


class _Index(int):
    """A loop's index. A compiled loop has a tensor there, which kernels convert; Triton's interpreter has an int."""

    def to(self, _dtype: object) -> int:
        return self


def register() -> None:
    """Let kernels convert the indices of their loops. vLLM calls this in each of its processes, as a plugin."""
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    interpreter.range = lambda *bounds: map(_Index, builtins.range(*bounds))
