"""The forms that a user's reward function may have, found from the names of its parameters, and their arguments.

``item``: one ``RewardInput``. ``items``: the list of a group. ``pairs`` (``completions, solutions``): DistRL-LLM's
form. ``lists``: TRL's form, which gets ``prompts``, ``completions``, ``completion_ids``, ``prompt_opened`` if it names
that, and each column of the rows as a list over the group, by name. ``score``: verl's form, which gets ``data_source,
solution_str, ground_truth, extra_info`` of one rollout, by name. docs/rewards.md describes what each returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from async_rl.errors import ConfigError, RewardError
from async_rl.records import TEXT_ROLE, TOOLS_ROLE
from async_rl.rewards.records import RewardInput
from async_rl.rewards.transcripts import after_prompt

FormKind = Literal["item", "items", "pairs", "lists", "score"]

_EXACT: Mapping[tuple[str, ...], FormKind] = {
    ("item",): "item",
    ("items",): "items",
    ("completions", "solutions"): "pairs",
}
_SCORE = ("data_source", "solution_str", "ground_truth", "extra_info")
_ABSENT = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainer passes and that generators do not have. A function that can do without gets none."""


@dataclass(frozen=True, slots=True)
class Form:
    """How to call a reward function.

    Attributes:
        kind: the form.
        named: the names of the parameters that can be given by name.
        required: those of them that have no default.
        takes_all: whether the function takes arguments of any name (``**kwargs``).
    """

    kind: FormKind
    named: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    takes_all: bool = False

    def takes(self, name: str) -> bool:
        return self.takes_all or name in self.named


def form_of(name: str, function: Any) -> Form:
    """Return the form of ``function``.

    Raises:
        ConfigError: ``function`` has other parameters, or is not a function. The message begins with ``name``.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name}: expected a function, got {type(function).__name__}; name a function (see docs/rewards.md)"
        ) from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = tuple(p.name for p in parameters if p.default is p.empty and p.kind in positional)
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = tuple(p.name for p in by_name)
    required = tuple(p.name for p in by_name if p.default is p.empty)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    exact = _EXACT.get(needed)
    if exact is not None and not (exact == "pairs" and takes_all):  # with **kwargs solutions is a column, as in TRL
        return Form(exact)
    if "solution_str" in named and set(required) <= set(_SCORE):
        return Form("score", named, required, takes_all)
    if "completions" in named or (takes_all and ("prompts" in named or "completion_ids" in named)):
        if absent := [key for key in required if key in _ABSENT]:
            raise ConfigError(
                f"{name}: expected a function that can do without {absent[0]}, which only TRL's trainer has; give the "
                f"parameter the default None"
            )
        return Form("lists", named, required, takes_all)
    raise ConfigError(
        f"{name}: expected a function with parameters (item), (items), (completions, solutions), (completions, ..., "
        f"**kwargs) as in TRL, or (data_source, solution_str, ground_truth, extra_info) as in verl, got "
        f"({', '.join(needed)}); rename its parameters (see docs/rewards.md)"
    )


def list_arguments(
    name: str, form: Form, items: Sequence[RewardInput], columns: Mapping[str, str]
) -> dict[str, list[Any]]:
    """Return the arguments of TRL's form for the rollouts ``items`` of one prompt, each a list over them.

    Prompts and completions are messages, or text with ``data.prompt_format = "text"``.

    Args:
        name: the function's name, for errors.
        form: the function's form.
        items: the rollouts.
        columns: the name that a column has in the data -> the key of the row that holds it.

    Raises:
        RewardError: the rows have no column of a name that the function needs.
    """
    given: dict[str, list[Any]] = {
        "prompts": [_prompt(item) for item in items],
        "completions": [_completion(item) for item in items],
        "completion_ids": [list(item.token_ids) for item in items],
    }
    if "prompt_opened" in form.named:  # TRL has no such argument, so it is no surprise in **kwargs
        given["prompt_opened"] = [item.prompt_opened for item in items]
    data = items[0].reward_data
    keys = {key: key for key in data} | {column: key for column, key in columns.items() if key in data}
    given |= {column: [item.reward_data[key] for item in items] for column, key in keys.items() if column not in given}
    if missing := [key for key in form.required if key not in given]:
        raise RewardError(
            f"{name}: expected the rows to have the column {missing[0]!r}, which the function needs, got only "
            f"{', '.join(sorted(keys)) or 'none'}; rename the parameter, or name the column in data.columns"
        )
    return {key: values for key, values in given.items() if form.takes(key)}


def score_arguments(form: Form, item: RewardInput) -> dict[str, Any]:
    """Return the arguments of verl's form for one rollout. ``extra_info`` is a copy: functions may change it."""
    data = item.reward_data
    extra = data.get("extra_info")
    given = {
        "data_source": data.get("data_source"),
        "solution_str": item.text,
        "ground_truth": data.get("gt_answer", _ground_truth(data)),
        "extra_info": dict(extra) if isinstance(extra, Mapping) else extra,
    }
    return {key: value for key, value in given.items() if form.takes(key)}


def _ground_truth(data: Mapping[str, Any]) -> Any:
    """Return the answer of a row in verl's form that has no ``gt_answer``."""
    model = data.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else data.get("ground_truth")


def _is_text(item: RewardInput) -> bool:
    return len(item.messages) == 1 and item.messages[0]["role"] == TEXT_ROLE


def _prompt(item: RewardInput) -> Any:
    """Return the prompt as text or as messages, without the schemas of tools, which in TRL are no message."""
    if _is_text(item):
        return item.messages[0]["content"]
    return [dict(message) for message in item.messages if message["role"] != TOOLS_ROLE]


def _completion(item: RewardInput) -> Any:
    """Return the answer as text or as messages: an agent's are all from its first answer on, tools' results included,
    as TRL has them.
    """
    if item.transcript:
        return after_prompt(item.transcript)
    return item.text if _is_text(item) else [{"role": "assistant", "content": item.text}]
