"""The sections ``reward`` and ``reward.code``, and the table of what each built-in reward needs and can do.

The sections say how answers are scored, and how programs are run and judged. ``REWARD_TYPES`` has an entry for each
built-in name that ``reward.type`` and ``reward.extra`` accept. Config checks, the checks before a start, evaluation and
the fake backend read it. ``rewards.registry`` has the functions that build the rewards, under the same names. A new
reward needs an entry in both tables.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from async_rl.config.data import RowField
from async_rl.config.judge import JudgeConfig
from async_rl.config.section import Free, Section
from async_rl.process.user_code import REWARDS, is_code_name, offered_code
from async_rl.registry import offers


@dataclass(frozen=True, slots=True)
class RewardType:
    """What is known about a reward before it is built.

    Attributes:
        row_fields: the fields that every row must have.
        compares_mathematics: whether ``reward.equality`` decides when two answers are equal.
        has_format: whether answers have a format, which ``reward.require_format`` and ``reward.format`` judge.
        runs_programs: whether the reward runs programs as ``reward.code`` says, so that it needs a sandbox or a
            verifier.
        asks_judge: whether a language model judges the answers, so that ``reward.judge`` must name one.
        asks_scorer: whether a scorer's model scores the answers, so that ``reward.model`` must name one.
        is_user_code: whether the reward is the user's own function. ``generator.allow_code`` must list it, and
            ``reward.time_limit_s`` limits its async calls.
        system_prompt: the default system message for rows without one. Empty if there is none.
        answer_form: template of an answer that earns the reward. ``{answer}`` and, if present, ``{thoughts}`` are
            replaced. The fake backend and ``rewards.conformance`` write answers with it.
    """

    row_fields: tuple[RowField, ...] = ()
    compares_mathematics: bool = False
    has_format: bool = False
    runs_programs: bool = False
    asks_judge: bool = False
    asks_scorer: bool = False
    is_user_code: bool = False
    system_prompt: str = ""
    answer_form: str = "{answer}"

    def write_answer(self, answer: str, *, thoughts: str) -> str:
        """Return a text that gives ``answer`` in the form that this reward accepts."""
        return self.answer_form.replace("{thoughts}", thoughts).replace("{answer}", answer)


_TAGS_ON_LINES = "<think>\n{thoughts}\n</think>\n<answer>\n{answer}\n</answer>"

REWARD_TYPES: Mapping[str, RewardType] = MappingProxyType(
    {
        "boxed": RewardType(
            row_fields=("gt_answer",),
            compares_mathematics=True,
            has_format=True,
            system_prompt="Please reason step by step, and put your final answer within \\boxed{}.",
            answer_form="{thoughts}: the answer is \\boxed{{answer}}",
        ),
        "think_answer_tags": RewardType(
            row_fields=("gt_answer",),
            compares_mathematics=True,
            has_format=True,
            system_prompt=(
                "You are a helpful assistant. You first think about the reasoning process inside <think> </think>, "
                "then give the final answer inside <answer> </answer>, without any explanation there, for example "
                "<answer> 123 </answer>. The user asks a maths problem.\n\n"
            ),
            answer_form="<think> {thoughts} </think>\n<answer> {answer} </answer>",
        ),
        "exact": RewardType(
            row_fields=("gt_answer",),
            has_format=True,
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
        "model": RewardType(asks_scorer=True),
        "judge": RewardType(asks_judge=True),
        "none": RewardType(),
    }
)

USER_CODE = RewardType(is_user_code=True)
"""What is known about a user's reward function before it is imported."""


def reward_named(name: str) -> str:
    """Return ``name``, or the name of the user's code if an installed package offers that as a reward ``name``."""
    return name if name in REWARD_TYPES else offered_code(REWARDS, name)


