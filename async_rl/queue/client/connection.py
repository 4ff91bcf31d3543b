"""A client's DEALER socket to the queue server. It repeats each request until the reply comes.

Both queue clients use it. It is not thread-safe: only one thread may use it.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from msgspec.structs import asdict

from async_rl.errors import AddressError, IdInUseError, LineageError, QueueError, WireError
from async_rl.net.address import check_address
from async_rl.net.caller import Caller
from async_rl.net.keys import ClientKeys
from async_rl.net.wire import Frame, Limits, Message, decode, encode
from async_rl.queue.messages import RECEIVE_HIGH_WATER_MARK, WIRE_TYPES

logger = logging.getLogger(__name__)

RESEND_S = 5.0
_RETRY_S = 0.02
_LIMITS = Limits(max_bytes=1 << 34, max_depth=None)
"""Limits on messages from the server. They are loose, because the server is trusted."""


@dataclass(slots=True)
class Outstanding:
    """A request that has no reply yet.

    ``due_at`` is the time at which to send the request next. ``sent_at`` is the time at which it was sent last; None if
    it was not sent yet.
    """

    request_id: str
    type: str
    fields: dict[str, Any]
    parts: tuple[Frame, ...]
    wait_s: float
    due_at: float
    sent_at: float | None = None


class Connection:
    """A client's socket to the server at ``address``.

    It connects in the background, also after a restart of the server. If the server has keys, ``keys`` are needed. With
    ``keys``, messages are sent only to the server whose public key they have. ``secret`` is sent with every message
    (``messages.Envelope``). ``link`` says whether the socket is connected, and why not.

    Raises:
        AddressError: the address is malformed.
    """

    def __init__(self, address: str, name: str, keys: ClientKeys | None = None, *, secret: str = "") -> None:
        if not check_address(address)[1]:
            raise AddressError(
                f"expected an address with a port, like tcp://127.0.0.1:5555, got {address!r}; add the queue's port"
            )
        self.address, self._secret = address, secret
        self._prefix, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        self._outstanding: dict[str, Outstanding] = {}
        self._num_outstanding: Counter[str] = Counter()
        self._waiting_since: float | None = None
        self._logged_trouble, self._logged_at = "", 0.0
        self._caller = Caller(address, "the queue server", keys, name=name, receive_mark=RECEIVE_HIGH_WATER_MARK)
        self.link, self._is_closed = self._caller.link, False

    @property
    def silent_s(self) -> float:
        """Seconds since the last reply if a reply is overdue; 0 if none is."""
        return 0.0 if self._waiting_since is None else max(0.0, time.monotonic() - self._waiting_since)

    def has_outstanding(self, type_: str) -> bool:
        """Return whether a request of the type ``type_`` has no reply yet."""
        return self._num_outstanding[type_] > 0

    def post(self, request: msgspec.Struct, parts: Sequence[Frame] = (), *, wait_s: float = 0.0) -> str:
        """Send a request (a record of ``messages``) and return its id.

        The server may delay the reply by up to ``wait_s``.
        """
        request_id = f"{self._prefix}-{next(self._numbers)}"
        now, type_ = time.monotonic(), WIRE_TYPES[type(request)]
        fields = {**asdict(request), "request_id": request_id, "wait_s": wait_s, "secret": self._secret}
        outstanding = Outstanding(request_id, type_, fields, tuple(parts), wait_s, now)
        self._outstanding[request_id] = outstanding
        self._num_outstanding[type_] += 1
        self._try_send(outstanding, now)
        return request_id

    def send_once(self, request: msgspec.Struct) -> bool:
        """Send a message that needs no reply. Return False if there is no connection, or after ``close``."""
        if self._is_closed:
            return False
        self._wait(0.0)
        return self._caller.send([encode(WIRE_TYPES[type(request)], {**asdict(request), "secret": self._secret})])

    def forget(self, request_id: str) -> None:
        """Stop waiting for the reply to this request, and stop repeating the request."""
        self._pop(request_id)
        self._update_silence(time.monotonic(), has_received=False)

    def poll(self, timeout_s: float) -> list[tuple[Outstanding | None, Message]]:
        """Return the received messages, each with the request that it answers, or with None if it answers none.

        If there are none, wait up to ``timeout_s`` for the first. A reply whose field ``more`` is true is followed by
        further messages for the same request.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self._send_due(now)
            due = min((o.due_at for o in self._outstanding.values()), default=deadline)
            self._wait(min(due, deadline) - now)
            now = time.monotonic()
            received = self._receive(now)
            self._update_silence(now, has_received=bool(received))
            if received or now >= deadline:
                return received

    @property
    def why_silent(self) -> str:
        """Why an answer may be missing, and what to do about it."""
        if self.link.is_connected:
            return "its process may be overloaded or suspended; see its log, logs/queue.log in the run directory"
        return self.link.trouble or "there is no connection to it; check that it runs there"

    def log_trouble(self, meanwhile: str) -> None:
        """Log why there is no connection, once for each cause, and later that there is one.

        ``meanwhile`` says what the client does until then.
        """
        trouble = self.link.trouble
        if trouble and trouble != self._logged_trouble:
            self._logged_at = self._logged_at or time.monotonic() - self.link.lost_s
            self._logged_trouble = trouble
            logger.warning("%s. %s", trouble, meanwhile)
        elif self._logged_trouble and self.link.is_connected:
            lost_s = time.monotonic() - self._logged_at
            logger.info("the queue server at %s answers, after %.0f s without a connection", self.address, lost_s)
            self._logged_trouble, self._logged_at = "", 0.0

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        self._is_closed = True
        self._caller.close(linger_ms=1000)

    def _wait(self, timeout_s: float) -> None:
        """Wait for messages. After a reconnection, send all requests again: some may be lost."""
        if self._caller.wait(timeout_s):
            now = time.monotonic()
            for request in self._outstanding.values():
                request.due_at = now

    def _send_due(self, now: float) -> None:
        for request in self._outstanding.values():
            if request.due_at <= now:
                self._try_send(request, now)

    def _try_send(self, request: Outstanding, now: float) -> None:
        """Send a request. If there is no connection, or no room, try again later."""
        # While there is no connection, don't encode in vain.
        if self.link.is_connected and self._caller.send(self._frames(request)):
            request.sent_at, request.due_at = now, now + RESEND_S + request.wait_s
        else:
            request.due_at = now + _RETRY_S

    def _frames(self, request: Outstanding) -> Sequence[Frame]:
        frame = encode(request.type, request.fields, num_parts=len(request.parts))
        return [frame, *request.parts]

    def _pop(self, request_id: str) -> Outstanding | None:
        request = self._outstanding.pop(request_id, None)
        if request is not None:
            self._num_outstanding[request.type] -= 1
        return request

    def _receive(self, now: float) -> list[tuple[Outstanding | None, Message]]:
        received: list[tuple[Outstanding | None, Message]] = []
        for frames in self._caller.receive():
            message = self._decoded(frames)
            request_id = message.fields.get("request_id")
            request = self._answered(request_id, message, now) if isinstance(request_id, str) else None
            # Skip the answer to a repeat of a request that is already answered.
            if request is not None or request_id is None:
                received.append((request, message))
        return received

    def _decoded(self, frames: list[zmq.Frame]) -> Message:
        try:
            return decode(frames[0].buffer, _LIMITS).with_parts(frame.buffer for frame in frames[1:])
        except WireError as error:
            raise WireError(f"the queue server at {self.address} sent a malformed message: {error}") from error

    def _answered(self, request_id: str, message: Message, now: float) -> Outstanding | None:
        """Return the request that ``message`` answers. Remove the request unless more messages of the reply follow."""
        if message.fields.get("more") is not True:
            return self._pop(request_id)
        request = self._outstanding.get(request_id)
        if request is not None:
            request.due_at = now + RESEND_S
        return request

    def _update_silence(self, now: float, *, has_received: bool) -> None:
        """Update the time for ``silent_s``.

        A reply is overdue only when the time by which the server may delay it is over.
        """
        if not any(o.sent_at is None or now > o.sent_at + o.wait_s for o in self._outstanding.values()):
            self._waiting_since = None
        elif has_received or self._waiting_since is None:
            self._waiting_since = now


_ERRORS = {"lineage": LineageError, "id_in_use": IdInUseError}


def raise_error(message: Message) -> None:
    """Raise the error that a reply of type "error" describes. Do nothing for other messages."""
    if message.type == "error":
        text = str(message.fields.get("message", "the queue server refused a request without a reason"))
        raise _ERRORS.get(str(message.fields.get("kind")), QueueError)(text)
