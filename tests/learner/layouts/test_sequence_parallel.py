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

from async_rl.config.loss import LossConfig
from async_rl.errors import ModelError
from async_rl.learner.data.packing import MicroBatch, pack
from async_rl.learner.layouts.sequence_parallel import Part, check_packing
from async_rl.learner.losses.batch import TokenLogprobs
from async_rl.learner.losses.objective import PolicyObjective
from async_rl.learner.model.policy_model import DeviceBatch, to_device
from async_rl.learner.sequences import TrainSequence
from async_rl.sampling_mask import SamplingMask
from tests.learner.rank_scenarios import off_policy_sequences
from tests.learner.tiny import random_sequences

CPU = torch.device("cpu")


@pytest.fixture(params=[0, 1])
def place(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process is one of two ranks; the other does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield request.param
    dist.destroy_process_group()


def sequence(sequence_id: int, token_ids: list[int], kept: list[int]) -> TrainSequence:
    """Trained from its third token on. Token i could have been one of ``kept[i]`` tokens: 1, 2 and so on."""
    (one,) = random_sequences(1, len(token_ids))
    words = [word for size in kept for word in range(1, size + 1)]
    return replace(
        one,
        sequence_id=sequence_id,
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=np.arange(len(token_ids)) >= 2,
        sampling_mask=SamplingMask(np.array(kept, np.int32), np.array(words, np.int32)),
        routes=np.array(token_ids, dtype=np.uint8)[:, None, None],
    )


def batches(sequences: list[TrainSequence]) -> tuple[MicroBatch, DeviceBatch]:
    ((micro_batch,),) = pack(sequences, max_tokens=1000, num_ranks=1)
    return micro_batch, to_device(micro_batch, CPU)


def part_of(micro_batch: MicroBatch, batch: DeviceBatch) -> Part:
    return Part.of(micro_batch, batch, cast(dist.ProcessGroup, dist.group.WORLD))


def test_a_part_has_its_tokens_and_what_they_predict(place: int):
    # Nothing needs the last tokens, and the second sequence shares 5, 6: the row is 5 6 9 4 7. The targets are 9, 4, 3
    # and 7, 8. They are predicted at places 1, 2, 3 and 1, 4. Two parts have 3 tokens each.
    micro_batch, batch = batches([sequence(0, [5, 6, 9, 4, 3], [2, 0, 3]), sequence(1, [5, 6, 7, 8], [1, 2])])
    part = part_of(micro_batch, batch)
    own = part.batch
    assert own.part is not None
    assert own.sampling_mask is not None
    assert own.routes is not None
    found = (
        own.token_ids.tolist(), own.position_ids.tolist(), part.tokens.tolist(), own.predict_index.tolist(),
        own.targets.tolist(), own.sampling_mask.sizes.tolist(), own.sampling_mask.words.tolist(), own.routes.tolist(),
        own.part.real.stop,
    )  # fmt: skip
    if place == 0:
        assert found == ([5, 6, 9], [0, 1, 2], [0, 1, 3], [1, 2, 1], [9, 4, 7], [2, 0, 1], [1, 2, 1], [5, 6, 9], 5)
    else:
        assert found == ([4, 7, 0], [3, 2, 0], [2, 4], [0, 1], [3, 8], [3, 2], [1, 2, 3, 1, 2], [4, 7, 0], 2)
    assert (part.num_tokens, own.num_sequences, own.part.num_tokens) == (5, 2, 3)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_slopes_of_a_part_are_predicted_as_those_of_the_whole(place: int, aggregation: str):
    micro_batch, batch = batches(off_policy_sequences())
    part = part_of(micro_batch, batch)
    objective = PolicyObjective(LossConfig.model_validate({"aggregation": aggregation}), 3, 8)
    whole = objective.predict_slopes(batch, version=3)
    predict = part.predicts(whole)
    assert whole is not None
    assert predict is not None
    scored = TokenLogprobs(batch.behavior_logprobs + 0.1, torch.ones_like(batch.behavior_logprobs))
    expected = whole(slice(None), scored).logprobs[part.tokens]
    own = TokenLogprobs(*(values[part.tokens] for values in scored[:2]))
    found = [predict(at, TokenLogprobs(*(v[at] for v in own[:2]))).logprobs for at in (slice(0, 20), slice(20, None))]
    torch.testing.assert_close(torch.cat(found), expected)
    assert expected.abs().max() > 0


def test_a_part_of_the_prompt_takes_part_in_the_sum_of_other_tokens(place: int):
    # The row is 1 2 3 4 5 6, and 5 and 6 predict the two trained tokens: the first rank has none of them.
    (one,) = random_sequences(1, 7)
    top = {"teacher_top_ids": np.ones((7, 3), np.int32), "teacher_top_logprobs": np.zeros((7, 3), np.float32)}
    micro_batch, batch = batches([replace(one, token_ids=np.arange(1, 8), loss_mask=np.arange(7) >= 5, **top)])
    part = part_of(micro_batch, batch)
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
