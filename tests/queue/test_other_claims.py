"""Claims that are counted as ``other``: a group of another history, and a sampled token that was not kept."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.records import Group
from async_rl.sampling_mask import SamplingMask
from tests.queue.builders import SAMPLING, group, leases, make_state, put


def keeping(made: Group, offset: int) -> Group:
    """Each sampled token with a set of one: the token plus ``offset``."""
    rollouts = []
    for rollout in made.rollouts:
        (sequence,) = rollout.sequences
        kept = sequence.token_ids[sequence.loss_mask] + offset
        mask = SamplingMask(np.ones(len(kept), np.int32), kept.astype(np.int32))
        rollouts.append(replace(rollout, sequences=(replace(sequence, sampling_mask=mask),)))
    return replace(made, rollouts=tuple(rollouts))


@pytest.mark.parametrize("claim", ["another lineage", "another kind", "a token that was not kept"])
def test_a_group_with_such_a_claim_is_refused(claim: str):
    state = make_state(sampling=replace(SAMPLING, top_k=1))
    honest, forged = (keeping(group(lease), 0) for lease in leases(state, 2))
    match claim:
        case "another lineage":
            forged = replace(forged, lineage="line-b")
        case "another kind":
            forged = replace(forged, kind="eval")
        case _:
            forged = keeping(forged, 1)
    assert (put(state, honest), put(state, forged)) == ("queued", "refused")
    entry = state.generators.get("g0")
    assert entry is not None
    assert entry.refused == {"other": 1}
