"""Groups that are nearly valid: an honest one, of which some fields are changed on the wire, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from async_rl.net.codec import GroupFields
from async_rl.net.wire import encode
from async_rl.records import NO_VERSION, Lease, Turn
from async_rl.sampling_mask import pack_ids

FLOATS = st.sampled_from([
    0.0, 1.0, -1.0, 0.5, 1e-4, 1e-2, 2.0, -80.0, -1e4, 1e6, -1e6, 1.1e6, 1e30, -1e30, -3e38, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"),
])  # fmt: skip
INTEGERS = st.sampled_from([0, 1, 2, 3, -1, -2, 7, 43, 44, 45, 46, 63, 64, 1000, 10**6, 2**31 - 1, -(2**31)])
TEXTS = st.sampled_from(["", "g0", "g1", "1", "\x1b[31m", "x" * 300, "\u202e", "\\boxed{1}", "stop", "error", "length"])
COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs", "versions")


@dataclass(slots=True)
class WireGroup:
    """A group's message before it is encoded: ``fields`` as ``GroupFields``, and its arrays."""

    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def encoded(self) -> bytes:
        return bytes(encode("group", {**self.fields, "columns": list(self.arrays)}, list(self.arrays.values())))


def honest(lease: Lease, version: int, generator_id: str, vocab_size: int, seed: int) -> WireGroup:
    """What a generator would return: random tokens and lengths, and one or two sequences in each rollout."""
    rng = np.random.default_rng(seed)
    sampling = lease.sampling
    num_sequences = rng.integers(1, 3, lease.group_size).tolist()
    prompts = rng.integers(1, sampling.max_prompt_tokens + 1, sum(num_sequences))
    # Both sequences of a rollout together have at most max_new_tokens.
    answers = rng.integers(1, sampling.max_new_tokens // 2 + 1, sum(num_sequences))
    mask = np.concatenate([np.arange(p + a) >= p for p, a in zip(prompts, answers, strict=True)])
    size, num_sampled = len(mask), int(mask.sum())
    accuracy = rng.integers(0, 2, lease.group_size).astype(float).tolist()
    turns = [(Turn(n, 0.5, 0.5),) for n in np.add.reduceat(answers, np.cumsum([0, *num_sequences[:-1]])).tolist()]
    fields = GroupFields(
        lease_id=lease.lease_id, kind=lease.kind, position=lease.prompt.position, generator_id=generator_id,
        lineage=lease.lineage, temperature=sampling.temperature, weights_digest={version: f"digest-{version}"},
        sampling_time_s=1.0, num_sequences=num_sequences, lengths=(prompts + answers).tolist(),
        reward_parts={"correct": list(accuracy)}, accuracy=accuracy, finish_reason=["stop"] * lease.group_size,
        extracted=["1"] * lease.group_size, columns=[],
        turns=turns if seed % 3 == 0 else None,
    )  # fmt: skip
    arrays: dict[str, np.ndarray] = {
        "token_ids": rng.integers(0, vocab_size, size).astype(np.int32),
        "loss_mask": mask,
        "behavior_logprobs": np.where(mask, -rng.uniform(0.0, 8.0, size), 0.0).astype(np.float32),
        "versions": np.where(mask, version, NO_VERSION).astype(np.int32),
    }
    if lease.wants_sampling_mask:
        # The sampled token and the one with the next id, so that one of the two can be changed.
        others = [sorted({token, (token + 1) % vocab_size}) for token in arrays["token_ids"][mask].tolist()]
        kept = pack_ids(np.full(num_sampled, 2), np.concatenate(others), vocab_size=vocab_size)
        arrays |= {"sampling_mask.sizes": kept.sizes, "sampling_mask.words": kept.words}
    return WireGroup(msgspec.to_builtins(fields), arrays)


Change = Callable[[WireGroup, st.DataObject], None]


def _an_entry(group: WireGroup, data: st.DataObject) -> None:
    """An entry of a column."""
    name = data.draw(st.sampled_from(sorted(group.arrays)))
    column = group.arrays[name].copy()
    if not len(column):
        return
    values = {"loss_mask": st.booleans(), "behavior_logprobs": FLOATS}.get(name, INTEGERS)
    index = data.draw(st.integers(0, len(column) - 1))
    with np.errstate(over="ignore"):
        column[index] = data.draw(values)
    group.arrays[name] = column


def _a_trained_token(group: WireGroup, data: st.DataObject) -> None:
    """A token that nobody sampled is trained, with all that belongs to it."""
    index = data.draw(st.integers(0, max(0, len(group.arrays["loss_mask"]) - 1)))
    for name, value in (("loss_mask", True), ("versions", 0), ("behavior_logprobs", -1.0)):
        column = group.arrays[name].copy()
        column[index : index + 1] = value
        group.arrays[name] = column


def _a_column(group: WireGroup, data: st.DataObject) -> None:
    """A column is missing, cut, of another type or shape."""
    name = data.draw(st.sampled_from(sorted(group.arrays)))
    column = group.arrays.pop(name)
    how = data.draw(st.sampled_from(["missing", "cut", "wide", "flat"]))
    if how != "missing":
        group.arrays[name] = {"cut": column[:-1], "wide": column.astype(np.float64), "flat": column[None]}[how]


def _lengths(group: WireGroup, data: st.DataObject) -> None:
    """Tokens move from one sequence to another, sequences between rollouts, or empty ones appear."""
    name = data.draw(st.sampled_from(["lengths", "num_sequences"]))
    values = group.fields[name]
    if not values:
        return
    first, second = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    amount = data.draw(st.integers(-3, values[first]))
    values[first] -= amount
    values[second] += amount
    if name == "lengths" and data.draw(st.booleans()):
        group.fields["lengths"] = [*values, 0]
        group.fields["num_sequences"][-1] += 1


def _a_value_of_a_rollout(group: WireGroup, data: st.DataObject) -> None:
    """Its accuracy, one of its texts, or a part of its reward."""
    name = data.draw(st.sampled_from(["accuracy", "accuracy", "finish_reason", "extracted", "reward_parts"]))
    values, num_rollouts = group.fields[name], len(group.fields["accuracy"])
    if name == "reward_parts":
        values = values.setdefault(data.draw(TEXTS), [None] * num_rollouts)
    kind = {"accuracy": FLOATS, "reward_parts": st.none() | FLOATS}.get(name, TEXTS)
    values[data.draw(st.integers(0, num_rollouts - 1))] = data.draw(kind)


def _a_turn(group: WireGroup, data: st.DataObject) -> None:
    turns = group.fields.get("turns")
    if turns is None:
        return
    rollout, place = data.draw(st.integers(0, len(turns) - 1)), data.draw(st.integers(0, 3))
    if place == 3:
        turns[rollout] = [*turns[rollout], *turns[rollout]]
    else:
        turns[rollout][0][place] = data.draw(FLOATS if place else INTEGERS)


def _a_field(group: WireGroup, data: st.DataObject) -> None:
    values = {
        "temperature": FLOATS, "sampling_time_s": FLOATS, "position": INTEGERS, "kind": TEXTS, "lineage": TEXTS,
        "generator_id": TEXTS, "lease_id": TEXTS, "accuracy": st.just([]), "lengths": st.just([]),
        "weights_digest": st.dictionaries(INTEGERS, TEXTS, max_size=2),
    }  # fmt: skip
    name = data.draw(st.sampled_from(sorted(values)))
    group.fields[name] = data.draw(values[name])


def _without_rollouts(group: WireGroup, data: st.DataObject) -> None:
    for name in ("num_sequences", "lengths", "accuracy", "finish_reason", "extracted"):
        group.fields[name] = []
    group.fields["reward_parts"], group.fields["turns"] = {}, None
    group.arrays = {name: column[:0] for name, column in group.arrays.items()}


CHANGES: tuple[Change, ...] = (
    _an_entry, _an_entry, _an_entry, _a_trained_token, _a_column, _lengths, _a_value_of_a_rollout,
    _a_value_of_a_rollout, _a_turn, _a_field, _without_rollouts,
)  # fmt: skip


def near_valid(
    data: st.DataObject, lease: Lease, *, version: int, generator_id: str, vocab_size: int, max_changes: int = 3
) -> bytes:
    """An encoded group for ``lease`` with up to ``max_changes`` changes."""
    group = honest(lease, version, generator_id, vocab_size, data.draw(st.integers(0, 2**16)))
    for change in data.draw(st.lists(st.sampled_from(CHANGES), max_size=max_changes)):
        if set(COLUMNS) <= group.arrays.keys() and group.fields["accuracy"]:
            change(group, data)
    return group.encoded()
