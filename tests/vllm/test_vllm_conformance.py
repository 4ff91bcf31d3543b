"""The real vLLM keeps the promises of ``backend.Backend``, with each of its model runners."""

from pathlib import Path

import pytest

from async_rl.generator.conformance import CHECKS, Subject, check_backend
from async_rl.generator.vllm.backend import VllmBackend
from tests.vllm.tiny import DEVICE, IS_INTERPRETED, TOLERANCE, make_config, weights_of, write_files

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_vllm_backend_conforms(tmp_path: Path, runner: str):
    directory = write_files(tmp_path)

    def make() -> VllmBackend:
        backend = VllmBackend.from_files(directory, make_config(runner=runner, batch_size=4), device=DEVICE)
        assert backend._engine.model_runner == runner
        return backend

    length = 48 if IS_INTERPRETED else 300  # new weights must arrive in the middle of an answer
    subject = Subject(make, weights_of, max_new_tokens=length, tolerance=max(TOLERANCE, 1e-3), limit_s=300.0)
    names = {check.__name__ for check in CHECKS}
    # It is not deterministic, and returns no routes of experts.
    assert set(check_backend(subject)) == names - {
        "repeats_itself_if_deterministic",
        "reports_the_routes_of_every_token",
    }
