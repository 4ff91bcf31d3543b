"""The modules of ``async_rl/weights`` that one version enters, for ``benchmarks.modules_entered --weights``.

The publisher (with its stream server process) and the receiver are the real ones. A version counts from
``Staging.stage`` to its acknowledgement and activation, after the first versions have built the connections. A profile
function in every thread of every process notes the file of each function that is called; functions that run while a
module is imported do not count.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_DIRECTORY = "MODULES_ENTERED_DIRECTORY"
_SITE_CUSTOMIZE = f"import runpy\nrunpy.run_path({__file__!r})['record_this_process']()\n"
"""Run by every Python process that finds it on its path: the children of this one."""


def record_this_process() -> None:
    """Note in a file of this process, one a line, each file that is entered, beside the number of the phase."""
    directory = Path(os.environ[_DIRECTORY])
    with (directory / "phase").open("rb") as file:
        phase = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    seen: set[tuple[int, str]] = set()
    entered = os.open(directory / f"entered-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        key = (phase[0], code.co_filename)
        if event == "call" and key not in seen and code.co_name != "<module>":
            seen.add(key)
            os.write(entered, f"{key[0]} {key[1]}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


class _Recorder:
    """What was entered, phase by phase. Phase 0 is the start and is not reported."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with (directory / "phase").open("wb+") as file:
            file.write(b"\0")
            file.flush()
            self._phase = mmap.mmap(file.fileno(), 1)

    @contextmanager
    def operation(self, number: int) -> Iterator[None]:
        """Note what is entered meanwhile as phase ``number``, above 0."""
        self._phase[0] = number
        try:
            yield
        finally:
            self._phase[0] = 0

    def modules(self, number: int, package: str) -> list[str]:
        """Modules of ``async_rl.<package>`` entered in this phase, by any process."""
        files: set[str] = set()
        for path in self._directory.glob("entered-*"):
            for line in path.read_text().splitlines():
                phase, _, name = line.partition(" ")
                if int(phase) == number:
                    files.add(name)
        marker = f"/async_rl/{package}/"
        return sorted(
            f"async_rl.{package}." + f.rpartition(marker)[2].removesuffix(".py").replace("/", ".")
            for f in files
            if marker in f
        )


@contextmanager
def _recording() -> Iterator[_Recorder]:
    """Record this process and every Python process that is started from here on."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        recorder = _Recorder(directory)
        (directory / "sitecustomize.py").write_text(_SITE_CUSTOMIZE)
        before = os.environ.get("PYTHONPATH", "")
        os.environ[_DIRECTORY] = name
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (name, before)))
        record_this_process()
        try:
            yield recorder
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            os.environ["PYTHONPATH"] = before


def entered_by_version() -> dict[str, list[str]]:
    """The modules of ``async_rl.weights`` that a version enters, by transport."""
    with _recording() as recorder:
        for number, options in enumerate(_TRANSPORTS.values(), start=1):
            _send_versions(recorder, number, options)
        return {label: recorder.modules(number, "weights") for number, label in enumerate(_TRANSPORTS, start=1)}


_TRANSPORTS: dict[str, dict[str, Any]] = {
    "gloo": {"transport": "gloo"},
    "tcp": {"transport": "tcp", "has_deltas": False},
    "tcp with deltas": {"transport": "tcp", "has_deltas": True},
}
_DEADLINE_S = 60.0


def _send_versions(recorder: _Recorder, number: int, options: dict[str, Any]) -> None:
    import torch

    from async_rl.queue.messages import Announcement
    from async_rl.weights.channel.publisher import Publisher
    from async_rl.weights.channel.receiver import Receiver
    from async_rl.weights.staging import Staging

    staging = Staging(None, 1 << 16, deadline_s=_DEADLINE_S, is_pulled=options["transport"] == "tcp")
    weights = {name: torch.randn(30_000) for name in "abcd"}
    with (
        closing(Publisher("127.0.0.1", deadline_s=_DEADLINE_S, insecure=False, **options)) as publisher,
        closing(Receiver("counted", insecure=False)) as receiver,
    ):

        def send(version: int) -> None:
            weights["a"][version] += 1
            staged = staging.stage("counted", version, iter(weights.items()))
            publisher.publish(staged)
            if version == 0:
                receiver.follow(Announcement("counted", 0, staged.manifest.digest, publisher.address))
            received = None
            while received is None or received.version != version:
                if not receiver.wait(_DEADLINE_S):
                    raise TimeoutError(f"version {version} did not come: {receiver.error}")
                received = receiver.poll()
            receiver.activated(received)
            if not publisher.wait(version, _DEADLINE_S, num_members=1):
                raise TimeoutError(f"version {version} was not acknowledged: {publisher.stats()}")

        if options["transport"] != "tcp" and not publisher.wait_for_collective(_DEADLINE_S):
            raise TimeoutError("the process that broadcasts weights did not start")
        for version in range(4):
            send(version)
        with recorder.operation(number):
            send(4)
