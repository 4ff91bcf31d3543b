"""A token sequence of a rollout that still grows: what the policy is given, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from async_rl.generator.backend import Sampled
from async_rl.records import PER_TOKEN, TOKEN_COLUMNS, EngineColumns, TokenSequence
from async_rl.sampling_mask import join


class OpenSequence:
    """A token sequence that still grows: tokens that the policy is given, an answer, given ones, an answer, and so on.

    It keeps the columns of each of them, by the names of ``TOKEN_COLUMNS``, in the order in which they came. ``_ends``
    has for each answer the number of these parts up to its end.
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Any]] = []
        self._ends: list[int] = []

    @property
    def has_samples(self) -> bool:
        return bool(self._ends)

    @property
    def answer_tokens(self) -> list[int]:
        """The number of tokens of each answer."""
        return [len(self._parts[end - 1]["token_ids"]) for end in self._ends]

    @property
    def num_sampled(self) -> int:
        return sum(self.answer_tokens)

    def add_given(self, ids: np.ndarray) -> None:
        self._parts.append({"token_ids": ids})

    def add_sampled(self, sampled: Sampled) -> None:
        said = {name: getattr(sampled, name) for name in EngineColumns.__struct_fields__}
        part = {name: value for name, value in said.items() if value is not None}
        for name in part.keys() & TOKEN_COLUMNS.keys():
            if TOKEN_COLUMNS[name].per == "computed":
                # A later turn computes the earlier ones again. Their tokens were sampled with the first routes.
                part[name] = part[name][sum(len(before.get(name, ())) for before in self._parts) :]
        self._parts.append(part | {
            "token_ids": sampled.token_ids, "loss_mask": np.ones(len(sampled.token_ids), np.bool_),
            "behavior_logprobs": sampled.logprobs, "versions": sampled.versions,
        })  # fmt: skip
        self._ends.append(len(self._parts))

    def drop_answer(self) -> None:
        """Remove the last answer, and all that follows the one before it."""
        self._ends.pop()
        del self._parts[self._ends[-1] if self._ends else 0 :]

    def token_ids(self) -> np.ndarray:
        """Return all tokens, int32 [N]."""
        return np.concatenate([part["token_ids"] for part in self._parts]).astype(np.int32)

    def sequence(self) -> TokenSequence:
        """Return the sequence up to its last sampled token. A state that nobody answered may not fit in the context."""
        parts = self._parts[: self._ends[-1]]
        return TokenSequence(**{name: _joined(name, parts) for name in parts[-1]})


def _joined(name: str, parts: Sequence[Mapping[str, Any]]) -> Any:
    """Return a column of the whole sequence, with ``given`` where a part has none if it has a value for every token."""
    column = PER_TOKEN.get(name)
    if column is None:
        values = [part[name] for part in parts if name in part]
        if len(values) == 1:
            return values[0]
        return join(values) if name == "sampling_mask" else np.concatenate(values)
    values = [part[name] if name in part else np.full(len(part["token_ids"]), column.given) for part in parts]
    return np.concatenate(values).astype(column.dtype, copy=False)


def whole_sequence(sample: Sampled) -> TokenSequence:
    """Return a sample's prompt and answer as one sequence. The loss mask is True on the answer."""
    whole = OpenSequence()
    whole.add_given(sample.prompt_ids)
    whole.add_sampled(sample)
    return whole.sequence()
