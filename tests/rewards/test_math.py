"""The whole reward, from config to parts and accuracy."""

import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.generator import SamplingConfig
from async_rl.config.learner import ModelConfig
from async_rl.config.reward import RewardConfig
from async_rl.config.run import RunConfig
from async_rl.errors import RewardError
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.registry import build_reward

ROOT = Path(__file__).resolve().parents[2]


def config(**reward: object) -> Config:
    return Config(
        run=RunConfig(dir="run"),
        model=ModelConfig(path="model"),
        sampling=SamplingConfig(max_new_tokens=100),
        reward=RewardConfig.model_validate(reward),
    )


def rollout(text: str, *, num_tokens: int = 10, finish_reason: str = "stop", gold: object = "72") -> RewardInput:
    return RewardInput(text, {"gt_answer": gold}, num_tokens, 100, finish_reason)  # pyright: ignore[reportArgumentType]


def test_a_right_boxed_answer_earns_the_scale():
    reward = build_reward(config(type="boxed", scale=10.0))
    assert reward(rollout(r"so \boxed{72}")) == RewardOutput({"correct": 10.0, "overlong": 0.0}, 1.0, "72")


def test_a_wrong_boxed_answer_earns_nothing():
    reward = build_reward(config(type="boxed"))
    assert reward(rollout(r"so \boxed{73}")) == RewardOutput({"correct": 0.0, "overlong": 0.0}, 0.0, "73")


def test_no_answer_earns_nothing():
    reward = build_reward(config(type="boxed"))
    assert reward(rollout("72")) == RewardOutput({"correct": 0.0, "overlong": 0.0}, 0.0, None)


def test_tags_in_the_right_structure_earn_the_scale():
    reward = build_reward(config(type="think_answer_tags"))
    text = "<think>a</think><answer>72</answer>"
    assert reward(rollout(text)) == RewardOutput({"correct": 1.0, "overlong": 0.0}, 1.0, "72")


def test_a_right_answer_in_a_wrong_structure_is_accurate_but_earns_nothing():
    reward = build_reward(config(type="think_answer_tags"))
    assert reward(rollout("<answer>72</answer>")) == RewardOutput({"correct": 0.0, "overlong": 0.0}, 1.0, "72")


def test_a_right_answer_in_a_wrong_structure_may_be_let_earn():
    reward = build_reward(config(type="think_answer_tags", require_format=False))
    assert reward(rollout("<answer>72</answer>")).parts == {"correct": 1.0, "overlong": 0.0}


def test_the_format_alone_may_earn():
    reward = build_reward(config(type="think_answer_tags", scale=10.0, format=0.5))
    parts = {"correct": 0.0, "format": 0.5, "overlong": 0.0}
    assert reward(rollout("<think>a</think><answer>73</answer>")).parts == parts
    assert reward(rollout("<answer>72</answer>")).parts == {**parts, "format": 0.0}
    assert reward(rollout("<think>a</think><answer>72</answer>")).parts == {**parts, "correct": 10.0}


def test_exact_takes_the_answer_tag_or_the_whole_text_and_no_mathematics():
    reward = build_reward(config(type="exact", soft_overlong=False))
    assert reward(rollout("<answer> 72 </answer> or so")) == RewardOutput({"correct": 1.0}, 1.0, "72")
    assert reward(rollout("<answer>1</answer><answer>72")).accuracy == 1.0
    assert reward(rollout(" 72\n")).accuracy == 1.0
    assert reward(rollout("<answer>72.0</answer>")).accuracy == 0.0
    assert reward(rollout("so 72")).accuracy == 0.0
    assert reward.counters() == {}


def test_boxed_answers_may_be_compared_as_text():
    reward = build_reward(config(type="boxed", equality="exact"))
    assert reward(rollout(r"\boxed{72}")).accuracy == 1.0
    assert reward(rollout(r"\boxed{72.0}")).accuracy == 0.0


def test_the_overlong_part_is_scaled_and_leaves_accuracy_alone():
    # L = 100, C = min(1024, 100 // 4) = 25, so 80 tokens cost (75 - 80) / 25 = -0.2, times 10.
    reward = build_reward(config(type="boxed", scale=10.0))
    output = reward(rollout(r"\boxed{72}", num_tokens=80))
    assert output.parts == pytest.approx({"correct": 10.0, "overlong": -2.0})
    assert output.accuracy == 1.0


