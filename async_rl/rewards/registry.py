"""Builds the reward that the config's section ``[reward]`` describes, for generators, evaluations and checks.

The result is a ``RewardSum``. It adds the main reward, further rewards with weights, and the penalty for over-long
answers. The penalty is DAPO's equation 13 (arXiv:2503.14476) or Colossal-RL's variant of it. In their formulas L is
``max_new_tokens`` and C is ``cache_length``. ``REWARDS`` is the table of built-in rewards. A name such as
``module:function`` or ``file.py:function`` is a function of the user. See docs/rewards.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from async_rl.config.config import Config
from async_rl.config.reward import REWARD_TYPES, reward_type
from async_rl.config.section import look_up
from async_rl.errors import RewardError
from async_rl.net.keys import ClientKeys
from async_rl.process.user_code import digest_of, is_code_name, load_code
from async_rl.registry import load, our_offers
from async_rl.rewards.answers import AnswerReward, XmlFormatReward, same_mathematics, same_text
from async_rl.rewards.extraction import Extraction, extract_answer_tag, extract_boxed, extract_xml_answer
from async_rl.rewards.functions import FunctionReward
from async_rl.rewards.judge import judge_reward
from async_rl.rewards.math.verifier import MathVerifier
from async_rl.rewards.model import model_reward
from async_rl.rewards.records import (
    CountingReward,
    GroupReward,
    Reward,
    RewardInput,
    RewardOutput,
    WaitingReward,
    score_group,
)

Builder = Callable[[Config, float], Reward]
"""A function of the config and a scale. It builds a reward whose parts are multiplied by the scale."""


def build_reward(
    config: Config, *, code_digests: Mapping[str, str] | None = None, keys: ClientKeys | None = None,
    has_scorers: bool = True,
) -> RewardSum:  # fmt: skip
    """Build and return the reward that ``config`` describes. The caller must close the reward.

    A sandbox is started at once. The reward's other processes start when they are needed first.

    Args:
        code_digests: name -> digest of the user's code on the learner. This machine's code must have the same digests.
            If None, digests are not compared.
        keys: this machine's keys for a scorer that has keys.
        has_scorers: whether scorers and judges may be asked. If not, as before a run, their rewards are 0, because
            they would be waited for, and a judge costs.

    Raises:
        ConfigError: the user's code is not allowed on this machine, is missing, differs from the learner's, or is not a
            reward function.
        SandboxError: the reward runs programs, and the sandbox or the verifier does not work.
    """

    def named(name: str, scale: float) -> Reward:
        if not has_scorers and (reward_type(name).asks_scorer or reward_type(name).asks_judge):
            return NoReward()
        if reward_type(name).asks_scorer:
            return model_reward(config, scale, keys)
        return _named(name, config, scale, code_digests)

    main = named(config.reward.type, config.reward.scale)
    extras = [Extra(name.rpartition(":")[2], named(name, 1.0), weight) for name, weight in config.reward.extra.items()]
    # The first of this name: a reward may be the main one and an extra one.
    right_by, names = config.reward.right_by, (config.reward.type, *config.reward.extra)
    built = zip(names, (main, *(extra.reward for extra in extras)), strict=True)
    judge = next((reward for name, reward in built if name == right_by), None) or named(right_by, 1.0)
    return RewardSum(main, extras, scale=config.reward.scale, overlong=overlong_penalty(config), judge=judge)


def _named(name: str, config: Config, scale: float, code_digests: Mapping[str, str] | None) -> Reward:
    if not is_code_name(name):
        offer = our_offers("async_rl.rewards").get(name)
        build: Builder = look_up(REWARDS, name, "reward.type") if offer is None else load(offer)
        return build(config, scale)
    function = load_code(name, allowed=config.generator.allow_code, digest=digest_of(name, code_digests))
    return FunctionReward(
        name,
        function,
        scale=scale,
        time_limit_s=config.reward.time_limit_s,
        columns={column: key for key, column in config.data.columns.items()},
    )


def _answer_reward(name: str, extract: Callable[[str], Extraction]) -> Builder:
    """Return the builder of the reward ``name``, an ``AnswerReward`` that finds answers with ``extract``."""

    def build(config: Config, scale: float) -> AnswerReward:
        is_mathematics = REWARD_TYPES[name].compares_mathematics and config.reward.equality == "math"
        verifier = MathVerifier() if is_mathematics else None
        return AnswerReward(
            extract,
            same_text if verifier is None else same_mathematics(verifier, config.reward.time_limit_s),
            scale=scale,
            require_format=config.reward.require_format,
            format_reward=config.reward.format,
            verifier=verifier,
        )

    return build


REWARDS: Mapping[str, Builder] = {
    "boxed": _answer_reward("boxed", extract_boxed),
    "think_answer_tags": _answer_reward("think_answer_tags", extract_answer_tag),
    "exact": _answer_reward("exact", extract_xml_answer),
    "xml_format": lambda config, scale: XmlFormatReward(scale=scale),
    "model": model_reward,
    "judge": judge_reward,
    "none": lambda config, scale: NoReward(),
}
"""The builder of each built-in reward, by name. ``config.reward.REWARD_TYPES`` has these names, and those for which an
extension offers a builder (``async_rl.rewards``)."""


OverlongPenalty = Callable[[RewardInput, float, bool], float]
"""A function of a rollout, the reward that the rollout earned, and whether the rollout has an answer. It returns the
penalty, which is at most 0. Reward and penalty are shares of ``reward.scale``."""


class Extra(NamedTuple):
    """A reward that is added to the main reward.

    The sum of its parts, times ``weight``, becomes one part called ``name``, or is added to the part of that name. Its
    accuracy is ignored.
    """

    name: str
    reward: Reward
    weight: float


class NoReward:
    """Gives every answer reward 0 and accuracy 0, for runs that learn from a teacher alone."""

    def __call__(self, item: RewardInput) -> RewardOutput:
        return RewardOutput({}, 0.0)

    def close(self) -> None: ...


class RewardSum:
    """The run's whole reward: the main reward, further rewards, and the penalty for over-long answers.

    Its output has the parts of ``main``, one part for each of ``extras``, and the part ``overlong``, which is the
    penalty times ``scale``. Without a penalty there is no part ``overlong``. The accuracy and the extracted answer are
    those of ``judge``, which is ``main`` if it is None, and otherwise may be one of ``extras`` or a reward that has no
    part. Spans of ``extras`` count with their weight. A reward that does not judge an answer has no part in its output;
    if that is ``judge``, the accuracy is the mean of those that do. If none does, nor does the sum.
    """

    def __init__(
        self,
        main: Reward,
        extras: Sequence[Extra] = (),
        *,
        scale: float,
        overlong: OverlongPenalty | None,
        judge: Reward | None = None,
    ) -> None:
        self._extras = tuple(extras)
        self._rewards = (main, *(extra.reward for extra in extras))
        if judge is not None and all(one is not judge for one in self._rewards):
            self._rewards += (judge,)
        self._judge = next(i for i, one in enumerate(self._rewards) if judge is None or one is judge)
        self._scale, self._overlong = scale, overlong
        self._pays = [not isinstance(one, NoReward) for one in self._rewards[: 1 + len(self._extras)]]

    @property
    def needs_whole_group(self) -> bool:
        return any(isinstance(reward, GroupReward) and reward.needs_whole_group for reward in self._rewards)

    @property
    def is_async(self) -> bool:
        return any(isinstance(reward, GroupReward) and reward.is_async for reward in self._rewards)

    @property
    def _waiting(self) -> list[WaitingReward]:
        return [reward for reward in self._rewards if isinstance(reward, WaitingReward)]

    @property
    def trouble(self) -> str:
        """Why grading waits for another process; empty if nothing is known to be wrong."""
        return next((reward.trouble for reward in self._waiting if reward.trouble), "")

    @property
    def num_waiting(self) -> int:
        """The number of rollouts that wait for another process."""
        return sum(reward.num_waiting for reward in self._waiting)

    def interrupt(self) -> None:
        """Let the calls that wait for another process fail. Call it before the threads of callers are joined."""
        for reward in self._waiting:
            reward.interrupt()

    def __call__(self, item: RewardInput) -> RewardOutput:
        return self.score_group([item])[0]

    def score_group(self, items: Sequence[RewardInput]) -> list[RewardOutput]:
        scored = [score_group(reward, items) for reward in self._rewards]
        if self._judge:
            _check_accuracies(scored[self._judge])
        return [self._sum(item, outputs) for item, outputs in zip(items, zip(*scored, strict=True), strict=True)]

    def _sum(self, item: RewardInput, outputs: Sequence[RewardOutput]) -> RewardOutput:
        """Return the whole reward of one rollout from the output of each reward."""
        paid = outputs[: 1 + len(self._extras)]
        judged = [output for output in paid if output.is_judged]
        verdicts = [output.is_judged for output, pays in zip(paid, self._pays, strict=True) if pays]
        if verdicts and not any(verdicts):
            return RewardOutput({}, 0.0, is_judged=False)
        parts, spans = dict(outputs[0].parts), Counter(dict(outputs[0].spans))
        for extra, output in zip(self._extras, paid[1:], strict=True):
            if output.is_judged:
                parts[extra.name] = parts.get(extra.name, 0.0) + extra.weight * sum(output.parts.values())
                spans.update({end: extra.weight * reward for end, reward in output.spans})
        if self._overlong is not None:
            first, earned = judged[0], sum(parts.values()) / self._scale
            has_answer = first.extracted is not None if first.has_answer is None else first.has_answer
            parts["overlong"] = self._scale * self._overlong(item, earned, has_answer)
        verdict = outputs[self._judge]
        accuracy = verdict.accuracy if verdict.is_judged else _mean_accuracy(judged)
        return RewardOutput(parts, accuracy, verdict.extracted, spans=tuple(sorted(spans.items())))

    def counters(self) -> dict[str, int]:
        """Return the counters of all rewards. Counters of the same name are summed."""
        total: Counter[str] = Counter()
        for reward in self._rewards:
            if isinstance(reward, CountingReward):
                total.update(reward.counters())
        return dict(total)

    def close(self) -> None:
        for reward in self._rewards:
            reward.close()


def _mean_accuracy(judged: Sequence[RewardOutput]) -> float:
    """Return the mean accuracy of the rewards that judge an answer. One outside 0..1 stands for all: it is a reward."""
    accuracies = [output.accuracy for output in judged]
    return next((one for one in accuracies if not 0 <= one <= 1), sum(accuracies) / len(accuracies))


def _check_accuracies(outputs: Sequence[RewardOutput]) -> None:
    """Check that the reward that ``reward.accuracy`` names has an accuracy.

    Raises:
        RewardError: it has none.
    """
    if outside := [output.accuracy for output in outputs if not 0 <= output.accuracy <= 1]:
        raise RewardError(
            f"reward.accuracy: expected an accuracy from 0 to 1, got {outside[0]:g}; let the function return 1 for a "
            f"right answer and 0 for a wrong one"
        )


def overlong_penalty(config: Config) -> OverlongPenalty | None:
    """Return the penalty that ``reward.overlong`` and ``reward.soft_overlong`` choose. None if both are off."""
    zeroes, is_soft = config.reward.overlong == "zero_at_limit", config.reward.soft_overlong
    if not zeroes and not is_soft:
        return None
    return partial(penalty_of, cache_length=config.cache_length if is_soft else None, zeroes=zeroes)


def penalty_of(item: RewardInput, earned: float, has_answer: bool, *, cache_length: int | None, zeroes: bool) -> float:
    """Return the penalty for a long answer, as a share of the reward's scale.

    DAPO's penalty is 0 up to L - C tokens, then ``((L - C) - n) / C``, and -1 from L tokens on. An answer that was cut
    before L tokens, for example by the model's context length, gets -1 too.

    Colossal-RL's penalty is ``-earned`` where DAPO's is -1, so that the reward becomes 0. Between L - C and L tokens it
    is DAPO's, but only for texts with an answer. So a wrong answer there gets less than a text without an answer.

    Args:
        item: has n, the number of sampled tokens, and L, the limit on it.
        earned: the reward without this penalty, as a share of the scale.
        has_answer: whether an answer was found in the text.
        cache_length: C, at least 1. If None, there is no linear part.
        zeroes: whether the penalty is Colossal-RL's.
    """
    if item.finish_reason == "length" or item.num_tokens >= item.max_new_tokens:
        return 0.0 - earned if zeroes else -1.0  # not -0.0
    if cache_length is None or (zeroes and not has_answer):
        return 0.0
    return min(0.0, (item.max_new_tokens - cache_length - item.num_tokens) / cache_length)
