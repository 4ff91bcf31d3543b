"""Start a queue server (``run_queue``, for the command), or find or start one (``ensure_queue``, for the learner)."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.errors import AddressError, QueueError
from async_rl.net.address import check_address, why_unbindable
from async_rl.net.keys import ClientKeys, client_keys_of
from async_rl.process.child import is_alive, is_parent_gone, module_command, package_environment, reuse_freed_memory
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.server.lifetime import FINISHED
from async_rl.queue.server.server import QueueServer
from async_rl.queue.storage.journal import Journal
from async_rl.run.directory import move_aside
from async_rl.run.queue_files import read_record

logger = logging.getLogger(__name__)

_PING_S = 10.0
"""Seconds to wait for the answer of a recorded server. It may be busy, and a second server would split the run."""
_START_S = 60.0
_LOOK_AGAIN_S = 0.2
ENDS_WELL = (FINISHED, "SIGTERM", "SIGINT")
"""Reasons for which a queue server ends with exit code 0."""


def run_queue(
    config: Config, *, insecure: bool, run_id: str | None = None, fresh: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Run a queue server until its end: load the data, bind the socket, and serve. ``async-rl queue CONFIG`` calls it.

    The server continues from the journal of an earlier server, unless ``fresh``. SIGTERM and SIGINT end it cleanly.

    Args:
        run_id: only the learner of this run may attach, and the server ends if it does not attach in time. None accepts
            any run.
        on_ready: called with the server's address.

    Raises:
        DataError: a data set is wrong.
        AddressError: the address can't be bound.
        ConfigError: the config does not fit.
        SystemExit: the server ended without its learner. A service manager starts it again.
    """
    from async_rl.data.dataset import load_rows_of, load_train_rows

    reuse_freed_memory()

    train = load_train_rows(config)
    evals = {name: load_rows_of(config, source).rows for name, source in config.data.eval.items()}
    open_journal = partial(_open_journal, config, run_id or "", fresh=fresh) if config.experimental.journal else None
    server = QueueServer(
        config, train.rows, evals, data_digest=train.digest, open_journal=open_journal, run_id=run_id or "",
        insecure=insecure, on_ready=on_ready,
        orphan_s=config.queue.linger_s + _START_S if run_id else None,
    )  # fmt: skip
    if serve_until_signal(server) not in ENDS_WELL:
        raise SystemExit(1)


def journal_directory(config: Config) -> Path:
    """Return the directory of the run's journal: ``queue.journal_dir``, or ``queue`` in the run directory."""
    return Path(config.queue.journal_dir or Path(config.run.dir) / "queue")


def _open_journal(config: Config, run_id: str, *, fresh: bool) -> Journal:
    directory = journal_directory(config)
    if fresh and directory.exists():
        move_aside(directory)
    return Journal(directory, identity=run_id)


def serve_until_signal(server: QueueServer) -> str:
    """Serve until SIGTERM, SIGINT or the server's own end. Return the reason for the end."""

    def end(signum: int, _frame: FrameType | None) -> None:
        is_urgent = signum == signal.SIGINT or is_parent_gone()
        (server.stop if is_urgent else server.stop_after_learner)(signal.Signals(signum).name)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
    return server.run()


def ensure_queue(
    config: Config, run_id: str, insecure: bool, log_path: Path, *, command: Sequence[str] | None = None,
    may_start: bool = True, wait_s: float = _START_S,
) -> str:  # fmt: skip
    """Return the address of this run's queue server. If no server is running, start one in a separate session.

    Args:
        command: the command that starts a server, to which the config file and options are appended. None uses this
            package's command.
        may_start: if False, another process starts the server. The function then waits up to ``wait_s`` for it.

    Raises:
        QueueError: the started server ended or did not answer in time (the message has the end of its log), or there is
            no server and it may not be started.
        AddressError: ``queue.address`` is on another host and nothing answers there.
    """
    fixed = config.queue.address
    if fixed is not None and why_unbindable(check_address(fixed)[0], 0) is not None:  # it is of another machine
        if answering_run(fixed, _START_S, client_keys_of(config.queue.keys)) is None:
            raise AddressError(
                f"no queue answers at queue.address = {fixed}; start one there: async-rl queue CONFIG, with the same "
                f"queue.keys as here"
            )
        return fixed
    address = _running(config, run_id)
    deadline = time.monotonic() + wait_s
    while address is None and not may_start and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
        address = _running(config, run_id)
    if address is not None:
        return address
    if not may_start:
        raise QueueError(
            f"no queue server of run {run_id} answered within {wait_s:.0f} s; launch starts it, and starts it again "
            f"when it ends: see {log_path} for the cause"
        )
    return _start(config, run_id, insecure, log_path, command or module_command("async_rl", "queue"))


