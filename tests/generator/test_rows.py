"""How the built-in engine computes a model's rows: it samples each family right, or refuses it by name before the
first sample. ``tests/families`` does the same for all families of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rl.config.generator import GeneratorConfig
from async_rl.errors import ModelError, WeightsError
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.generator.hf.lockstep import LockstepRows
from async_rl.generator.hf.rows import SlotRows
from async_rl.generator.hf.self_test import choose_rows
from async_rl.queue.parity import ProbeSequence
from tests.families.catalogue import build
from tests.families.sampling import NUM_SLOTS, weights_of, write_family

pytestmark = pytest.mark.usefixtures("one_thread")

PROBES = (
    ProbeSequence(np.array([5, 9, 4, 7, 8, 3, 20], np.int32), 3),
    ProbeSequence(np.arange(3, 43, dtype=np.int32), 32),
    ProbeSequence(np.array([12, 13], np.int32), 1),
)


def chosen(name: str) -> Any:
    return choose_rows(build(name), 4)


def test_a_model_whose_tokens_see_later_ones_is_refused_before_the_first_sample(tmp_path: Path):
    write_family(tmp_path, "BERT without a causal mask")
    backend = TransformersBackend.from_files(tmp_path, GeneratorConfig(batch_size=NUM_SLOTS))
    with pytest.raises(
        ModelError, match=r'can\'t sample BertLMHeadModel: .*differ by .* nats .*; set generator\.backend = "vllm"'
    ):
        backend.activate(1, weights_of(build("BERT without a causal mask")))


def test_a_leak_between_rows_is_found_and_avoided(monkeypatch: pytest.MonkeyPatch):
    model: PreTrainedModel = build("Llama")
    original = SlotRows.remove
    # Rows that move keep the keys and values of the sequence before them.
    monkeypatch.setattr(SlotRows, "remove", lambda self, rows, sources, destinations: original(self, rows, [], []))
    assert isinstance(choose_rows(model, 4), LockstepRows)


def test_first_weights_that_give_nan_are_named_as_the_cause():
    model = build("Llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(WeightsError, match="first version of the weights gives NaN"):
        choose_rows(model, 4)


# Scaled and capped logits, with slots and without.
@pytest.mark.parametrize("name", ["Granite", "Cohere", "nanochat", "Gemma 2", "Mamba 2", "Falcon-H1"])
@pytest.mark.parametrize("mode", ["cached_decode", "full_forward", "float32_head"])
def test_given_tokens_are_scored_as_the_model_computes_them(tmp_path: Path, name: str, mode: Any):
    write_family(tmp_path, name)
    backend = TransformersBackend.from_files(tmp_path, GeneratorConfig(batch_size=2), load_pretrained=True)
    found = backend.score_tokens(PROBES, 0.7, mode)
    model = build(name)
    model.set_attn_implementation("eager")  # sdpa leaves out the cap of Gemma 2
    expected: list[float] = []
    for probe in PROBES:
        ids = torch.from_numpy(probe.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = (model(input_ids=ids[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
        start = len(ids) - probe.num_scored
        expected += [float(logprobs[place - 1, ids[place]]) for place in range(start, len(ids))]
    np.testing.assert_allclose(found, expected, atol=1e-5)
