"""Convert the queue's state to bytes and back, for the journal and for snapshots, and to plain data for people.

The journal of the server and the snapshot in a checkpoint both have one ``PersistedState``. The journal also has a
record for each group, lease and evaluation (``Changes``), and a restarted server restores all of them. A snapshot also
has the groups that belong to it. ``restore`` defines which fields a snapshot replaces.

After a restore, the work of the queue since the snapshot is lost: leases have ended, and prompts are drawn again in the
order of the stream. Only the ledger keeps the lost amounts, as ``rolled_back``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import xxhash

from async_rl.errors import DamagedJournalError, QueueError
from async_rl.net.wire import pack_plain
from async_rl.queue.core import diagnosis
from async_rl.queue.core.admission import LEARNER_STATUS, LearnerSide
from async_rl.queue.core.evaluations import Answer, Evaluation, EvaluationRecord
from async_rl.queue.core.generator_requests import build_lease
from async_rl.queue.core.generators import GeneratorRecord
from async_rl.queue.core.groups import GroupRecord, ReadyGroups, SnapshotRecord, StoredGroup, snapshot_key
from async_rl.queue.core.leases import ActiveLease, ClosedLease, LeaseRecord
from async_rl.queue.core.prompts import PassRate, Place, Row
from async_rl.queue.core.state import PersistedState, QueueState, decode_state, persisted, read_counter, stop_reason
from async_rl.queue.messages import DropCause
from async_rl.queue.storage.journal import Kind
from async_rl.queue.storage.payloads import PayloadRef
from async_rl.records import Sampling

Entries = Mapping[Kind, Mapping[str, Any]]

_ANNOUNCED = ("lineage", "version", "digest", "channel", "ports")
"""The names of the announcement's fields that the queue's status shows."""
KEPT_AT_RESTORE = frozenset({
    "now", "data_digest", "learner", "old_lineages", "outcomes", "received_evals", "num_damaged", "code",
    "quarantines",
})  # fmt: skip
"""Names of the fields that the restore of a snapshot does not replace: the clock, the digest of the rows, the learners,
the outcomes of groups, the received evaluations, the number of damaged groups, the digest of the user's code, and who
was quarantined."""
KNOWN_AT_RESTORE = frozenset({"num_good", "num_outcomes", "proven_code", "failed_places"})
"""Names of the fields that the restore of a snapshot replaces only if nothing is known since: what has failed, and what
was good."""

_DIGEST_BYTES = 16
_OLDER_CHECKPOINT = "write the name of an older checkpoint into checkpoints/latest, and start the learner again"


class Snapshot(msgspec.Struct, frozen=True):
    """The queue's state right after the learner reported a step, and the groups that were queued or taken then.

    ``rates`` and ``places`` are the records of a curriculum, by row and by position.
    """

    state: PersistedState
    groups: list[StoredGroup]
    rates: dict[int, PassRate] = {}
    places: dict[int, Place] = {}


_SNAPSHOT_DECODER = msgspec.msgpack.Decoder(Snapshot, dec_hook=read_counter)


# The journal.


def load(
    state: QueueState, entries: Entries, data: bytes, eval_rows: Mapping[str, Sequence[Row]],
    eval_samplings: Mapping[str, Sampling], now: float,
) -> list[PayloadRef]:  # fmt: skip
    """Fill an empty ``state`` from the journal: its records (``entries``), and ``data``, as of ``encode_state``.

    The queue's clock goes on from where it stopped, and the progress of every lease starts at 0.

    Returns:
        The places of the groups' bytes that are in use.

    Raises:
        DamagedJournalError: a record is missing.
        QueueError: the journal was written for other training rows, or by another version of this code.
    """
    try:
        saved = decode_state(data)
        # Before the first learner no prompt was drawn, so the rows may change.
        is_used = saved.learner is not None
        if is_used and saved.data_digest != state.data_digest and not state.settings.accepts_changed_data:
            raise _changed_data("the queue's journal was written", saved, state)
        state.adopt(replace(saved, data_digest=state.data_digest))
        state.clock_ahead_s = saved.now - now
        groups = _load_groups(state, entries)
        places = _load_evaluations(state, entries, eval_rows, eval_samplings)
        _load_curriculum(state, entries)
        _load_leases(state, entries)
    except KeyError as error:
        raise DamagedJournalError(f"the record {error} is missing") from error
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise QueueError(
            f"the queue's journal is undamaged, but was written by another version of async-rl: "
            f"{type(error).__name__}: {error}; start that version, or rename the directory queue.journal_dir (if "
            f"unset, run.dir/queue), so that the run resumes from its last checkpoint"
        ) from error
    return [group.ref for group in groups] + places


def _load_groups(state: QueueState, entries: Entries) -> list[StoredGroup]:
    records = {lease_id: msgspec.convert(plain, GroupRecord) for lease_id, plain in entries["group"].items()}
    for key, plain in entries["snapshot"].items():
        lease_ids = msgspec.convert(plain, SnapshotRecord).lease_ids
        state.snapshot_refs.add(key, [records[lease_id].group for lease_id in lease_ids])
    taken_ids = () if state.learner is None else state.learner.taken_ids
    state.set_taken(tuple(records[lease_id].group for lease_id in taken_ids))
    for lease_id, record in records.items():
        if record.is_live and lease_id not in taken_ids:
            state.queued.add(record.group)
    return [record.group for record in records.values()]


def _load_evaluations(
    state: QueueState, entries: Entries, eval_rows: Mapping[str, Sequence[Row]], samplings: Mapping[str, Sampling]
) -> list[PayloadRef]:
    answers: dict[tuple[str, int], dict[int, Answer]] = {}
    for key, plain in entries["answer"].items():
        dataset, step, row = json.loads(key)
        answers.setdefault((dataset, step), {})[row] = msgspec.convert(plain, Answer)
    for plain in entries["evaluation"].values():
        record = msgspec.convert(plain, EvaluationRecord)
        evaluation = Evaluation(record, eval_rows[record.dataset], samplings[record.dataset])
        state.evals.add(evaluation)
        for row, answer in answers.get(evaluation.key, {}).items():
            if row not in evaluation.todo:
                raise DamagedJournalError(
                    f"it has an answer to row {row} of the evaluation set {record.dataset!r}, which now has "
                    f"{len(evaluation.rows)} rows"
                )
            evaluation.todo.remove(row)
            state.evals.answer(evaluation, row, answer)
    return [a.ref for by_row in answers.values() for a in by_row.values() if a.ref is not None]


def _load_curriculum(state: QueueState, entries: Entries) -> None:
    rates = {int(row): msgspec.convert(plain, PassRate) for row, plain in entries["pass_rate"].items()}
    places = {int(position): msgspec.convert(plain, Place) for position, plain in entries["place"].items()}
    state.stream.curriculum.replace(rates, places)


def _load_leases(state: QueueState, entries: Entries) -> None:
    for lease_id, plain in entries["lease"].items():
        record = msgspec.convert(plain, LeaseRecord)
        evaluation = None if record.evaluation is None else state.evals.get(record.evaluation)
        if evaluation is not None:
            evaluation.todo.remove(record.position)
        state.leases.add(build_active_lease(state, lease_id, record))
    closed = {lease_id: msgspec.convert(plain, ClosedLease) for lease_id, plain in entries["closed_lease"].items()}
    for lease_id, lease in sorted(closed.items(), key=lambda item: item[1].number):
        state.leases.restore_closed(lease_id, lease)
    for generator_id, plain in entries["generator"].items():
        state.generators.restore(generator_id, msgspec.convert(plain, GeneratorRecord), state.now)


def build_active_lease(state: QueueState, lease_id: str, record: LeaseRecord) -> ActiveLease:
    """Build the lease ``lease_id`` from its record in the journal. Its progress is 0."""
    evaluation = None if record.evaluation is None else state.evals.get(record.evaluation)
    lease = build_lease(
        state, evaluation, record.position, lease_id=lease_id, lineage=record.lineage,
        min_version=record.min_version, attempt=record.attempt, version=record.version,
    )  # fmt: skip
    reserved = 0 if evaluation is not None else state.settings.reserved_bytes
    return ActiveLease(
        lease, record.generator_id, record.version, reserved, record.issued_at, state.now,
        evaluation=record.evaluation,
    )  # fmt: skip


# The snapshot.


def snapshot(state: QueueState, learner: LearnerSide) -> bytes:
    """Return the queue's state after the learner's last reported step as bytes, and keep the state's groups stored.

    Taken groups count as queued. The prompts of leases in flight count as not yet drawn.
    """
    in_flight = [active.lease.prompt.position for active in state.leases if active.evaluation is None]
    groups = sorted([*state.taken, *state.queued], key=lambda g: g.order)
    state.release_refs(state.snapshot_refs.add(snapshot_key(learner.lineage, learner.step), groups))
    saved = persisted(state)
    requeued = sorted([*state.cursor.requeued, *in_flight])
    saved.cursor = msgspec.structs.replace(state.cursor, requeued=requeued)
    saved.learner = msgspec.structs.replace(learner, taken_ids=(), acked=None, announcement=None, digests={})
    curriculum = state.stream.curriculum
    return _encode_snapshot(Snapshot(saved, groups, curriculum.rates(), curriculum.places))


def read_snapshot(state: QueueState, data: bytes, *, step: int, version: int) -> Snapshot:
    """Decode a snapshot's bytes, ``data``, and check that it fits the learner.

    Raises:
        QueueError: it is damaged, or its step, version or training rows differ from the learner's.
    """
    decoded = _decode_snapshot(data)
    learner = decoded.state.learner
    if learner is None or (learner.step, learner.version) != (step, version):
        got = "one without a learner" if learner is None else f"one of step {learner.step} at version {learner.version}"
        raise QueueError(
            f"expected a snapshot of step {step} at version {version} in the checkpoint, got {got}; {_OLDER_CHECKPOINT}"
        )
    # A fork with other data has no digest of the rows that it will get.
    is_other = decoded.state.data_digest not in ("", state.data_digest)
    if is_other and not state.settings.accepts_changed_data:
        raise _changed_data("the checkpoint", decoded.state, state)
    return decoded


def _decode_snapshot(data: bytes) -> Snapshot:
    if not data:
        raise QueueError(
            "expected the queue's snapshot in the checkpoint, got that of a replay, which had no queue; go on with "
            "async-rl replay, or start a run from its export/ as model.path"
        )
    digest, frame = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(frame) != digest:
        raise QueueError(
            f"the queue's snapshot in the checkpoint is damaged: its {len(data)} bytes do not match their checksum; "
            f"{_OLDER_CHECKPOINT}"
        )
    try:
        return _SNAPSHOT_DECODER.decode(frame)
    except msgspec.MsgspecError as error:
        raise QueueError(
            f"the queue's snapshot in the checkpoint is undamaged, but was written by another version of async-rl: "
            f"{error}; resume with that version"
        ) from error


def snapshot_for_other_data(data: bytes) -> bytes:
    """Return a snapshot with the learner's step and version of the snapshot ``data``, and otherwise an empty queue.

    Its prompts begin at the first one, and it fits any training rows.

    Raises:
        QueueError: the snapshot is damaged, or was written by another version of async-rl.
    """
    return _encode_snapshot(Snapshot(PersistedState(learner=_decode_snapshot(data).state.learner), []))


def _encode_snapshot(snapshot: Snapshot) -> bytes:
    frame = pack_plain(snapshot)
    return xxhash.xxh3_128_digest(frame) + frame


def restore(state: QueueState, restored: Snapshot | None) -> None:
    """Replace the state by a snapshot, or by an empty state if ``restored`` is None.

    The prompts of groups that are no longer stored are requeued.
    """
    saved = PersistedState() if restored is None else restored.state
    kept = {name: getattr(state, name) for name in KEPT_AT_RESTORE}
    kept |= {name: getattr(state, name) or getattr(saved, name) for name in KNOWN_AT_RESTORE}
    ledger, eval_ledger = saved.ledger.restored_over(state.ledger), saved.eval_ledger.restored_over(state.eval_ledger)
    state.adopt(replace(saved, ledger=ledger, eval_ledger=eval_ledger, **kept))
    drop_undelivered(state, "rolled_back")
    state.stream.curriculum.replace(*(({}, {}) if restored is None else (restored.rates, restored.places)))
    _restore_groups(state, restored)


def _restore_groups(state: QueueState, restored: Snapshot | None) -> None:
    """Make the snapshot's groups that are still stored ready to be taken, and drop all other groups."""
    here = {group.lease_id: group for group in (*state.queued, *state.taken)}
    groups = [] if restored is None else restored.groups
    stored = [here.get(group.lease_id) or state.snapshot_refs.get(group.lease_id) for group in groups]
    kept = [group for group in stored if group is not None]
    state.queued = ReadyGroups(kept)
    state.set_taken(())
    for group in kept:
        state.changes.put("group", group.lease_id, GroupRecord(group))
    key, released = None, []
    if restored is not None and restored.state.learner is not None:
        key = snapshot_key(restored.state.learner.lineage, restored.state.learner.step)
        released = state.snapshot_refs.add(key, kept)
    released += state.snapshot_refs.release_all_but(key)
    state.release_refs(released)
    pinned = {group.lease_id for group in released}
    for group in here.values():
        if group.lease_id not in state.queued and group.lease_id not in pinned:
            state.forget_group(group)
    for group, there in zip(groups, stored, strict=True):
        if there is None:
            state.ledger.drop("queued", "rolled_back", group.num_rollouts, group.num_tokens)
            state.stream.requeue(group.position)


