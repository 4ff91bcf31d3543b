"""The order of prompts: curricula, whose rows may be passed over, sources that take turns, and a single source."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.data import CurriculumConfig
from async_rl.queue.core import learner_requests
from async_rl.queue.core.prompts import Curriculum, Mixture, PassRate, Place, PromptStream, chance
from async_rl.queue.core.state import QueueState
from tests.examples import examples
from tests.queue.builders import LINEAGE, announce, group, leases, put, rows, settings

ASIDE = CurriculumConfig(solved_at=1.0, unsolved_at=0.0, rest_epochs=2)
CHANCES = st.one_of(
    st.just({"chance": "uniform"}),
    st.fixed_dictionaries(
        {"chance": st.sampled_from(["learnability", "failures"]), "min_chance": st.sampled_from([0.05, 0.1, 0.5, 1.0])}
    ),
)
LIMITS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"solved_at": st.sampled_from([0.75, 1.0]), "rest_epochs": st.integers(1, 3)}),
    st.fixed_dictionaries(
        {"unsolved_at": st.sampled_from([0.0, 0.25]), "rest_epochs": st.integers(1, 3)},
        optional={"solved_at": st.sampled_from([0.75, 1.0])},
    ),
)
CONFIGS = st.builds(lambda chance, limits: CurriculumConfig(**chance, **limits), CHANCES, LIMITS)
SOURCES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=3)


def make_stream(config: CurriculumConfig, sources: list[tuple[int, int]], epochs: int | None = None) -> PromptStream:
    """``sources`` are pairs (number of rows, weight)."""
    sizes, weights = zip(*sources, strict=True)
    return PromptStream(sum(sizes), seed=0, weights=weights, sizes=sizes, epochs=epochs, curriculum=config)


def rate_of(row: int, random: Random) -> float:
    """Of every four rows one is always solved, one never, and two are solved now and then."""
    return (1.0, 0.0, random.choice((0.25, 0.5, 1.0)), 0.75)[row % 4]


def draw_and_observe(stream: PromptStream, count: int, random: Random) -> list[tuple[int, int, int]]:
    """Return (position, row, epoch) of up to ``count`` prompts, each of which ends before the next is drawn."""
    drawn: list[tuple[int, int, int]] = []
    while len(drawn) < count and (position := stream.draw()) is not None:
        row, epoch = stream.locate(position)
        stream.observe(position, rate_of(row, random))
        stream.curriculum.close_place(position)
        drawn.append((position, row, epoch))
    return drawn


def test_chances_are_worked_out_by_hand():
    learnability = CurriculumConfig(chance="learnability", min_chance=0.1)
    assert [chance(learnability, p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.1, 0.75, 1.0, 0.75, 0.1]
    failures = CurriculumConfig(chance="failures", min_chance=0.1)
    assert [chance(failures, p) for p in (0.0, 0.25, 0.5, 1.0)] == [1.0, 0.75, 0.5, 0.1]
    assert [chance(CurriculumConfig(), p) for p in (0.0, 1.0)] == [1.0, 1.0]


def test_a_solved_row_is_left_out_of_two_epochs_and_then_tried_again():
    stream = PromptStream(3, seed=0, shuffle=False, curriculum=ASIDE)
    rates = {0: 1.0, 1: 0.5, 2: 0.0}
    drawn: list[tuple[int, int]] = []
    for _ in range(8):
        position = stream.draw()
        assert position is not None
        drawn.append(stream.locate(position))
        # Row 2 is solved from its second group on.
        stream.observe(position, 0.5 if drawn.count((2, 3)) else rates[drawn[-1][0]])
    # Rows 0 and 2 rest in epochs 1 and 2. In epoch 3 row 2 has both answers, so it stays; row 0 rests again.
    assert drawn == [(0, 0), (1, 0), (2, 0), (1, 1), (1, 2), (0, 3), (1, 3), (2, 3)]
    assert (stream.cursor.aside[0], stream.epoch) == (4, 3)


def test_rows_are_thinned_at_their_chance():
    curriculum = Curriculum(CurriculumConfig(chance="learnability", min_chance=0.1), 1, seed=0)
    curriculum.replace({0: PassRate(0.25, 0)}, {})
    verdicts = [curriculum.verdict(0, epoch, 0, epoch) for epoch in range(4000)]
    # 3/4 of 4000 with a standard deviation of 27.
    assert abs(verdicts.count("sampled") - 3000) < 110
    assert set(verdicts) == {"sampled", "thinned"}


@examples(60, num_quick=15)
@given(CONFIGS, SOURCES, st.integers(0, 1000), st.sampled_from([None, 2, 4]))
def test_counts_add_up_and_shares_stay_exact(
    config: CurriculumConfig, sources: list[tuple[int, int]], seed: int, epochs: int | None
):
    stream = make_stream(config, sources, epochs)
    drawn = draw_and_observe(stream, 120, Random(seed))
    # No position is left out or drawn twice, and no row twice in an epoch.
    assert [position for position, _, _ in drawn] == list(range(len(drawn)))
    assert len({(row, epoch) for _, row, epoch in drawn}) == len(drawn)
    first_rows = [sum(size for size, _ in sources[:index]) for index in range(len(sources))]
    for index, (size, weight) in enumerate(sources):
        count = sum(first_rows[index] <= row < first_rows[index] + size for _, row, _ in drawn)
        share = Fraction(len(drawn) * weight, sum(w for _, w in sources))
        assert abs(count - share) < 1
    if epochs is not None and len(drawn) < 120:
        # Every source was passed over so often: each row was drawn or passed over in each of its epochs.
        assert stream.exhausted
        assert min(stream.row_epochs) >= epochs - 1
        assert len(drawn) + stream.num_passed >= epochs * stream.num_rows
    assert not stream.curriculum.places


@examples(40, num_quick=10)
@given(CONFIGS, SOURCES, st.integers(0, 1000), st.integers(0, 80))
def test_a_stream_restored_from_its_records_goes_on_in_the_same_order(
    config: CurriculumConfig, sources: list[tuple[int, int]], seed: int, before: int
):
    first, second = make_stream(config, sources), make_stream(config, sources)
    draw_and_observe(first, before, Random(seed))
    second.cursor = type(first.cursor)(
        first.cursor.position, [], first.cursor.aside.copy(), first.cursor.thinned.copy()
    )
    second.curriculum.replace(first.curriculum.rates(), first.curriculum.places)
    again = [draw_and_observe(stream, 60, Random(seed + 1)) for stream in (first, second)]
    assert again[0] == again[1]


def test_a_stream_whose_curriculum_is_switched_off_keeps_the_places_of_open_prompts():
    stream = PromptStream(2, seed=0, shuffle=False)
    stream.cursor.position, stream.cursor.aside[0] = 3, 1
    stream.curriculum.replace({}, {2: Place(3)})
    assert stream.locate(2) == (1, 1)
    assert stream.draw() == 3
    assert stream.locate(3) == (0, 2)


# The queue.


def make_state(num_rows: int, *, epochs: int | None = None) -> QueueState:
    stream = PromptStream(num_rows, seed=0, shuffle=False, epochs=epochs, curriculum=ASIDE)
    state = QueueState(settings(max_staleness=3), rows(num_rows), stream)
    learner_requests.attach(state, LINEAGE, "", 0, 0, 50, None, 0.0)
    announce(state, 0)
    return state


def test_filtered_groups_count_too_and_a_learner_that_is_killed_sees_the_same_prompts_again():
    state = make_state(4)
    first = leases(state, 4)
    for lease in first[:2]:
        assert put(state, group(lease, accuracies=(1.0, 1.0))) == "filtered"
    for lease in first[2:]:
        assert put(state, group(lease)) == "queued"
    snapshot = learner_requests.snapshot(state, LINEAGE, 0.0)
    second = leases(state, 4)
    assert [lease.prompt.row for lease in second] == [2, 3, 2, 3]
    assert [lease.prompt.epoch for lease in second] == [1, 1, 2, 2]
    assert [lease.prompt.position for lease in second] == [4, 5, 6, 7]
    put(state, group(second[0], accuracies=(1.0, 1.0)))
    metrics = state.stats().metrics
    assert {key: value for key, value in metrics.items() if key.startswith("curriculum/")} == {
        "curriculum/passed_aside": 4,
        "curriculum/passed_thinned": 0,
        "curriculum/aside": 0.75,
        "curriculum/known": 1.0,
        "curriculum/pass_rate": (1.0 + 1.0 + 1.0 + 0.5) / 4,
    }
    learner_requests.attach(state, "line-b", LINEAGE, 0, 0, 50, snapshot, 0.0)
    announce(state, 0, "line-b")
    assert state.stream.curriculum.rates()[2] == PassRate(0.5, 0)
    again = leases(state, 4)
    assert [lease.prompt for lease in again] == [lease.prompt for lease in second]
    state.check()


def test_the_run_ends_if_all_rows_of_the_last_epochs_rest():
    state = make_state(2, epochs=3)
    for lease in leases(state, 2):
        assert put(state, group(lease, accuracies=(1.0, 1.0))) == "filtered"
    revision = state.revision
    assert leases(state, 1) == []
    assert state.stream.exhausted
    assert state.revision > revision
    assert leases(state, 1) == []
    assert state.cursor.aside[0] == 4


# Sources that take turns: exact shares at every position, and what an epoch is.


WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(WEIGHTS)
def test_after_any_number_of_prompts_every_source_is_within_one_of_its_share(weights: list[int]):
    mixture = Mixture([1] * len(weights), weights)
    counts = [0] * len(weights)
    for position in range(2 * sum(weights)):
        source, earlier = mixture.locate(position)
        assert earlier == counts[source] == mixture.count(source, position)
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction((position + 1) * weight, sum(weights))) < 1


def test_three_to_one_is_worked_out_by_hand():
    # Shares 3/4 and 1/4. At the second prompt both are behind by 1/2, and the first goes first. At the third the
    # first is behind by 9/4 - 2 = 1/4, too little to be due.
    mixture = Mixture([10, 10], [3, 1])
    assert [mixture.locate(p) for p in range(8)] == [
        (0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (0, 4), (1, 1), (0, 5),
    ]  # fmt: skip


@given(WEIGHTS, st.data())
def test_an_epoch_ends_with_the_last_source_that_has_been_passed_over(weights: list[int], data: st.DataObject):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(weights), max_size=len(weights)))
    mixture, epochs = Mixture(sizes, weights), data.draw(st.integers(1, 3))
    end = mixture.end_of(epochs)
    passed = [[mixture.count(s, p) >= epochs * size for s, size in enumerate(sizes)] for p in (end - 1, end)]
    assert not all(passed[0])
    assert all(passed[1])


def test_the_stream_ends_when_every_source_has_been_passed_over():
    # Weights 3 and 1, sizes 3 and 2: the second prompt of the second source is at position 6, so seven prompts.
    stream = PromptStream(5, seed=0, shuffle=False, epochs=1, weights=[3, 1], sizes=[3, 2])
    drawn = [position for _ in range(9) if (position := stream.draw()) is not None]
    assert [stream.locate(p) for p in drawn] == [(0, 0), (1, 0), (3, 0), (2, 0), (0, 1), (1, 1), (4, 0)]
    assert stream.exhausted
    assert stream.epoch == 0


# The stream of one source.


def draw_all(stream: PromptStream, count: int) -> list[int]:
    return [p for _ in range(count) if (p := stream.draw()) is not None]


def test_every_epoch_is_an_order_of_all_rows_and_no_two_are_alike():
    stream = PromptStream(50, seed=3)
    epochs = [[stream.locate(epoch * 50 + i)[0] for i in range(50)] for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_positions_that_come_back_are_drawn_first_in_stream_order():
    stream = PromptStream(10, seed=0)
    assert draw_all(stream, 5) == [0, 1, 2, 3, 4]
    for position in (3, 1):
        stream.requeue(position)
    assert draw_all(stream, 3) == [1, 3, 5]


def test_without_shuffle_rows_come_in_file_order():
    stream = PromptStream(3, seed=0, shuffle=False)
    assert [stream.locate(i) for i in range(4)] == [(0, 0), (1, 0), (2, 0), (0, 1)]
