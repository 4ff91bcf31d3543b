"""The generator's side of the weights channel: receives versions while the engine goes on decoding.

The worker's loop calls ``follow`` with each announcement, ``poll`` between two steps, and ``activated`` once the
backend uses what ``poll`` gave. Two background threads do the rest: one talks to the publisher (and sends the signs
of life), one transfers (``transfers.py``), mostly outside the interpreter's lock. torch is imported by the first of
them to need it.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass

import zmq

from async_rl.errors import AsyncRLError, WeightsError, WireError
from async_rl.net.address import check_address, is_loopback, local_host_towards, refuse_open_stream
from async_rl.net.keys import ClientKeys
from async_rl.queue.messages import Announcement
from async_rl.weights import control
from async_rl.weights.background import Wake
from async_rl.weights.buffers import Buffers, StagedWeights
from async_rl.weights.collective.receiver import CollectiveOrder
from async_rl.weights.manifest import Manifest, manifest_from_fields
from async_rl.weights.tcp.receiver import StreamOrder
from async_rl.weights.transfers import ReceiverStats, Reply, Transfers

__all__ = ["Receiver", "ReceiverStats"]

_POLL_MS = 100
_CONNECT_RETRY_S = 0.1
_SILENT_S = 15.0
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A collective that this side was told to enter."""

    number: int
    manifest: Manifest


