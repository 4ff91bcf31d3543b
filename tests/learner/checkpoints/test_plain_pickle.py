"""Pickles are read as plain data: names stay names, calls are recorded, and no other opcode is known."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch

from async_rl.learner.checkpoints.plain_pickle import Name, Record, UnreadablePickleError, read_pickle

OPCODES = [value[0] for name, value in vars(pickle).items() if name.isupper() and isinstance(value, bytes)]


@dataclass
class Point:
    x: int


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_comes_back(protocol: int):
    plain = {"a": [1, -1, 255, 1 << 40, None], "b": (True, False, ("x" * 300, ())), "c": {}, "d": [[], {"e": "ü"}]}
    assert read_pickle(pickle.dumps(plain, protocol)) == plain


def test_objects_calls_and_names_are_recorded_and_not_made():
    found = read_pickle(pickle.dumps([Point(3), torch.Size([4, 5]), torch.float16, OrderedDict()]))
    assert [(one.kind, one.content) for one in found if isinstance(one, Record)] == [
        (f"{__name__}.Point", {"x": 3}), ("torch.Size", ((4, 5),)), ("collections.OrderedDict", ()),
    ]  # fmt: skip
    assert found[2] == Name("torch.float16")


def test_an_object_that_occurs_twice_is_one_record():
    point = Point(3)
    one, other = read_pickle(pickle.dumps([point, point]))
    assert one is other


BAD: dict[str, bytes] = {
    "bytes": pickle.dumps(b"x"),
    "a float": pickle.dumps(0.5),
    "a set": pickle.dumps({1}),
    "a key that is a tuple": pickle.dumps({(1,): 2}),
    "a state for a list": b"\x80\x04]}b.",
    "a state for a name": b"\x80\x04cos\nsystem\n}b.",
    "a second state": b"\x80\x04cos\nsystem\n)\x81}b}b.",
    "a call of a record": b"\x80\x04cos\nsystem\n)R)R.",
    "a call with a list": b"\x80\x04cos\nsystem\n]R.",
    "an object of no class": b"\x80\x04])\x81.",
    "an object of another protocol": b"(cos\nsystem\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "nothing": b".",
    "no end": b"\x80\x04]",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_anything_else_is_refused(data: bytes):
    with pytest.raises(UnreadablePickleError):
        read_pickle(data)


def test_no_damage_ends_in_another_error_or_in_another_type():
    whole = pickle.dumps({"a": [Point(1), (torch.Size([1]), "text")], "b": {"c": None}})
    random = Random(0)
    num_read = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(random.randrange(1, 4)):
            data[random.randrange(len(data))] = random.choice(OPCODES)
        try:
            found: Any = read_pickle(bytes(data))
        except UnreadablePickleError:
            continue
        num_read += 1
        assert type(found) in (type(None), bool, int, str, list, tuple, dict, Name, Record)
    assert 0 < num_read < 3000
