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
from msgspec.structs import asdict

from async_rl.errors import WireError
from async_rl.net.codec import encode_group
from async_rl.net.wire import ALIGNMENT, Limits, decode, encode
from async_rl.queue.messages import Announcement, Decoded, FailedRollouts, Failure, GeneratorStats, TrainedCounts
from async_rl.queue.parity import Answer, encode_answer
from async_rl.records import Lease, Prompt
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
    own = {"request_id": "r-1", "wait_s": 0.0, "lineage": lineage}
    mine = {"request_id": "r-1", "wait_s": 0.0, "generator_id": generator_id}
    answer = encode_answer(Answer(0, "fake", "", None))
    facts = TrainedCounts(True, 4, {"truncated": 1}, 12, {"stale": 2})
    prompt = Prompt(0, 0, 0, ({"role": "user", "content": "row 0"},), {"gt_answer": "0"})
    lease = Lease(f"{lineage}-0-train0-1-1", "train", prompt, 2, SAMPLING, lineage, 0, 1, 1, 0)
    announcement = Announcement(lineage, step, "digest", "tcp://127.0.0.1:1", b"", (1, 2))
    at = {**own, "step": step, "version": step}
    plain: dict[str, tuple[Mapping[str, Any], Sequence[bytes]]] = {
        "ping": ({"request_id": "r-1"}, ()),
        "status": ({"request_id": "r-1"}, ()),
        "attach": (
            {
                **own, "run_id": run_id, "parent_lineage": "line-e", "fork_version": 0, "step": 0, "num_steps": 9,
                "config_toml": "[run]", "files": ["a.txt", "b.json"], "has_snapshot": True,
            },
            (b"hello", b"{}", b"no snapshot, but bytes" * 9),
        ),
        "alive": (own | {"trouble": "pulls are slow"}, ()),
        "confirm": ({**own, "announced": 0, "evaluations": [["test", step]]}, ()),
        "bye_learner": (own, ()),
        "announce": ({**own, **asdict(announcement)}, ()),
        "evaluate": ({**own, "dataset": "test", "step": step, "min_version": 0, "exclusive": False}, ()),
        "eval_results": ({**own, "received": [["test", 0], ["test", 5]]}, ()),
        "await_eval": (own, ()),
        "take": (at, ()),
        "ack": ({**at, "snapshot": False, "trained": facts, "training_notes": ["ESS is low"]}, ()),
        "snapshot": (own, ()),
        "checkpoint_committed": ({**own, "step": step}, ()),
        "parity_answers": ({**own, "since": 0}, ()),
        "quarantine": ({**own, "generator_id": "nobody", "reason": "far"}, ()),
        "finish": (own, ()),
        "hello": ({**mine, "host": "host-1", "backend": "fake", "replaces": None}, ()),
        "lease": ({**mine, "lineage": lineage, "version": 0, "max_leases": 2}, ()),
        "heartbeat": (
            {**mine, "progress": {lease.lease_id: 5}, "stats": _STATS, "trouble": "no route to the weights"}, (),
        ),
        "return": (
            {**mine, "lease_ids": [lease.lease_id], "failed": [FailedRollouts(lease.lease_id, _FAILURE, 1)]},
            (encode_group(group(lease, generator=generator_id)),),
        ),
        "fail": ({**mine, "lease_id": lease.lease_id, "failure": _FAILURE}, ()),
        "parity": ({**mine, "lineage": lineage, "version": 0, "answer": answer}, ()),
        "bye": (mine, ()),
    }  # fmt: skip
    return {type_: (encode(type_, fields, num_parts=len(parts)), *parts) for type_, (fields, parts) in plain.items()}


_STATS = GeneratorStats(
    8,
    10.0,
    5.0,
    40.0,
    0.5,
    num_activations=3,
    num_tokens=1000,
    decoded=(Decoded(1.0, 1.5, 9),),
    counters={"judge_retries": 2},
)
_FAILURE = Failure("reward_error", "KeyError: 'x' (/r.py, line 3, in score)", "KeyError at /r.py:3")