def reward_type(name: str) -> RewardType:
    """Return what is known about the reward ``name``, which is a built-in reward or the user's own code.

    Raises:
        ValueError: no reward has this name. The message lists the known names.
    """
    if is_code_name(name):
        return USER_CODE
    if name not in REWARD_TYPES:
        known = ", ".join(dict.fromkeys((*REWARD_TYPES, *offers(REWARDS))))
        raise ValueError(f"expected {known}, module:function or file.py:function, got {name!r}; correct it")
    return REWARD_TYPES[name]


class CodeRewardConfig(Section):
    """How programs that the model writes are run and judged, for ``reward.type = "code"``."""

    time_limit_s: float = Field(
        default=10.0, gt=0, description="Maximum wall-clock seconds that one test of a program may take."
    )
    total_time_limit_s: float = Field(
        default=60.0, gt=0, description="Maximum wall-clock seconds that all tests of one answer may take together."
    )
    memory_bytes: int = Field(default=1 << 30, ge=256 << 20, description="Maximum bytes of address space of a program.")
    packages: tuple[str, ...] = Field(
        default=("numpy",),
        strict=False,
        description="Packages that are imported before a program starts. If empty, programs can import only the "
        "standard library, else all packages that are installed with async-rl.",
    )
    prelude: Literal["calls", "always", "never"] = Field(
        default="calls",
        description="Which programs can use common modules without importing them: calls means programs of which a "
        "function is tested, always means all, never means none.",
    )
    compare: Literal["tokens", "cascade"] = Field(
        default="tokens",
        description="How a program's output is compared with the expected output. tokens: the same tokens in the "
        "same order. cascade: also in another order or repeated, as Colossal-RL does, so it may accept a wrong "
        "program.",
    )
    partial_credit: bool = Field(
        default=False,
        description="Whether reward and accuracy of a program are the share of tests passed instead of all or nothing.",
    )
    workers: Free[int | None] = Field(
        default=None,
        ge=1,
        description="Number of programs that run at the same time; if unset, the number of CPU cores.",
    )
    endpoint: Free[str | None] = Field(
        default=None,
        description="Address of an `async-rl verifier`, as in http://10.0.0.1:8000, that runs the programs; if "
        "unset, every generator's machine does.",
    )
    allow_unsafe: Free[bool] = Field(
        default=False, description="Whether programs may run without a sandbox on a machine that can't provide one."
    )

    @property
    def num_workers(self) -> int:
        """Number of programs that run at the same time."""
        return self.workers or len(os.sched_getaffinity(0))

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"expected an address like http://10.0.0.1:8000, got {value!r}; correct it")
        return value


