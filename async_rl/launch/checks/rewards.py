"""Checks of rewards and environments: the user's code, the judge, and what a reward says of sample answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from async_rl.config.config import Config
from async_rl.config.reward import reward_type
from async_rl.data.dataset import Row
from async_rl.errors import RewardError
from async_rl.launch.checks.environment_trial import trial_findings, try_environment
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.user_code_trial import try_reward
from async_rl.process.user_code import check_allowed, check_allowed_command, code_digests, describe_error
from async_rl.rewards.conformance import example_of, rollout_of
from async_rl.rewards.judge import judge_reward
from async_rl.rewards.records import UNJUDGED, RewardOutput
from async_rl.rewards.registry import build_reward

_SAMPLE_ROWS = 3
_SHOWN_ANSWER = 40
_Grade = tuple[str | None, float, str | None, float, str | None]


def check_code(config: Config) -> None:
    """Check that the user's code that the config names exists, and that generators on this machine may import theirs.

    Raises:
        ConfigError: the code does not exist, or ``generator.allow_code`` does not list it.
    """
    code_digests(config.recorded_code_names)
    if config.samples_here:
        check_allowed(config.code_names, config.generator.allow_code)
        environment = config.environment
        check_allowed_command(environment.program, config.generator.allow_code, key=environment.program_key)


def check_judge(config: Config) -> None:
    """Check the files and the key of ``reward.judge``, if a reward asks a judge and this machine samples. The judge
    itself may be away.

    Raises:
        ConfigError: one of them is missing or can't be read.
    """
    if config.reward.asks_judge and config.samples_here:
        judge_reward(config, 1.0).close()


def try_own_reward(config: Config, rows: Sequence[Row]) -> list[Finding]:
    """Let the user's reward functions score answers to the first rows, if generators on this machine call them.

    Return the findings of ``try_reward``.
    """
    is_own = any(kind.is_user_code for kind in config.reward.types)
    if not is_own or not rows or not config.samples_here or config.environment.is_set:
        return []
    return try_reward(config, [(row.messages, row.reward_data) for row in rows])


def try_own_environment(config: Config, rows: Sequence[Row]) -> Iterator[Finding]:
    """Let the user's environment play the first rows, if generators on this machine play it. Warn if it fails on some
    of them only.

    Raises:
        ConfigError: on each row the environment fails, or returns something other than it must.
    """
    if config.environment.is_set and config.samples_here:
        yield from trial_findings(config, rows, try_environment(config, rows))


def grade_first_rows(config: Config, rows: Sequence[Row]) -> Iterator[Finding]:
    """Check the reward, unless an environment gives it: it must accept a right answer and reject a wrong one to each of
    the first training rows.
    """
    if config.environment.is_set or not rows:
        return
    name = config.reward.right_by
    judge = reward_type(name)
    if judge.asks_scorer or judge.asks_judge or name == "none":
        yield Finding("reward", "skip", f"{name} calls no answer right or wrong")
        return
    reward = build_reward(config, has_scorers=False)
    sample = rows[:_SAMPLE_ROWS]
    try:
        graded = [_grade(config, reward, row) for row in sample]
    except RewardError as error:
        yield Finding("reward", "FAIL", f"can't grade: {error}", fix="correct the row or the reward function")
        return
    except Exception as error:  # the user's code raises what it likes
        text = f"can't grade: {describe_error(error)[0]}"
        yield Finding("reward", "FAIL", text, fix="correct the row or the reward function")
        return
    finally:
        reward.close()
    if not (judged := [grade for grade in graded if grade is not None]):
        text = f"{name} judges no answer to the first {len(sample)} rows: it returned None"
        yield Finding("reward", "WARN", text, fix="ignore this if it judges answers to other rows")
    else:
        yield _verdict(name, judged, is_user_code=judge.is_user_code)


def _grade(config: Config, reward: Any, row: Row) -> _Grade | None:
    """Grade a right and a wrong answer to one dataset row.

    Returns:
        The texts (None if unknown) and accuracies of the right and of the wrong answer, and what the reward found in
        the right one. None if the reward judges neither.

    Raises:
        RewardError: the row can't be graded.
    """
    is_mathematics = config.reward.equality == "math"
    example = example_of(reward_type(config.reward.right_by), row.reward_data, is_mathematics=is_mathematics)

    def output_of(text: str | None) -> RewardOutput:
        if text is None:
            return UNJUDGED
        return reward(rollout_of(text, row.reward_data, config.sampling.max_new_tokens, row.messages))

    right, wrong = output_of(example.right), output_of(example.wrong)
    if not (right.is_judged or wrong.is_judged):
        return None
    return example.right, float(right.accuracy), example.wrong, float(wrong.accuracy), right.extracted


def _verdict(name: str, graded: Sequence[_Grade], *, is_user_code: bool) -> Finding:
    answered = [(text, accuracy) for text, accuracy, *_ in graded if text is not None]
    refused = [text for text, accuracy in answered if accuracy < 1]
    accepted = [(index, text, accuracy) for index, (_, _, text, accuracy, _) in enumerate(graded) if accuracy > 0]
    if accepted:
        where = f"a wrong answer on row {accepted[0][0]}: {accepted[0][1]!r}"
        text = f"{name} accepts {where}"
        if is_user_code and all(accuracy < 1 for *_, accuracy in accepted):
            text = f"{name} gives part of the points for {where}"
            fix = "ignore this if it rewards something else; reward.accuracy can name what tells right from wrong"
            return Finding("reward", "WARN", text, fix=fix)
        fix = "check the reward, and gt_answer or test_cases of this row, because any answer might be rewarded"
        return Finding("reward", "FAIL", text, fix=fix)
    if refused and is_user_code:
        fix = "ignore this if the reward expects another form of answer; otherwise check how it reads the answer"
        text = f"{name} gave the right answer {refused[0]!r} an accuracy below 1"
        return Finding("reward", "WARN", text, fix=fix)
    if refused:
        fix = "check gt_answer of this row, and reward.equality, because no answer could be right"
        return Finding("reward", "FAIL", f"{name} rejects the right answer {refused[0]!r}", fix=fix)
    if not answered:
        text = f"{name} rejects a wrong answer on each of {len(graded)} rows; no right answer is known here"
        return Finding("reward", "OK", text)
    text = f"{name} accepts the right answer of {len(answered)} rows and rejects a wrong one"
    read = ", ".join(repr(answer[:_SHOWN_ANSWER]) for *_, answer in graded if answer is not None)
    return Finding("reward", "OK", f"{text}; it reads the rows' answers as {read}" if read else text)
