"""What engine and learner say to each other about the same tokens, and how it is compared."""

import math

import numpy as np
import pytest

from async_rl.errors import WireError
from async_rl.queue.parity import (
    Answer,
    Probe,
    ProbeSequence,
    compare,
    decode_answer,
    decode_probe,
    encode_answer,
    encode_probe,
    looks_masked,
    parity_limit,
)
from async_rl.queue.server.handlers import MAX_ANSWER_BYTES


def test_the_difference_of_four_tokens_by_hand():
    # Differences 0.5, -1, 0, 2: mean |d| 3.5 / 4, mean d 1.5 / 4; a percentile is never below a token's own value.
    found = compare(np.array([-1.0, -3.0, -2.0, -1.0]), np.array([-1.5, -2.0, -2.0, -3.0]))
    assert (found.tokens, found.mean, found.bias, found.max) == (4, 0.875, 0.375, 2.0)
    assert (found.p50, found.p95, found.p99) == (1.0, 2.0, 2.0)
    assert found.metrics("parity/")["parity/mean"] == 0.875


@pytest.mark.parametrize("odd", [-np.inf, np.nan])
def test_a_token_without_a_probability_is_an_infinite_difference(odd: float):
    found = compare(np.array([-1.0, odd]), np.array([-1.0, -2.0]))
    assert math.isinf(found.mean)
    assert math.isinf(found.max)


def test_a_limit_is_tight_only_where_both_sides_are_exact():
    assert parity_limit(None, ("float32", "float32")) == 1e-3
    assert parity_limit(None, ("bfloat16", "float32")) == 0.05
    assert parity_limit(0.3, ("float32", "float32")) == 0.3


def test_a_mask_shows_in_one_direction_only():
    learner = np.array([-1.0, -2.0, -3.0])
    assert looks_masked(learner + np.array([0.2, 0.1, 0.3]), learner)
    assert looks_masked(np.array([-0.9, -np.inf, -2.8]), learner)
    assert not looks_masked(learner + np.array([0.2, -0.1, 0.3]), learner)
    assert not looks_masked(np.full(3, -np.inf), learner)


def largest_probe() -> Probe:
    given = ProbeSequence(np.arange(96, dtype=np.int32), 32)
    logprobs = np.linspace(-3, 0, 32, dtype=np.float32)
    return Probe("lineage", 7, 0.7, (given,) * 8, (logprobs,) * 8, "bfloat16", 0.2)


def test_a_probe_and_an_answer_come_out_as_they_went_in_and_are_small():
    probe = largest_probe()
    data = encode_probe(probe)
    assert len(data) < MAX_ANSWER_BYTES
    back = decode_probe(data)
    assert (back.lineage, back.version, back.temperature) == ("lineage", 7, 0.7)
    assert (back.dtype, back.limit) == ("bfloat16", 0.2)
    np.testing.assert_array_equal(back.sequences[7].token_ids, probe.sequences[7].token_ids)
    np.testing.assert_array_equal(back.logprobs[0], probe.logprobs[0])
    answer = decode_answer(encode_answer(Answer(7, "vllm", "bfloat16", probe.logprobs[0], "temperature", ("weights",))))
    assert (answer.version, answer.backend, answer.cause, answer.excluded) == (7, "vllm", "temperature", ("weights",))
    np.testing.assert_array_equal(answer.logprobs, probe.logprobs[0])
    assert decode_answer(encode_answer(Answer(7, "fake", "", None))).logprobs is None


@pytest.mark.parametrize("num_scored", [0, 96, 200])
def test_a_probe_that_scores_its_first_token_or_more_than_there_are_is_refused(num_scored: int):
    probe = largest_probe()
    given = ProbeSequence(probe.sequences[0].token_ids, num_scored)
    odd = Probe("l", 1, 1.0, (given,), (np.zeros(num_scored, np.float32),), "float32")
    with pytest.raises(WireError):
        decode_probe(encode_probe(odd))
