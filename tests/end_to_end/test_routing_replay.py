"""Routing replay takes the engine's choice of experts out of the mismatch.

A group goes the whole way but for the sockets, as in ``test_lag_0_ratio.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from async_rl.config.generator import GeneratorConfig
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.generator.rollouts import whole_sequence
from async_rl.learner.data.batch import prepare_batch
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.loop.step_result import update_metrics
from async_rl.learner.model.routing import gates
from async_rl.learner.ranks import init_ranks
from async_rl.net.codec import decode_group, encode_group
from async_rl.queue.core.groups import read_summary, why_unfit
from async_rl.queue.messages import TakenGroup
from async_rl.records import Group, Rollout
from async_rl.routes import FAMILIES, RoutingShape, routers_of
from tests.generator.leases import make_lease
from tests.learner.moe import moe_model
from tests.learner.rank_scenarios import routed_config

SHAPE = RoutingShape(3, 8, 2)


def perturb(model: Any, share: float) -> list[tuple[int, int]]:
    """Let the routers choose another second expert for ``share`` of the tokens, with weights from their own logits.

    The result lists for each call how many tokens chose differently, and of how many.
    """
    family, generator = FAMILIES[model.config.model_type], torch.Generator().manual_seed(0)
    counts: list[tuple[int, int]] = []

    def choose(router: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, own = output
        third = logits.topk(3, dim=-1).indices[:, 2]
        changed = torch.rand(len(own), generator=generator) < share
        chosen = torch.stack([own[:, 0], torch.where(changed, third, own[:, 1])], dim=1)
        counts.append((int(changed.sum()), len(own)))
        return logits, gates(family, router, logits, chosen).to(weights.dtype), chosen

    for router in routers_of(model, model.config.model_type):
        router.register_forward_hook(choose)
    return counts


def test_replay_takes_the_engines_choice_of_experts_out_of_the_mismatch(tmp_path: Path):
    directory = moe_model(tmp_path / "model")
    backend = TransformersBackend.from_files(directory, GeneratorConfig(batch_size=8), load_pretrained=True)
    counts = perturb(backend._model, 0.1)
    taken = []
    for index in range(4):
        lease = replace(make_lease(str(index), group_size=4, max_new_tokens=16, seed=index), wants_routes=True)
        backend.submit(lease, backend.encode_prompt([{"role": "user", "content": f"{index}+1="}]))
        samples = []
        while backend.num_running:
            samples += backend.step()
        rollouts = tuple(Rollout((whole_sequence(s),), {"correct": 1.0}, 1.0, s.finish_reason) for s in samples)
        body = encode_group(Group(str(index), "train", 0, "g", lease.lineage, 1.0, rollouts, {0: "digest"}))
        assert why_unfit(read_summary(body), lease, newest_version=0, routing=SHAPE) == ""
        taken.append(TakenGroup(decode_group(body), lease.prompt, 0.0, 0, False))
    changed, total = np.sum(counts, axis=0)
    assert changed / total > 0.05
    found = {}
    for name, routing in (("replayed", SHAPE), ("free", None)):
        prepared = prepare_batch(
            taken, mask_truncated=False, num_updates=1, known_weights=lambda _: True, vocab_size=64, routing=routing
        )
        assert not prepared.masked
        config = routed_config(tmp_path, model={"routing_replay": routing is not None})
        engine = FsdpEngine(config, init_ranks(config))
        found[name] = update_metrics([engine.update(prepared.sequences, version=0)])
        engine.close()
    replayed, free = found["replayed"], found["free"]
    # |log pi - log mu|, and the k3 estimate of KL(mu || pi), which is about half its square.
    assert replayed["ratio/mean_abs_log"] < 1e-5
    assert replayed["mismatch_kl/lag_0"] < 1e-9
    assert free["ratio/mean_abs_log"] > 1e-3
    assert free["mismatch_kl/lag_0"] > 1e-4
    assert 0.05 < replayed["routing/different"] < 0.2
    assert "routing/different" not in free
