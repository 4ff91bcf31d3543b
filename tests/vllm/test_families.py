"""Models with other layers than full attention, on the real engine: their versions load, and their logprobs are right.

Plain full forward passes of the same tiny model are the reference, before and after a weight update.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.errors import ModelError
from async_rl.generator.vllm.backend import VllmBackend
from tests.generator.leases import run_all, submit
from tests.generator.tiny_model import write_tokenizer
from tests.vllm.families import make_family
from tests.vllm.tiny import VOCABULARY, assert_scored_by, engine, make_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = ["1+1", "what is 23+4", "7", "a longer prompt than the others are"]


def write_files(directory: Path, family: str, **changes: object) -> Path:
    make_family(family, 0, vocab_size=VOCABULARY, **changes).config.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.mark.parametrize(
    "family",
    [
        "gemma 3", "mamba 2",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3 moe", "gpt-oss", "granite 4 hybrid")),
    ],
)  # fmt: skip
def test_every_token_scores_as_in_a_full_forward_pass_of_its_version(tmp_path, family):
    models = {version: make_family(family, version, vocab_size=VOCABULARY) for version in (3, 4)}
    with engine(write_files(tmp_path, family), kv_after_update="recompute") as backend:
        backend.activate(3, dict(models[3].named_parameters()))
        for i, prompt in enumerate(PROMPTS):
            submit(backend, str(i), prompt, group_size=16, max_new_tokens=200, seed=i)
        finished = []
        while backend.num_running and backend.num_tokens < 200:
            finished += backend.step()
        backend.activate(4, dict(models[4].named_parameters()))
        finished += run_all(backend).values()
        submit(backend, "after", PROMPTS[1], group_size=4, max_new_tokens=20)
        finished += run_all(backend).values()
    assert len(finished) == 68
    assert assert_scored_by(models, finished) > 0


def test_a_model_that_vllm_cannot_run_here_is_refused_at_start(tmp_path):
    directory = write_files(tmp_path, "qwen3 next")
    with pytest.raises(ModelError, match="vLLM can't run Qwen3NextForCausalLM in float32 here"):
        VllmBackend.from_files(directory, make_config(), device="cpu")
