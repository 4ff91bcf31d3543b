"""The queue's state for people and metrics, as records and plain data. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.queue.core.admission import LEARNER_STATUS, LearnerSide
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import NotReady, QueueStats

_ANNOUNCED = ("lineage", "version", "digest", "channel")
"""The fields of the announcement that the status shows."""


def ledger_dict(state: QueueState) -> dict[str, Any]:
    """Both ledgers and the outcomes."""
    return {
        **state.ledger.as_dict(),
        "eval": state.eval_ledger.as_dict(),
        "outcomes": state.outcomes.as_dict(),
    }


def check_totals(state: QueueState) -> None:
    """Raises AssertionError if an identity is broken, or the ledger and the totals of what is stored differ."""
    state.ledger.check()
    state.eval_ledger.check()
    groups, tokens = state.ledger.groups, state.ledger.tokens
    held_tokens = state.queued.num_tokens + sum(g.num_tokens for g in state.taken)
    _compare(
        {
            "queued": (groups.queued, len(state.queued)),
            "taken": (groups.taken, len(state.taken)),
            "in_flight": (groups.in_flight, state.leases.num_training),
            "tokens": (tokens.queued + tokens.taken, held_tokens),
            "prompts": (state.stream.position, _prompts(state)),
        }
    )


def check(state: QueueState) -> None:
    """``check_totals``, and every total against what it sums; its cost grows with what is stored.

    Raises:
        AssertionError: something does not add up, or a prompt got lost.
    """
    check_totals(state)
    queued, leases = list(state.queued), list(state.leases)
    _compare(
        {
            "queued bytes": (state.queued.num_bytes, sum(g.ref.length for g in queued)),
            "bytes": (state.group_bytes, sum(g.ref.length for g in (*queued, *state.taken))),
            "queued tokens": (state.queued.num_tokens, sum(g.num_tokens for g in queued)),
            "reserved": (state.leases.reserved, sum(lease.reserved for lease in leases)),
            "training leases": (state.leases.num_training, sum(lease.evaluation is None for lease in leases)),
        }
    )


def _compare(totals: Mapping[str, tuple[int, int]]) -> None:
    wrong = {name: pair for name, pair in totals.items() if pair[0] != pair[1]}
    if wrong:
        raise AssertionError(f"(counted, stored) differ: {wrong}")


def _prompts(state: QueueState) -> int:
    """Prompts drawn from the stream, by where they are now; those that were dropped to come again count once."""
    groups = state.ledger.groups
    here = state.stream.num_requeued + groups.in_flight + groups.queued + groups.taken
    ended = ("poison", "too_slow", "step_skipped", "unused_at_end")
    return here + groups.done + groups.filtered + state.prompts_too_long + sum(groups.dropped[c] for c in ended)


def ledger_file(state: QueueState) -> dict[str, Any]:
    """The content of ``ledger.json``. ``broken`` names an identity that does not hold (a bug of ours)."""
    learner = state.learner
    plain: dict[str, Any] = {
        "lineage": learner.lineage if learner else None,
        "step": learner.step if learner else None,
        "version": learner.version if learner else None,
        **ledger_dict(state),
        "excluded": excluded(state),
    }
    try:
        check_totals(state)
    except AssertionError as error:
        plain["broken"] = str(error)
    return plain


def stats(state: QueueState) -> QueueStats:
    """Queue statistics at time ``state.now``, set by the latest call."""
    alive = state.generators.alive(state.now)
    return QueueStats(
        depth=len(state.queued),
        bytes=state.group_bytes + state.evals.num_bytes,
        in_flight=state.ledger.groups.in_flight,
        num_generators=len(alive),
        generators=state.generators.total(state.now),
        ledger=ledger_dict(state),
        prompts_too_long=state.prompts_too_long,
        epoch=state.stream.epoch,
        alive_generators=tuple(sorted(entry.generator_id for entry in alive)),
    )


def not_ready(state: QueueState, learner: LearnerSide) -> NotReady:
    """The answer to a take that can't be filled, with the reason for the watchdog."""
    num_groups = state.settings.groups_per_step
    if learner.finished or not learner.steps_left:
        return NotReady(f"all {learner.num_steps} steps are trained", stats(state), exhausted=True)
    stop = state.stop_diagnosis()
    if stop:
        return NotReady(stop, stats(state), stop=stop)
    in_flight = state.ledger.groups.in_flight
    if state.stream.exhausted and not in_flight:
        line = f"the data has ended with {len(state.queued)} groups left, a step needs {num_groups}"
        return NotReady(line, stats(state), exhausted=True)
    if state.waits_since is not None:
        late = state.leases.training_older_than(state.settings.oldest_after_step(learner.version))
        waited_s = state.now - state.waits_since
        line = f"waits {waited_s:.0f} s (queue.wait_s) for {len(late)} groups that this step would make stale"
        return NotReady(line, stats(state))
    line = f"{who_samples(state)}{len(state.queued)} of {num_groups} groups are queued, {in_flight} in flight"
    if state.filtered_since_step:
        line += f", {state.filtered_since_step} filtered since the last step"
    blocker = state.evals.exclusive
    if blocker is not None:
        line += f"; evaluation comes first: {blocker.progress_line}"
    if learner.announcement is None:
        line += "; no version is announced yet"
    return NotReady(line, stats(state))


def who_samples(state: QueueState) -> str:
    """A warning that no generator samples; empty if one does. It precedes the reason for a wait."""
    return "" if state.generators.alive(state.now) else "no generator is connected: "


def status(state: QueueState, now: float) -> dict[str, Any]:
    """The full status of the queue for people, as plain data."""
    state.at(now)
    learner = state.learner
    announced = learner.announcement if learner else None
    return {
        **{name: getattr(learner, name, None) for name in LEARNER_STATUS},
        "finished": bool(learner and learner.finished),
        "announced": {name: getattr(announced, name) for name in _ANNOUNCED} if announced else None,
        "depth": len(state.queued),
        "bytes": state.group_bytes + state.evals.num_bytes,
        "bytes_pinned": sum(g.ref.length for g in state.snapshot_refs.groups if not state.is_live(g.lease_id)),
        "bytes_reserved": state.leases.reserved,
        "max_bytes": state.settings.max_bytes,
        "stream": {
            "position": state.stream.position,
            "requeued": state.stream.num_requeued,
            "epoch": state.stream.epoch,
        },
        "leases": _leases(state),
        "generators": state.generators.as_dicts(state.now),
        "evaluations": [e.progress_line for e in state.evals],
        "prompts_too_long": state.prompts_too_long,
        "filtered_since_step": state.filtered_since_step,
        "stop": state.stop_diagnosis(),
        "excluded": excluded(state),
        "ledger": ledger_dict(state),
    }


def excluded(state: QueueState) -> list[dict[str, Any]]:
    """The prompts that were excluded most recently (at most 100).

    ``row`` is the row's index in the loaded data set. It starts at 0 and does not count malformed rows.
    """
    found: list[dict[str, Any]] = []
    for position, cause in state.last_excluded.items():
        row, epoch = state.stream.locate(position)
        found.append({"position": position, "row": row, "epoch": epoch, "cause": cause})
    return found


def _leases(state: QueueState) -> list[dict[str, Any]]:
    return [
        {
            "lease_id": active.lease.lease_id,
            "generator": active.generator_id,
            "kind": active.lease.kind,
            "version": active.version,
            "attempt": active.lease.attempt,
            "progress": active.progress,
            "age_s": state.now - active.issued_at,
            "silent_s": state.now - active.grown_at,
        }
        for active in state.leases
    ]
