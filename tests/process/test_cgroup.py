"""Memory limits of cgroups: both versions, containers, and the counts of the kernel's kills."""

from pathlib import Path

import psutil
import pytest

from async_rl.process import cgroup
from async_rl.process.cgroup import MemoryGroup, MemoryKills, available_memory, limit_text, memory_groups

V1_MOUNT = "36 25 0:31 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "25 30 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1_FILES = {
    "memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "700", "memory.memsw.limit_in_bytes": "1100",
    "memory.stat": "cache 1\ntotal_inactive_file 40\ntotal_active_file 60\ninactive_file 7\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
}  # fmt: skip
V2_FILES = {
    "memory.max": "1000", "memory.current": "700", "memory.swap.max": "50", "memory.swap.current": "20",
    "memory.stat": "anon 500\ninactive_file 40\nactive_file 60\n",
    "memory.events": "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\n",
}  # fmt: skip


def machine(root: Path, cgroups: str, *mounts: str) -> Path:
    """A root directory whose ``/proc`` says in which cgroups this process is, and where they are mounted."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroups)
    (root / "proc/self/mountinfo").write_text(
        "".join(f"{line}\n" for line in ("22 1 8:1 / / rw - ext4 /dev/sda rw", *mounts))
    )
    (root / "proc/vmstat").write_text("nr_free_pages 5\noom_kill 10\n")
    return root


def group(directory: Path, files: dict[str, str], **changes: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (files | {key.replace("__", "."): text for key, text in changes.items()}).items():
        (directory / name).write_text(f"{text.rstrip()}\n")
    return directory


def test_the_groups_of_version_1_are_found_from_the_inside_out(tmp_path: Path):
    root = machine(tmp_path, "5:cpu:/x\n4:hugetlb,memory:/job/step\n0::/\n", V1_MOUNT.format(top="/"))
    top = root / "sys/fs/cgroup/memory"
    for directory in (top / "job/step", top / "job", top):
        group(directory, V1_FILES)
    assert memory_groups(root) == [MemoryGroup(at, is_v2=False) for at in (top / "job/step", top / "job", top)]


@pytest.mark.parametrize(
    ("path", "top"), [("/kubepods/pod7", "/kubepods/pod7"), ("/", "/"), ("/../../pod7", "/"), ("/other", "/pod7")]
)
def test_a_container_finds_its_own_group_at_the_mount_point(tmp_path: Path, path: str, top: str):
    root = machine(tmp_path, f"0::{path}\n", V2_MOUNT.format(top=top))
    at = group(root / "sys/fs/cgroup", V2_FILES)
    assert [found.directory for found in memory_groups(root)] == ([] if path == "/other" and top == "/" else [at])


@pytest.mark.parametrize(("files", "is_v2", "swap"), [(V1_FILES, False, 100), (V2_FILES, True, 30)])
def test_what_a_group_can_still_take(tmp_path: Path, files: dict[str, str], is_v2: bool, swap: int):
    # 700 are used, of which 40 + 60 are cached files: 1000 - (700 - 100) = 400.
    found = MemoryGroup(group(tmp_path, files), is_v2)
    assert (found.limit_bytes, found.available_bytes, found.free_swap_bytes) == (1000, 400, swap)
    assert found.num_kills == 3


def test_a_group_without_a_limit_limits_nothing(tmp_path: Path):
    first = group(tmp_path / "1", V1_FILES, memory__limit_in_bytes="9223372036854771712")
    second = group(tmp_path / "2", V2_FILES, memory__max="max", memory__swap__max="max")
    for found in (MemoryGroup(first, is_v2=False), MemoryGroup(second, is_v2=True)):
        assert (found.limit_bytes, found.available_bytes, found.free_swap_bytes) == (None, None, None)


def test_available_memory_is_the_least_of_machine_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    groups = [MemoryGroup(group(tmp_path / "1", V1_FILES), is_v2=False)]
    monkeypatch.setattr(cgroup, "memory_groups", lambda: groups)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 450, "total": 5000}))
    monkeypatch.setattr(psutil, "swap_memory", lambda: type("S", (), {"free": 70}))
    assert available_memory() == 400
    assert available_memory(with_swap=True) == 400 + 70  # of 100 that the group may swap; the machine has 450 + 70
    assert limit_text() == f"the limit of the cgroup {tmp_path / '1'}, 0.977 KiB"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 300, "total": 900}))
    assert available_memory() == 300
    assert limit_text() == "the machine's memory, 900 B"


def test_kills_are_counted_since_the_last_look(tmp_path: Path):
    root = machine(tmp_path, "0::/pod7\n", V2_MOUNT.format(top="/pod7"))
    at = group(root / "sys/fs/cgroup", V2_FILES)
    kills = MemoryKills(root)
    assert kills.poll() == (0, 0)
    (at / "memory.events").write_text("oom 5\noom_kill 5\n")
    (root / "proc/vmstat").write_text("oom_kill 12\n")
    own, anywhere = kills.poll()
    assert own == 2
    assert anywhere > 0
    assert kills.poll() == (0, 0)
    (root / "proc/vmstat").write_text("oom_kill 13\n")
    assert kills.poll() == (0, 1)
