"""Count the modules that a group, or a version of the weights, enters on its way: the parts that a reader must know.

``--queue``: between a group's return by the generator and its take by the learner. Server, generator and learner are
the real ones, over real sockets and with a journal, each in a thread of this process. ``sys.setprofile`` notes the
module of every Python function that is called meanwhile.

``--weights``: a version from its staging to its acknowledgement, by each transport (``modules_entered_weights``).

    python -m benchmarks.modules_entered --queue --weights
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import async_rl
from async_rl.config.loading import load_config
from async_rl.queue.client.clients import GeneratorQueue, LearnerQueue
from async_rl.queue.messages import Announcement, Batch, LeasesGranted, Returned
from async_rl.queue.server.start import run_queue
from async_rl.records import Lease
from benchmarks.modules_entered_weights import entered_by_version
from benchmarks.queue_measure import Load
from benchmarks.queue_product import DIGEST, ProductOptions, make_group, rollouts, tokens_for, write_config

_LINEAGE = "0123456789abcdef"
_NUM_GROUPS = 4
_SIZE_BYTES = 4 << 10
_WAIT_S = 20.0


class Recorder:
    """Notes the modules whose functions are called, by this thread and by threads that start after it was made."""

    def __init__(self) -> None:
        self._is_on = False
        self._entered: set[str] = set()
        threading.setprofile(self._note)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is called meanwhile."""
        self._is_on = True
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._is_on = False

    def entered(self, package: str) -> list[str]:
        """The modules of this package that were entered."""
        return sorted(name for name in self._entered if name.startswith(f"{package}."))

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call":
            self._entered.add(str(frame.f_globals.get("__name__", "")))


def record_group(recorder: Recorder, directory: Path) -> None:
    """Record one batch of groups, from the first return to the end of the take."""
    load, options = Load(_SIZE_BYTES), ProductOptions(directory, has_journal=True, groups_per_step=_NUM_GROUPS)
    config, addresses = load_config(write_config(directory, load, options)), Queue[str]()
    server = threading.Thread(target=lambda: run_queue(config, insecure=False, on_ready=addresses.put))
    server.start()
    address = addresses.get(timeout=_WAIT_S)
    learner, generator = LearnerQueue(address, _WAIT_S), GeneratorQueue(address, "generator-0")
    try:
        learner.attach("count", _LINEAGE, "", 0, 0, 1, "", {}, None)
        learner.announce(Announcement(_LINEAGE, 0, DIGEST, "tcp://127.0.0.1:1"))
        generator.hello(_WAIT_S, "count")
        leases = _leases(generator)
        made = rollouts(tokens_for(_SIZE_BYTES), 0)
        with recorder.recording():
            for lease in leases:
                generator.return_group(
                    make_group(lease.lease_id, lease.prompt.position, lease.lineage, made, "generator-0")
                )
            num_queued = 0
            while num_queued < len(leases):
                num_queued += sum(e.verdict == "queued" for e in generator.poll(_WAIT_S) if isinstance(e, Returned))
            batch = learner.take(_LINEAGE, 0, 0, _WAIT_S)
        assert isinstance(batch, Batch)
        assert len(batch.groups) == _NUM_GROUPS
        learner.finish(_LINEAGE)
    finally:
        generator.close()
        learner.close()
        server.join(_WAIT_S)


def _leases(generator: GeneratorQueue) -> list[Lease]:
    generator.request_leases(_LINEAGE, 0, _NUM_GROUPS, _WAIT_S)
    leases: list[Lease] = []
    while len(leases) < _NUM_GROUPS:
        for event in generator.poll(_WAIT_S):
            leases += event.leases if isinstance(event, LeasesGranted) else ()
    return leases


def report(package: str, entered: list[str]) -> None:
    """Print how many of the package's modules were entered, and which."""
    directory = Path(async_rl.__file__).parent.joinpath(*package.split(".")[1:])
    modules = [path for path in directory.rglob("*.py") if path.name != "__init__.py"]
    print(f"{package}: {len(entered)} of {len(modules)} modules entered")
    for name in entered:
        print(f"  {name.removeprefix(package + '.')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", action="store_true", help="the path of a group, from its return to its take")
    parser.add_argument("--weights", action="store_true", help="the path of a version, by each transport")
    options = parser.parse_args()
    if not options.queue and not options.weights:
        parser.error("expected --queue or --weights")
    if options.weights:
        for transport, entered in entered_by_version().items():
            print(f"by {transport}:")
            report("async_rl.weights", entered)
    if options.queue:
        recorder = Recorder()
        with TemporaryDirectory(prefix="modules-entered-") as name:
            record_group(recorder, Path(name))
        report("async_rl.queue", recorder.entered("async_rl.queue"))


if __name__ == "__main__":
    main()
