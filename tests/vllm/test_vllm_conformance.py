"""The real vLLM keeps the promises of ``backend.Backend``."""

from pathlib import Path

import pytest

from async_rl.generator.conformance import CHECKS, Subject, check_backend
from async_rl.generator.vllm.backend import VllmBackend
from tests.vllm.tiny import make_config, weights_of, write_files

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_vllm_backend_conforms(tmp_path: Path):
    directory = write_files(tmp_path)
    made = make_config(batch_size=4)
    subject = Subject(
        lambda: VllmBackend.from_files(directory, made, device="cpu"), weights_of, max_new_tokens=300, limit_s=300.0
    )
    names = {check.__name__ for check in CHECKS}
    # It is not deterministic, and returns no routes of experts.
    assert set(check_backend(subject)) == names - {
        "repeats_itself_if_deterministic",
        "reports_the_routes_of_every_token",
    }
