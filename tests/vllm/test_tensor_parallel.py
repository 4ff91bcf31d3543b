"""One engine over two worker processes: every one takes its part of a version out of the same shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.vllm.tiny import make_config, make_model, run_all, scores, submit, weights_of, write_files

pytestmark = pytest.mark.vllm


@pytest.mark.timeout(900)
def test_logprobs_are_exact_before_and_after_a_swap_with_two_workers(tmp_path):
    from async_rl.generator.vllm_backend import VllmBackend

    config = make_config(tensor_parallel_size=2, kv_after_swap="recompute", batch_size=8)
    backend = VllmBackend.from_files(write_files(tmp_path), config, device="cpu")
    try:
        models = {0: make_model(0), 1: make_model(1)}
        backend.activate(0, weights_of(0))
        submit(backend, "a", "what is 23+4", group_size=8, max_new_tokens=80, temperature=0.8)
        while backend.num_tokens < 8 * 20 and backend.num_running:
            backend.step()
        backend.activate(1, weights_of(1))
        finished = run_all(backend)
    finally:
        backend.close()
    assert {v for s in finished.values() for v in s.versions.tolist()} == {0, 1}
    for sampled in finished.values():
        for version in set(sampled.versions.tolist()):
            mine = sampled.versions == version
            expected = scores(models[version], sampled, 0.8)[mine]
            np.testing.assert_allclose(sampled.logprobs[mine], expected, atol=1e-5)