def mutants(messages: Mapping[str, Frames], seed: int) -> Iterator[Frames]:
    """Mutants without end, of all types in turn; one in fifty is a replay of the original."""
    rng = random.Random(seed)
    types = sorted(messages)
    others = {type_: frames[0] for type_, frames in messages.items()}
    number = 0
    while True:
        type_ = types[number % len(types)]
        number += 1
        frame, *parts = messages[type_]
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
        frame = mutate(rng, frame)
    return frame


def _mutated_parts(rng: random.Random, parts: Sequence[bytes]) -> list[bytes]:
    """A valid frame before something broken: mostly a broken group."""
    match rng.randrange(8):
        case 0:
            return [*parts, rng.randbytes(9)]
        case 1:
            return list(parts[1:])
        case 2:
            return [_flip(rng, parts[0], b""), *parts[1:]]
        case _:
            mutate = _tolerant(rng.choice((_change_a_value, _nudge_a_number, _drop_a_field, _lie_about_arrays)))
            return [mutate(rng, parts[0]), *parts[1:]]


# Byte by byte.


def _flip(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


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
    _flip, _flip, _truncate, _extend, _splice, _lie_about_the_header,
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


def _change_a_value(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    container, key = rng.choice(list(_places(header[2])) or [(header, 2)])
    container[key] = rng.choice(_LEAVES)
    return _closed(header, payload)


def _nudge_a_number(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    numbers = [(c, k) for c, k in _places(header) if isinstance(c[k], int | float) and not isinstance(c[k], bool)]
    container, key = rng.choice(numbers)
    container[key] += rng.choice((-1, 1, 7, 2**20))
    return _closed(header, payload)


def _drop_a_field(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    maps = [(c, k) for c, k in _places(header[2:3]) if isinstance(c, dict)]
    if maps:
        container, key = rng.choice(maps)
        del container[key]
    return _closed(header, payload)


def _add_fields(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    if isinstance(header[2], dict):
        header[2].update({f"more-{n}": rng.choice(_LEAVES) for n in range(rng.choice((1, 30)))})
    return _closed(header, payload)


def _change_the_type(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    header[1] = rng.choice(("return", "lease", "heartbeat", "status", "handle", "on_ping", "_on_ping", "x" * 999, 7))
    return _closed(header, payload)


def _nest(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    container, key = rng.choice(list(_places(header[2])) or [(header, 2)])
    for _ in range(rng.choice((3, 11, 12, 13, 200))):
        container[key] = [container[key]] if rng.random() < 0.5 else {"deep": container[key]}
    return _closed(header, payload)


def _grow(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    container, key = rng.choice(list(_places(header[2])) or [(header, 2)])
    container[key] = rng.choice(([0] * 3000, {f"k{n}": n for n in range(1000)}, "y" * 20_000))
    return _closed(header, payload)


def _lie_about_arrays(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    table = header[3]
    if isinstance(table, list) and table and rng.random() < 0.7:
        table[rng.randrange(len(table))] = rng.choice((*_TABLES, table[0]))
    else:
        header[3] = rng.choice(([rng.choice(_TABLES)], [["|u1", [0], 0]] * 500, None, {}))
    return _closed(header, payload)


def _lie_about_parts(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    header[4] = rng.choice((0, 1, 2, -1, 10**6, 2**63, None, True, "1"))
    return _closed(header, payload)


def _lie_about_the_whole(rng: random.Random, frame: bytes) -> bytes:
    header, payload = _opened(frame)
    header[rng.choice((0, 2, 3, 4))] = rng.choice(_LEAVES)
    return _closed(header, payload)


def _tolerant(mutate: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, bytes], bytes]:
    """A second mutation of one frame may find it too broken; then the first stands."""

    def tried(rng: random.Random, frame: bytes) -> bytes:
        try:
            return mutate(rng, frame)
        except (ValueError, OverflowError, TypeError, IndexError, KeyError, struct.error):
            return frame

    return tried


_FIELD_LEVEL: tuple[Callable[[random.Random, bytes], bytes], ...] = tuple(
    map(
        _tolerant,
        (
            _change_a_value, _change_a_value, _change_a_value, _nudge_a_number, _drop_a_field, _add_fields,
            _change_the_type, _nest, _grow, _lie_about_arrays, _lie_about_the_whole, _lie_about_parts,
        ),
    )
)  # fmt: skip
