"""The running sequences against a plain list of sequences, under any order of arrivals, steps and departures."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rl.generator.backend import rollout_keys, uniforms
from async_rl.generator.hf.slots import RunningSequences
from tests.examples import examples
from tests.generator.leases import make_lease

MAX_RUNNING = 6
ACTIONS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(1, MAX_RUNNING)),
    st.tuples(st.just("step"), st.integers(1, 40)),
    st.tuples(st.just("leave"), st.sets(st.integers(0, MAX_RUNNING - 1))),
)


@examples(150)
@given(st.lists(ACTIONS, max_size=25))
def test_every_sequence_keeps_its_own_tokens_wherever_it_is_moved(actions):
    table = RunningSequences(MAX_RUNNING)
    expected: dict[tuple[str, int], list[int]] = {}
    prompts: dict[str, int] = {}
    clock = 0
    for name, value in actions:
        if name == "arrive" and min(value, table.num_free):
            lease_id, length = str(len(prompts)), 1 + len(prompts) % 5
            prompts[lease_id] = length
            count = min(value, table.num_free)
            table.add(make_lease(lease_id, seed=length), np.arange(length, dtype=np.int32), 0, count)
            expected |= {(lease_id, index): [] for index in range(count)}
        elif name == "step" and table.num_rows:
            for _ in range(value):
                tokens = clock * MAX_RUNNING + np.arange(table.num_rows)
                for sequence, token in zip(table.sequences, tokens.tolist(), strict=True):
                    expected[sequence.lease.lease_id, sequence.index].append(token)
                versions = np.full(len(tokens), clock, np.int32)
                table.record({"token_ids": tokens, "logprobs": -tokens.astype(np.float64), "versions": versions})
                clock += 1
        elif name == "leave":
            leaving = [row for row in sorted(value) if row < table.num_rows]
            for row in leaving:
                del expected[table.sequences[row].lease.lease_id, table.sequences[row].index]
            sources, gaps = table.remove(leaving)
            assert not set(sources) & set(gaps)
        assert {(o.lease.lease_id, o.index) for o in table.sequences} == expected.keys()
        for row, sequence in enumerate(table.sequences):
            columns = table.sampled(row)
            tokens = columns["token_ids"]
            assert tokens.tolist() == expected[sequence.lease.lease_id, sequence.index]
            if len(tokens):
                assert columns["logprobs"].tolist() == (-tokens).tolist()
                assert columns["versions"].tolist() == (tokens // MAX_RUNNING).tolist()
            length = prompts[sequence.lease.lease_id]
            assert table.position[row] == length - 1 + len(tokens)
            assert table.key[row] == rollout_keys(length, np.array([sequence.index]))[0]


def test_random_numbers_are_a_function_of_seed_rollout_and_token_and_look_uniform():
    keys = rollout_keys(5, np.arange(100))
    draws = np.concatenate([uniforms(keys, np.full(100, token)) for token in range(100)])
    assert draws[:100].tolist() == uniforms(rollout_keys(5, np.arange(100)), np.zeros(100, np.int64)).tolist()
    assert len(set(draws.tolist())) == 10_000
    assert draws.min() >= 0
    assert draws.max() < 1
    # 10 000 draws in 10 bins: 1000 each, standard deviation sqrt(1000 * 0.9) = 30.
    assert np.abs(np.histogram(draws, bins=10, range=(0, 1))[0] - 1000).max() < 150
    assert not set(draws.tolist()) & set(uniforms(rollout_keys(6, np.arange(100)), np.zeros(100, np.int64)).tolist())
