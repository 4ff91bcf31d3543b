"""Questions wait for their scorer, outlive its death, and are answered by the run's model only."""

from contextlib import closing
from threading import Thread

import numpy as np
import pytest

from async_rl.errors import RewardError
from async_rl.net import link
from async_rl.scorer.client import scorer_client as client_module
from async_rl.scorer.client.messages import Received
from async_rl.scorer.client.scorer_client import ScorerClient
from tests.end_to_end.harness import wait_until
from tests.ports import free_address
from tests.scorer.client.scripted import Dies, RunningScorer, ScriptedModel, score_of, scoring


def test_a_question_waits_for_its_scorer_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "LOST_AFTER_S", 0.01)
    monkeypatch.setattr(client_module, "_LOOK_S", 0.02)
    address = free_address()
    with closing(ScorerClient("judge", address)) as client:
        future = client.score([], "four")
        wait_until("its trouble", lambda: "nothing listens" in client.trouble)
        assert "the scorer judge" in client.trouble
        assert client.num_waiting == 1
        with RunningScorer(address, ScriptedModel()):
            assert score_of(future) == 4.0
            wait_until("an end of it", lambda: client.num_waiting == 0 and not client.trouble)


def test_a_question_that_a_scorer_took_with_it_is_asked_again():
    def die(_: Received) -> tuple[np.ndarray, ...]:
        raise Dies

    address = free_address()
    with closing(ScorerClient("judge", address)) as client:
        first = RunningScorer(address, ScriptedModel(die))
        futures = [client.score([], "a" * length) for length in (1, 2, 3)]
        first.join()
        assert not any(future.done() for future in futures)
        with RunningScorer(address, ScriptedModel()):
            assert [score_of(future) for future in futures] == [1.0, 2.0, 3.0]


def test_a_scorer_with_another_model_counts_as_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "_ASK_AGAIN_S", 0.05)
    address = free_address()
    with closing(ScorerClient("judge", address)) as client:
        with RunningScorer(address, ScriptedModel(digest="first")):
            assert score_of(client.score([], "one")) == 3.0
        with RunningScorer(address, ScriptedModel(digest="second")):
            future = client.score([], "four")
            wait_until("its trouble", lambda: "expected the digest first, got second" in client.trouble)
        assert not future.done()
        with RunningScorer(address, ScriptedModel(digest="first")):
            assert score_of(future) == 4.0


@pytest.mark.parametrize("kind", ["digest", "vocabulary"])
def test_the_digests_that_the_config_or_the_model_demand_are_checked_from_the_start(kind: str):
    address = free_address()
    digest, vocabulary = ("other", None) if kind == "digest" else (None, "other")
    client = ScorerClient("judge", address, digest=digest, vocabulary=vocabulary)
    with closing(client), RunningScorer(address, ScriptedModel()):
        future = client.score([], "four")
        wait_until("its trouble", lambda: f"another {'model' if digest else 'vocabulary'}" in client.trouble)
        assert not future.done()


def test_what_a_scorer_cant_answer_fails_alone():
    def score(received: Received) -> tuple[np.ndarray, ...] | str:
        return "too long" if len(received.message.text) > 3 else (np.ones(1, np.float32),)

    with scoring(score) as (_, client, _):
        short, long = client.score([], "one"), client.score([], "three")
        assert score_of(short) == 1.0
        with pytest.raises(RewardError, match="the scorer judge: too long"):
            score_of(long)


def test_a_client_that_closes_fails_what_waits_and_what_comes_later():
    client = ScorerClient("judge", free_address())
    before = client.score([], "one")
    client.close()
    client.close()
    for future in (before, client.score([], "two")):
        with pytest.raises(RewardError, match="a generator that ends"):
            score_of(future)


def test_a_question_that_is_asked_while_the_client_closes_fails_too(monkeypatch: pytest.MonkeyPatch):
    client = ScorerClient("judge", free_address())
    closer = Thread(target=client.close)

    def close_meanwhile(*_: int) -> str:
        closer.start()
        closer.join(0.5)  # in vain: it waits for the question
        return ""

    monkeypatch.setattr(client_module, "why_too_large", close_meanwhile)
    future = client.score([], "one")
    closer.join()
    with pytest.raises(RewardError, match="a generator that ends"):
        future.result(5.0)