class QueueRestarter:
    """Starts this run's queue server again if its process has died, at the same port and from its journal.

    The learner that started the server calls it while it has no connection to ``address``. A process that is alive is
    not replaced, because it may be busy or suspended.
    """

    def __init__(
        self, config: Config, run_id: str, insecure: bool, log_path: Path, address: str, *,
        command: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Take the arguments of ``ensure_queue``, and the ``address`` that it returned."""
        self._config, self._run_id, self._insecure = config, run_id, insecure
        self._log_path, self._address, self._command = log_path, address, command

    def __call__(self) -> bool:
        """Start the server if its process has died. Return whether it was started.

        Raises:
            QueueError: the new server ended at once, or the port is used by another process.
        """
        record = read_record(Path(self._config.run.dir))
        if record is None or record.address != self._address or is_alive(record.pid):
            return False
        logger.warning("the queue server (process %d) is gone; starting it again from its journal", record.pid)
        address = ensure_queue(self._config, self._run_id, self._insecure, self._log_path, command=self._command)
        if address != self._address:
            raise QueueError(
                f"expected the queue server back at {self._address}, where generators look for it, got it at "
                f"{address}: its port was taken by another process; start learner and generators again"
            )
        return True


def finish_queue(config: Config, run_id: str) -> None:
    """Tell this run's queue server that the run is over, if a server is running. The learner ended without doing so."""
    address = _running(config, run_id)
    if address is None:
        return
    with closing(LearnerQueue(address, _PING_S, client_keys_of(config.queue.keys))) as queue:
        try:
            lineage = queue.status()["lineage"]
            if lineage is not None:
                queue.finish(lineage)
        except QueueError as error:
            logger.warning("the run is finished, but its queue server did not accept the end of the run: %s", error)


def answering_run(address: str, timeout_s: float, keys: ClientKeys | None = None) -> str | None:
    """Return the id of the run that the server at ``address`` serves; None if nothing answers within ``timeout_s``."""
    with closing(LearnerQueue(address, timeout_s, keys)) as queue, suppress(QueueError):
        return queue.ping()
    return None


def _running(config: Config, run_id: str) -> str | None:
    """Return the address of a running server that serves this run, or no run yet; None if there is none.

    The address recorded in ``queue.json`` is tried first, then ``queue.address`` if it has a port.
    """
    record, keys = read_record(Path(config.run.dir)), client_keys_of(config.queue.keys)
    if record is not None and is_alive(record.pid) and answering_run(record.address, _PING_S, keys) in (run_id, ""):
        return record.address
    fixed = config.queue.address
    if fixed is None or not check_address(fixed)[1] or why_unbindable(*check_address(fixed)) is None:
        return None
    return fixed if answering_run(fixed, _PING_S, keys) in (run_id, "") else None


def _start(
    config: Config, run_id: str, insecure: bool, log_path: Path, command: Sequence[str], *, starts_left: int = 5
) -> str:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    config_path = log_path.with_suffix(".toml")
    config_path.write_text(config_to_toml(config), encoding="utf-8")
    arguments = [*command, str(config_path), "--run-id", run_id, *(["--insecure"] if insecure else [])]
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            arguments, env=package_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    logger.info("started the queue server, process %d, log %s", process.pid, log_path)
    keys = client_keys_of(config.queue.keys)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        record = read_record(Path(config.run.dir))
        address = record.address if record is not None and record.pid == process.pid else None
        if address is not None and answering_run(address, _PING_S, keys) == run_id:
            return address
        try:
            code = process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        if code < 0 and starts_left:
            logger.warning("the queue server was killed by signal %d before it answered; starting it again", -code)
            return _start(config, run_id, insecure, log_path, command, starts_left=starts_left - 1)
        raise QueueError(f"the queue server ended with code {code}; the end of {log_path}:\n{_tail(log_path)}")
    process.terminate()
    raise QueueError(f"the queue server did not answer in {_START_S:.0f} s; the end of {log_path}:\n{_tail(log_path)}")


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
