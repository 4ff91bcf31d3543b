"""Notes about groups that train nothing, event by event. By default: 4 groups a step, 2 answers a group."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec import structs

from async_rl.queue.core import diagnosis, persistence
from async_rl.queue.core.state import QueueState, decode_state, encode_state
from async_rl.queue.messages import NotReady
from async_rl.records import Turn, cut_limit
from tests.queue.builders import ack, all_trained, dropped, group, leases, make_state, positions, put, take

pytestmark = pytest.mark.usefixtures("fixed_admission")

WRONG, RIGHT, BOTH = (0.0, 0.0), (1.0, 1.0), (1.0, 0.0)


def a_state(**changes: Any) -> QueueState:
    usual: dict[str, Any] = {"groups_per_step": 4, "max_staleness": 9, "num_rows": 1000}
    return make_state(**usual | changes)


def arrive(state: QueueState, count: int, accuracies: tuple[float, ...], version: int = 0, **facts: Any) -> None:
    """``count`` groups are leased, and arrive with these accuracies."""
    for _ in range(count):
        (lease,) = leases(state, 1, version)
        made = group(lease, version, accuracies=accuracies, **facts)
        put(state, structs.replace(made, example="so it\n is\x1b 42"))


def the_note(state: QueueState) -> str:
    (text,) = diagnosis.notes(state).values()
    return text


def test_two_batches_of_wrong_answers_make_a_note_and_one_group_less_makes_none():
    state = a_state()
    arrive(state, 7, WRONG)
    assert diagnosis.notes(state) == {}
    arrive(state, 1, WRONG)
    assert the_note(state) == (
        "all 8 groups since the run began have only wrong answers. Read an answer: if it is right, the reward misreads "
        "it (reward.type); if it answers another question, the chat template is wrong (async-rl doctor shows a "
        "rendered prompt); if its form is wrong, say the form in the prompt, or train it first (async-rl sft); else "
        'take easier prompts (data.train). One answer ends: "so it is 42"'
    )
    assert (
        persistence.status(state, 0.0)["group_notes"]
        == persistence.ledger_file(state)["group_notes"]
        == diagnosis.notes(state)
    )
    # The streak goes on: still one note, with the newest count.
    arrive(state, 5, WRONG)
    assert the_note(state).startswith("all 13 groups since the run began")


def test_a_note_says_which_limit_cut_how_many_answers():
    # Each group has two answers of 8 tokens, and sampling.max_new_tokens is 8.
    state = a_state()
    arrive(state, 6, WRONG, tokens=8, finish_reason="length")
    arrive(state, 2, WRONG)
    assert the_note(state).startswith(
        "all 8 groups since the run began have only wrong answers; 75% were cut at sampling.max_new_tokens = 8. Raise "
        "sampling.max_new_tokens, or let the prompt ask for shorter answers; if"
    )


def test_answers_that_the_limit_of_a_turn_cut_are_not_blamed_on_the_limit_of_the_rollout():
    state = a_state(max_turn_tokens=2)
    for _ in range(8):
        (lease,) = leases(state, 1)
        made = group(lease, accuracies=WRONG, finish_reason="length")  # three tokens: turns of one and two
        turns = (Turn(1, 0.0, 0.0), Turn(2, 0.0, 0.0))
        put(state, structs.replace(made, rollouts=tuple(structs.replace(r, turns=turns) for r in made.rollouts)))
    assert the_note(state) == (
        "all 8 groups since the run began have only wrong answers; 100% were cut at environment.max_turn_tokens = 2. "
        "Raise environment.max_turn_tokens, or let the prompt ask for shorter answers."
    )


@pytest.mark.parametrize(
    ("num_sampled", "last_turn", "limit"),
    [(8, 8, "max_new_tokens"), (8, 3, "max_new_tokens"), (7, 3, "max_turn_tokens"), (7, 2, "context")],
)
def test_the_limit_that_cut_an_answer_is_told_by_its_lengths(num_sampled: int, last_turn: int, limit: str):
    assert cut_limit(num_sampled, last_turn, max_new_tokens=8, max_turn_tokens=3) == limit


def test_right_answers_and_mixed_groups_have_notes_of_their_own():
    state = a_state()
    arrive(state, 8, RIGHT)
    assert the_note(state).startswith("all 8 groups since the run began have only right answers. They teach")
    state = a_state()
    arrive(state, 5, RIGHT)
    arrive(state, 3, WRONG)
    assert the_note(state).startswith(
        "none of the 8 groups since the run began can train: 5 with only right answers, 3 with only wrong answers. "
        "Only differences within a group train: raise sampling.group_size"
    )


def test_answers_that_are_all_cut_and_left_out_of_the_loss_make_a_note():
    state = a_state(mask_truncated=True)
    arrive(state, 8, BOTH, tokens=8, finish_reason="length")
    assert the_note(state).startswith(
        "all 8 groups since the run began have only answers that were cut; 100% were cut at sampling.max_new_tokens = "
        "8. Raise sampling.max_new_tokens"
    )
    assert "set loss.mask_truncated = false" in the_note(state)
    kept = a_state()
    arrive(kept, 8, BOTH, tokens=8, finish_reason="length")
    assert diagnosis.notes(kept) == {}


def test_without_a_filter_only_equal_rewards_train_nothing():
    state = a_state(filter_range=None)
    arrive(state, 8, WRONG)
    assert the_note(state).startswith("all 8 groups since the run began have only wrong answers")
    taught = a_state(filter_range=None, teacher_bytes=12)
    arrive(taught, 8, WRONG)
    assert diagnosis.notes(taught) == {}
    shaped = a_state(filter_range=None)
    for _ in range(8):
        (lease,) = leases(shaped, 1)
        made = group(lease, accuracies=WRONG)
        first = structs.replace(made.rollouts[0], reward_parts={"length": 0.5})
        put(shaped, structs.replace(made, rollouts=(first, made.rollouts[1])))
    assert diagnosis.notes(shaped) == {}


def test_a_later_streak_must_be_longer_than_chance_makes_it():
    # 64 groups can train and 64 can't. The probability of n further ones that can't is the product of (65 + i) / (130 +
    # i) for i below n: 1.4e-6 for 22, and 7.8e-7 for 23.
    state = a_state(max_staleness=999, max_filtered=10_000)
    for _ in range(64):
        arrive(state, 1, WRONG)
        arrive(state, 1, BOTH)
    arrive(state, 22, WRONG)
    assert diagnosis.notes(state) == {}
    arrive(state, 1, WRONG)
    assert the_note(state).startswith("all of the last 23 groups have only wrong answers")


def test_eight_batches_in_a_row_make_a_note_whatever_came_before():
    state = a_state(groups_per_step=16, max_staleness=99, max_filtered=10_000)
    arrive(state, 1, BOTH)
    arrive(state, 127, RIGHT)
    assert diagnosis.notes(state) == {}
    arrive(state, 1, RIGHT)
    assert the_note(state).startswith("all of the last 128 groups have only right answers")


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_runs_that_learn_draw_no_note(share: float):
    """``share`` of 400 groups can train; three seeds."""
    for seed in range(3):
        state, random = (
            a_state(max_staleness=10_000, max_bytes=1 << 30, max_filtered=10_000, num_steps=2000),
            Random(seed),
        )
        arrive(state, 1, BOTH)
        for _ in range(400):
            arrive(state, 1, BOTH if random.random() < share else WRONG if random.random() < 0.5 else RIGHT)
        assert diagnosis.notes(state) == {}, seed


def test_a_run_whose_first_answers_are_nearly_all_wrong_says_so_in_spite_of_lucky_ones():
    # 12 answers a group, and 4 groups a step. One right answer of 96, in the third group.
    wrong, lucky = (0.0,) * 12, (1.0,) + (0.0,) * 11
    state = a_state(group_size=12)
    arrive(state, 2, wrong)
    arrive(state, 1, lucky)
    arrive(state, 4, wrong, tokens=8, finish_reason="length")
    assert diagnosis.notes(state) == {}
    arrive(state, 1, wrong)
    assert the_note(state) == (
        "7 of the first 8 groups have only wrong answers, and 1% of all answers are right; 57% were cut at "
        "sampling.max_new_tokens = 8. Raise sampling.max_new_tokens, or let the prompt ask for shorter answers; if the "
        "answers are complete and go on, the model does not end its turns (async-rl doctor lists the tokens that end "
        'one). One answer ends: "so it is 42"'
    )


@pytest.mark.parametrize(("num_right", "is_noted"), [(4, True), (5, False)])
def test_at_most_one_right_answer_in_twenty_is_few(num_right: int, is_noted: bool):
    # 8 groups of 10 answers, of which two groups have right ones: 4 or 5 of 80.
    state = a_state(group_size=10)
    for right in (2, num_right - 2):
        arrive(state, 3, (0.0,) * 10)
        arrive(state, 1, (1.0,) * right + (0.0,) * (10 - right))
    assert bool(diagnosis.notes(state)) == is_noted


def test_later_answers_that_are_nearly_all_wrong_are_no_matter_of_the_beginning():
    wrong, lucky = (0.0,) * 10, (1.0,) + (0.0,) * 9
    state = a_state(group_size=10)
    arrive(state, 12, lucky)  # three batches
    for _ in range(3):
        arrive(state, 4, wrong)
        arrive(state, 1, lucky)
    assert diagnosis.notes(state) == {}


def test_notes_survive_the_queue_and_go_back_with_a_snapshot():
    state = a_state()
    arrive(state, 8, WRONG)
    saved = decode_state(encode_state(state))
    assert saved.signal == state.signal
    assert saved.signal.notes == diagnosis.notes(state)


def test_prompts_that_are_excluded_as_too_slow_make_a_note_with_the_setting():
    # Under "mask" a group whose newest token is too old is late; after max_attempts = 1 its prompt is excluded.
    state = make_state(on_stale="mask", max_staleness=1, max_attempts=1)
    slow, *others = leases(state, 4)
    for lease in others:
        put(state, group(lease))
    assert len(positions(take(state))) == 2
    ack(state)
    (fresh,) = leases(state, 1, version=1)
    put(state, group(fresh, 1))
    assert len(positions(take(state))) == 2
    ack(state)
    assert put(state, group(slow)) == "stale"
    assert dropped(state) == {"too_slow": 1}
    assert the_note(state) == (
        "1 prompt was excluded as too slow: 1 times (queue.max_attempts) all tokens of the answers were older than "
        "queue.max_staleness = 1 allows when they arrived. What takes long, such as slow tools and long answers, is "
        'missing from the training. Raise queue.max_staleness, or set queue.on_stale = "wait", with which steps wait '
        "for them"
    )


def test_data_of_which_nothing_could_be_trained_says_what_became_of_it():
    state = make_state(num_rows=4, epochs=1, max_attempts=1)
    arrive(state, 1, WRONG)
    arrive(state, 1, RIGHT)
    arrive(state, 1, WRONG)
    leases(state, 1)
    assert isinstance(answer := take(state, now=11.0), NotReady)
    assert answer.exhausted
    assert answer.reason == (
        "the data has ended (data.epochs); prompts: 3 filtered (2 with only wrong answers, 1 with only right ones), 1 "
        "failed queue.max_attempts times. none of the 3 groups since the run began can train: 1 with only right "
        "answers, 2 with only wrong answers. Only differences within a group train: raise sampling.group_size, or take "
        'prompts that the model answers right now and then (data.train). One answer ends: "so it is 42". The '
        "generators' logs say why prompts failed"
    )


def test_data_that_was_trained_says_so_in_short():
    state = make_state(num_rows=3, epochs=1)
    arrive(state, 2, BOTH)
    take(state)
    ack(state, all_trained(2))
    arrive(state, 1, WRONG, version=1)
    assert isinstance(answer := take(state), NotReady)
    assert answer.reason == (
        "the data has ended (data.epochs); prompts: 2 trained, 1 filtered (1 with only wrong answers, 0 with only "
        "right ones)"
    )


def test_answers_that_the_reward_does_not_judge_are_not_called_wrong():
    state = a_state()
    for _ in range(8):
        (lease,) = leases(state, 1)
        assert put(state, group(lease, accuracies=WRONG, finish_reason="unjudged")) == "filtered"
    assert the_note(state) == (
        "all 8 groups since the run began have only answers that the reward does not judge. The reward returned None "
        "for each of them: let one of its functions judge these rows (reward.type, extra)."
    )
