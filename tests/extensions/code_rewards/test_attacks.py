"""Hostile programs: none earns anything or harms anything, and each is judged within its limit.

They are sent the way a model's answers are, through the code reward, so that what is tested is what trains.
"""

import fcntl
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from async_rl.extensions.code_rewards.sandbox import Program, Sandbox
from async_rl.process.sandbox.limits import Limits
from async_rl.rewards.records import CountingReward, Reward, RewardInput
from async_rl.rewards.registry import build_reward
from tests.config.made import a_config

EXPECTED = "the expected output is 1f0c8a\n"
TIME_LIMIT_S = 1.0
LIMITS = Limits(60.0, 512 << 20, 1 << 20, 1 << 20, 8)
JUDGED_WITHIN_S = 15.0
"""The limit, and what a machine that does much else takes to start and to end a process."""


def build(**code: object) -> Reward:
    settings = {"time_limit_s": TIME_LIMIT_S, "memory_bytes": 512 << 20, "packages": [], **code}
    return build_reward(a_config(reward={"type": "code", "code": settings}))


@pytest.fixture(scope="module")
def reward() -> Iterator[Reward]:
    built = build()
    yield built
    built.close()


def score(reward: Reward, source: str, **cases: object) -> float:
    """What the program earns; it must be judged in time."""
    tests = {"inputs": ["the input\n"], "outputs": [EXPECTED], **cases}
    item = RewardInput(f"```python\n{source}\n```", {"test_cases": tests}, 10, 100, "stop")
    started_s = time.monotonic()
    output = reward(item)
    assert time.monotonic() - started_s < JUDGED_WITHIN_S
    assert output.accuracy == output.parts["correct"]
    return output.accuracy


def verdicts(reward: Reward) -> dict[str, int]:
    assert isinstance(reward, CountingReward)
    return {name.removeprefix("code_tests_"): count for name, count in reward.counters().items()}


def processes_with(marker: str) -> set[int]:
    """Processes of this machine with ``marker`` in their name or command line."""
    listed = psutil.process_iter(["name", "cmdline"])
    return {one.pid for one in listed if marker in " ".join([one.info["name"], *(one.info["cmdline"] or ())])}


def own_launchers() -> set[int]:
    """The launchers of this process's sandboxes. Others may come and go: another process may run tests too."""
    descendants = {child.pid for child in psutil.Process().children(recursive=True)}
    return descendants & processes_with("async_rl.extensions.code_rewards.program")


RIGHT = f"print({EXPECTED.strip()!r})"
CALLED: dict[str, object] = {"fn_name": "f", "inputs": [[]], "outputs": [["secret"]]}