def test_a_cut_answer_loses_the_whole_scale():
    reward = build_reward(config(type="boxed", scale=10.0))
    assert reward(rollout("...", num_tokens=100, finish_reason="length")).parts == {"correct": 0.0, "overlong": -10.0}
    assert reward(rollout(r"\boxed{72}", num_tokens=100, finish_reason="length")).parts == {
        "correct": 10.0,
        "overlong": -10.0,
    }


def test_cache_length_is_taken_from_the_config():
    # C = 50: 75 tokens cost (50 - 75) / 50.
    reward = build_reward(config(type="boxed", cache_length=50))
    assert reward(rollout("", num_tokens=75)).parts == {"correct": 0.0, "overlong": -0.5}


def test_without_soft_overlong_there_is_no_such_part():
    reward = build_reward(config(type="boxed", soft_overlong=False))
    assert reward(rollout(r"\boxed{72}", num_tokens=100, finish_reason="length")).parts == {"correct": 1.0}


def test_zero_at_limit_takes_what_a_cut_answer_earned_and_no_more():
    # Scale 10, L = 100, C = 25: the line at 80 tokens costs 10 * (75 - 80) / 25 = 2.
    reward = build_reward(config(type="boxed", scale=10.0, overlong="zero_at_limit"))
    right, wrong = r"\boxed{72}", r"\boxed{73}"
    assert reward(rollout(right, num_tokens=80)).parts == pytest.approx({"correct": 10.0, "overlong": -2.0})
    assert reward(rollout(wrong, num_tokens=80)).parts == pytest.approx({"correct": 0.0, "overlong": -2.0})
    assert reward(rollout("...", num_tokens=80)).parts == {"correct": 0.0, "overlong": 0.0}
    cut = reward(rollout(right, num_tokens=100, finish_reason="length"))
    assert (cut.parts, cut.accuracy) == ({"correct": 10.0, "overlong": -10.0}, 1.0)
    assert reward(rollout("...", num_tokens=100, finish_reason="length")).parts == {"correct": 0.0, "overlong": 0.0}


def test_zero_at_limit_needs_no_soft_overlong():
    reward = build_reward(config(type="boxed", overlong="zero_at_limit", soft_overlong=False))
    assert reward(rollout(r"\boxed{72}", num_tokens=99)).parts == {"correct": 1.0, "overlong": 0.0}
    assert reward(rollout(r"\boxed{72}", num_tokens=100)).parts == {"correct": 1.0, "overlong": -1.0}


@pytest.mark.parametrize("gold", [72, 72.0, "72", "$72"])
def test_numbers_are_as_good_as_text_in_reward_data(gold: object):
    assert build_reward(config(type="boxed"))(rollout(r"\boxed{72}", gold=gold)).accuracy == 1.0


@pytest.mark.parametrize("gold", [None, True, ["72"]])
def test_reward_data_without_an_answer_is_an_error_not_a_wrong_answer(gold: object):
    with pytest.raises(RewardError, match="gt_answer"):
        build_reward(config(type="boxed"))(rollout(r"\boxed{72}", gold=gold))


def test_comparisons_that_time_out_are_counted_and_score_nothing():
    reward = build_reward(config(type="boxed", time_limit_s=0.5))
    output = reward(rollout(r"\boxed{9^{9^{9^9}}}"))
    assert output.accuracy == 0.0
    assert output.parts["correct"] == 0.0
    assert reward.counters()["verifier_timed_out"] == 1
    reward.close()


def test_a_megabyte_of_text_is_scored_in_bounded_time():
    reward = build_reward(config(type="boxed"))
    assert reward(rollout("\\boxed{" + "9" * 1_000_000 + "}")).accuracy == 0.0
    assert reward.counters()["verifier_requests"] == 0


def test_rewards_and_data_import_no_torch_and_no_sympy():
    # The generator's worker starts fast; sympy lives in the child alone.
    program = (
        "import sys, async_rl.data.dataset, async_rl.rewards.registry\n"
        "print([m for m in ('torch', 'transformers', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
