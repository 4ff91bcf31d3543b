"""Failures that may pass by themselves, as Python and the usual client libraries raise them."""

import errno
import socket
import urllib.error
import urllib.request
from email.message import Message

import httpx
import pytest
import requests

from async_rl.process.transient import is_transient
from async_rl.process.user_code import describe_error
from tests.ports import free_port


def raised(call: object) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 any exception is what the test asks about
        call()  # type: ignore[operator]
    return caught.value


def test_a_service_that_refuses_is_transient_whatever_library_asks():
    url = f"http://127.0.0.1:{free_port()}/"
    for call in (urllib.request.urlopen, requests.get, httpx.get):
        assert is_transient(raised(lambda call=call: call(url))), call


def test_a_service_that_never_answers_is_transient():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        assert is_transient(raised(lambda: requests.get(url, timeout=0.05)))
        assert is_transient(raised(lambda: httpx.get(url, timeout=0.05)))
        assert is_transient(raised(lambda: urllib.request.urlopen(url, timeout=0.05)))


def with_status(code: int) -> list[BaseException]:
    response = httpx.Response(code, request=httpx.Request("GET", "http://a"))
    old = requests.Response()
    old.status_code = code
    return [
        raised(response.raise_for_status),
        raised(old.raise_for_status),
        urllib.error.HTTPError("http://a", code, "no", Message(), None),
    ]


@pytest.mark.parametrize(("code", "expected"), [(503, True), (500, True), (429, True), (404, False), (400, False)])
def test_an_http_reply_is_transient_by_its_status(code: int, expected: bool):
    for error in with_status(code):
        assert is_transient(error) == expected, type(error)


def test_the_users_own_exception_is_transient_if_a_transient_one_led_to_it():
    def wrapped(*, hidden: bool) -> None:
        try:
            raise ConnectionResetError("gone")
        except ConnectionResetError as error:
            if hidden:
                raise ValueError("tool failed") from None
            raise ValueError("tool failed") from error

    assert is_transient(raised(lambda: wrapped(hidden=False)))
    assert not is_transient(raised(lambda: wrapped(hidden=True)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EHOSTUNREACH, "no route"), True), (socket.gaierror("unknown"), True), (TimeoutError(), True),
        (BrokenPipeError(), True),
        (KeyError("x"), False), (ValueError("1"), False), (FileNotFoundError(errno.ENOENT, "no"), False),
        (MemoryError(), False), (SystemExit(500), False),
    ],
)  # fmt: skip
def test_networks_that_are_away_are_transient_and_mistakes_are_not(error: BaseException, expected: bool):
    assert is_transient(error) == expected


class HostileError(Exception):
    """An exception of user code whose own text and attributes can't be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    @property
    def response(self) -> object:
        raise RuntimeError("the response was not read")


def test_an_exception_that_can_not_be_read_is_described_and_no_transient_failure():
    assert not is_transient(HostileError())
    sentence, place = describe_error(raised(lambda: (_ for _ in ()).throw(HostileError())))
    assert sentence.startswith("HostileError: its text can't be read (RuntimeError)")
    assert place.startswith("HostileError at ")
