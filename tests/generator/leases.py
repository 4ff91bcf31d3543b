"""Leases for the generator's tests, and what backends do with them."""

from __future__ import annotations

from typing import Any

from async_rl.generator.backend import Backend, Sampled
from async_rl.records import Lease, LeaseKind, Prompt, Sampling


def make_lease(
    lease_id: str = "a",
    *,
    kind: LeaseKind = "train",
    group_size: int = 2,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 8,
    max_prompt_tokens: int = 64,
    stop: tuple[str, ...] = (),
    min_p: float = 0.0,
    stop_token_ids: tuple[int, ...] = (),
    seed: int = 7,
    min_version: int = 0,
    lineage: str = "first",
    answer: str = "2",
) -> Lease:
    prompt = Prompt(0, 0, 0, ({"role": "user", "content": "1+1"},), {"gt_answer": answer})
    sampling = Sampling(temperature, top_p, top_k, max_new_tokens, max_prompt_tokens, stop, min_p, stop_token_ids)
    return Lease(lease_id, kind, prompt, group_size, sampling, lineage, min_version, 4, 0, seed)


def submit(backend: Backend, lease_id: str, prompt: str = "1+1", **settings: Any) -> None:
    lease = make_lease(lease_id, **settings)
    backend.submit(lease, backend.encode_prompt([{"role": "user", "content": prompt}]))


def run_all(backend: Backend) -> dict[tuple[str, int], Sampled]:
    finished: dict[tuple[str, int], Sampled] = {}
    while backend.num_running:
        for sampled in backend.step():
            assert (sampled.lease_id, sampled.index) not in finished
            finished[sampled.lease_id, sampled.index] = sampled
    assert backend.progress() == {}
    return finished
