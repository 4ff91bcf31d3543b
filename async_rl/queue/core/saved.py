"""The buffer's state as plain data and back, so that a restarted server goes on where the dead one stopped. Pure.

Records that come and go (groups, leases, fates, evaluations) are noted one by one in ``Changes``; everything else is
small and saved whole. Time goes on as if none had passed while no server ran, and every lease may grow anew.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from async_rl.errors import QueueError
from async_rl.queue.core import lease_scheduler
from async_rl.queue.core.changes import Kind
from async_rl.queue.core.evals import Answer, Evaluation, Row
from async_rl.queue.core.leases import Fate, HeldLease
from async_rl.queue.core.ledger import Ledger, Outcomes
from async_rl.queue.core.state import Attempts, LearnerSide, QueueState
from async_rl.queue.core.stored_group import HeldGroup
from async_rl.queue.messages import Announcement
from async_rl.queue.storage.payloads import Place
from async_rl.records import Sampling

Entries = Mapping[Kind, Mapping[str, Mapping[str, Any]]]


def save(state: QueueState) -> dict[str, Any]:
    """What ``Changes`` does not note."""
    return {
        "now": state.now,
        "data_digest": state.data_digest,
        "learner": None if state.learner is None else _learner_fields(state.learner),
        "position": state.stream.position,
        "again": state.stream.again,
        "attempts": {p: (a.failed, a.stale) for p, a in state.attempts.items()},
        "set_aside": dict(state.set_aside),
        "set_aside_last": state.set_aside_last,
        "old_lineages": sorted(state.old_lineages),
        "ledger": state.ledger.save(),
        "eval_ledger": state.eval_ledger.save(),
        "outcomes": state.outcomes.save(),
        "received_evals": state.evals.received,
        "filtered_since_step": state.filtered_since_step,
        "filtered_right_since_step": state.filtered_right_since_step,
        "prompts_too_long": state.prompts_too_long,
    }


def load(
    state: QueueState, entries: Entries, small: Mapping[str, Any], eval_rows: Mapping[str, Sequence[Row]],
    eval_samplings: Mapping[str, Sampling], now: float,
) -> list[Place]:  # fmt: skip
    """Fill an empty state; the places of the bodies in use.

    Raises:
        QueueError: it was written of other training rows, or is not understood.
    """
    if small.get("data_digest") != state.data_digest and not state.settings.accepts_changed_data:
        raise QueueError(
            f"data.train has changed since the queue's journal was written: expected rows with digest "
            f"{small.get('data_digest')}, got {state.data_digest}; put the old file back, or accept the new one with "
            f"data.on_change = 'accept'"
        )
    try:
        state.now, state.clock_ahead_s = small["now"], small["now"] - now
        _load_counters(state, small)
        groups = _load_groups(state, entries, small)
        places = _load_evals(state, entries, small, eval_rows, eval_samplings)
        _load_leases(state, entries)
    except (KeyError, TypeError, ValueError) as error:
        raise QueueError(
            f"the queue's journal is whole but not understood: {type(error).__name__}: {error}; it is another "
            f"version's: start with a new queue.journal_dir"
        ) from error
    return [group.place for group in groups] + places


def _learner_fields(learner: LearnerSide) -> dict[str, Any]:
    announced = learner.announcement
    return {
        "lineage": learner.lineage,
        "step": learner.step,
        "num_steps": learner.num_steps,
        "version": learner.version,
        "fork_version": learner.fork_version,
        "lease_bound": learner.lease_bound,
        "announcement": None if announced is None else msgspec.structs.asdict(announced),
        "taken": [group.lease_id for group in learner.taken],
        "acked": learner.acked,
        "finished": learner.finished,
    }


def _load_counters(state: QueueState, small: Mapping[str, Any]) -> None:
    state.stream.restore(small["position"], small["again"])
    state.attempts = {p: Attempts(failed, stale) for p, (failed, stale) in small["attempts"].items()}
    state.set_aside = Counter(small["set_aside"])
    state.set_aside_last = small["set_aside_last"]
    state.old_lineages = set(small["old_lineages"])
    state.ledger = Ledger.load(small["ledger"])
    state.eval_ledger = Ledger.load(small["eval_ledger"], "delivered")
    state.outcomes = Outcomes.load(small["outcomes"])
    state.filtered_since_step = small["filtered_since_step"]
    state.filtered_right_since_step = small["filtered_right_since_step"]
    state.prompts_too_long = small["prompts_too_long"]


def _load_groups(state: QueueState, entries: Entries, small: Mapping[str, Any]) -> list[HeldGroup]:
    groups: dict[str, HeldGroup] = {}
    held: set[str] = set()
    for lease_id, fields in entries["group"].items():
        facts = dict(fields)
        if facts.pop("is_held"):
            held.add(lease_id)
        groups[lease_id] = HeldGroup.from_facts(facts)
    for key, fields in entries["pin"].items():
        state.pins.add(key, [groups[lease_id] for lease_id in fields["lease_ids"]])
    if (plain := small["learner"]) is not None:
        announced = plain["announcement"]
        state.learner = LearnerSide(
            lineage=plain["lineage"],
            step=plain["step"],
            num_steps=plain["num_steps"],
            version=plain["version"],
            fork_version=plain["fork_version"],
            lease_bound=plain["lease_bound"],
            announcement=None if announced is None else Announcement(**announced),
            acked=None if plain["acked"] is None else (plain["acked"][0], plain["acked"][1]),
            finished=plain["finished"],
        )
        state.learner.hold(tuple(groups[lease_id] for lease_id in plain["taken"]))
        held -= set(plain["taken"])
    for lease_id in held:
        state.queued.add(groups[lease_id])
    return list(groups.values())


def _load_evals(
    state: QueueState, entries: Entries, small: Mapping[str, Any], eval_rows: Mapping[str, Sequence[Row]],
    samplings: Mapping[str, Sampling],
) -> list[Place]:  # fmt: skip
    answers: dict[tuple[str, int], dict[int, Answer]] = {}
    for key, fields in entries["answer"].items():
        dataset, step, row = json.loads(key)
        answers.setdefault((dataset, step), {})[row] = Answer.from_facts(fields)
    for fields in entries["evaluation"].values():
        key = (fields["dataset"], fields["step"])
        rows, sampling = eval_rows[key[0]], samplings[key[0]]
        evaluation = Evaluation(key, rows, fields["num_samples"], sampling, fields["min_version"], fields["exclusive"])
        evaluation.attempts = Counter(fields["attempts"])
        state.evals.add(evaluation)
        for row, answer in answers.get(key, {}).items():
            evaluation.todo.remove(row)
            state.evals.answer(evaluation, row, answer)
    state.evals.restore_received((dataset, step) for dataset, step in small["received_evals"])
    return [a.place for found in answers.values() for a in found.values() if a.place is not None]


def _load_leases(state: QueueState, entries: Entries) -> None:
    for fields in entries["lease"].values():
        key = fields["evaluation"]
        evaluation = None if key is None else state.evals.get((key[0], key[1]))
        if evaluation is not None:
            evaluation.todo.remove(fields["position"])
    for lease_id, fields in entries["lease"].items():
        state.leases.add(_held_lease(state, lease_id, fields))
    fates = sorted(entries["fate"].items(), key=lambda item: item[1]["number"])
    for lease_id, fields in fates:
        state.leases.restore_fate(lease_id, Fate(fields["fate"], fields["number"]))


def _held_lease(state: QueueState, lease_id: str, fields: Mapping[str, Any]) -> HeldLease:
    key = None if fields["evaluation"] is None else (fields["evaluation"][0], fields["evaluation"][1])
    evaluation = None if key is None else state.evals.get(key)
    lease = lease_scheduler.build_lease(
        state, evaluation, fields["position"], lease_id=lease_id, lineage=fields["lineage"],
        min_version=fields["min_version"], attempt=fields["attempt"], version=fields["version"],
    )  # fmt: skip
    reserved = 0 if evaluation is not None else state.settings.worst_case_bytes
    return HeldLease(
        lease, fields["generator_id"], fields["version"], reserved, fields["issued_at"], state.now, evaluation=key
    )
