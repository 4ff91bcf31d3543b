"""Why a client's ZeroMQ socket has no connection to its server.

ZeroMQ connects in the background, and says nothing while it fails. ``Link`` follows the events of one socket, and tells
the usual causes apart: a name that can't be resolved, a port at which nothing listens, a firewall, a server that does
not answer, keys that don't fit. As long as there is no connection, a thread of its own tries the port by plain TCP.

After a handshake with keys that don't fit, ZeroMQ never connects again. ``Link`` then connects the socket anew, because
the server's list of keys may have changed. It also limits each attempt to connect. While a firewall drops packets, the
kernel's pauses between two packets of one attempt grow to a minute, so an attempt without a limit goes on for as long
after the port was opened.
"""

from __future__ import annotations

import socket
import threading
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from async_rl.net.address import check_address, url_host

LOST_AFTER_S = 1.0
"""Shorter interruptions, such as the restart of a server, need no explanation."""
_PROBE_S = 3.0
_PROBE_EVERY_S = 5.0
_CONNECT_S = 3.0
"""Limit on one attempt to connect. In this time the kernel sends three or four packets, with pauses of 1 or 2 s."""
_HANDSHAKE_S = 3.0
_RECONNECT_S = 1.0
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_FAILED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
}
_OTHER_KEY = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_SILENT = -1
"""The failure of a server that accepted the connection and then said nothing until ZeroMQ gave up."""
_READABLE = int(zmq.POLLIN)


class Link:
    """Watches whether ``client`` is connected to the server at ``address``. Only the socket's thread may use it.

    Attempts to connect that get no answer begin anew every few seconds.

    Create it before ``client`` connects.

    Args:
        server: what the server is called in texts, such as "the queue server".
        public_key: the client's public key (z85), which the server must know; empty without keys.
        to_open: what to open if a firewall drops the packets; the port of ``address`` if it is empty.

    Attributes:
        new_key_s: seconds for which another server key is no trouble. A server may have a new one at each start, which
            its clients learn somewhat later.
    """

    def __init__(
        self, client: zmq.Socket[bytes], address: str, server: str, public_key: str = "", *, to_open: str = ""
    ) -> None:
        self._client, self._address, self._server, self._public_key = client, address, server, public_key
        self._to_open = to_open
        self._host, self._port = check_address(address)
        client.setsockopt(zmq.CONNECT_TIMEOUT, round(_CONNECT_S * 1000))
        self._monitor = client.get_monitor_socket(int(_EVENTS))
        self.is_connected = False
        """Whether the socket was connected at the last ``update``. A connection to a suspended server still counts."""
        self._lost_at = time.monotonic()
        self._opened_at: float | None = None
        self._failure, self._failed_at, self.new_key_s = 0, 0.0, 0.0
        self._reconnect_at: float | None = None
        self._probe: threading.Thread | None = None
        self._probe_at = 0.0
        self._found = ""

    @property
    def lost_s(self) -> float:
        """For how many seconds there has been no connection; 0 if there is one."""
        return 0.0 if self.is_connected else time.monotonic() - self._lost_at

    @property
    def trouble(self) -> str:
        """Why there is no connection, and what to do about it. Empty if there is one, or if the cause is not known yet.

        Call ``update`` from time to time, so that the cause is looked for.
        """
        if self.is_connected or self.lost_s < LOST_AFTER_S:
            return ""
        is_waiting = self._opened_at is not None and time.monotonic() - self._opened_at > _HANDSHAKE_S
        if self._failure not in (0, _SILENT):
            is_new = self._failure == _OTHER_KEY and time.monotonic() - self._failed_at < self.new_key_s
            return "" if is_new else self._handshake_trouble()
        if self._failure == _SILENT or is_waiting:
            return (
                f"{self._server} at {self._address} accepts connections, but does not answer; check that its process "
                f"runs and is not suspended, and that the port is its own"
            )
        return self._found

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._monitor, zmq.POLLIN)

    def update(self) -> bool:
        """Take in what has happened to the connection. Return whether the socket has connected since the last call."""
        has_connected, now = False, time.monotonic()
        while int(self._monitor.get(zmq.EVENTS)) & _READABLE:
            event = int(parse_monitor_message(self._monitor.recv_multipart())["event"])
            has_connected |= self._follow(event, now)
        if not self.is_connected:
            self._reconnect(now)
            if now - self._lost_at >= LOST_AFTER_S and not self._failure and self._opened_at is None:
                self._start_probe(now)
        return has_connected and self.is_connected

    def close(self) -> None:
        """End the watch. Call it before the socket is closed."""
        if not self._client.closed:
            self._client.disable_monitor()
        self._monitor.close()

    def _follow(self, event: int, now: float) -> bool:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_connected, self._failure, self._found = True, 0, ""
            self._opened_at = self._reconnect_at = None
            return True
        if self.is_connected:
            self.is_connected, self._lost_at = False, now
        opened_at, self._opened_at = self._opened_at, now if event == zmq.EVENT_CONNECTED else None
        if event in _FAILED:
            self._failed_at = self._failed_at if self._failure else now
            is_silent = opened_at is not None and now - opened_at > _HANDSHAKE_S
            self._failure = _SILENT if is_silent else event
            if event != _OTHER_KEY:
                self._reconnect_at = now + _RECONNECT_S
        elif event == zmq.EVENT_CLOSED:  # an attempt to connect has failed, so what was found before may be over
            self._failure = 0
        return False

    def _reconnect(self, now: float) -> None:
        """Connect the socket anew if ZeroMQ has given up."""
        if self._reconnect_at is not None and now >= self._reconnect_at and not self._client.closed:
            self._reconnect_at = None
            self._client.disconnect(self._address)
            self._client.connect(self._address)

    def _handshake_trouble(self) -> str:
        where = f"{self._server} at {self._address}"
        if self._failure == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"{where} refuses the key of this client, {self._public_key}; add the key to allowed.txt in the "
                f"directory of the server's keys, or use a key file that is listed there"
            )
        if not self._public_key:
            return (
                f"{where} closes the connection: it has keys and this client has none, or it is no server of "
                f"async-rl; name a key file (--keys FILE, or queue.keys), or check the address"
            )
        if self._failure == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return f"{where} has no keys, but this client has; start the server with queue.keys, or this client without"
        return (
            f"{where} has another server key than this client's key file, or it is no server of async-rl; use a key "
            f"file that was made in the same directory as the server's keys, or check the address"
        )

    def _start_probe(self, now: float) -> None:
        if now < self._probe_at or (self._probe is not None and self._probe.is_alive()):
            return
        self._probe_at = now + _PROBE_EVERY_S
        self._probe = threading.Thread(target=self._run_probe, name="link-probe", daemon=True)
        self._probe.start()

    def _run_probe(self) -> None:
        self._found = why_unreachable(self._server, self._host, self._port, to_open=self._to_open)


