"""What every reward needs and can do, by the name that ``reward.type`` and ``reward.extra`` give it.

Config validation, preflight, doctor, evaluation and the fake backend ask this table; ``rewards.registry`` has the
functions that build the rewards, under the same names. A new reward is a row here and a row there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from async_rl.process.user_code import is_code_name


@dataclass(frozen=True, slots=True)
class RewardType:
    """What the rest of the program may ask about a reward before it is built.

    Attributes:
        row_fields: the fields that every row must have.
        can_vote: it may extract an answer from a text, so that ``eval.majority`` can vote over answers.
        votes_by_default: it does extract one; ``eval.majority`` is on if unset.
        compares_mathematics: ``reward.equality`` decides when two answers are equal.
        runs_programs: it runs the programs of ``reward.code``, so it needs a sandbox or a verifier.
        is_user_code: the user's own function, allowed by name and compared by digest; ``reward.time_limit_s`` bounds
            its async calls.
        system_prompt: the default system message of a row that has none; empty for none.
        answer_form: the text in which ``{answer}`` earns the reward; ``{thoughts}`` stands where the form has them.
            Doctor and the fake backend write answers with it.
    """

    row_fields: tuple[str, ...] = ()
    can_vote: bool = False
    votes_by_default: bool = False
    compares_mathematics: bool = False
    runs_programs: bool = False
    is_user_code: bool = False
    system_prompt: str = ""
    answer_form: str = "{answer}"

    def write_answer(self, answer: str, *, thoughts: str) -> str:
        """A text that gives ``answer`` in the form that this reward accepts."""
        return self.answer_form.replace("{thoughts}", thoughts).replace("{answer}", answer)


_TAGS_ON_LINES = "<think>\n{thoughts}\n</think>\n<answer>\n{answer}\n</answer>"

REWARD_TYPES: Mapping[str, RewardType] = MappingProxyType(
    {
        "boxed": RewardType(
            row_fields=("gt_answer",),
            can_vote=True,
            votes_by_default=True,
            compares_mathematics=True,
            system_prompt="Please reason step by step, and put your final answer within \\boxed{}.",
            answer_form="{thoughts}: the answer is \\boxed{{answer}}",
        ),
        "think_answer_tags": RewardType(
            row_fields=("gt_answer",),
            can_vote=True,
            votes_by_default=True,
            compares_mathematics=True,
            system_prompt=(
                "You are a helpful assistant. You first think about the reasoning process inside <think> </think>, "
                "then give the final answer inside <answer> </answer>, without any explanation there, for example "
                "<answer> 123 </answer>. The user asks a maths problem.\n\n"
            ),
            answer_form="<think> {thoughts} </think>\n<answer> {answer} </answer>",
        ),
        "exact": RewardType(
            row_fields=("gt_answer",),
            can_vote=True,
            votes_by_default=True,
            system_prompt=(
                "A conversation between a User and an Assistant. The Assistant thinks about the question first, then "
                "answers it, in exactly this form:\n<think>\nits thoughts\n</think>\n<answer>\nthe answer alone\n"
                "</answer>\n"
            ),
            answer_form=_TAGS_ON_LINES,
        ),
        "xml_format": RewardType(answer_form=_TAGS_ON_LINES),
        "code": RewardType(
            row_fields=("test_cases",), runs_programs=True, system_prompt="You are a helpful assistant."
        ),
    }
)

USER_CODE = RewardType(can_vote=True, is_user_code=True)
"""What is known of a function of the user's own before it is imported."""


def reward_type(name: str) -> RewardType:
    """Look up a built-in reward, or the row for the user's own code.

    Raises:
        ValueError: no reward has this name; the message lists the known ones.
    """
    if is_code_name(name):
        return USER_CODE
    if name not in REWARD_TYPES:
        raise ValueError(f"expected {', '.join(REWARD_TYPES)}, module:function or file.py:function, got {name!r}")
    return REWARD_TYPES[name]
