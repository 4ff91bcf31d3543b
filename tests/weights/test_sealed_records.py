"""Records of an encrypted stream of weights: nobody on the path can read, change, repeat, reorder or remove one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rl.errors import CorruptWeightsError
from async_rl.weights.tcp.protocol import TAG_BYTES, RecordCipher, Request, make_request

KEY, REQUEST = bytes(range(32)), make_request(bytes(16), [0, 1])
RECORDS = [b"first record", b"second and longer record", b"third"]


def cipher(request: Request = REQUEST, nonce: bytes = b"n" * 16) -> RecordCipher:
    return RecordCipher(KEY, request, nonce)


def sealed() -> list[bytes]:
    sender = cipher()
    return [bytes(sender.encrypt(memoryview(record))) for record in RECORDS]


def opened(receiver: RecordCipher, records: list[bytes]) -> list[bytes]:
    plain = [bytearray(len(record) - TAG_BYTES) for record in records]
    for record, into in zip(records, plain, strict=True):
        receiver.decrypt(memoryview(record), memoryview(into))
    return [bytes(one) for one in plain]


def test_records_come_back_and_show_nothing_on_the_way():
    assert opened(cipher(), sealed()) == RECORDS
    assert not any(plain in record for plain, record in zip(RECORDS, sealed(), strict=True))
    assert bytes(cipher(nonce=b"m" * 16).encrypt(memoryview(RECORDS[0]))) != sealed()[0]


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda a, b, c: [bytes([a[0] ^ 1]) + a[1:], b, c], id="changed"),
        pytest.param(lambda a, b, c: [a, a, b, c], id="repeated"),
        pytest.param(lambda a, b, c: [b, a, c], id="reordered"),
        pytest.param(lambda a, b, c: [a, c], id="removed"),
    ],
)
def test_what_is_done_to_a_record_on_the_way_is_noticed(attack: Callable[..., list[bytes]]):
    with pytest.raises(CorruptWeightsError):
        opened(cipher(), attack(*sealed()))


@pytest.mark.parametrize("other", [cipher(make_request(bytes(16), [0, 2])), cipher(nonce=b"m" * 16)])
def test_records_of_one_answer_are_none_of_another(other: RecordCipher):
    with pytest.raises(CorruptWeightsError):
        opened(other, sealed())