class RewardConfig(Section):
    """How an answer is scored."""

    type: str = Field(
        default="boxed",
        description="Reward that scores answers: boxed, think_answer_tags, exact, xml_format, code, model (a reward "
        "model), judge (a language model judges), none (every answer gets 0), your own function as "
        "module:function or file.py:function, which generator.allow_code must list, or a name for which an installed "
        "package offers one.",
    )
    model: str | None = Field(
        default=None, description="The scorer, one of the tables scorer.NAME, whose model is the reward `model`."
    )
    scale: float = Field(
        default=1.0, gt=0, description="Points that a right answer earns: the factor of the main reward."
    )
    equality: Literal["math", "exact"] = Field(
        default="math",
        description="When the rewards boxed and think_answer_tags treat two answers as equal: if they have the same "
        "mathematical value, or the same text.",
    )
    require_format: bool = Field(
        default=True,
        description="Whether a right answer must also have a valid format to earn reward.scale points. Its accuracy "
        "is 1 in either case.",
    )
    format: float = Field(
        default=0.0, description="Points for a valid format, whatever the answer; reward.scale does not apply to them."
    )
    max_abs: float = Field(
        default=1e6,
        gt=0,
        description="Largest absolute value of a reward, also of one turn's reward. A rollout that exceeds it has "
        "failed.",
    )
    extra: dict[str, float] = Field(
        default={},
        description="Further rewards: a table NAME = WEIGHT, with names as in reward.type. Each is multiplied by its "
        "weight and added.",
    )
    accuracy: str | None = Field(
        default=None,
        description="The reward whose accuracy is an answer's accuracy, with a name as in reward.type. It adds nothing "
        "to the reward. If unset, reward.type.",
    )
    soft_overlong: bool = Field(
        default=True,
        description="Whether long answers lose reward, also with your own reward: up to reward.scale, linearly over "
        "the last reward.cache_length tokens before sampling.max_new_tokens.",
    )
    overlong: Literal["dapo", "zero_at_limit"] = Field(
        default="dapo",
        description="Form of the penalty on long answers: dapo subtracts up to reward.scale from every answer; "
        "zero_at_limit only where an answer was found, and gives 0 to answers that were cut, even with soft_overlong "
        "= false.",
    )
    cache_length: int | None = Field(
        default=None,
        ge=1,
        description="Number of tokens before sampling.max_new_tokens over which the penalty on long answers grows; if "
        "unset, a quarter of max_new_tokens, at most 1024.",
    )
    time_limit_s: float = Field(
        default=5.0,
        gt=0,
        description="Maximum processor seconds for comparing one answer, and maximum wall-clock seconds for one call "
        "of your own async reward.",
    )
    max_call_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds for which a running call of a reward keeps its leases alive; after that their prompts "
        "are sampled again.",
    )
    code: CodeRewardConfig = Field(default=CodeRewardConfig(), description="How programs are run and judged.")
    judge: JudgeConfig = Field(default=JudgeConfig(), description="The language model that judges answers.")

    @field_validator("type")
    @classmethod
    def _is_reward(cls, value: str) -> str:
        reward_type(value)
        return value

    @field_validator("extra")
    @classmethod
    def _are_rewards(cls, value: dict[str, float]) -> dict[str, float]:
        for name, weight in value.items():
            cls._is_reward(name)
            if weight == 0 or not math.isfinite(weight):
                raise ValueError(
                    f"expected a finite weight other than 0 for {name}, got {weight}; correct it, or leave {name} out"
                )
        return value

    @field_validator("accuracy")
    @classmethod
    def _tells_right_from_wrong(cls, value: str | None) -> str | None:
        if value == "none":
            raise ValueError('expected a reward that scores answers, got "none"; leave the key out')
        return value if value is None else cls._is_reward(value)

    @model_validator(mode="after")
    def _has_judge(self) -> Self:
        if self.asks_judge:
            for key in ("endpoint", "model"):
                if not getattr(self.judge, key):
                    raise ValueError(f'judge.{key}: expected a value with the reward "judge", got none; set it')
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all rewards of the run, ``type`` first, and last one that only says what is right."""
        named = (self.type, *self.extra)
        return named if self.right_by in named else (*named, self.right_by)

    def weight_of(self, part: str) -> float:
        """Return the factor that the reward's ``part`` contains, which is not 0."""
        weights = {"format": self.format} | {name.rpartition(":")[2]: weight for name, weight in self.extra.items()}
        return weights.get(part) or self.scale

    @property
    def shown(self) -> str:
        """The names of all rewards of the run, for messages."""
        return ", ".join(self.names)

    @property
    def right_by(self) -> str:
        """The name of the reward whose accuracy is an answer's accuracy."""
        return self.accuracy or self.type

    @property
    def types(self) -> tuple[RewardType, ...]:
        """What is known about each reward of the run, in the order of ``names``."""
        return tuple(reward_type(name) for name in self.names)

    @property
    def compares_mathematics(self) -> bool:
        """Whether a reward of the run compares answers by their mathematical value, in processes of their own."""
        return self.equality == "math" and any(one.compares_mathematics for one in self.types)

    @property
    def runs_programs(self) -> bool:
        """Whether one of the rewards runs programs, so that a sandbox or a verifier is needed."""
        return any(one.runs_programs for one in self.types)

    @property
    def asks_scorer(self) -> bool:
        """Whether one of the rewards is a scorer's model."""
        return any(one.asks_scorer for one in self.types)

    @property
    def asks_judge(self) -> bool:
        """Whether one of the rewards is a judge's verdict."""
        return any(one.asks_judge for one in self.types)
