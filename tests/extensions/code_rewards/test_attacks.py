"""Hostile programs: none earns anything or harms anything, and each is judged within its limit.

They are sent the way a model's answers are, through the code reward, so that what is tested is what trains.
"""

import fcntl
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from async_rl.config.loading import parse_config
from async_rl.extensions.code_rewards.sandbox import Program, Sandbox
from async_rl.process.sandbox.limits import Limits
from async_rl.rewards.records import Reward, RewardInput
from async_rl.rewards.registry import build_reward

EXPECTED = "the expected output is 1f0c8a\n"
TIME_LIMIT_S = 1.0
JUDGED_WITHIN_S = 15.0
"""The limit, and what a machine that does much else takes to start and to end a process."""


def build(**code: object) -> Reward:
    settings = {"time_limit_s": TIME_LIMIT_S, "memory_bytes": 512 << 20, "packages": [], **code}
    raw = {"run": {"dir": "run"}, "model": {"path": "m"}, "reward": {"type": "code", "code": settings}}
    return build_reward(parse_config(raw, "the test"))


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
    return {name.removeprefix("code_tests_"): count for name, count in reward.counters().items()}


def processes_with(marker: str) -> list[int]:
    """Processes of this machine whose command line or environment holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes() + (entry / "comm").read_bytes()
            except OSError:
                continue  # it ended in between
            if marker.encode() in words:
                found.append(int(entry.name))
    return found


def own_launchers() -> set[int]:
    """The launchers of this process's sandboxes. Others may come and go: another process may run tests too."""
    descendants = {child.pid for child in psutil.Process().children(recursive=True)}
    return descendants & set(processes_with("async_rl.extensions.code_rewards.program"))


def test_a_right_program_is_paid_here_so_that_the_others_are_refused_for_what_they_do(reward: Reward):
    assert score(reward, f"print({EXPECTED.strip()!r})") == 1.0


FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


def test_a_fork_bomb(reward: Reward):
    assert score(reward, FORK_BOMB) == 0.0
    # The machine can still start processes, and the sandbox programs.
    assert subprocess.run(["true"], timeout=30).returncode == 0
    assert score(reward, f"print({EXPECTED.strip()!r})") == 1.0


def test_a_thread_bomb(reward: Reward):
    source = """
import threading
threading.stack_size(1 << 16)
wait = threading.Event().wait
while True:
    threading.Thread(target=wait).start()
"""
    assert score(reward, source) == 0.0


@pytest.mark.parametrize(
    "source",
    [
        "x = b'a' * (1 << 40)",
        "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
        "import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(100)]",
        "import mmap\nx = []\nfor i in range(1000):\n    f = open(str(i), 'w+b')\n    f.truncate(1 << 24)\n"
        "    x.append(f.write(b'x' * (1 << 24)))",
    ],
)
def test_a_memory_bomb(reward: Reward, source: str):
    before = verdicts(reward)
    assert score(reward, source) == 0.0
    after = verdicts(reward)
    assert after["failed"] + after["timed_out"] == before["failed"] + before["timed_out"] + 1


@pytest.mark.parametrize("source", ["while True: pass", "9 ** 9 ** 9 ** 9", "import time\ntime.sleep(1000)"])
def test_an_endless_loop_and_a_sleep(reward: Reward, source: str):
    before = verdicts(reward)["timed_out"]
    assert score(reward, source) == 0.0
    assert verdicts(reward)["timed_out"] == before + 1


def test_signals_do_not_save_an_endless_loop(reward: Reward):
    source = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
"""
    before = verdicts(reward)["timed_out"]
    assert score(reward, source) == 0.0
    assert verdicts(reward)["timed_out"] == before + 1


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_gigabyte_of_output(reward: Reward, stream: str):
    source = f"import sys\nfor _ in range(1024):\n    sys.{stream}.write('x' * (1 << 20))"
    assert score(reward, source) == 0.0


def test_right_output_followed_by_a_gigabyte_that_is_cut_off(reward: Reward):
    source = f"""
import os
os.write(1, {EXPECTED!r}.encode())
try:
    while True:
        os.write(1, b"\\n" * (1 << 20))
except OSError:
    pass
