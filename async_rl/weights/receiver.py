"""The generator's side of the weights channel: receives versions while the engine goes on decoding.

The worker's loop calls ``follow`` with each announcement, ``poll`` between two steps, and ``activated`` once the
backend uses what ``poll`` gave. Two background threads do the rest: one talks to the publisher (and sends the signs
of life), one sits in collectives, outside the interpreter's lock. torch is imported by the first of them to need it.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from async_rl.address import check_address, local_host_towards, refuse_open_collectives
from async_rl.errors import AsyncRLError, WeightsError, WireError
from async_rl.keys import ClientKeys
from async_rl.queue.messages import Announcement
from async_rl.weights import control
from async_rl.weights.background import JobThread, Wake
from async_rl.weights.buffers import Buffer, Buffers, StagedWeights
from async_rl.weights.manifest import Manifest, digest_bytes, manifest_from_fields

if TYPE_CHECKING:
    from async_rl.weights.collective import CollectiveGroup

_POLL_MS = 100
_CONNECT_RETRY_S = 0.1
_SILENT_S = 15.0
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Cumulative. ``corrupt`` transfers brought bytes that did not match their digests; they count as failed too."""

    received: int = 0
    failed: int = 0
    corrupt: int = 0
    receive_s: float = 0.0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """What the transfer thread needs for one attempt. ``host`` is the publisher's, ``local_host`` this side's."""

    number: int
    backend: str
    manifest: Manifest
    host: str
    local_host: str


