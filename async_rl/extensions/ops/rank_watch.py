"""Which rank of the learner waits for which, in ``logs/rank-N.json``, before ``experimental.distributed_timeout_s``.

A thread of each rank writes what the rank does: its command, its place in the code, and the collective in which it
waits, as torch's flight recorder knows it (gloo's ``send`` and ``recv`` are not in there). When half of the timeout is
over, the first rank that waits tells the user of ``launch``. These are files and no entries of rank 0's store, because
a process that is stopped answers nothing. ``async-rl bundle`` reads them, also of a run that has ended.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config.config import Config
from async_rl.run.directory import RunDir, write_atomically
from async_rl.run.notes import tell

_LOOKS = 20
"""How often a rank writes its file within the timeout."""
_SILENT_LOOKS = 3


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank did at ``time``, as ``time.time``. It writes that every ``look_s`` seconds.

    Attributes:
        command: what rank 0 has told it to do.
        place: module and line of its main thread.
        collective: what it waits in since the time ``since``; empty if it waits in none. It has the same text on all
            ranks that wait together.
        members: the ranks of that collective.
    """

    rank: int
    time: float
    look_s: float
    command: str
    place: str
    collective: str = ""
    members: Sequence[int] = ()
    since: float = 0.0

    def seen(self, now: float) -> str:
        """What others know of this rank at the time ``now``."""
        doing = self.collective or self.command
        return f"rank {self.rank}, which {now - self.time:.0f} s ago was in {doing}, at {self.place}"


def watch_rank(config: Config, rank: int, command: Callable[[], str]) -> Callable[[], None]:
    """Start the thread of this rank, which executes ``command()``. Return what ends it."""
    ended = threading.Event()
    watched = RunDir(Path(config.run.dir)), rank, config.experimental.distributed_timeout_s, command, ended
    threading.Thread(target=_watch, args=watched, name="rank-watch", daemon=True).start()
    return ended.set


def _watch(run_dir: RunDir, rank: int, timeout_s: float, command: Callable[[], str], ended: threading.Event) -> None:
    look_s, reported = timeout_s / _LOOKS, 0.0
    while not ended.wait(look_s):
        state = RankState(rank, time.time(), look_s, command(), _place(), *_recorded_wait())
        line = long_waits(read_states(run_dir) | {rank: state}).get(rank)
        with suppress(OSError):  # no such directory yet, or a full disk, which others report; the log has the line
            if line and state.time - state.since >= timeout_s / 2 and state.since != reported:
                reported = state.since
                tell(run_dir, f"{line}. A rank gives up after {timeout_s:g} s")
            write_atomically(run_dir.logs / f"rank-{rank}.json", msgspec.json.encode(state).decode())


def _recorded_wait() -> tuple[str, Sequence[int], float]:
    """Return the oldest collective of this process that has not ended, its ranks, and since when it waits in there."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace_json  # pyright: ignore[reportAttributeAccessIssue]
    from torch.distributed.distributed_c10d import _resolve_process_group

    begun: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in json.loads(_dump_fr_trace_json(includeCollectives=True, onlyActive=False)).get("entries", ()):
        in_order = begun.setdefault((entry["pg_id"], entry["is_p2p"]), [])
        if entry["retired"] or entry["state"] == "completed":
            in_order.clear()  # NCCL never ends the parts of what it sends together: they begin before what has ended
        else:
            in_order.append(entry)
    waits = [entry for entries in begun.values() for entry in entries]
    if not waits:
        return "", (), 0.0
    first = min(waits, key=lambda entry: entry["time_created_ns"])
    group, number = first["process_group"][0], first["p2p_seq_id" if first["is_p2p"] else "collective_seq_id"]
    collective = f"{first['profiling_name']} #{number} of group {group}, sizes {first['input_sizes']}"
    members: list[int] = []
    with suppress(RuntimeError, ValueError):  # the group has been left in the meantime
        members = dist.get_process_group_ranks(_resolve_process_group(group))
    return collective, members, first["time_created_ns"] / 1e9


def _place() -> str:
    """Return where the main thread is in the code of async-rl, beyond the helpers of ``ranks``."""
    stack = traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    places = ((str(frame.f_globals.get("__name__")), line) for frame, line in stack)
    ours = (f"{m}:{line}" for m, line in places if m.startswith("async_rl.") and m != "async_rl.learner.ranks")
    return next(ours, "other code")


def read_states(run_dir: RunDir) -> dict[int, RankState]:
    """Return by rank what each wrote last. A damaged file counts as none."""
    states: dict[int, RankState] = {}
    for path in sorted(run_dir.logs.glob("rank-*.json")):
        with suppress(OSError, msgspec.MsgspecError):
            state = msgspec.json.decode(path.read_bytes(), type=RankState)
            states[state.rank] = state
    return states


def long_waits(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return for the first of the ranks that wait together for long which they are, for whom, and where those were.

    The present is the time of the newest state, because the run may have ended. A rank that is silent does not wait: it
    is stopped, or gone.
    """
    now = max((state.time for state in states.values()), default=0.0)
    waits: dict[str, list[RankState]] = {}
    for _, state in sorted(states.items()):
        if state.collective and now - state.since > state.look_s and now - state.time < _SILENT_LOOKS * state.look_s:
            waits.setdefault(state.collective, []).append(state)
    lines: dict[int, str] = {}
    for collective, ranks in waits.items():
        there = [state.rank for state in ranks]
        absent = [states[r].seen(now) if r in states else f"rank {r}" for r in ranks[0].members if r not in there]
        whom = " and ".join(absent) or "no other rank: all are there, so look at the network between them"
        since_s = now - min(state.since for state in ranks)
        lines[there[0]] = f"rank {', '.join(map(str, there))} waits in {collective} since {since_s:.0f} s for {whom}"
    return lines
