"""Mutants in chunks: each chunk has a seed of its own, so that a long test can stop and go on.

``pytest -m long -k mutants --mutants 250000 --first-mutant 100000`` sends that many to every port, from that one on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

SEED = 20_261_121
CHUNK = 1000
FEW = 300
"""Mutants of a quick test: the first of a chunk."""
REPLAYED = 0.1
"""Share of the mutants that are recorded messages of somebody else, unchanged."""


def long_chunks(config: pytest.Config) -> range:
    """The chunks that the command line asks for."""
    first, count = config.option.first_mutant // CHUNK, config.option.mutants // CHUNK
    return range(first, first + count)


def chunk_rng(chunk: int) -> random.Random:
    return random.Random(SEED + chunk)


def byte_mutants(rng: random.Random, messages: Sequence[bytes]) -> Iterator[bytes]:
    """Mutants of byte strings without end; some are replays."""
    while True:
        message = rng.choice(messages)
        if rng.random() >= REPLAYED:
            for _ in range(rng.choice((1, 1, 2, 4))):
                message = rng.choice(_MUTATIONS)(rng, message, rng.choice(messages))
        yield message


def flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _extend(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data + rng.randbytes(rng.choice((1, 15, 500, 70_000)))


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _repeat(rng: random.Random, data: bytes, other: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start : start + 40] * rng.choice((2, 3, 200)) + data[start:]


def _overwrite(rng: random.Random, data: bytes, other: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    new = rng.choice(
        (b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f", b"9" * 30, b"\r\n", b"\r\n\r\n", b'"', b"[" * 300, b"-1")
    )
    return data[:start] + new + data[start + len(new) :]


_MUTATIONS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    flip, flip, _truncate, _extend, _splice, _repeat, _overwrite, _overwrite,
)  # fmt: skip