os._exit(0)
"""
    assert score(reward, source) == 0.0


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


def test_its_directory_is_new_for_every_program(reward: Reward):
    source = f"import os\nif os.listdir('.'):\n    print({EXPECTED.strip()!r})\nopen('left', 'w').write('something')"
    assert score(reward, source) == 0.0
    assert score(reward, source) == 0.0


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


def test_reading_its_parents_processes_files_environment_and_the_expected_output(
    reward: Reward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
    limits = Limits(60.0, 512 << 20, 1 << 20, 1 << 20, 8)
    assert sandbox.run(Program("print('77ab12')", stdin=b"77ab12"), limits).output == b"77ab12\n"
    assert sandbox.run(Program(look), limits).output == b"True []\n"
    # It would be found: a program finds its own.
    assert b"'kept 77ab12'" in sandbox.run(Program("kept = ['kept 77ab12']\n" + look), limits).output
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
    ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit", "import os; os.kill(os.getpid(), 9)",
     "import os; os.abort()", "import ctypes; ctypes.string_at(0)", "quit()"],
)  # fmt: skip
def test_leaving_early(reward: Reward, leave: str):
    assert score(reward, leave) == 0.0
    assert score(reward, f"def f():\n    {leave}", fn_name="f", inputs=[[]], outputs=[[1]]) == 0.0


ALWAYS_EQUAL = """
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
"""


@pytest.mark.parametrize("base", ["object", "str", "int", "list", "dict", "float", "tuple"])
@pytest.mark.parametrize("value", ["Always()", "[Always()]", "{'a': Always()}", "Always"])
def test_an_object_that_equals_everything(reward: Reward, base: str, value: str):
    source = ALWAYS_EQUAL.format(base=base, value=value)
    assert score(reward, source, fn_name="f", inputs=[[]], outputs=[["secret"]]) == 0.0
    assert score(reward, source + "\nprint(f())") == 0.0


PATCHES = """
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
"""


def test_monkey_patching_builtins(reward: Reward):
    assert score(reward, PATCHES) == 0.0
    assert score(reward, PATCHES, fn_name="f", inputs=[[]], outputs=[["secret"]]) == 0.0
    # Nothing of it reaches the next program.
    assert score(reward, f"print({EXPECTED.strip()!r})") == 1.0


def test_an_answer_written_past_the_harness_is_judged_like_any_other(reward: Reward):
    source = """
import os
for fd in range(64):
    try:
        os.write(fd, b'{"ended": {"exit_code": 0, "timed_out": false}}\\n[true]')
    except OSError:
        pass
def f():
    os._exit(0)
"""
    assert score(reward, source) == 0.0
    assert score(reward, source, fn_name="f", inputs=[[]], outputs=[["secret"]]) == 0.0


def test_no_program_outlives_its_verdict(reward: Reward):
    name = f"program{os.getpid() % 10**7}"
    source = f'import ctypes, time\nctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)\ntime.sleep(1000)'
    import threading

    thread = threading.Thread(target=score, args=(reward, source))
    thread.start()
    seen = False
    while thread.is_alive() and not seen:
        seen = bool(processes_with(name))
    thread.join()
    assert seen
    assert processes_with(name) == []


def test_new_namespaces_privileges_and_kernel_doors_are_shut(reward: Reward):
    source = f"""
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
"""
    assert score(reward, source) == 0.0


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_NOFILE"])
def test_limits_can_not_be_lifted(reward: Reward, name: str):
    source = f"""
import resource
soft, hard = resource.getrlimit(resource.{name})
try:
    resource.setrlimit(resource.{name}, (hard + 1, hard + 1))
except (OSError, ValueError):
    print("as before")
else:
    print({EXPECTED.strip()!r})
"""
    assert score(reward, source) == 0.0


@pytest.mark.parametrize(
    "source", ["def", "\0", "print(1", "(" * 100_000, "x = " + "-" * 200_000 + "1", "#" * 5_000_000, "", "\ud800"]
)
def test_programs_that_are_none(reward: Reward, source: str):
    assert score(reward, source) == 0.0


def test_an_endless_recursion_and_a_deep_structure_returned(reward: Reward):
    assert score(reward, "def f(n): return f(n + 1)\nf(0)") == 0.0
    source = "def f():\n    x = []\n    for _ in range(100000): x = [x]\n    return x"
    assert score(reward, source, fn_name="f", inputs=[[]], outputs=[[1]]) == 0.0


def test_two_programs_at_a_time_find_nothing_of_each_other():
    sandbox = Sandbox()
    limits = Limits(5.0, 512 << 20, 1 << 20, 1 << 20, 8)
    look = "import os, time\nopen('mine', 'w')\ntime.sleep(0.3)\nprint(os.getpid(), os.listdir('.'), os.getppid())"
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ran = list(pool.map(lambda _: sandbox.run(Program(look), limits), range(4)))
    sandbox.close()
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
    limits = Limits(60.0, 512 << 20, 1 << 20, 1 << 20, 8)
    with closing(Sandbox()) as sandbox, ThreadPoolExecutor(2) as threads:
        heard, spoken = [threads.submit(sandbox.run, Program(source), limits) for source in (listen, talk)]
        assert spoken.result().exit_code == 0
        assert heard.result().output == b"True\nnothing\n"


_COMMON = """
import ctypes, fcntl, os, struct, sys, time
path = os.__file__  # every program can read it
file = os.open(path, os.O_RDONLY)
end = time.monotonic() + 2.0
libc = ctypes.CDLL(None, use_errno=True)


