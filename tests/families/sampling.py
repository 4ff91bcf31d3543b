"""What the built-in engine reports for a family, against plain forward passes of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.config.generator import GeneratorConfig
from async_rl.generator.backend import Sampled
from async_rl.generator.hf.backend import TransformersBackend
from tests.families.catalogue import build
from tests.generator.leases import make_lease
from tests.generator.tiny_model import write_tokenizer

PROMPT_TOKENS = (1, 3, 13, 21)
"""Lengths of the prompts in one batch. Windows have 8 tokens."""
NUM_SLOTS = 5
STEPS_BEFORE_UPDATE = 9


def write_family(directory: Path, name: str) -> None:
    """Write the family's model and a tokenizer to ``directory``."""
    build(name).save_pretrained(directory)
    write_tokenizer(directory)


def worst_difference(directory: Path, name: str) -> float:
    """Return max |engine - plain forward pass| over the log-probabilities of all tokens of a run, in nats.

    Four groups of prompts of 1 to 21 tokens share five slots, so slots are used again; answers have up to 24 tokens;
    after nine steps new weights arrive, and running sequences go on with them.
    """
    models = {1: build(name, seed=0), 2: build(name, seed=1)}
    backend = TransformersBackend.from_files(
        directory, GeneratorConfig(batch_size=NUM_SLOTS, kv_after_update="recompute")
    )
    backend.activate(1, weights_of(models[1]))
    generator = np.random.default_rng(0)
    for index, length in enumerate(PROMPT_TOKENS):
        lease = make_lease(str(index), group_size=3 if index == 0 else 2, max_new_tokens=12 + 4 * index, seed=index)
        backend.submit(lease, generator.integers(3, 46, size=length, dtype=np.int32))
    finished = [sampled for _ in range(STEPS_BEFORE_UPDATE) for sampled in backend.step()]
    backend.activate(2, weights_of(models[2]))
    while backend.num_running:
        finished += backend.step()
    assert len(finished) == 9
    assert {version for sampled in finished for version in sampled.versions.tolist()} == {1, 2}
    return max(_difference(models, sampled) for sampled in finished)


def weights_of(model: Any) -> dict[str, Tensor]:
    """What the learner publishes: parameters and persistent buffers, tied ones once."""
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name not in tied}


@torch.no_grad()
def _difference(models: dict[int, Any], sampled: Sampled) -> float:
    ids = torch.from_numpy(np.concatenate([sampled.prompt_ids, sampled.token_ids]).astype(np.int64))
    start, worst = len(sampled.prompt_ids), 0.0
    for version in set(sampled.versions.tolist()):
        model = models[version]
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, ids[start:, None])[:, 0].numpy()
        of_version = sampled.versions == version
        worst = max(worst, float(np.abs(sampled.logprobs - expected)[of_version].max()))
    return worst
