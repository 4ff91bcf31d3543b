"""CURVE keys: they decide which clients may connect to the sockets of a run, and they encrypt the messages.

``async-rl keys new DIR`` makes a directory with ``queue.key`` (the server's key pair), a file for each client (the
client's key pair and the server's public key) and ``allowed.txt`` (the public keys of admitted clients). A server calls
``ServerKeys.guard`` for its socket, and a client calls ``ClientKeys.identify``.

CURVE checks a key only when a connection begins. ``net.connections`` therefore asks the server's ``AllowList`` again at
each message, and when the list has lost a key.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import zmq

from async_rl.errors import KeyFileError

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

logger = logging.getLogger(__name__)

SERVER_FILE = "queue.key"
CLIENT_FILE = "client.key"
ALLOWED_FILE = "allowed.txt"
DEFAULT_CLIENT = "client"
SECRET_VARIABLE = "ASYNC_RL_GENERATOR_SECRET"
"""Name of the environment variable with the secret by which a generator owns its id on a queue without keys. If the
variable is unset, the secret is random. ``launch`` gives all its generators the same secret, so that a restarted
generator can take over the id of a dead one at once."""

REMOVED_AFTER_S = 2.0
"""A key is removed when ``allowed.txt`` has lacked it for this many seconds. An editor may empty the file before it
writes it anew, and a copy over a network may arrive in pieces."""
_LOOK_S = 0.1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_DOMAIN = "async-rl"
_NONE_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The key pair of a client and the public key of the server that the client trusts, as z85 text."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the keys from a client's key file.

        Raises:
            KeyFileError: the file is missing, readable by other users, or not a client's key file.
        """
        plain = _read_secret(Path(path), ("public", "secret", "server"))
        return cls(plain["public"], plain["secret"], plain["server"])

    def for_server(self, public: bytes) -> ClientKeys:
        """Return this client's keys for another server, whose public key is ``public``."""
        return ClientKeys(self.public, self.secret, public)

    def identify(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys on ``socket``, before ``connect``.

        Messages are then sent only to a server that proves its key.
        """
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.server


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The key pair of a server, as z85 text, and ``allowed``, the path of the file that lists the admitted clients."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: Path

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read the server's key pair from ``queue.key`` of a directory that ``async-rl keys new`` made.

        Raises:
            KeyFileError: a file is missing, readable by other users, or not made by ``keys new``.
        """
        plain = _read_secret(Path(directory) / SERVER_FILE, ("public", "secret"))
        return cls(plain["public"], plain["secret"], _checked_list(directory))

    @classmethod
    def ephemeral(cls, directory: str | Path) -> Self:
        """Make a new server key pair for this process only. It admits the clients in ``allowed.txt`` of ``directory``.

        The server must send its public key to its clients.

        Raises:
            KeyFileError: ``allowed.txt`` is missing or malformed.
        """
        return cls(*zmq.curve_keypair(), _checked_list(directory))

    def allow_list(self) -> AllowList:
        """Return the list of admitted clients, for ``guard`` and for ``connections.RouterConnections``."""
        return AllowList(self.allowed)

    def guard(
        self, socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], allow_list: AllowList
    ) -> ThreadAuthenticator:  # fmt: skip
        """Make ``socket`` admit only the clients in ``allow_list``. Call it before ``bind``.

        Return the thread that decides. The caller stops this guard after it has closed the socket.
        """
        from zmq.auth.thread import ThreadAuthenticator  # loads asyncio, which unencrypted runs need not

        guard = ThreadAuthenticator(context)
        guard.start()
        guard.configure_curve_callback(_DOMAIN, allow_list)
        # With a domain, libzmq admits a client only if the guard answers.
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = self.public, self.secret, True
        return guard


