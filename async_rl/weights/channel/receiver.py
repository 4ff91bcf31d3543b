"""The generator's side of the weights channel: receives new versions of the weights while the engine goes on decoding.

The worker's loop calls ``Receiver.follow`` with each announcement of a learner. Between two decode steps it calls
``poll``, which returns a version that has arrived. When the backend uses that version, it calls ``activated``. Two
background threads do the rest. The control thread in this module exchanges messages with the publisher. The transfer
thread (``receive_worker``) receives the bytes, mostly without holding the interpreter's lock. torch is imported by the
first thread that needs it.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
import time
from collections import deque

from async_rl.errors import AddressError, AsyncRLError, WeightsError, WireError
from async_rl.net.address import check_address, is_loopback, local_host_towards, refuse_open_stream
from async_rl.net.keys import ClientKeys
from async_rl.net.wake import Wake
from async_rl.queue.messages import Announcement
from async_rl.weights import control
from async_rl.weights.channel.engine_ranks import EngineRanks
from async_rl.weights.channel.receive_worker import ReceiveWorker, Reply
from async_rl.weights.collective.libraries import offers
from async_rl.weights.control import PublisherSocket
from async_rl.weights.manifest import Manifest, manifest_from_fields
from async_rl.weights.peer_messages import PeerFailed
from async_rl.weights.receive_buffers import ReceiveBuffers, ReceivedWeights
from async_rl.weights.tcp.arrivals import Arrivals
from async_rl.weights.tcp.peer_server import PeerServer
from async_rl.weights.transport import ReceiveOrder

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_CONNECT_RETRY_S = 0.1
_SILENT_S = 15.0
_LOST_S = 5.0
"""A shorter loss of the connection needs no message."""
_CLOSE_S = 5.0
PEER_PORTS = 16
"""Generators of one machine find their ports from ``generator.peer_port`` on, so at most this many can serve."""


def end_this_process() -> None:
    """Kill this generator, because a call of its collective's library does not return.

    Nothing else ends such a call. The queue grants the generator's leases again, ``launch`` starts another one, and
    the engine's processes end with this one.
    """
    logger.critical(
        "the library that receives weights does not return, so this generator ends; it can be started again. If it "
        'repeats, set weights.transport = "tcp"'
    )
    os.kill(os.getpid(), signal.SIGKILL)


class Receiver:
    """Receives versions of the weights from the learner that was announced last.

    Args:
        generator_id: the id with which the generator is known to the queue.
        insecure: the user trusts the network: take part in collectives beyond loopback, which authenticate nobody, and
            pull weights unencrypted.
        device: this generator's CUDA device, needed for NCCL. None if there is no CUDA device.
        keys: this generator's keys. Needed if the publisher has keys.
        may_collect: take part in collectives, if ``insecure`` allows it. If False, every version is pulled.
        has_ports: whether ``weights.port`` is set. Only for texts.
        has_peers: serve the versions of this generator to others.
        peer_port: listen for them at this port or one of the next, see ``PEER_PORTS``. 0: at any.
        engine: the engine's workers, which then take part in collectives instead of this process. None: this process.
    """

    def __init__(
        self, generator_id: str, *, insecure: bool, device: str | None = None, keys: ClientKeys | None = None,
        may_collect: bool = True, has_ports: bool = False, has_peers: bool = False, peer_port: int = 0,
        engine: EngineRanks | None = None,
    ) -> None:  # fmt: skip
        self._generator_id = generator_id
        self._insecure = insecure
        self._may_collect = may_collect
        self._has_ports = has_ports
        self._to_open = ""
        self._device = device
        self._keys = keys
        self._buffers = ReceiveBuffers(pinned=device is not None)
        self._announced: Announcement | None = None
        self._received = Wake()
        self._wake = Wake()
        self._replies: deque[tuple[str, control.MemberMessage]] = deque()
        self._channel_error: str | None = None
        self._offer_error: str | None = None
        self._crash: Exception | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self._socket: PublisherSocket | None = None
        self._channel = self._address = ""
        self._joined_lineage = ""
        self._host = self._local_host = ""
        self._silent_since = 0.0
        self._next_heartbeat = 0.0
        self._joined = False
        self._attempt: tuple[int, Manifest] | None = None
        self._arrivals = Arrivals()
        self._has_peers = has_peers
        self._peer_ports = range(peer_port, peer_port + PEER_PORTS) if peer_port else None
        self._peer_server: PeerServer | None = None
        self._worker = ReceiveWorker(self._buffers, self._received.set, device, engine, self._arrivals)
        self._num_ranks = 1 if engine is None else engine.num_ranks

    def follow(self, announcement: Announcement) -> None:
        """Receive versions from the learner in ``announcement``. Return at once.

        If its channel or its lineage is new, the control thread connects to it and leaves the learner before.
        """
        self._announced = announcement
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weights-receive", daemon=True)
            self._thread.start()
        self._wake.set()

    def poll(self) -> ReceivedWeights | None:
        """Return the newest verified version of the announced lineage. None if there is none, or the engine already
        uses it.

        Until a newer version has arrived, every call returns the same version. When a call returns a newer version, the
        memory of the one returned before is freed.

        Raises:
            WeightsError: the receiver's thread has failed, so no version will come.
        """
        if self._crash is not None:
            raise WeightsError(
                f"the thread that receives weights from the learner has failed: {self._crash!r}; if "
                f"this error does not name a cause outside async-rl, please report it"
            ) from self._crash
        self._received.clear()
        announced = self._announced
        return None if announced is None else self._buffers.newest(announced.lineage)

    def activated(self, received: ReceivedWeights) -> None:
        """Record that the engine uses ``received`` now. The memory of older versions may be overwritten.

        Raises:
            WeightsError: ``poll`` has returned a newer version in the meantime.
        """
        self._buffers.activated(received)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a version has arrived that ``poll`` has not returned. Return whether one arrived within
        ``timeout_s``.
        """
        return self._received.wait(timeout_s)

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when a version arrives. ``poll`` makes it unreadable again."""
        return self._received.fileno()

    @property
    def error(self) -> str | None:
        """The reason why no version can be received now. None if there is no error. The receiver keeps trying."""
        return self._channel_error or self._offer_error or self._worker.error

    def close(self) -> None:
        """Tell the publisher that this generator leaves, and end both threads. Wait a few seconds for a transfer in
        progress.
        """
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * _CLOSE_S)

    # The control thread.

    def _run(self) -> None:
        try:
            # Importing torch holds the interpreter's lock for seconds: do it before the first heartbeat is due.
            importlib.import_module("async_rl.weights.collective.receiver")
            while not self._closing:
                self._reconnect()
                (self._wake if self._socket is None else self._socket).wait(_POLL_S)
                self._wake.clear()
                self._receive_messages()
                self._send_replies()
                self._send_heartbeat()
                if self._worker.is_stuck:
                    end_this_process()
        except Exception as error:
            self._crash = error
            self._channel_error = f"the weights receiver has failed: {error!r}"
            self._received.set()
        finally:
            if self._socket is not None:
                self._socket.leave()
            if self._peer_server is not None:
                self._peer_server.close()
            self._worker.close(_CLOSE_S)

    def _reconnect(self) -> None:
        """Connect to the announced publisher if its channel or lineage differs from the connected one's."""
        announced = self._announced
        assert announced is not None
        if (announced.channel, announced.lineage) == (self._channel, self._joined_lineage):
            return
        if self._socket is not None:
            self._socket.leave()
            self._socket = None
        self._channel, self._joined_lineage = announced.channel, announced.lineage
        self._next_heartbeat = 0.0
        self._forget_membership()
        self._to_open = control.ports_to_open(announced.ports, are_set=self._has_ports)
        self._address, server_key = control.parse_channel(announced.channel)
        try:
            self._host, _ = check_address(self._address)
            self._local_host = local_host_towards(self._address)
            keys = control.keys_towards(server_key, self._keys)
            refuse_open_stream(self._host, has_keys=keys is not None, is_trusted=self._insecure)
        except AsyncRLError as error:
            self._channel_error = str(error)
            return
        self._listen_for_peers()
        self._socket = PublisherSocket(self._address, keys, self._wake, to_open=self._to_open)
        self._silent_since = time.monotonic()

    def _listen_for_peers(self) -> None:
        """Listen for other generators at the address from which the learner is reached. They are in its network."""
        if not self._has_peers or (self._peer_server is not None and self._peer_server.host == self._local_host):
            return
        if self._peer_server is not None:
            self._peer_server.close()
        try:
            self._peer_server = PeerServer(self._arrivals, self._local_host, self._peer_ports)
        except AddressError:
            ports = self._peer_ports or range(1, 1 << 16)
            self._peer_server = None
            logger.warning(
                "generator.peer_port: expected a free port of %s to %s at %s, but all are in use; this generator sends "
                "no weights to others; set another port, or 0 for any",
                ports[0], ports[-1], self._local_host,
            )  # fmt: skip

    def _forget_membership(self) -> None:
        self._joined, self._attempt = False, None
        self._worker.disconnect()

    def _send_replies(self) -> None:
        while self._replies:
            channel, message = self._replies.popleft()
            if channel == self._channel and self._joined and self._socket is not None:
                self._socket.send(message)

    def _send_heartbeat(self) -> None:
        """Send ``Heartbeat`` (``Join`` while this generator is no member), unless the next one is not due yet."""
        now = time.monotonic()
        self._check_connection(now)
        if now < self._next_heartbeat:
            return
        message = control.Heartbeat(self._worker.pulled_bytes) if self._joined else self._join_message()
        is_sent = self._socket is not None and self._socket.send(message)
        self._joined = self._joined or is_sent
        self._next_heartbeat = now + (control.HEARTBEAT_S if is_sent else _CONNECT_RETRY_S)

    def _check_connection(self, now: float) -> None:
        """Note why there is no connection, or that the connected learner is silent."""
        if self._socket is None:
            return
        if not self._socket.is_connected:
            # A cause that is over remains until the learner answers: it does so in a few seconds, or another is found.
            self._channel_error = self._socket.trouble_after(_LOST_S) or self._channel_error
            self._silent_since = now
        elif now - self._silent_since > _SILENT_S:
            # Without the exact time, which would make it another error, and another line of the log, every second.
            self._channel_error = f"the learner at {self._address} has been silent for more than {_SILENT_S:g} s"

    def _join_message(self) -> control.Join:
        # Collectives authenticate nobody: none over a network that is not trusted.
        is_trusted = self._insecure or is_loopback(self._local_host)
        offered = offers(self._device) if is_trusted and self._may_collect else []
        digest = self._buffers.newest_digest()
        port = 0 if self._peer_server is None else self._peer_server.port
        return control.Join(self._generator_id, self._local_host, offered, self._num_ranks, digest, port)

    def _receive_messages(self) -> None:
        while self._socket is not None:
            try:
                message = self._socket.receive()
                if message is None:
                    return
                self._handle(message)
            except WireError as error:
                self._channel_error = f"malformed message from the learner at {self._address}: {error}"

    def _handle(self, message: control.PublisherMessage) -> None:
        self._silent_since = time.monotonic()
        match message:
            case control.Ping():
                self._channel_error = None
            case control.NotMember():
                self._next_heartbeat = 0.0
                self._forget_membership()
            case control.Dropped(reason, retry_s):
                self._channel_error = f"dropped by the learner: {reason}"
                self._forget_membership()
                self._next_heartbeat = time.monotonic() + retry_s
            case control.PrepareCollective(attempt, manifest_fields):
                self._prepare_collective(attempt, manifest_from_fields(manifest_fields))
            case control.StartCollective():
                self._start_collective(message)
            case control.Pull():
                self._pull(message)

    def _prepare_collective(self, attempt: int, manifest: Manifest) -> None:
        reply = self._replying()
        if self._needs(attempt, manifest, reply):
            self._attempt = attempt, manifest
            self._worker.prepare(manifest, attempt, reply)

    def _start_collective(self, start: control.StartCollective) -> None:
        if self._attempt is not None and self._attempt[0] == start.attempt:
            self._receive(start, self._attempt[1])

    def _pull(self, pull: control.Pull) -> None:
        manifest, reply = manifest_from_fields(pull.manifest), self._replying()
        if self._peer_server is not None and pull.serve_token:
            self._peer_server.open_session(pull.serve_token, pull.serve_key, manifest)
        if not self._needs(pull.attempt, manifest, reply):
            return
        if not pull.key and not self._insecure and not is_loopback(self._host):
            self._offer_error = (
                f"the learner at {self._host} offers weights unencrypted; to accept them, start this generator with "
                f"--insecure or set weights.trusted_network = true"
            )
            reply(control.Failed(pull.attempt, self._offer_error, False))
            return
        self._receive(pull, manifest)

    def _receive(self, message: control.StartCollective | control.Pull, manifest: Manifest) -> None:
        deadline, reply = time.monotonic() + message.deadline_s, self._replying()

        def on_peer_failed(reason: str, is_faulty: bool) -> None:
            reply(PeerFailed(message.attempt, reason, is_faulty))

        order = ReceiveOrder(
            message, manifest, self._host, self._local_host, deadline, self._worker.count_pulled, self._to_open,
            on_peer_failed,
        )  # fmt: skip
        self._worker.receive(order, reply)

    def _needs(self, attempt: int, manifest: Manifest, reply: Reply) -> bool:
        """Return whether the offered version must be received.

        If it must not, reply to the publisher: ``Ack`` if this generator holds the version already, ``Failed`` if the
        version's digest differs from the announced one.
        """
        announced = self._announced
        offered = (manifest.lineage, manifest.version)
        self._offer_error = None
        expected = announced if announced and offered == (announced.lineage, announced.version) else None
        if expected is not None and manifest.digest != expected.digest:
            self._offer_error = (
                f"version {manifest.version} was announced with digest {expected.digest}, offered with "
                f"{manifest.digest}"
            )
            reply(control.Failed(attempt, self._offer_error, True))
            return False
        if self._buffers.holds(manifest):
            reply(control.Ack(attempt, manifest.version, manifest.digest, 0, 0, 0.0))
            return False
        return True

    def _replying(self) -> Reply:
        """Return a function that sends a message to the publisher that is connected now. Any thread may call it.

        If the receiver has connected to another publisher in the meantime, the message is discarded.
        """
        channel = self._channel

        def reply(message: control.MemberMessage) -> None:
            self._replies.append((channel, message))
            self._wake.set()

        return reply
