"""The checks that every reward must pass, whether it is built in or the user's own. They need no test framework.

The input is a reward and an example row. The output is a list of problems, which is empty if the reward passes.
``example_of`` writes a right and a wrong answer to a row. The doctor and the checks before a run use it too. The checks
can be run from the command line::

    python -m async_rl.rewards.conformance file.py:function '{"gt_answer": "42"}' 'a text with the right answer'
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from async_rl.config.reward import RewardType
from async_rl.errors import AsyncRLError, RewardError
from async_rl.records import row_fields
from async_rl.rewards.gold import gold_readings
from async_rl.rewards.records import CountingReward, GroupReward, Reward, RewardInput, RewardOutput, score_group

T = TypeVar("T")

MAX_NEW_TOKENS = 100
WRONG_ANSWER = "no such answer, 91827364"
"""A text that answers no row, in no particular form."""
_WRONG_PROGRAM = f"```python\nprint({WRONG_ANSWER!r})\n```"
_IN_DOLLARS = re.compile(r"\A\$([^$]+)\$\.?\Z")
"""An answer that rows have in dollars, and a model in a box or a tag."""
_NUM_TOKENS = 8
_NUM_THREADS = 4

HOSTILE_TEXTS: Mapping[str, str] = {
    "empty": "",
    "blank": " \n\t",
    "huge": "42 " * 300_000,
    "huge box": "\\boxed{" + "9" * 300_000 + "}",
    "boxes never closed": "\\boxed{" * 20_000,
    "tags never closed": "<think>\n<answer>\n" * 20_000,
    "tags in reverse": "</answer>1<answer></think>1<think>",
    "deeply nested": "\\boxed{" + "(" * 5_000 + ")" * 5_000 + "}",
    "null characters and emoji": "\\boxed{\0\u202e\U0001f600\ufffd}",
    "not a number": "\\boxed{nan}",
    "infinite": "\\boxed{1e99999}",
    "division by zero": "\\boxed{\\frac{1}{0}}",
    "number too large to compute": "\\boxed{9^{9^{9^9}}}",
    "program that never ends": "```python\nwhile True:\n    pass\n```",
    "program that kills": "```python\nimport os\nos.kill(os.getppid(), 9)\n```",
    "fence never closed": "```python\n" * 20_000,
}
"""Unusual texts that a model may write, each with a name. A reward must score all of them without an error."""


@dataclass(frozen=True, slots=True)
class Example:
    """An example row for the checks, with texts of a right and of a wrong answer.

    Attributes:
        reward_data: the row's fields, such as ``gt_answer``.
        right: a text that must get accuracy 1. None if no such text is known.
        wrong: a text that must get an accuracy below 1. None if no such text is known.
        row_fields: the fields that the row must have. Without one of them, the reward must raise RewardError.
    """

    reward_data: Mapping[str, Any]
    right: str | None = None
    wrong: str | None = None
    row_fields: Sequence[str] = ()


def example_of(kind: RewardType, reward_data: Mapping[str, Any], *, is_mathematics: bool = True) -> Example:
    """Return the row ``reward_data`` with a right and a wrong answer, as a reward of the type ``kind`` expects them.

    The right answer is the row's final answer, as a model would write it. It is None if the row has no ``gt_answer``,
    and for a reward that runs programs. ``is_mathematics`` is whether ``reward.equality`` is "math".
    """
    if kind.runs_programs:
        return Example(reward_data, None, _WRONG_PROGRAM, kind.row_fields)
    golds = gold_readings(reward_data, is_mathematics=is_mathematics and kind.compares_mathematics)
    answer = _IN_DOLLARS.sub(r"\1", golds[0]) if golds and kind.compares_mathematics else next(iter(golds), None)
    right = None if answer is None else kind.write_answer(answer, thoughts="thoughts")
    return Example(reward_data, right, wrong_answer(kind, reward_data, right), kind.row_fields)


def wrong_answer(kind: RewardType, reward_data: Mapping[str, Any], right: str | None) -> str:
    """Return a wrong answer to the row ``reward_data``. If ``right`` has the row's number, it has a longer one that
    contains it, such as 155 for 5.
    """
    gold = str(reward_data.get("gt_answer", "")).strip()
    if right is not None and gold[:1].isdecimal() and gold in right and (kind.row_fields or kind.is_user_code):
        return right.replace(gold, f"15{gold}")
    # A reward that uses no field of the row can only judge the form, so its wrong answer has the wrong form.
    return kind.write_answer(WRONG_ANSWER, thoughts="thoughts") if kind.row_fields else WRONG_ANSWER


def rollout_of(
    text: str, reward_data: Mapping[str, Any], max_new_tokens: int, messages: Sequence[Mapping[str, str]] = ()
) -> RewardInput:
    """Return ``text`` as a rollout of a few tokens that ended by itself. ``messages`` are those of its prompt."""
    data, token_ids = row_fields(reward_data), tuple(range(_NUM_TOKENS))
    return RewardInput(text, data, _NUM_TOKENS, max_new_tokens, "stop", messages=messages, token_ids=token_ids)


@dataclass(slots=True)
class _Checks:
    """All checks on one reward. ``run`` makes the checks, and ``problems`` has a sentence for each problem found."""

    reward: Reward
    example: Example
    time_limit_s: float
    problems: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        texts = {**HOSTILE_TEXTS, "right": self.example.right, "wrong": self.example.wrong}
        scored: dict[str, RewardOutput] = {}
        try:
            for name, text in texts.items():
                if text is not None and (output := self._score(name, text)) is not None:
                    scored[name] = output
            self._check_known_answers(scored)
            self._check_group(scored, {name: text for name, text in texts.items() if text is not None})
            self._check_threads(scored)
            self._check_missing_fields()
            self._check_counters()
        except _HangError:
            pass  # reported already; a hanging call can't be ended, so no further checks run
        return self.problems

    def _score(self, name: str, text: str) -> RewardOutput | None:
        """Score ``text`` twice, check that the outputs are equal, and return the first one. None if one is invalid.

        ``name`` is the name of the text in problems.
        """
        outputs: list[RewardOutput] = []
        for _ in range(2):
            output = self._called(f"text {name!r}", lambda: self.reward(self._item(text)))
            if output is None or not self._is_valid(name, output):
                return None
            outputs.append(output)
        if outputs[0] != outputs[1]:
            self.problems.append(f"text {name!r}: expected the same output twice, got {outputs[0]} and {outputs[1]}")
        return outputs[0]

    def _is_valid(self, name: str, output: object) -> bool:
        if not isinstance(output, RewardOutput):
            self.problems.append(f"text {name!r}: expected a RewardOutput, got {type(output).__name__}")
            return False
        for part, value in output.parts.items():
            if not _is_number(value) or not math.isfinite(value):
                self.problems.append(f"text {name!r}: expected part {part!r} to be a finite number, got {value!r}")
                return False
        if not _is_number(output.accuracy):
            self.problems.append(f"text {name!r}: expected a finite accuracy, got {output.accuracy!r}")
            return False
        if output.extracted is not None and not isinstance(output.extracted, str):
            self.problems.append(f"text {name!r}: expected the extracted answer as text, got {output.extracted!r:.80}")
            return False
        return True

    def _check_known_answers(self, scored: Mapping[str, RewardOutput]) -> None:
        if "right" in scored and scored["right"].accuracy < 1:
            self.problems.append(f"the right answer: expected accuracy 1, got {scored['right'].accuracy}")
        if "wrong" in scored and scored["wrong"].accuracy >= 1:
            self.problems.append(
                f"the wrong answer {self.example.wrong!r}: expected accuracy below 1, got {scored['wrong'].accuracy}"
            )

    def _check_group(self, scored: Mapping[str, RewardOutput], texts: Mapping[str, str]) -> None:
        """Check that scoring a group returns the same outputs, in order, as scoring its rollouts one by one.

        If the reward compares the rollouts of a group, only check that each output is valid.
        """
        names = [name for name in ("empty", "blank", "infinite", "right", "wrong") if name in scored]
        items = [self._item(texts[name]) for name in names]
        outputs = self._called("a group", lambda: score_group(self.reward, items))
        if outputs is None:
            return
        if len(outputs) != len(items):
            self.problems.append(f"a group: expected {len(items)} outputs, got {len(outputs)}")
        elif not (isinstance(self.reward, GroupReward) and self.reward.needs_whole_group):
            for name, output in zip(names, outputs, strict=True):
                if output != scored[name]:
                    self.problems.append(
                        f"text {name!r}: expected the same output in a group as alone, got {output} and {scored[name]}"
                    )
        else:
            for name, output in zip(names, outputs, strict=True):
                self._is_valid(name, output)

    def _check_threads(self, scored: Mapping[str, RewardOutput]) -> None:
        """Check that several threads can call the reward at the same time, as generators do."""
        if "right" not in scored:
            return
        item, found = self._item(self.example.right or ""), list[RewardOutput]()

        def score() -> None:
            found.append(self.reward(item))

        def score_at_once() -> None:
            threads = [threading.Thread(target=score, daemon=True) for _ in range(_NUM_THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        self._called("several threads", score_at_once)
        if found != [scored["right"]] * _NUM_THREADS:
            self.problems.append(f"several threads: expected {_NUM_THREADS} times {scored['right']}, got {found}")

    def _check_missing_fields(self) -> None:
        for missing in self.example.row_fields:
            data = {name: value for name, value in self.example.reward_data.items() if name != missing}
            item = self._item(self.example.right or "", data)
            try:
                output = _bounded(lambda item=item: self.reward(item), self.time_limit_s)
            except RewardError:
                continue
            except Exception as error:
                self.problems.append(
                    f"row without {missing}: expected RewardError, got {type(error).__name__}: {error}"
                )
            else:
                self.problems.append(f"row without {missing}: expected RewardError, got {output}")

    def _check_counters(self) -> None:
        counters = self.reward.counters() if isinstance(self.reward, CountingReward) else {}
        for name, count in counters.items():
            if not isinstance(count, int) or count < 0:
                self.problems.append(f"counter {name!r}: expected a count of at least 0, got {count!r}")

    def _called(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``. If ``call`` raises an error, note a problem with ``what`` and return None.

        Raises:
            _HangError: ``call`` did not end within the time limit. This is noted as a problem too.
        """
        try:
            return _bounded(call, self.time_limit_s)
        except _HangError:
            self.problems.append(f"{what}: expected an output within {self.time_limit_s:g} s, got none")
            raise
        except Exception as error:
            self.problems.append(f"{what}: expected an output, got {type(error).__name__}: {error}")
            return None

    def _item(self, text: str, reward_data: Mapping[str, Any] | None = None) -> RewardInput:
        data = self.example.reward_data if reward_data is None else reward_data
        return rollout_of(text, data, MAX_NEW_TOKENS)