class Receiver:
    """Versions of whatever learner was announced last.

    Args:
        generator_id: as in the generator's handshake with the queue.
        insecure: allow collectives to listen beyond loopback (nothing on them is authenticated).
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
        self._stats = ReceiverStats()
        self._channel_error: str | None = None
        self._transfer_error: str | None = None
        self._crash: Exception | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._channel = ""
        self._joined_lineage = ""
        self._local_host = ""
        self._heard = 0.0
        self._next_beat = 0.0
        self._joined = False
        self._attempt: _Attempt | None = None
        self._transfers: JobThread | None = None
        self._group: CollectiveGroup | None = None
        self._epoch = -1

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
        return self._channel_error or self._transfer_error

    def stats(self) -> ReceiverStats:
        return self._stats

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
            importlib.import_module("async_rl.weights.collective")

            self._transfers = JobThread("weights-transfer")
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
        if self._transfers is not None:
            self._transfers.close(self._close_group, _CLOSE_S)
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
            host, _ = check_address(address)
            self._local_host = local_host_towards(address)
            refuse_open_collectives(self._local_host, is_trusted=self._insecure)
            keys = control.keys_towards(server_key, self._keys)
        except AsyncRLError as error:
            self._channel_error = str(error)
            return
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        # Nothing is queued for a learner that is not there: signs of life are of no use later.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, control.TO_MEMBER_LIMITS.max_bytes)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        if keys is not None:
            keys.identify(socket)
        socket.connect(address)
        poller.register(socket, zmq.POLLIN)
        self._socket = socket

    def _forget_membership(self) -> None:
        """No attempt goes on here, and the communicator was of an epoch that is over (numbers may come again)."""
        self._joined, self._attempt = False, None
        if self._transfers is not None:
            self._transfers.submit(self._close_group)

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
        join = control.Join(self._generator_id, self._local_host, os.getpid())
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
            case control.Enter(attempt, backend, manifest_fields):
                manifest = manifest_from_fields(manifest_fields)
                self._enter(attempt, backend, manifest)
            case control.Go():
                self._go(message)

    def _enter(self, number: int, backend: str, manifest: Manifest) -> None:
        target = self._target
        told = (manifest.lineage, manifest.version)
        if target is not None and told == (target.lineage, target.version) and manifest.digest != target.digest:
            reason = f"version {told[1]} was announced with digest {target.digest}, offered with {manifest.digest}"
            self._transfer_error = reason
            self._say(control.Failed(number, reason, True))
            return
        if self._buffers.holds(manifest):
            self._say(control.Ack(number, manifest.version, manifest.digest))
            return
        host, _ = check_address(control.parse_channel(self._channel)[0])
        attempt = _Attempt(number, backend, manifest, host, self._local_host)
        self._attempt = attempt
        assert self._transfers is not None
        channel = self._channel
        self._transfers.submit(lambda: self._prepare(channel, attempt))

    def _go(self, go: control.Go) -> None:
        attempt, channel = self._attempt, self._channel
        if attempt is None or attempt.number != go.attempt:
            return
        assert self._transfers is not None
        deadline = time.monotonic() + go.deadline_s
        self._transfers.submit(lambda: self._transfer(channel, attempt, go, deadline))

    # The transfer thread.

    def _reply(self, channel: str, message: control.MemberMessage) -> None:
        self._outbox.append((channel, message))
        self._wake.set()

    def _prepare(self, channel: str, attempt: _Attempt) -> None:
        try:
            self._buffers.reserve(attempt.manifest)
        except RuntimeError as error:
            reason = f"no host memory for {attempt.manifest.size_bytes} bytes of weights: {error}"
            self._count(ok=False)
            self._reply(channel, control.Failed(attempt.number, reason, False))
            return
        self._reply(channel, control.Ready(attempt.number))

    def _transfer(self, channel: str, attempt: _Attempt, go: control.Go, deadline: float) -> None:
        start = time.monotonic()
        try:
            buffer = self._buffers.reserve(attempt.manifest)
            self._collect(buffer, attempt, go, deadline)
        except Exception as error:
            # Whatever it was, the publisher must know, and this communicator is of no use any more.
            self._close_group()
            self._failed(channel, attempt, str(error) or repr(error), corrupt=False)
            return
        corrupt = _mismatches(buffer, attempt.manifest)
        if corrupt:
            self._failed(channel, attempt, corrupt, corrupt=True)
            return
        elapsed_s = time.monotonic() - start
        staged = self._buffers.commit(buffer, attempt.manifest, elapsed_s)
        self._transfer_error = None
        self._count(ok=True, elapsed_s=elapsed_s, size_bytes=attempt.manifest.size_bytes)
        self._reply(channel, control.Ack(attempt.number, staged.version, staged.digest))
        self._arrived.set()

    def _collect(self, buffer: Buffer, attempt: _Attempt, go: control.Go, deadline: float) -> None:
        """Every bucket, through the epoch's communicator, which is built first if it is a new one."""
        from async_rl.weights.collective import CollectiveGroup

        if go.store_port:
            self._close_group()
            self._group = CollectiveGroup.create(
                attempt.backend,
                store_host=attempt.host,
                store_port=go.store_port,
                rank=go.rank,
                size=go.size,
                stall_s=go.stall_s,
                local_host=attempt.local_host,
                device=self._device,
            )
            self._epoch = go.epoch
        if self._group is None or self._epoch != go.epoch:
            raise WeightsError(f"expected the communicator of epoch {go.epoch} to be here still, got {self._epoch}")
        for bucket in buffer.buckets:
            self._group.broadcast(bucket, chunk_bytes=go.chunk_bytes, deadline=deadline)

    def _failed(self, channel: str, attempt: _Attempt, reason: str, *, corrupt: bool) -> None:
        self._count(ok=False, corrupt=corrupt)
        self._transfer_error = f"version {attempt.manifest.version} did not arrive: {reason}"
        self._reply(channel, control.Failed(attempt.number, reason, corrupt))

    def _close_group(self) -> None:
        group, self._group = self._group, None
        self._epoch = -1
        if group is not None:
            group.close()

    def _count(self, *, ok: bool, corrupt: bool = False, elapsed_s: float = 0.0, size_bytes: int = 0) -> None:
        before = self._stats
        self._stats = ReceiverStats(
            received=before.received + ok,
            failed=before.failed + (not ok),
            corrupt=before.corrupt + corrupt,
            receive_s=before.receive_s + elapsed_s,
            received_bytes=before.received_bytes + size_bytes,
        )


def _mismatches(buffer: Buffer, manifest: Manifest) -> str:
    """Which buckets are not what the manifest says; empty when all are."""
    wrong = [
        f"bucket {index}: expected {expected}, got {got}"
        for index, (bucket, expected) in enumerate(zip(buffer.buckets, manifest.bucket_digests, strict=True))
        if (got := digest_bytes(bucket.numpy().data)) != expected
    ]
    return "digest mismatch in " + "; ".join(wrong[:3]) if wrong else ""