def drop_undelivered(state: QueueState, cause: DropCause) -> None:
    """Count the answers that the learner has not received as dropped for ``cause``, and delete all evaluations."""
    state.evals.clear()
    state.received_evals = set()
    for account in (state.eval_ledger.groups, state.eval_ledger.rollouts, state.eval_ledger.tokens):
        account.dropped[cause] += account.queued
        account.queued = 0


def _changed_data(since: str, saved: PersistedState, state: QueueState) -> QueueError:
    return QueueError(
        f"data.train has changed since {since}: expected rows with digest {saved.data_digest}, got "
        f"{state.data_digest}; put the old file back, or set data.on_change = 'accept': then the run "
        f"goes on at its place in the data, with the new rows"
    )


# For people.


def ledger_file(state: QueueState) -> dict[str, Any]:
    """Return the content of ``ledger.json``. Its key ``broken`` says which counts don't add up (a bug in async-rl)."""
    learner = state.learner
    plain: dict[str, Any] = {
        "lineage": learner.lineage if learner else None,
        "step": learner.step if learner else None,
        "version": learner.version if learner else None,
        **state.ledger_dict(),
        "excluded": excluded(state),
        "training_notes": learner.training_notes if learner else (),
        "group_notes": diagnosis.notes(state),
    }
    try:
        state.check_totals()
    except AssertionError as error:
        plain["broken"] = str(error)
    return plain