class Receiver:
    """Versions of whatever learner was announced last.

    Args:
        generator_id: as in the generator's handshake with the queue.
        insecure: the network is trusted: take part in collectives beyond loopback (nothing on them is authenticated),
            and pull weights in the clear.
        device: this generator's CUDA device, where the publisher uses NCCL.
        keys: this generator's; needed where the publisher has keys.
    """

    def __init__(
        self, generator_id: str, *, insecure: bool, device: str | None = None, keys: ClientKeys | None = None
    ) -> None:
        self._generator_id = generator_id
        self._insecure = insecure
        self._device = device
        self._keys = keys
        self._buffers = Buffers(pinned=device is not None)
        self._target: Announcement | None = None
        self._arrived = Wake()
        self._wake = Wake()
        self._outbox: deque[tuple[str, control.MemberMessage]] = deque()
        self._channel_error: str | None = None
        self._offer_error: str | None = None
        self._crash: Exception | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._channel = ""
        self._joined_lineage = ""
        self._host = self._local_host = ""
        self._heard = 0.0
        self._next_beat = 0.0
        self._joined = False
        self._attempt: _Attempt | None = None
        self._transfers = Transfers(self._buffers, self._arrived.set, device)

    def follow(self, announcement: Announcement) -> None:
        """Receive from this learner. Returns at once; a new channel or lineage makes it connect anew."""
        self._target = announcement
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weights-receive", daemon=True)
            self._thread.start()
        self._wake.set()

    def poll(self) -> StagedWeights | None:
        """The newest verified version that is not in use yet, of the lineage that is followed.

        The same one again until a newer one came; the one given before is given up by that.

        Raises:
            WeightsError: the receiver's thread has failed; no version will come any more.
        """
        if self._crash is not None:
            raise WeightsError(f"the weights receiver has failed: {self._crash!r}") from self._crash
        self._arrived.clear()
        target = self._target
        return None if target is None else self._buffers.newest(target.lineage)

    def activated(self, staged: StagedWeights) -> None:
        """The engine uses this version now; buffers of older ones may be overwritten.

        Raises:
            WeightsError: ``poll`` has returned a newer one since.
        """
        self._buffers.activated(staged)

    def wait(self, timeout_s: float) -> bool:
        """Whether, within ``timeout_s``, something came that the next ``poll`` may return."""
        return self._arrived.wait(timeout_s)

    def fileno(self) -> int:
        """Readable when something came since the last ``poll``; for a poller that waits for more than this."""
        return self._arrived.fileno()

    @property
    def error(self) -> str | None:
        """Why no version comes at present; None when all is well. It goes on trying by itself."""
        return self._channel_error or self._offer_error or self._transfers.error

    def stats(self) -> ReceiverStats:
        return self._transfers.stats

    def close(self) -> None:
        """Leave, and end the threads. A transfer under way is waited for a few seconds."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * _CLOSE_S)

    # The control thread.

    def _run(self) -> None:
        try:
            # Loading torch holds the interpreter for long; a member must not fall silent for that.
            importlib.import_module("async_rl.weights.collective.communicator")
            self._context = zmq.Context()
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            while not self._closing:
                self._reconnect(poller)
                poller.poll(_POLL_MS)
                self._wake.clear()
                self._receive()
                self._flush()
                self._beat()
        except Exception as error:
            self._crash = error
            self._channel_error = f"the weights receiver has failed: {error!r}"
            self._arrived.set()
        finally:
            self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self._say(control.Leave())
            self._socket.close(linger=500)
        self._transfers.close(_CLOSE_S)
        if self._context is not None:
            self._context.term()

    def _reconnect(self, poller: zmq.Poller) -> None:
        target = self._target
        assert target is not None
        assert self._context is not None
        if (target.channel, target.lineage) == (self._channel, self._joined_lineage):
            return
        if self._socket is not None:
            self._say(control.Leave())
            poller.unregister(self._socket)
            self._socket.close(linger=500)
            self._socket = None
        self._channel, self._joined_lineage = target.channel, target.lineage
        self._next_beat = 0.0
        self._forget_membership()
        self._heard = time.monotonic()
        address, server_key = control.parse_channel(target.channel)
        try:
            self._host, _ = check_address(address)
            self._local_host = local_host_towards(address)
            keys = control.keys_towards(server_key, self._keys)
            refuse_open_stream(self._host, has_keys=keys is not None, is_trusted=self._insecure)
        except AsyncRLError as error:
            self._channel_error = str(error)
            return
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        # Nothing is queued for a learner that is not there: signs of life are of no use later.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, control.TO_MEMBER_LIMITS.max_bytes)
        socket.setsockopt(zmq.IPV6, int(":" in self._host))
        if keys is not None:
            keys.identify(socket)
        socket.connect(address)
        poller.register(socket, zmq.POLLIN)
        self._socket = socket

    def _forget_membership(self) -> None:
        """No attempt goes on here, and the communicator was of an epoch that is over (numbers may come again)."""
        self._joined, self._attempt = False, None
        self._transfers.disconnect()

    def _say(self, message: control.MemberMessage) -> bool:
        """Whether it went out: not while there is no connection."""
        if self._socket is None:
            return False
        try:
            self._socket.send(control.encode_message(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _flush(self) -> None:
        while self._outbox:
            channel, message = self._outbox.popleft()
            if channel == self._channel and self._joined:
                self._say(message)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._heard > _SILENT_S and self._socket is not None:
            self._channel_error = f"the learner at {self._channel} was not heard of for {now - self._heard:.0f} s"
        if now < self._next_beat:
            return
        join = control.Join(
            self._generator_id, self._local_host, os.getpid(), self._collectives(), self._buffers.newest_digest()
        )
        said = self._say(control.Alive() if self._joined else join)
        self._joined = self._joined or said
        self._next_beat = now + (control.HEARTBEAT_S if said else _CONNECT_RETRY_S)

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = control.decode_message(frame, control.TO_MEMBER, control.TO_MEMBER_LIMITS)
                self._handle(message)
            except WireError as error:
                self._channel_error = f"malformed message from the learner at {self._channel}: {error}"

    def _handle(self, message: control.PublisherMessage) -> None:
        self._heard = time.monotonic()
        match message:
            case control.Check():
                self._channel_error = None
            case control.Unknown():
                self._next_beat = 0.0
                self._forget_membership()
            case control.Dropped(reason, retry_s):
                self._channel_error = f"dropped by the learner: {reason}"
                self._forget_membership()
                self._next_beat = time.monotonic() + retry_s
            case control.Enter(attempt, manifest_fields):
                self._enter(attempt, manifest_from_fields(manifest_fields))
            case control.Go():
                self._go(message)
            case control.Fetch():
                self._fetch(message)

    def _collectives(self) -> list[str]:
        """Those that this side can take part in: not where anybody could be on the network."""
        if not self._insecure and not is_loopback(self._local_host):
            return []
        return ["gloo"] if self._device is None else ["gloo", "nccl"]

    def _lacks(self, attempt: int, manifest: Manifest, reply: Reply) -> bool:
        """Whether what is offered is to be received; if not, the publisher is told why."""
        target = self._target
        told = (manifest.lineage, manifest.version)
        self._offer_error = None
        if target is not None and told == (target.lineage, target.version) and manifest.digest != target.digest:
            self._offer_error = (
                f"version {told[1]} was announced with digest {target.digest}, offered with {manifest.digest}"
            )
            reply(control.Failed(attempt, self._offer_error, True))
            return False
        if self._buffers.holds(manifest):
            reply(control.Ack(attempt, manifest.version, manifest.digest, 0, 0))
            return False
        return True

    def _enter(self, number: int, manifest: Manifest) -> None:
        reply = self._replying()
        if self._lacks(number, manifest, reply):
            self._attempt = _Attempt(number, manifest)
            self._transfers.prepare(manifest, number, reply)

    def _go(self, go: control.Go) -> None:
        if go.manifest:
            manifest = manifest_from_fields(go.manifest)
            if not self._lacks(go.attempt, manifest, self._replying()):
                # The others must not wait for this rank.
                self._transfers.disconnect()
                return
            self._attempt = _Attempt(go.attempt, manifest)
        attempt = self._attempt
        if attempt is None or attempt.number != go.attempt:
            return
        order = CollectiveOrder(go, self._host, self._local_host)
        self._transfers.collect(order, attempt.manifest, self._replying())

    def _fetch(self, fetch: control.Fetch) -> None:
        manifest, reply = manifest_from_fields(fetch.manifest), self._replying()
        if not self._lacks(fetch.attempt, manifest, reply):
            return
        if not fetch.key and not self._insecure and not is_loopback(self._host):
            self._offer_error = (
                f"the learner offers weights in the clear at {self._host}; this generator takes them so only with "
                f"--insecure or weights.trusted_network = true"
            )
            reply(control.Failed(fetch.attempt, self._offer_error, False))
            return
        self._transfers.pull(StreamOrder(fetch, self._host), manifest, reply)

    def _replying(self) -> Reply:
        """For the transfer thread: says it to the publisher of now, or to none if that is another one by then."""
        channel = self._channel

        def reply(message: control.MemberMessage) -> None:
            self._outbox.append((channel, message))
            self._wake.set()

        return reply