class AllowList:
    """The public keys in ``allowed.txt``. The file is read again whenever it has changed. Thread-safe.

    A new key counts at once. A key is removed after the file has lacked it for ``REMOVED_AFTER_S``, so a file that is
    being replaced (empty, half-written or missing for a moment) removes nobody. A malformed line counts as missing; the
    other lines stay valid. A file that can't be read, or that other users may write, counts as empty.

    Args:
        clock: returns the time in seconds, from any start.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock, self._lock = path, clock, threading.Lock()
        self._stamp: tuple[int, ...] | None = None
        self._names: dict[bytes, str] = {}
        self._missing_since: dict[bytes, float] = {}
        self._num_removed, self._looked_at = 0, float("-inf")
        self._problem, self._problem_since = "", 0.0
        self._logged_problem = ""

    @property
    def num_removed(self) -> int:
        """How many keys were removed since the start. Reading it looks at the file."""
        with self._lock:
            self._refresh(self._clock())
            return self._num_removed

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the client with the public key ``key`` (z85) is admitted. pyzmq calls this method."""
        return self.name_of(key) is not None

    def name_of(self, key: bytes) -> str | None:
        """Return the name of the admitted client with the public key ``key``; None if there is none."""
        with self._lock:
            now = self._clock()
            if key not in self._names:
                self._looked_at = float("-inf")  # it may have been added just now
            self._refresh(now)
            return self._names.get(key)

    def _refresh(self, now: float) -> None:
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._look(now)
        if self._problem and now - self._problem_since >= REMOVED_AFTER_S and self._problem != self._logged_problem:
            self._logged_problem = self._problem
            logger.warning("%s", self._problem)
        for key, since in list(self._missing_since.items()):
            if now - since >= REMOVED_AFTER_S:
                del self._missing_since[key]
                self._num_removed += 1
                logger.warning(
                    "the key of client %r, %s, is not in %s any more; its connections are closed, and it is not "
                    "admitted again until its line is back", self._names.pop(key), key.decode(), self.path,
                )  # fmt: skip

    def _look(self, now: float) -> None:
        """Read the file if it has changed. Note the keys that are new, and those that are missing."""
        try:
            about = self.path.stat()
            # The time of the last status change, too: a change of the mode decides as well.
            stamp = (about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino)
            if stamp == self._stamp:
                return
            names, problem = _parse_allowed(self.path)
        except (OSError, KeyFileError) as error:
            stamp, names = None, {}
            problem = str(error) if isinstance(error, KeyFileError) else f"can't read {self.path}: {error.strerror}"
        self._stamp = stamp
        if problem != self._problem:
            self._problem, self._problem_since = problem, now
        self._names.update(names)
        missing = self._names.keys() - names.keys()
        self._missing_since = {key: self._missing_since.get(key, now) for key in missing}


def client_keys_of(directory: str | None) -> ClientKeys | None:
    """Read ``client.key`` in ``directory``, the value of ``queue.keys``. Return None if ``directory`` is None.

    Raises:
        KeyFileError: see ``ClientKeys.load``.
    """
    return None if directory is None else ClientKeys.load(Path(directory) / CLIENT_FILE)


def make_keys(directory: Path, clients: Sequence[str] = ()) -> list[str]:
    """Make the keys that are missing in ``directory``: the server's, those of ``client.key`` and those of ``clients``.

    Existing keys are never replaced. Return one line of text for each file that was made or kept.

    Raises:
        KeyFileError: a client's name is not allowed; or the directory is accessible to other users, can't be written,
            or has client keys without ``queue.key``.
    """
    names = list(dict.fromkeys((DEFAULT_CLIENT, *clients)))
    for name in names:
        if not _NAME.fullmatch(name) or f"{name}.key" == SERVER_FILE:
            raise KeyFileError(
                f"expected a client's name of letters, digits, '.', '_' and '-', other than 'queue', got {name!r}; "
                f"choose another name"
            )
    try:
        done = _make_server(directory)
        server = _read_secret(directory / SERVER_FILE, ("public", "secret"))["public"]
        return done + [_make_client(directory, name, server) for name in names]
    except OSError as error:
        raise KeyFileError(
            f"can't write keys to {directory}: {error.strerror or error}; choose another directory"
        ) from error


def _make_server(directory: Path) -> list[str]:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_open(directory, directory.stat(), "700")
    path = directory / SERVER_FILE
    if path.exists():
        return [f"kept {path}"]
    if any(directory.glob("*.key")):
        raise KeyFileError(
            f"{directory}: expected the server's {SERVER_FILE} next to the clients' keys, but it is missing; restore "
            f"it, or choose another directory for new keys"
        )
    public, secret = zmq.curve_keypair()
    _write_secret(path, "the queue server's pair", {"public": public, "secret": secret})
    return [f"made {path}: stays with the queue server"]