def status(state: QueueState, now: float) -> dict[str, Any]:
    """Return the full status of the queue at the time ``now``, as plain data for people."""
    state.set_clock(now)
    learner = state.learner
    announced = learner.announcement if learner else None
    return {
        **{name: getattr(learner, name, None) for name in LEARNER_STATUS},
        "num_steps": most_steps(state),
        "finished": bool(learner and learner.finished),
        "announced": {name: getattr(announced, name) for name in _ANNOUNCED} if announced else None,
        "run_ahead": state.run_ahead.metrics(state.now),
        "depth": len(state.queued),
        "bytes": state.group_bytes + state.evals.num_bytes,
        "bytes_pinned": sum(g.ref.disk_bytes for g in state.snapshot_refs.groups if not state.is_live(g.lease_id)),
        "bytes_reserved": state.leases.reserved,
        "max_bytes": state.settings.queue.max_bytes,
        "stream": {
            "position": state.stream.position,
            "requeued": state.stream.num_requeued,
            "epoch": state.stream.epoch,
            "aside": state.cursor.aside.total(),
            "thinned": state.cursor.thinned.total(),
        },
        "leases": _leases(state),
        "generators": state.generators.as_dicts(state.now),
        "evaluations": [e.progress_line for e in state.evals],
        "prompts_too_long": state.prompts_too_long,
        "damaged_groups": state.num_damaged,
        "filtered_since_step": state.filtered_since_step,
        "stop": stop_reason(state),
        "excluded": excluded(state),
        "group_notes": diagnosis.notes(state),
        "ledger": state.ledger_dict(),
    }


def most_steps(state: QueueState) -> int | None:
    """Return the number of steps that the run makes at most; None without a learner.

    It is ``learner.steps``, or less if the data ends before.
    """
    learner, groups = state.learner, state.ledger.groups
    if learner is None:
        return None
    left = groups.queued + groups.in_flight + state.stream.most_prompts_left
    steps = learner.step + bool(state.taken) + left / state.settings.groups_per_step
    return learner.num_steps if steps >= learner.num_steps else math.ceil(steps)


def excluded(state: QueueState) -> list[dict[str, Any]]:
    """Return the prompts that were excluded last (at most 100), with row, epoch and cause.

    ``row`` is the row's index in the loaded data set. It starts at 0 and does not count malformed rows.
    """
    prompts: list[dict[str, Any]] = []
    for position, cause in state.last_excluded.items():
        row, epoch = state.stream.locate(position)
        prompts.append({"position": position, "row": row, "epoch": epoch, "cause": cause})
    return prompts


def _leases(state: QueueState) -> list[dict[str, Any]]:
    return [
        {
            # Without its random part: any client may ask for the status.
            "lease_id": active.lease.lease_id.rpartition("-")[0],
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