def check_reward(reward: Reward, example: Example, *, time_limit_s: float = 60.0) -> list[str]:
    """Run all checks on ``reward`` with the row ``example``. Return a sentence for each problem.

    ``time_limit_s`` is the time in wall-clock seconds that one call of the reward may take.
    """
    return _Checks(reward, example, time_limit_s).run()


class _HangError(Exception):
    """A call did not end within its time limit. A ``TimeoutError`` that the call itself raises is another thing."""


def _bounded(call: Callable[[], T], time_limit_s: float) -> T:
    """Run ``call`` in a separate thread. Return its result, or raise its error.

    Raises:
        _HangError: ``call`` did not end within ``time_limit_s`` seconds. Its thread goes on in the background.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(time_limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise _HangError
    return results[0]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def main() -> int:
    """Check the reward that the command line names, and print the problems.

    Return the exit code: 0 if there is no problem, 1 if there are problems, 2 if the reward can't be built.
    """
    if len(sys.argv) not in (3, 4):
        sys.stderr.write("usage: python -m async_rl.rewards.conformance NAME ROW_AS_JSON [RIGHT_TEXT]\n")
        return 2
    from async_rl.config.config import Config
    from async_rl.config.reward import reward_type
    from async_rl.rewards.registry import build_reward

    name, row = sys.argv[1], json.loads(sys.argv[2])
    raw: dict[str, Any] = {
        "run": {"dir": "unused"},
        "model": {"path": "unused"},
        "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
        "reward": {"type": name, "soft_overlong": False},
        "generator": {"allow_code": [name.rpartition(":")[0]] if ":" in name else []},
    }
    try:
        reward = build_reward(Config.model_validate(raw))
        kind, right = reward_type(name), next(iter(sys.argv[3:]), None)
        example = Example(row, right, right and wrong_answer(kind, row, right), kind.row_fields)
    except (AsyncRLError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    with closing(reward):
        problems = check_reward(reward, example)
    sys.stdout.write("".join(f"{problem}\n" for problem in problems) or f"{name}: conforms\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
