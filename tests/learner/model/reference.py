"""Engines, and what transformers' own model computes one sequence at a time: the reference for their steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.rank_scenarios import save
from tests.learner.tiny import trained_tokens

Tensors = dict[str, Tensor]


def engine_of(config: Config, **settings: Any) -> FsdpEngine:
    """An engine of this process alone."""
    return FsdpEngine(config, init_ranks(config), **settings)


def saved(engine: FsdpEngine, directory: Path) -> Path:
    """Save ``engine`` to the checkpoint ``directory``, with the digests that an export reads."""
    save(engine, directory, 1)
    write_manifest(directory)
    return directory


def plain_model(directory: Path, weights: Mapping[str, Tensor] | None = None, attention: str = "eager") -> Any:
    """Transformers' model in ``directory``, float32; with ``weights`` in their place, as a generator has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).eval()
    if weights is not None:
        wrong = model.load_state_dict(weights, strict=False)
        assert not wrong.unexpected_keys
        assert set(wrong.missing_keys) <= {"lm_head.weight"}
    return model


def plain_scores(model: Any, sequence: TrainSequence, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities, with their graph, and entropies of the trained tokens."""
    token_ids, mask = torch.from_numpy(sequence.token_ids).long(), torch.from_numpy(sequence.loss_mask[1:])
    logprobs = (model(input_ids=token_ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1).detach()
    return logprobs.gather(-1, token_ids[1:, None])[:, 0][mask], entropies[mask]


def plain_step(
    directory: Path, sequences: list[TrainSequence], attention: str = "eager"
) -> tuple[dict[int, Tensor], Tensors]:
    """The log-probabilities of each sequence, and the gradients of the DAPO loss."""
    model = plain_model(directory, attention=attention)
    scores: dict[int, Tensor] = {}
    for sequence in sequences:
        mask = torch.from_numpy(sequence.loss_mask[1:])
        logprobs, _ = plain_scores(model, sequence)
        scores[sequence.sequence_id] = logprobs.detach()
        ratio = (logprobs - torch.from_numpy(sequence.behavior_logprobs[1:])[mask]).exp()
        advantages = torch.from_numpy(sequence.advantages[1:])[mask]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        (loss.sum() / trained_tokens(sequences)).backward()
    return scores, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradients(checkpoint: Path) -> Tensors:
    """The gradients of the last step: with beta1 = 0 they are AdamW's first moments."""
    tensors = load_tensors(checkpoint, OPTIMIZER)
    return {n.removeprefix("exp_avg."): tensor for n, tensor in tensors.items() if n.startswith("exp_avg.")}


def assert_near(ours: Tensors, expected: Tensors) -> None:
    """Within 1e-5 of the largest number of all. What only we have, such as an unused weight's gradient, is 0."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-5, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert all(not bool(ours[name].any()) for name in ours.keys() - expected.keys())
