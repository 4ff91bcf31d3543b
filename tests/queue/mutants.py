"""Valid requests of every type that the server knows, and seeded mutants of them. No sockets.

Half of the mutants are made byte by byte, half field by field: those are decoded, changed and encoded again, so that
they get past the outer frame and reach what reads them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgpack
import msgspec
from msgspec.structs import asdict

from async_rl.errors import WireError
from async_rl.net.codec import encode_group
from async_rl.net.wire import ALIGNMENT, Limits, decode, encode
from async_rl.queue import messages
from async_rl.queue.messages import Decoded, FailedRollouts, Failure, GeneratorStats, TrainedCounts
from async_rl.queue.parity import Answer, encode_answer
from async_rl.records import Lease, Prompt
from tests.fuzz import flip
from tests.queue.builders import SAMPLING, group

Frames = tuple[bytes, ...]
"""A message: its frame, and its parts behind it."""

_PREFIX = struct.Struct("<4sI")
_LEAVES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.5, 1e308, float("nan"),
    float("inf"), "", "x", "x" * 300, "a\0b", "line-f", b"", b"\xff\xfe", [], {}, [[]] * 50, {"a": {"b": {"c": []}}},
    [1, "2", None], {1: 2, "3": 4},
)  # fmt: skip
_TABLES: tuple[Any, ...] = (
    ["|u1", [2**40 - 1], 0], ["<f8", [2**20, 2**20], 0], ["|u1", [1], 2**62], ["|u1", [1], -16],
    ["<i4", [3, 3, 3, 3], 0],
    ["|O", [1], 0], ["|u1", [-1], 0], ["|u1", [], 0], ["|u1", [0], 16], ["<f4", "many", 0], "|u1", [],
    ["|u1", [1, 1, 1, 1, 1], 0],
)  # fmt: skip


def corpus(
    lineage: str = "line-f", generator_id: str = "fuzz", run_id: str = "other", step: int = 10**6
) -> dict[str, Frames]:
    """One valid message of every type, by type."""
    mine = generator_id
    failure = Failure("reward_error", "KeyError: 'x' (/r.py, line 3, in score)", "KeyError at /r.py:3")
    prompt = Prompt(0, 0, 0, ({"role": "user", "content": "row 0"},), {"gt_answer": "0"})
    lease = Lease(f"{lineage}-0-train0-1-1", "train", prompt, 2, SAMPLING, lineage, 0, 1, 1, 0)
    facts = TrainedCounts(True, 4, {"truncated": 1}, 12, {"stale": 2})
    decoded, counters = (Decoded(1.0, 1.5, 9),), {"judge_retries": 2}
    stats = GeneratorStats(8, 10.0, 5.0, 40.0, 0.5, num_tokens=1000, decoded=decoded, counters=counters)
    attach = messages.Attach(run_id, lineage, "line-e", 0, 0, 9, "[run]", ("a.txt", "b.json"), has_snapshot=True)
    returned = messages.ReturnGroups(mine, (lease.lease_id,), (FailedRollouts(lease.lease_id, failure, 1),))
    with_parts: list[tuple[msgspec.Struct, list[bytes]]] = [
        (attach, [b"hello", b"{}", b"no snapshot, but bytes" * 9]),
        (returned, [encode_group(group(lease, generator=mine))]),
    ]
    alone: list[msgspec.Struct] = [
        messages.Ping(), messages.GetStatus(),
        messages.Alive(lineage, "pulls are slow"),
        messages.ConfirmLineage(lineage, 0, (("test", step),)),
        messages.LearnerGoodbye(lineage),
        messages.Announcement(lineage, step, "digest", "tcp://127.0.0.1:1", b"", (1, 2)),
        messages.Evaluate(lineage, "test", step, 0, exclusive=False),
        messages.GetEvalResults(lineage, (("test", 0), ("test", 5))),
        messages.AwaitEval(lineage),
        messages.Take(lineage, step, step),
        messages.StepAck(lineage, step, step, facts, training_notes=("ESS is low",)),
        messages.TakeSnapshot(lineage),
        messages.CheckpointCommitted(lineage, step),
        messages.GetProbeAnswers(lineage, 0),
        messages.Quarantine(lineage, "nobody", "far"),
        messages.Finish(lineage),
        messages.Hello(mine, "host-1", "fake"),
        messages.LeaseRequest(mine, lineage, 0, 2),
        messages.Heartbeat(mine, {lease.lease_id: 5}, stats, "no route to the weights"),
        messages.FailLease(mine, lease.lease_id, failure),
        messages.AnswerProbe(mine, lineage, 0, encode_answer(Answer(0, "fake", "", None))),
        messages.Goodbye(mine),
    ]  # fmt: skip
    return {
        messages.WIRE_TYPES[type(one)]: framed(one, parts) for one, parts in (*with_parts, *((m, []) for m in alone))
    }


def framed(request: msgspec.Struct, parts: Sequence[bytes] = ()) -> Frames:
    """The message of a request, as a client sends it."""
    fields = {**asdict(request), "request_id": "r-1", "wait_s": 0.0}
    return encode(messages.WIRE_TYPES[type(request)], fields, num_parts=len(parts)), *parts


def mutants(originals: Mapping[str, Frames], seed: int) -> Iterator[Frames]:
    """Mutants without end, of all types in turn; one in fifty is a replay of the original."""
    rng = random.Random(seed)
    types = sorted(originals)
    others = {type_: frames[0] for type_, frames in originals.items()}
    number = 0
    while True:
        type_ = types[number % len(types)]
        number += 1
        frame, *parts = originals[type_]
        if parts and rng.random() < 0.5:
            yield frame, *_mutated_parts(rng, parts)
        else:
            yield _mutant(rng, frame, others), *parts


def gets_past_the_frame(frames: Frames, limits: Limits) -> bool:
    """Whether it is a whole message."""
    try:
        decode(frames[0], limits).with_parts(map(memoryview, frames[1:]))
    except WireError:
        return False
    return True


def _mutant(rng: random.Random, frame: bytes, frames: Mapping[str, bytes]) -> bytes:
    if rng.random() < 0.02:
        return frame
    if rng.random() < 0.5:
        other = frames[rng.choice(sorted(frames))]
        return rng.choice(_BYTE_LEVEL)(rng, frame, other)
    mutate = rng.choice(_FIELD_LEVEL)
    for _ in range(rng.choice((1, 1, 2, 4))):
        frame = _mutate_fields(rng, frame, mutate)
    return frame


def _mutated_parts(rng: random.Random, parts: Sequence[bytes]) -> list[bytes]:
    """A valid frame before something broken: mostly a broken group."""
    match rng.randrange(8):
        case 0:
            return [*parts, rng.randbytes(9)]
        case 1:
            return list(parts[1:])
        case 2:
            return [flip(rng, parts[0], b""), *parts[1:]]
        case _:
            mutate = rng.choice((_change_a_value, _nudge_a_number, _drop_a_field, _lie_about_arrays))
            return [_mutate_fields(rng, parts[0], mutate), *parts[1:]]


# Byte by byte.


def _truncate(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def _extend(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    return frame + rng.randbytes(rng.choice((1, 15, 16, 500)))


def _splice(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))] + other[rng.randrange(len(other)) :]


def _lie_about_the_header(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    length = rng.choice((0, 1, len(frame), 2**31, 2**32 - 1, rng.randrange(2 * len(frame))))
    return frame[:4] + struct.pack("<I", length) + frame[8:]


_BYTE_LEVEL: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    flip, flip, _truncate, _extend, _splice, _lie_about_the_header,
)  # fmt: skip


# Field by field.


def _opened(frame: bytes) -> tuple[list[Any], bytes]:
    """The header [schema, type, fields, table, number of parts] and the bytes of the arrays, mutated or not."""
    _, length = _PREFIX.unpack_from(frame)
    header = msgpack.unpackb(frame[_PREFIX.size : _PREFIX.size + length], strict_map_key=False)
    return header, frame[-(-(_PREFIX.size + length) // ALIGNMENT) * ALIGNMENT :]


def _closed(header: list[Any], payload: bytes) -> bytes:
    raw: bytes = msgpack.Packer().pack(header)
    size = _PREFIX.size + len(raw)
    return _PREFIX.pack(b"ARL1", len(raw)) + raw + bytes(-size % ALIGNMENT) + payload


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside ``value``."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _change_a_value(rng: random.Random, header: list[Any]) -> None:
    container, key = rng.choice(list(_places(header[2])) or [(header, 2)])
    container[key] = rng.choice(_LEAVES)


def _nudge_a_number(rng: random.Random, header: list[Any]) -> None:
    numbers = [(c, k) for c, k in _places(header) if isinstance(c[k], int | float) and not isinstance(c[k], bool)]
    container, key = rng.choice(numbers)
    container[key] += rng.choice((-1, 1, 7, 2**20))


def _drop_a_field(rng: random.Random, header: list[Any]) -> None:
    if maps := [(c, k) for c, k in _places(header[2:3]) if isinstance(c, dict)]:
        container, key = rng.choice(maps)
        del container[key]


def _add_fields(rng: random.Random, header: list[Any]) -> None:
    if isinstance(header[2], dict):
        header[2].update({f"more-{n}": rng.choice(_LEAVES) for n in range(rng.choice((1, 30)))})


def _change_the_type(rng: random.Random, header: list[Any]) -> None:
    header[1] = rng.choice(("return", "lease", "heartbeat", "status", "handle", "on_ping", "_on_ping", "x" * 999, 7))


def _nest(rng: random.Random, header: list[Any]) -> None:
    container, key = rng.choice(list(_places(header[2])) or [(header, 2)])
    for _ in range(rng.choice((3, 11, 12, 13, 200))):
        container[key] = [container[key]] if rng.random() < 0.5 else {"deep": container[key]}


def _grow(rng: random.Random, header: list[Any]) -> None:
    container, key = rng.choice(list(_places(header[2])) or [(header, 2)])
    container[key] = rng.choice(([0] * 3000, {f"k{n}": n for n in range(1000)}, "y" * 20_000))


def _lie_about_arrays(rng: random.Random, header: list[Any]) -> None:
    table = header[3]
    if isinstance(table, list) and table and rng.random() < 0.7:
        table[rng.randrange(len(table))] = rng.choice((*_TABLES, table[0]))
    else:
        header[3] = rng.choice(([rng.choice(_TABLES)], [["|u1", [0], 0]] * 500, None, {}))


def _lie_about_parts(rng: random.Random, header: list[Any]) -> None:
    header[4] = rng.choice((0, 1, 2, -1, 10**6, 2**63, None, True, "1"))


def _lie_about_the_whole(rng: random.Random, header: list[Any]) -> None:
    header[rng.choice((0, 2, 3, 4))] = rng.choice(_LEAVES)


def _mutate_fields(rng: random.Random, frame: bytes, mutate: Callable[[random.Random, list[Any]], None]) -> bytes:
    """Decode, change and encode the header. What is too broken for it already stays as it is."""
    try:
        header, payload = _opened(frame)
        mutate(rng, header)
        return _closed(header, payload)
    except (ValueError, OverflowError, TypeError, IndexError, KeyError, struct.error):
        return frame


_FIELD_LEVEL: tuple[Callable[[random.Random, list[Any]], None], ...] = (
    _change_a_value, _change_a_value, _change_a_value, _nudge_a_number, _drop_a_field, _add_fields,
    _change_the_type, _nest, _grow, _lie_about_arrays, _lie_about_the_whole, _lie_about_parts,
)  # fmt: skip