WORTHLESS = {
    "a fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "a gigabyte of errors": "import sys\nfor _ in range(1024):\n    sys.stderr.write('x' * (1 << 20))",
    "right output and then a gigabyte that is cut off": f"""
import os
os.write(1, {EXPECTED!r}.encode())
try:
    while True:
        os.write(1, b"\\n" * (1 << 20))
except OSError:
    pass
os._exit(0)
""",
    "new namespaces, privileges and kernel doors that are shut": f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
UNSHARE, MOUNT, PTRACE, BPF, KEYCTL, IO_URING, PERF, USERFAULTFD = 272, 165, 101, 321, 250, 425, 298, 323
opened = []
if os.uname().machine == "x86_64":
    for number in (UNSHARE, MOUNT, PTRACE, BPF, KEYCTL, IO_URING, PERF, USERFAULTFD):
        if libc.syscall(number, 0x10000000, 0, 0, 0, 0, 0) >= 0:
            opened.append(number)
for call in (lambda: os.setuid(0), lambda: os.chroot("."), lambda: os.execv("/bin/sh", ["sh"]),
             lambda: os.mknod("node"), lambda: os.chown(".", 0, 0), lambda: os.nice(-1)):
    try:
        call()
    except OSError:
        continue
    opened.append(call)
print({EXPECTED.strip()!r} if opened else "all shut")
""",
    "limits that are lifted": f"""
import resource
for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE"):
    which = getattr(resource, f"RLIMIT_{{name}}")
    soft, hard = resource.getrlimit(which)
    try:
        resource.setrlimit(which, (hard + 1, hard + 1))
    except (OSError, ValueError):
        continue
    {RIGHT}
    break
""",
    "an endless recursion": "def f(n): return f(n + 1)\nf(0)",
    **{f"no program: {text[:9]!r}": text for text in (
        "def", "\0", "(" * 100_000, "x = " + "-" * 200_000 + "1", "#" * 5_000_000, "", "\ud800"
    )},
}  # fmt: skip


@pytest.mark.parametrize("kind", WORTHLESS)
def test_a_program_that_earns_nothing_and_leaves_the_next_one_as_it_is(reward: Reward, kind: str):
    assert score(reward, WORTHLESS[kind]) == 0.0
    # The machine can still start processes, and the sandbox programs.
    assert subprocess.run(["true"], timeout=30).returncode == 0
    assert score(reward, RIGHT) == 1.0


def test_its_directory_is_new_for_every_program(reward: Reward):
    source = f"import os\nif os.listdir('.'):\n    {RIGHT}\nopen('left', 'w').write('something')"
    assert [score(reward, source) for _ in range(2)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("x = b'a' * (1 << 40)", "failed"),
        ("x = []\nwhile True:\n    x.append(bytearray(1 << 24))", "failed"),
        ("import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(100)]", "failed"),
        ("import mmap\nx = []\nfor i in range(1000):\n    f = open(str(i), 'w+b')\n    f.truncate(1 << 24)\n"
         "    x.append(f.write(b'x' * (1 << 24)))", "failed"),
        ("import signal\nfor number in range(1, 65):\n    try:\n        signal.signal(number, signal.SIG_IGN)\n"
         "    except (OSError, ValueError):\n        pass\nwhile True: pass", "timed_out"),
        ("9 ** 9 ** 9 ** 9", "timed_out"),
        ("import time\ntime.sleep(1000)", "timed_out"),
    ],
)  # fmt: skip
def test_bombs_of_memory_and_time(reward: Reward, source: str, verdict: str):
    before = verdicts(reward)
    assert score(reward, source) == 0.0
    after = verdicts(reward)
    ended = ("failed", "timed_out") if verdict == "failed" else (verdict,)  # a bomb of memory may be slow
    assert sum(after[one] - before[one] for one in ended) == 1


def test_writing_outside_its_directory(reward: Reward, tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_text("untouched")
    libraries = os.path.dirname(os.__file__)
    paths = [str(precious), str(tmp_path / "new"), "/new", "/tmp/new", f"{libraries}/new.py", f"{libraries}/os.py"]
    source = f"""
import os
for path in {[*paths, "/dev/new", "../new"]!r}:
    try:
        open(path, "w").write("overwritten")
    except OSError:
        continue
    print({EXPECTED.strip()!r})
try:
    os.unlink({libraries + "/os.py"!r})
    print({EXPECTED.strip()!r})
except OSError:
    pass
"""
    assert score(reward, source) == 0.0
    assert precious.read_text() == "untouched"
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


READER = """
import os
found = b""
for path in {paths!r}:
    try:
        found += open(path, "rb").read(1 << 20)
    except OSError:
        pass
for top in ("/", "/dev", os.getcwd()):
    for name in os.listdir(top):
        path = os.path.join(top, name)
        if os.path.isfile(path):
            found += open(path, "rb").read(1 << 20)
for value in list(globals().values()) + list(os.environ.values()):
    found += str(value).encode()
marker = b"the expected output is " + b"1f0c8a"
print(marker.decode() if marker in found.replace(b"marker", b"") else "nothing")
"""


def test_reading_its_parents_processes_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "answers.txt").write_text(EXPECTED)
    monkeypatch.setenv("ASYNC_RL_TEST_SECRET", EXPECTED)
    parents = [os.getpid(), os.getppid(), 1]
    paths = [f"/proc/{pid}/{name}" for pid in parents for name in ("environ", "cmdline", "mem", "maps", "fd/0", "fd/3")]
    paths += [str(tmp_path / "answers.txt"), __file__, "/proc/self/environ", "/etc/passwd"]
    source = READER.format(paths=paths)
    with Path("/proc/self/environ").open("rb"):  # the test itself could
        pass
    built = build()  # the launcher is started with the secret in its parent's environment
    assert score(built, source) == 0.0
    built.close()


def test_no_object_in_its_memory_holds_the_expected_output_or_another_program():
    look = """
import gc
gc.unfreeze()
texts = set()
for thing in gc.get_objects():
    if isinstance(thing, (dict, list, tuple, set)):
        for item in list(thing.values() if isinstance(thing, dict) else thing):
            if isinstance(item, str):
                texts.add(item)
            elif isinstance(item, bytes):
                texts.add(item.decode("latin1"))
print(len(texts) > 1000, [text for text in texts if "".join(("77ab", "12")) in text])
"""
    sandbox = Sandbox()
    assert sandbox.run(Program("print('77ab12')", stdin=b"77ab12"), LIMITS).output == b"77ab12\n"
    assert sandbox.run(Program(look), LIMITS).output == b"True []\n"
    # It would be found: a program finds its own.
    assert b"'kept 77ab12'" in sandbox.run(Program("kept = ['kept 77ab12']\n" + look), LIMITS).output
    sandbox.close()


@pytest.mark.parametrize("kind", ["AF_INET, socket.SOCK_STREAM", "AF_INET6, socket.SOCK_DGRAM", "AF_UNIX"])
def test_opening_a_socket(reward: Reward, kind: str):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0)
        port = listener.getsockname()[1]
        source = f"""
import socket
try:
    made = socket.socket(socket.{kind})
except OSError:
    print("none")
else:
    print({EXPECTED.strip()!r})
    made.connect(("127.0.0.1", {port}))
"""
        assert score(reward, source) == 0.0
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_killing_its_parent(reward: Reward):
    source = f"""
import os, signal
for pid in (os.getppid(), {os.getpid()}, {os.getppid()}, -1, 0):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except OSError:
            pass
"""
    launchers = own_launchers()
    assert score(reward, source) == 0.0
    assert launchers
    assert launchers <= own_launchers()


@pytest.mark.parametrize(
    "leave",
    ["import os; os._exit(0)", "import sys; sys.exit(0)", "import os; os.kill(os.getpid(), 9)",
     "import ctypes; ctypes.string_at(0)", "quit()"],
)  # fmt: skip
def test_leaving_early(reward: Reward, leave: str):
    assert score(reward, leave) == 0.0
    assert score(reward, f"def f():\n    {leave}", **CALLED) == 0.0


FORGERS = {
    "an object that equals everything": """
class Always({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __contains__(self, other): return True
    def __len__(self): return 1
    def strip(self, *_): return self
    def split(self, *_): return self
def f():
    return {value}
print(f())
""",
    "patched builtins": """
import builtins, json, os, sys, types

class Everything(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0

def yes(*_, **__): return True

builtins.all = builtins.any = builtins.isinstance = yes
builtins.str = Everything
builtins.list = builtins.set = builtins.dict = builtins.type = yes
json.dumps = lambda *_, **__: "true"
json.loads = lambda *_, **__: Everything()
os.write = os.read = yes
sys.exit = os._exit = yes
for name, module in list(sys.modules.items()):
    for key, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else []:
        if callable(value) and name.startswith("async_rl"):
            setattr(module, key, yes)
def f():
    return Everything()
""",
    "an answer written past the harness": """
import os
for fd in range(64):
    try:
        os.write(fd, b'{"ended": {"exit_code": 0, "timed_out": false}}\\n[true]')
    except OSError:
        pass
def f():
    os._exit(0)
""",
    "a deep structure": "def f():\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
}


@pytest.mark.parametrize("kind", FORGERS)
def test_what_forges_an_equal_result_earns_nothing(reward: Reward, kind: str):
    values = [(base, "Always()") for base in ("object", "str", "int", "list", "dict", "float", "tuple")]
    values += [("str", value) for value in ("[Always()]", "{'a': Always()}", "Always")]
    for base, value in values if "equals" in kind else [("", "")]:
        source = FORGERS[kind].replace("{base}", base).replace("{value}", value)
        assert score(reward, source, **CALLED) == 0.0
        assert score(reward, source) == 0.0
    # Nothing of it reaches the next program.
    assert score(reward, RIGHT) == 1.0


def test_no_program_outlives_its_verdict(reward: Reward):
    name = f"program{os.getpid() % 10**7}"
    source = f'import ctypes, time\nctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)\ntime.sleep(1000)'
    thread = threading.Thread(target=score, args=(reward, source))
    thread.start()
    seen = False
    while thread.is_alive() and not seen:
        seen = bool(processes_with(name))
    thread.join()
    assert seen
    assert not processes_with(name)


def test_programs_run_side_by_side_and_find_nothing_of_each_other():
    look = "import os, time\nopen('mine', 'w')\ntime.sleep(1)\nprint(os.getpid(), os.listdir('.'), os.getppid())"
    with closing(Sandbox()) as sandbox, ThreadPoolExecutor(4) as pool:
        started_s = time.monotonic()
        ran = list(pool.map(lambda _: sandbox.run(Program(look), LIMITS), range(4)))
        assert time.monotonic() - started_s < 3.5  # one after the other would take four
    assert {one.output for one in ran} == {b"1 ['mine'] 0\n"}


def test_programs_that_run_at_the_same_time_can_not_talk():
    # A socket of a pair gets an abstract address of five hexadecimal digits when it sends with SO_PASSCRED, without a
    # call of bind. Once its peer is gone, everybody in the same network namespace may send to that address.
    listen = """
import socket
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
ours.send(b"x")
theirs.close()
try:
    ours.send(b"x")
except ConnectionRefusedError:
    print(ours.getsockname()[:1] == b"\\0", flush=True)
ours.settimeout(4.0)
try:
    print(ours.recv(100))
except TimeoutError:
    print("nothing")
"""
    talk = """
import socket
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for number in range(1 << 20):
    try:
        ours.sendto(b"the answer", b"\\0%05x" % number)
    except OSError:
        pass
"""
    with closing(Sandbox()) as sandbox, ThreadPoolExecutor(2) as threads:
        heard, spoken = [threads.submit(sandbox.run, Program(source), LIMITS) for source in (listen, talk)]
        assert spoken.result().exit_code == 0
        assert heard.result().output == b"True\nnothing\n"


FUTEX = """
import ctypes, os, struct, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
file = os.open(os.__file__, os.O_RDONLY)  # every program can read it
page = libc.mmap(None, ctypes.c_size_t(4096), 1, {sharing}, file, ctypes.c_long(0))
value, limit = ctypes.c_uint32.from_address(page).value, struct.pack("qq", 0, 20_000_000)

def futex(operation, value, timeout=None):
    number = 202 if os.uname().machine == 'x86_64' else 98
    return libc.syscall(number, ctypes.c_void_p(page), operation, value, timeout, None, 0xFFFFFFFF)

end, woken = time.monotonic() + 2.0, 0
while time.monotonic() < end:
    woken = max(woken, {call})
    time.sleep(0.01 * {pause})
print(woken)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [1, 2], ids=["shared", "private"])
def test_programs_wake_each_other_by_no_page_that_all_can_read(sharing: int):
    calls = [("futex(1, 1)", 1), ("futex(0, value, limit)", 0)]
    with closing(Sandbox()) as sandbox, ThreadPoolExecutor(2) as threads:
        sources = [FUTEX.format(sharing=sharing, call=call, pause=pause) for call, pause in calls]
        wakes, _ = [threads.submit(sandbox.run, Program(source), LIMITS) for source in sources]
        assert wakes.result().output == b"0\n", wakes.result()


def test_programs_that_lock_or_join_threads_run_as_elsewhere_and_see_no_lock_of_the_machine():
    source = """
import ctypes, fcntl, mmap, os, sqlite3, struct, threading
file = os.open(os.__file__, os.O_RDONLY)
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
for command in (fcntl.F_GETLK, fcntl.F_OFD_GETLK):  # may anybody else write?
    try:
        found = fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    except OSError:
        continue
    assert struct.unpack("hhqqi4x", found)[0] == fcntl.F_UNLCK
with open("mine", "w+b") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_EX)
    file.write(b"x" * 4096)
    file.flush()
    with mmap.mmap(file.fileno(), 4096) as whole:
        print(whole[:2])
with sqlite3.connect("rows.db") as rows:
    rows.execute("create table t (x)")
    rows.execute("insert into t values (1)")
    print(rows.execute("select * from t").fetchall())
threads = [threading.Thread(target=lambda: None) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
work = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: libc.usleep(100_000) and None)
print(libc.pthread_create(ctypes.byref(thread), None, work, None), libc.pthread_join(thread, None))
"""
    with closing(Sandbox()) as sandbox, open(os.__file__, "rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        fcntl.lockf(theirs, fcntl.LOCK_SH)
        fcntl.fcntl(theirs, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
        assert sandbox.run(Program(source), LIMITS).output == b"b'xx'\n[(1,)]\n0 0\n"
