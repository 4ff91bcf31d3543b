"""Budgets and turns of the questions that wait for a scorer, by hand-worked numbers."""

from __future__ import annotations

import pytest

from async_rl.scorer import questions
from async_rl.scorer.questions import PeerBudget, Question, WaitingQuestions


@pytest.fixture(autouse=True)
def _small_budgets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(questions, "MAX_PEER_QUESTIONS", 8)
    monkeypatch.setattr(questions, "MAX_PEER_BYTES", 100)
    monkeypatch.setattr(questions, "MAX_KEY_BYTES", 200)
    monkeypatch.setattr(questions, "MAX_TOTAL_BYTES", 400)
    monkeypatch.setattr(questions, "MIN_BATCH_BYTES", 40)
    monkeypatch.setattr(questions, "MAX_BATCH_ANSWER_BYTES", 60)


def question(budget: PeerBudget, number: int = 0, *, size: int = 10, answer: int = 0) -> Question:
    return Question(b"", number, budget, size, answer)


def test_a_connection_has_a_number_and_bytes_and_gets_them_back_with_its_answers():
    waiting, peer = WaitingQuestions(), PeerBudget(b"a", "key")
    assert all(not waiting.admit(question(peer, size=1)) for _ in range(8))
    assert "expected at most 8 questions of one connection" in waiting.admit(question(peer, size=1))
    for done in waiting.take(0):
        waiting.release(done)
    assert (peer.num_questions, peer.held_bytes, waiting.held_bytes) == (0, 0, 0)
    # 60 of the question and of its answer are held until it has left, also while it is computed.
    assert not waiting.admit(question(peer, size=20, answer=40))
    (computed,) = waiting.take(0)
    assert "at most 100 bytes of one connection, got 101" in waiting.admit(question(peer, size=1, answer=40))
    assert not waiting.admit(question(peer, size=1, answer=39))
    waiting.release(computed)
    assert waiting.held_bytes == 40
    # One that alone exceeds the bytes is admitted alone.
    large = PeerBudget(b"b", "other")
    assert not waiting.admit(question(large, size=10, answer=140))
    assert waiting.admit(question(large, size=1))


def test_one_key_leaves_half_of_the_room_to_others():
    waiting = WaitingQuestions()
    for name in (b"a", b"b"):
        assert not waiting.admit(question(PeerBudget(name, "many"), size=100))
    assert "those with this key 200 of 200" in waiting.admit(question(PeerBudget(b"c", "many"), size=1))
    for name in (b"d", b"e"):
        assert not waiting.admit(question(PeerBudget(name, "other"), size=100))
    assert "all clients hold 400 of 400 bytes" in waiting.admit(question(PeerBudget(b"f", "third"), size=1))


def test_turns_go_round_the_keys_and_their_connections():
    waiting = WaitingQuestions()
    greedy = [PeerBudget(name, "greedy") for name in (b"a", b"b")]
    single = PeerBudget(b"c", "single")
    for number in range(4):
        assert not waiting.admit(question(greedy[0], number))
    assert not waiting.admit(question(greedy[1], 9))
    for number in range(2):
        assert not waiting.admit(question(single, number))
    batch = waiting.take(0)  # four of 10 bytes are 40
    assert [(one.budget.peer, one.request_id) for one in batch] == [(b"a", 0), (b"c", 0), (b"b", 9), (b"c", 1)]
    assert [(one.budget.peer, one.request_id) for one in waiting.take(0)] == [(b"a", 1), (b"a", 2), (b"a", 3)]
    assert waiting.take(0) == []


def test_a_batch_is_limited_by_the_bytes_of_its_answers_and_has_at_least_one_question():
    waiting = WaitingQuestions()
    for name in (b"a", b"b", b"c"):
        assert not waiting.admit(question(PeerBudget(name, name.decode()), size=1, answer=30))
    assert [len(waiting.take(0)) for _ in range(2)] == [2, 1]
    assert not waiting.admit(question(PeerBudget(b"d", "d"), size=100, answer=90))
    assert len(waiting.take(0)) == 1


def test_batches_grow_until_they_take_two_seconds_and_shrink_when_they_take_longer():
    waiting = WaitingQuestions()

    def num_taken() -> int:
        peers = [PeerBudget(bytes([number]), str(number)) for number in range(16)]
        assert not any(waiting.admit(question(peer)) for peer in peers)
        batch = waiting.take(0)
        while rest := waiting.take(0):
            for one in rest:
                waiting.release(one)
        for one in batch:
            waiting.release(one)
        return len(batch)

    budget = PeerBudget(b"a", "a")
    assert num_taken() == 4
    # 40 bytes in 1 s are 80 in 2 s; 40 bytes in 40 s are less than the least batch.
    waiting.note_batch([question(budget, size=40)], 1.0)
    assert num_taken() == 8
    waiting.note_batch([question(budget, size=40)], 40.0)
    assert num_taken() == 4


def test_a_connection_that_ended_gives_its_waiting_questions_back_and_the_computed_one_later():
    waiting, gone, other = WaitingQuestions(), PeerBudget(b"a", "key"), PeerBudget(b"b", "key")
    assert not waiting.admit(question(gone, size=40))
    (computed,) = waiting.take(0)
    assert not waiting.admit(question(gone, size=30))
    assert not waiting.admit(question(other, size=5))
    waiting.forget(gone)
    assert waiting.held_bytes == 45
    waiting.release(computed)
    assert waiting.held_bytes == 5
    assert [one.budget for one in waiting.take(0)] == [other]