def tried(call, *arguments):
    try:
        return call(*arguments)
    except (OSError, ValueError):
        return None


def blocked(call, *arguments):
    try:
        call(*arguments)
    except BlockingIOError:
        return True
    except OSError:
        return False


def looked(condition):
    while time.monotonic() < end:
        if condition():
            return print("heard")
        time.sleep(0.01)
    print("nothing")
"""

_LOCK = "struct.pack('hhqqi4x', {kind}, 0, 0, 0, 0)"  # struct flock
_FUTEX = """
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), 1, {sharing}, file, ctypes.c_long(0))
value = ctypes.c_uint32.from_address(page).value
limit = struct.pack("qq", 0, 20_000_000)


def futex(operation, value, timeout=None):
    number = 202 if os.uname().machine == 'x86_64' else 98
    return libc.syscall(number, ctypes.c_void_p(page), operation, value, timeout, None, 0xFFFFFFFF)
"""
_TALKS = {
    "flock": (
        "looked(lambda: blocked(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB) "
        "or tried(fcntl.flock, file, fcntl.LOCK_UN))",
        "tried(fcntl.flock, file, fcntl.LOCK_SH)\ntime.sleep(2.5)",
    ),
    "a lock of a range": (
        f"""def seen():
    found = tried(fcntl.fcntl, file, fcntl.F_GETLK, {_LOCK.format(kind="fcntl.F_WRLCK")})
    return found is not None and struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK
looked(seen)""",
        f"tried(fcntl.fcntl, file, fcntl.F_SETLK, {_LOCK.format(kind='fcntl.F_RDLCK')})\ntime.sleep(2.5)",
    ),
    "an open file description lock": (
        f"""def seen():
    found = tried(fcntl.fcntl, file, 36, {_LOCK.format(kind="fcntl.F_WRLCK")})
    return found is not None and struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK
looked(seen)""",
        f"tried(fcntl.fcntl, file, 37, {_LOCK.format(kind='fcntl.F_RDLCK')})\ntime.sleep(2.5)",
    ),
    "a futex in a private mapping": (
        _FUTEX.format(sharing=2) + "looked(lambda: futex(1, 1) > 0)",
        _FUTEX.format(sharing=2) + "looked(lambda: futex(0, value, limit) is None)",
    ),
    "a futex in a shared mapping": (
        _FUTEX.format(sharing=1) + "looked(lambda: futex(1, 1) > 0)",
        _FUTEX.format(sharing=1) + "looked(lambda: futex(0, value, limit) is None)",
    ),
}
"""What the listener and the talker do, by the means."""


@pytest.mark.slow
@pytest.mark.parametrize("means", _TALKS)
def test_programs_pass_no_message_by_files_that_all_can_read(means: str):
    listen, talk = _TALKS[means]
    limits = Limits(30.0, 512 << 20, 1 << 20, 1 << 20, 8)
    with closing(Sandbox()) as sandbox, ThreadPoolExecutor(2) as threads:
        heard, spoken = [threads.submit(sandbox.run, Program(_COMMON + source), limits) for source in (listen, talk)]
        assert spoken.result().exit_code == 0, spoken.result()
        assert heard.result().output == b"nothing\n", heard.result()


def test_a_lock_in_a_program_neither_reaches_the_machine_nor_sees_its_locks():
    source = """
import fcntl, os
file = os.open(os.__file__, os.O_RDONLY)
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
print("locked", flush=True)
input()
"""
    limits = Limits(10.0, 512 << 20, 1 << 20, 1 << 20, 8)
    with closing(Sandbox()) as sandbox, open(os.__file__, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sandbox.run(Program(source, stdin=b"\n"), limits).output == b"locked\n"


def test_programs_that_lock_their_own_files_or_join_threads_run_as_elsewhere():
    source = """
import ctypes, fcntl, mmap, os, sqlite3, threading
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
    limits = Limits(10.0, 512 << 20, 1 << 20, 1 << 20, 8)
    with closing(Sandbox()) as sandbox:
        assert sandbox.run(Program(source), limits).output == b"b'xx'\n[(1,)]\n0 0\n"
