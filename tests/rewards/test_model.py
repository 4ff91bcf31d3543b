"""The reward of a reward model is its score, and its calls wait for the scorer."""

import threading
from contextlib import closing

import numpy as np
import pytest

from async_rl.errors import RewardError
from async_rl.rewards.conformance import Example, check_reward
from async_rl.rewards.model import ModelReward
from async_rl.rewards.records import RewardInput
from async_rl.rewards.registry import RewardSum
from async_rl.scorer.client.messages import Received
from async_rl.scorer.client.scorer_client import ScorerClient
from tests.ports import free_address
from tests.scorer.client.scripted import RunningScorer, ScriptedModel

AGENT = {"role": "user", "content": "2+3?"}
PROMPT = ({"role": "user", "content": "1+1"},)


def item(text: str, *transcript: dict[str, str]) -> RewardInput:
    return RewardInput(text, {}, 3, 9, "stop", PROMPT, transcript=transcript)


def test_the_score_times_the_scale_is_the_reward_and_its_logistic_function_the_accuracy():
    asked: list[Received] = []

    def score(received: Received) -> tuple[np.ndarray, ...]:
        asked.append(received)
        return (np.array([{"good": 0.0, "bad": -np.log(3.0)}[received.message.text]], np.float32),)

    address = free_address()
    with RunningScorer(address, ScriptedModel(score)):
        reward = ModelReward(ScorerClient("judge", address), scale=2.0)
        with closing(RewardSum(reward, scale=2.0, overlong=None)) as whole:
            good, bad = whole.score_group([item("good"), item("bad", AGENT, {"role": "assistant", "content": "bad"})])
    # The logistic function of 0 is 1/2, that of -log 3 is 1 / (1 + 3).
    assert (good.parts, good.accuracy) == ({"model": 0.0}, 0.5)
    assert bad.parts["model"] == pytest.approx(-2 * np.log(3.0))
    assert bad.accuracy == pytest.approx(0.25)
    # It is asked about the prompt, or about the conversation of an agent before its last answer.
    assert [one.message.messages for one in asked] == [[dict(PROMPT[0])], [AGENT]]


@pytest.mark.parametrize("arrays", [(), (np.ones((), np.float32),), (np.ones(2, np.float32),), (np.ones(1),) * 2])
def test_an_answer_of_another_form_is_an_error_and_no_reward(arrays: tuple[np.ndarray, ...]):
    address = free_address()
    reward = ModelReward(ScorerClient("judge", address), scale=1.0)
    one = pytest.raises(RewardError, match="expected one score from the reward model")
    with RunningScorer(address, ScriptedModel(lambda _: arrays)), closing(reward), one:
        reward(item("a"))


def test_the_reward_conforms():
    address = free_address()
    reward = ModelReward(ScorerClient("judge", address), scale=1.0)
    with RunningScorer(address, ScriptedModel()), closing(reward):
        assert check_reward(reward, Example({})) == []


def test_waiting_calls_are_counted_and_can_be_interrupted():
    reward = RewardSum(ModelReward(ScorerClient("judge", free_address()), scale=1.0), scale=1.0, overlong=None)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            reward(item("a"))
        except RewardError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while not reward.num_waiting:
        caller.join(0.005)
    assert errors == []
    reward.interrupt()
    caller.join()
    assert len(errors) == 1
    reward.close()
