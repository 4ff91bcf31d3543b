"""The fixture that runs a test with each of vLLM's model runners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    """``experimental.vllm.model_runner``. The test is skipped for a runner that can't run on this machine."""
    if request.param == "v2":
        from vllm.triton_utils import HAS_TRITON  # pyright: ignore[reportMissingImports]

        if not HAS_TRITON:
            pytest.skip(
                "vLLM's model runner v2 needs Triton: a GPU, or make test-vllm-v2, which interprets its kernels"
            )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(request.param == "v1")))  # which the key overrides
        yield request.param