def _make_client(directory: Path, name: str, server: bytes) -> str:
    path, allowed = directory / f"{name}.key", directory / ALLOWED_FILE
    if path.exists():
        known = ClientKeys.load(path).public in (read_allowed(allowed) if allowed.exists() else {})
        return f"kept {path}" + ("" if known else f"; it is not in {allowed}, so it is not admitted")
    public, secret = zmq.curve_keypair()
    _write_secret(path, f"client {name}", {"public": public, "secret": secret, "server": server})
    with os.fdopen(os.open(allowed, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
        file.write(b"%s %s\n" % (public, name.encode()))
    owner = "the learner's, and any generator's; " if name == DEFAULT_CLIENT else ""
    return f"made {path}: {owner}for `async-rl generator --keys {path}`; admitted by {allowed}"


def read_allowed(path: Path) -> dict[bytes, str]:
    """Read the file ``allowed.txt``. Return the client names by public key; a key without a name is called ``unnamed``.

    Raises:
        KeyFileError: other users may write the file, or a line is malformed.
        OSError: the file can't be read.
    """
    names, problem = _parse_allowed(path)
    if problem:
        raise KeyFileError(problem)
    return names


def _parse_allowed(path: Path) -> tuple[dict[bytes, str], str]:
    """Return the client names in the well-formed lines, by public key, and what is wrong with the first other line.

    Raises:
        KeyFileError: other users may write the file.
        OSError: the file can't be read.
    """
    text, status = _read(path)
    mode = status.st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KeyFileError(
            f"{path}: expected a file that only you may write, but other users may write it (mode {mode & 0o777:o}); "
            f"run: chmod 600 {path}"
        )
    names: dict[bytes, str] = {}
    problem = ""
    for number, line in enumerate(text.splitlines(), start=1):
        key, _, name = line.strip().partition(" ")
        if not key:
            continue
        if _KEY.fullmatch(key):
            names[key.encode()] = name.strip() or "unnamed"
        elif not problem:
            problem = (
                f"{path}, line {number}: expected a public key of 40 characters and a name, got {line[:60]!r}; correct "
                f"the line, or delete it"
            )
    return names, problem


def _checked_list(directory: str | Path) -> Path:
    """Return the path of ``allowed.txt`` in ``directory``, after a check that the file can be read.

    Raises:
        KeyFileError: the file is missing or malformed.
    """
    path = Path(directory) / ALLOWED_FILE
    try:
        read_allowed(path)
    except OSError as error:
        raise KeyFileError(
            f"can't read {path}: {error.strerror}; make keys with: async-rl keys new {directory}"
        ) from None
    return path


def _read_secret(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    try:
        text, status = _read(path)
    except OSError as error:
        raise KeyFileError(
            f"can't read {path}: {error.strerror}; make keys with: async-rl keys new {path.parent}"
        ) from None
    _refuse_open(path, status, "600")
    try:
        plain = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        plain = {}
    keys = {name: plain.get(name) for name in names}
    # The error does not show the text, because it contains a secret.
    wrong = [name for name, key in keys.items() if not isinstance(key, str) or not _KEY.fullmatch(key)]
    if wrong:
        raise KeyFileError(
            f"{path}: expected a key file with {', '.join(keys)}, but {wrong[0]} is missing or not a key; make new "
            f"keys in another directory: async-rl keys new DIR"
        )
    return {name: str(key).encode() for name, key in keys.items()}


def _read(path: Path) -> tuple[str, os.stat_result]:
    """Return the text of a file, and its owner and permission bits.

    Both are read from one open descriptor, so they fit together.
    """
    with path.open("rb") as file:
        return file.read(1 << 20).decode("utf-8", errors="replace"), os.fstat(file.fileno())


def _refuse_open(path: Path, status: os.stat_result, wanted: str) -> None:
    """Raise KeyFileError if others than the owner may access the path; its group may if this user is not the owner.

    Kubernetes mounts secrets so: root owns the files, and the user of the container reads them as one of the group.
    """
    for_nobody = _NONE_FOR_OTHERS if status.st_uid == os.geteuid() else stat.S_IWGRP | stat.S_IRWXO
    if status.st_mode & for_nobody:
        mode = f"{status.st_mode & 0o777:o}"
        raise KeyFileError(
            f"{path} holds secrets, but other users may access it (mode {mode}); run: chmod {wanted} {path}"
        )


def _write_secret(path: Path, title: str, keys: Mapping[str, bytes]) -> None:
    """Write ``keys`` to a new file that other users can never read, not even while it is being written."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(f"# async-rl: {title}. Secret.\n".encode())
        file.writelines(b'%s = "%s"\n' % (name.encode(), key) for name, key in keys.items())
