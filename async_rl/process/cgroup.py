"""The memory limits of this process's control groups (cgroups), and the kernel's kills for lack of memory.

A container, a pod, a Slurm job or a systemd unit is a cgroup. Its limit may be far below the machine's memory, which is
what ``/proc/meminfo`` shows inside of it, too. At the limit the kernel kills a process of the group with SIGKILL. Both
versions of cgroups are read. Elsewhere than on Linux there are no groups and no kills.

The doctor and the checks of ``launch`` ask ``available_memory``. The supervisor asks ``MemoryKills``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from async_rl.output import size_text

_NO_LIMIT = 1 << 62
"""Version 1 writes a number near 2**63 for no limit."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A cgroup that counts memory. Its figures are read at each call, because they change.

    Attributes:
        directory: of its files.
        is_v2: whether they are those of version 2.
    """

    directory: Path
    is_v2: bool

    @property
    def limit_bytes(self) -> int | None:
        """The most memory that its processes may have together; None without a limit."""
        return self._number("memory.max" if self.is_v2 else "memory.limit_in_bytes")

    @property
    def available_bytes(self) -> int | None:
        """What its processes can still take, with the cached files that the kernel would give up; None if no limit."""
        limit, used = self.limit_bytes, self._number("memory.current" if self.is_v2 else "memory.usage_in_bytes")
        if limit is None or used is None:
            return None
        prefix = "" if self.is_v2 else "total_"  # with the groups inside of it
        cached = sum(self._fields("memory.stat").get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        return max(0, limit - max(0, used - cached))

    @property
    def free_swap_bytes(self) -> int | None:
        """How much its processes can still swap out; None without a limit."""
        if self.is_v2:
            limit, used = self._number("memory.swap.max"), self._number("memory.swap.current")
            return None if limit is None else max(0, limit - (used or 0))
        both, limit = self._number("memory.memsw.limit_in_bytes"), self.limit_bytes
        return None if both is None or limit is None else max(0, both - limit)

    @property
    def num_kills(self) -> int:
        """How many of its processes the kernel has killed for lack of memory."""
        return self._fields("memory.events" if self.is_v2 else "memory.oom_control").get("oom_kill", 0)

    def _number(self, name: str) -> int | None:
        try:
            text = (self.directory / name).read_text().strip()
        except OSError:  # the kernel counts no swap, or the group is gone
            return None
        return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None

    def _fields(self, name: str) -> dict[str, int]:
        try:
            return _numbers((self.directory / name).read_text())
        except OSError:
            return {}


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the cgroups of this process that count memory: the one it is in, then those around it.

    ``root`` has the directories ``proc`` and ``sys``.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    groups: list[MemoryGroup] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        if (top := _mount_of(mounts, path, is_v2=is_v2)) is not None:
            mounted_at, inside = root / top[0].lstrip("/"), top[1]
            within = mounted_at / inside
            directories = [within, *(parent for parent in within.parents if parent.is_relative_to(mounted_at))]
            groups += [MemoryGroup(directory, is_v2) for directory in directories]
    file = {True: "memory.current", False: "memory.usage_in_bytes"}
    # The root of version 2 counts nothing, and of two versions only one has the memory.
    return [group for group in groups if (group.directory / file[group.is_v2]).exists()]


def _mount_of(mounts: Sequence[str], path: str, *, is_v2: bool) -> tuple[str, str] | None:
    """Return where the hierarchy of the cgroup ``path`` is mounted, and the path below it; None if it is not mounted.

    A container may see only its own group, at the mount point.
    """
    for line in mounts:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind != ("cgroup2" if is_v2 else "cgroup") or (not is_v2 and "memory" not in options.split(",")):
            continue
        top, point = (word.replace("\\040", " ") for word in left.split(" ")[3:5])
        is_inside = path == top or path.startswith(f"{top.rstrip('/')}/")
        return point, path[len(top) :].strip("/") if is_inside and ".." not in path.split("/") else ""
    return None


def available_memory(*, with_swap: bool = False) -> int:
    """Return how many bytes of memory new processes can use, on this machine and within this process's cgroups.

    ``with_swap``: whether what can be swapped out counts.
    """
    swap = psutil.swap_memory().free if with_swap else 0
    found = [psutil.virtual_memory().available + swap]
    for group in memory_groups():
        if (available := group.available_bytes) is not None:
            allowed = group.free_swap_bytes
            found.append(available + (swap if allowed is None else min(swap, allowed)))
    return min(found)


def memory_limit() -> MemoryGroup | None:
    """Return the cgroup of this process with the lowest limit; None if no limit is below the machine's memory."""
    total = psutil.virtual_memory().total
    limited = [(limit, group) for group in memory_groups() if (limit := group.limit_bytes) is not None]
    lowest = min(limited, key=lambda pair: pair[0], default=None)
    return None if lowest is None or lowest[0] >= total else lowest[1]


def limit_text() -> str:
    """Return words for what limits this process's memory, such as ``the limit of the cgroup DIRECTORY, 2 GiB``."""
    if (group := memory_limit()) is not None:
        return f"the limit of the cgroup {group.directory}, {size_text(group.limit_bytes or 0)}"
    return f"the machine's memory, {size_text(psutil.virtual_memory().total)}"


class MemoryKills:
    """Counts the processes that the kernel killed for lack of memory, in this process's cgroups and on the machine.

    The machine's count has those of its other users and containers, too.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._groups = root, memory_groups(root)
        self._seen = self.num_own, self.num_anywhere

    @property
    def num_own(self) -> int:
        """The kills in this process's own cgroup, since it was made."""
        return self._groups[0].num_kills if self._groups else 0

    @property
    def num_anywhere(self) -> int:
        """A number that grows with every kill. One kill may count more than once."""
        try:
            machine = _numbers((self._root / "proc/vmstat").read_text()).get("oom_kill", 0)
        except OSError:
            machine = 0
        return machine + sum(group.num_kills for group in self._groups)

    def poll(self) -> tuple[int, int]:
        """Return by how much the two numbers have grown since the last call, or since this object was made."""
        before, self._seen = self._seen, (self.num_own, self.num_anywhere)
        return self._seen[0] - before[0], self._seen[1] - before[1]


def prefer_for_memory_kill(pid: int, amount: int) -> None:
    """Ask the kernel to kill the process ``pid``, and those that it will start, before others if memory runs out.

    Do nothing if the process has ended, or elsewhere than on Linux.

    Args:
        amount: 0 to 1000 thousandths of the limit, by which its memory counts as larger. What it inherits is kept if
            that is more.
    """
    path = Path(f"/proc/{pid}/oom_score_adj")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if int(path.read_text()) < amount:
            path.write_text(str(amount))


def _numbers(text: str) -> dict[str, int]:
    """Return the numbers of lines such as ``oom_kill 3``, by name. Other lines are left out."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