def why_unreachable(server: str, host: str, port: int, timeout_s: float = _PROBE_S, *, to_open: str = "") -> str:
    """Try to connect to ``host`` by TCP. Return why that fails and what to do about it; empty if it succeeds.

    The arguments are those of ``unreachable_text``.
    """
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return unreachable_text(server, host, port, error, timeout_s, to_open=to_open)
    return ""


def unreachable_text(
    server: str, host: str, port: int, error: OSError, timeout_s: float, *, to_open: str = ""
) -> str:  # fmt: skip
    """Return what ``error`` says about ``server``, and what to do about it.

    Args:
        server: what the server is called in the text, such as "the queue server".
        error: comes from an attempt to connect by TCP that was given ``timeout_s`` seconds.
        to_open: what to open if a firewall drops the packets, such as "open the ports 5556 and 5557"; if empty, the
            port to which the attempt was made.
    """
    place = f"{url_host(host)}:{port}"
    if isinstance(error, socket.gaierror):
        return (
            f"the host name {host!r} of {server} can't be resolved ({error.strerror}); correct the address, or add the "
            f"name to DNS or /etc/hosts"
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            f"nothing listens at {place} (connection refused); check that {server} runs there, and that it binds this "
            f"address and port"
        )
    if isinstance(error, TimeoutError):
        return (
            f"no answer from {place} in {timeout_s:g} s; a firewall may drop the packets: "
            f"{to_open or f'open port {port}'} on the machine of {server}, and check that the machine is up"
        )
    return f"no connection to {place}: {error.strerror or error}; check this machine's network and routes to {server}"
