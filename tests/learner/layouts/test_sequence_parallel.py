"""The part of a micro-batch that each rank of a group computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from async_rl.errors import ModelError
from async_rl.learner.data.packing import pack
from async_rl.learner.layouts.sequence_parallel import Part, check_packing
from async_rl.learner.losses.batch import TokenLogprobs
from async_rl.learner.model.policy_model import to_device
from tests.learner.tiny import random_sequences


@pytest.fixture(params=[0, 1])
def place(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process is one of two ranks; the other does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield request.param
    dist.destroy_process_group()


def test_a_part_of_the_prompt_takes_part_in_the_sum_of_other_tokens(place: int):
    # The row is 1 2 3 4 5 6, and 5 and 6 predict the two trained tokens: the first rank has none of them.
    (one,) = random_sequences(1, 7)
    top = {"teacher_top_ids": np.ones((7, 3), np.int32), "teacher_top_logprobs": np.zeros((7, 3), np.float32)}
    sequences = [replace(one, token_ids=np.arange(1, 8), loss_mask=np.arange(7) >= 5, **top)]
    ((micro_batch,),) = pack(sequences, max_tokens=1000, num_ranks=1)
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    part = Part.of(micro_batch, to_device(micro_batch, torch.device("cpu")), group)
    assert (len(part.tokens), part.num_tokens) == ((0, 2)[place], 2)
    own = torch.full((len(part.tokens),), 0.5, requires_grad=True)
    gathered = part.gather(TokenLogprobs(own, own.detach(), own[:, None].expand(-1, 3) if len(own) else None))
    assert gathered.others is not None
    assert gathered.others.tolist() == [[0.5 * place] * 3] * 2  # the other rank's are added


def test_padded_rows_cannot_be_divided():
    check_packing("packed", 2)
    check_packing("padded", 1)
    with pytest.raises(ModelError, match=r"parallel\.sequence: expected 1 for a model that computes padded rows"):
        check_packing("padded", 2)
