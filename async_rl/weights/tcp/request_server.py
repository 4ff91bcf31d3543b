"""Accepts the connections of generators that fetch weights, and reads their requests. No torch.

The stream server and a generator that serves others use it. A request must name a session that was opened before.
Every connection has a thread of its own.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from async_rl.errors import AsyncRLError
from async_rl.net.streams import (
    MAX_UNAUTHENTICATED,
    MAX_UNAUTHENTICATED_OF_ADDRESS,
    UnauthenticatedPeers,
    descriptors_for_peers,
    is_out_of_resources,
    raise_descriptor_limit,
    shut_down,
    until,
)
from async_rl.weights.tcp.protocol import Request, read_header, read_items

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
_SPARE_DESCRIPTORS = 64
_HEADER_S = 5.0
"""Time from a connection's begin to the end of its first request's header."""
_FULL_S = 1.0
"""Without descriptors for another connection, wait for one to end, at most this long at a time."""
_STALL_S = 30
"""A connection on which nothing moves for this long is closed."""
_SESSION_S = 3.0
"""How long a request waits for its session: the generator may learn of it before this process does."""


class Session(Protocol):
    """A permission to fetch one version.

    Attributes:
        connections: connections that wait for an answer of this session.
    """

    connections: set[socket.socket]

    @property
    def num_items(self) -> int:
        """Number of items that one request may name."""
        ...


SessionT = TypeVar("SessionT", bound=Session)


class RequestServer(Generic[SessionT]):
    """Keeps the sessions and the connections of one listening socket.

    Args:
        answer: sends the answer to a request over a connection. Called in the connection's thread.
        max_connections: most connections at a time.
    """

    def __init__(
        self, answer: Callable[[socket.socket, SessionT, Request], None], max_connections: int = MAX_CONNECTIONS
    ) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._session_opened, self._connection_ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._sessions: dict[bytes, SessionT] = {}
        self._max_descriptors = raise_descriptor_limit()
        most = descriptors_for_peers(self._max_descriptors, _SPARE_DESCRIPTORS)
        self._max_connections, self._has_warned_full = min(max_connections, most), False
        self._num_connections = 0
        self._unauthenticated: UnauthenticatedPeers[socket.socket] = UnauthenticatedPeers(
            most=MAX_UNAUTHENTICATED, most_of_address=MAX_UNAUTHENTICATED_OF_ADDRESS
        )

    def open_session(self, token: bytes, session: SessionT) -> None:
        """Let requests with this token read from ``session``."""
        with self._lock:
            self._sessions[token] = session
            self._session_opened.notify_all()

    def sessions(self) -> list[tuple[bytes, SessionT]]:
        """Return the sessions that are open, with their tokens."""
        with self._lock:
            return list(self._sessions.items())

    def end_session(self, token: bytes) -> None:
        """Forget this session, and close the connections that still read from it."""
        with self._lock:
            session = self._sessions.pop(token, None)
            connections = list(session.connections) if session is not None else []
        for connection in connections:
            shut_down(connection)

    def finish(self, connection: socket.socket, session: SessionT) -> None:
        """Record that all of an answer but its last byte was sent, so that the end of the session leaves the connection
        open for the next request.
        """
        with self._lock:
            session.connections.discard(connection)

    def accept(self, listener: socket.socket) -> None:
        """Accept connections until ``listener`` is closed.

        Raises:
            OSError: it was closed.
        """
        while True:
            try:
                connection, (address, *_) = listener.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise
                if is_out_of_resources(error):
                    logger.warning("can't accept another connection for weights: %s; waiting until one ends", error)
                    with self._lock:
                        self._connection_ended.wait(_FULL_S)
                # Otherwise that one peer was gone before it was accepted.
                continue
            with self._lock:
                is_admitted = self._num_connections < self._max_connections
                self._num_connections += is_admitted
                ended = self._unauthenticated.add(connection, address, time.monotonic()) if is_admitted else []
            for other in ended:
                shut_down(other)  # its thread ends then
            if not is_admitted:
                connection.close()
                self._warn_full()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError as error:
                logger.warning("can't serve a connection for weights: %s", error)
                self._end(connection)

    def _warn_full(self) -> None:
        if self._has_warned_full:
            return
        self._has_warned_full = True
        logger.warning(
            "closed a connection for weights: all %d are in use; raise the limit on open files (ulimit -n), which is "
            "%d",
            self._max_connections, self._max_descriptors,
        )  # fmt: skip

    # One thread for each connection.

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer_requests(connection)
        except (OSError, AsyncRLError) as error:
            # It affects this peer alone. A generator that is alive reports the failure to the publisher.
            logger.info("a weights connection ended: %s", error)
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._num_connections -= 1
            self._unauthenticated.remove(connection)
            self._connection_ended.notify_all()

    def _answer_requests(self, connection: socket.socket) -> None:
        timeout = struct.pack("ll", _STALL_S, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Until the first token is checked, nothing but a header is read, and not for long.
        read, is_known = until(connection, time.monotonic() + _HEADER_S), False
        while (header := read_header(read)) is not None:
            session = self._find_session(header.token, connection)
            if session is None:
                return
            try:
                if not is_known:
                    read, is_known = connection.recv, True
                    connection.settimeout(None)
                    with self._lock:
                        self._unauthenticated.remove(connection)
                self._answer(connection, session, read_items(connection, header, session.num_items))
            finally:
                self.finish(connection, session)

    def _find_session(self, token: bytes, connection: socket.socket) -> SessionT | None:
        """Return the session with this token. None if no such session is opened within ``_SESSION_S``."""
        with self._lock:
            if not self._session_opened.wait_for(lambda: token in self._sessions, _SESSION_S):
                return None
            session = self._sessions[token]
            session.connections.add(connection)
            return session
