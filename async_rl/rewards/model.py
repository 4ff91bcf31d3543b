"""The reward of a reward model: the score that a scorer's model gives the conversation with its last answer.

``registry`` builds it. The scorer (``async-rl scorer``) renders prompt and answer with its own tokenizer. While the
scorer is away, calls wait, so grading pauses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from async_rl.config.config import Config
from async_rl.errors import RewardError
from async_rl.net.keys import ClientKeys
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.served import ServedReward
from async_rl.rewards.transcripts import conversation_of
from async_rl.scorer.client.scorer_client import ScorerClient


class ModelReward(ServedReward):
    """Asks the scorer of ``reward.model``. The part ``model`` is the score times ``scale``.

    The accuracy is the logistic function of the score: the probability that the answer beats one of score 0 under the
    model of Bradley and Terry.
    """

    def __init__(self, client: ScorerClient, *, scale: float) -> None:
        super().__init__(client)
        self._client, self._scale = client, scale

    def score_group(self, items: Sequence[RewardInput]) -> list[RewardOutput]:
        futures = [self._client.score(conversation_of(item)[:-1], item.text) for item in items]
        return [self._output(_score(future.result())) for future in futures]

    def _output(self, score: float) -> RewardOutput:
        if not math.isfinite(score):
            raise RewardError(f"expected a finite score from the reward model, got {score}; check the model's weights")
        accuracy = 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
        return RewardOutput({"model": self._scale * score}, accuracy, has_answer=True)


def _score(arrays: tuple[np.ndarray, ...]) -> float:
    if [array.shape for array in arrays] != [(1,)]:
        raise RewardError(
            f"expected one score from the reward model, got arrays of the shapes {[list(a.shape) for a in arrays]}; "
            f"install the same version of async-rl on every machine"
        )
    return float(arrays[0][0])


def model_reward(config: Config, scale: float, keys: ClientKeys | None = None) -> ModelReward:
    """Build the reward of ``reward.model``, which the config's validation has checked. It connects in the
    background.
    """
    assert config.reward.model is not None
    scorer = config.scorer[config.reward.model]
    client = ScorerClient(config.reward.model, scorer.address, keys, digest=scorer.digest)
    return ModelReward(client, scale=scale)
