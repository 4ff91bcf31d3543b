"""One engine over two worker processes: every one takes its part of a version out of the same shared memory.

The versions are of another dtype than the engine: a bfloat16 learner's weights in a float32 engine.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.vllm.tiny import make_config, make_model, run_all, scores, submit, weights_of, write_files

pytestmark = pytest.mark.vllm


def published(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in weights_of(seed).items()}


@torch.no_grad()
def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with the values that bfloat16 keeps, computing in float32."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.timeout(900)
def test_logprobs_are_exact_before_and_after_a_swap_with_two_workers_and_another_dtype(tmp_path):
    from async_rl.generator.vllm.backend import VllmBackend

    config = make_config(tensor_parallel_size=2, kv_after_update="recompute", batch_size=8)
    backend = VllmBackend.from_files(write_files(tmp_path), config, device="cpu")
    try:
        models = {0: rounded(make_model(0)), 1: rounded(make_model(1))}
        backend.activate(0, published(0))
        submit(backend, "a", "what is 23+4", group_size=8, max_new_tokens=80, temperature=0.8)
        while backend.num_tokens < 8 * 20 and backend.num_running:
            backend.step()
        backend.activate(1, published(1))
        finished = run_all(backend)
    finally:
        backend.close()
    assert {v for s in finished.values() for v in s.versions.tolist()} == {0, 1}
    for sampled in finished.values():
        for version in set(sampled.versions.tolist()):
            mine = sampled.versions == version
            expected = scores(models[version], sampled, 0.8)[mine]
            np.testing.assert_allclose(sampled.logprobs[mine], expected, atol=1e-5)
