"""Launch: the commands it makes, the processes it keeps, the children that end with it, the lines it prints."""

import errno
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rich.console import Console

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.config.queue import QueueConfig
from async_rl.errors import AddressError, ConfigError, ModelError, QueueError, RunError
from async_rl.launch import launch as launch_module
from async_rl.launch.checks.addresses import check_bindable, check_weights_ports
from async_rl.launch.checks.models import check_critic
from async_rl.launch.hints import Hints, LedgerNotes
from async_rl.launch.launch import (
    RunCommands,
    continuation_lines,
    describe_commands,
    explain,
    nobody_samples_line,
)
from async_rl.launch.live_view import (
    LiveView,
    PlainView,
    newest_message,
)
from async_rl.launch.memory_deaths import MemoryDeaths
from async_rl.launch.summary import summary
from async_rl.launch.supervisor import Command, Death, Outcome, ProcessStatus, Supervisor, Timing
from async_rl.process.child import DEVICES_ARE_DEALT, PACKAGE_ROOT, PACKAGE_SOURCES, ParentWatch
from async_rl.process.user_code import write_digests
from async_rl.run.directory import RunDir
from async_rl.run.figures.progress import RunProgress, duration, eval_accuracies, eval_lines, step_line
from async_rl.run.lock import RunLock, acquire
from async_rl.run.records.step_log import StepLogTail
from async_rl.run.reuse import prepare_run_dir

DEADLINE_S = 60.0
FAST = Timing(poll_s=0.02, queue_start_s=20.0, backoff_s=0.02, max_backoff_s=0.1, finish_s=0.3, grace_s=5.0)


def a_config(directory: Path | str = "runs/x", **sections: dict[str, object]) -> Config:
    return parse_config({"run": {"dir": str(directory)}, "model": {"path": "tiny"}, **sections}, "test")


def poll(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        threading.Event().wait(0.02)


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie whose parent is gone does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- commands


def some_commands(
    config: Config, inherited: dict[str, str] | None = None, cores: tuple[int, ...] = (), gpus: tuple[str, ...] = ()
) -> RunCommands:
    return RunCommands(
        config, ["run.toml", "--set", "run.seed=1"], run_id="r1", insecure=False, inherited=inherited or {},
        num_cores=8, cores=cores, gpus=gpus,
    )  # fmt: skip


def test_every_rank_gets_its_place_its_devices_and_the_rendezvous():
    config = a_config(learner={"nproc": 2, "devices": [4, 5]}, generator={"count": 2})
    ranks = some_commands(config).learner(1234)
    assert [c.name for c in ranks] == ["learner-0", "learner-1"]
    assert ranks[1].argv == (sys.executable, "-m", "async_rl", "learner", "run.toml", "--set", "run.seed=1")
    environment = ranks[1].environment
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    assert expected.items() <= environment.items()
    assert (environment["CUDA_VISIBLE_DEVICES"], environment[DEVICES_ARE_DEALT]) == ("4,5", "1")
    assert environment["OMP_NUM_THREADS"] == "2"  # 8 cores over 2 ranks and 2 generators


def test_the_package_is_once_on_the_path_of_every_process():
    for before, after in (("", []), (PACKAGE_ROOT, []), (f"/mine:{PACKAGE_ROOT}:/other", ["/mine", "/other"])):
        command = some_commands(a_config(), {"PYTHONPATH": before}).queue(None)
        assert command.environment["PYTHONPATH"].split(":") == [PACKAGE_ROOT, *PACKAGE_SOURCES, *after]


def cores_of(config: Config, cores: tuple[int, ...], inherited: dict[str, str] | None = None) -> list[tuple[int, ...]]:
    commands = some_commands(config, inherited, cores)
    generators = [commands.generator(i, "tcp://127.0.0.1:5", 0) for i in range(commands.num_generators)]
    assert commands.queue(None).cores == ()
    return [command.cores for command in (*commands.learner(1), *generators)]


def test_ranks_and_generators_share_the_cores_that_there_are():
    config = a_config(learner={"nproc": 1}, generator={"count": 2})
    assert cores_of(config, (0, 1, 2, 5, 6)) == [(0, 1), (2, 5), (6,)]
    assert cores_of(config, (0, 1)) == [(), (), ()]
    line = some_commands(config, cores=(3, 4, 7)).learner(1)[0].shell_line()
    assert f" taskset -c 3 {sys.executable} -m async_rl learner" in line


def test_whoever_chooses_threads_keeps_all_cores():
    assert cores_of(a_config(), (0, 1), {"OMP_NUM_THREADS": "2"}) == [(), ()]
    assert cores_of(a_config(learner={"num_threads": 2}), (0, 1)) == [(), ()]
    assert cores_of(a_config(generator={"num_threads": 2}), (0, 1)) == [(), ()]


def test_generators_are_dealt_their_devices_in_order():
    config = a_config(generator={"count": 2, "tensor_parallel_size": 2, "devices": [3, 2, 1, 0], "num_threads": 5})
    commands = some_commands(config)
    dealt = [commands.generator(i, "tcp://127.0.0.1:5", 0).environment["CUDA_VISIBLE_DEVICES"] for i in range(2)]
    assert dealt == ["3,2", "1,0"]
    assert commands.generator(0, "tcp://127.0.0.1:5", 0).environment["OMP_NUM_THREADS"] == "5"


def test_a_restarted_generator_has_a_name_of_its_own_and_the_same_log_and_says_whom_it_replaces():
    again = some_commands(a_config()).generator(0, "tcp://127.0.0.1:5", 2)
    assert again.argv[-4:] == ("--id", "generator-0-2", "--replaces", "generator-0-1")
    assert "--replaces" not in some_commands(a_config()).generator(0, "tcp://127.0.0.1:5", 0).argv
    assert again.name == "generator-0"


def test_device_indices_count_among_the_visible_ones_and_others_are_refused():
    config = a_config(learner={"devices": [1]})
    learner = some_commands(config, {"CUDA_VISIBLE_DEVICES": "6,GPU-7"}, gpus=("6", "GPU-7")).learner(1)[0]
    assert learner.environment["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    with pytest.raises(ConfigError, match=r"learner\.devices.*'6'"):
        some_commands(config, {"CUDA_VISIBLE_DEVICES": "6"}, gpus=("6",))


def test_a_restarted_queue_server_takes_the_port_it_had():
    commands = some_commands(a_config(queue={"address": "tcp://0.0.0.0:*"}))
    assert not any("queue.address" in part for part in commands.queue(None).argv)
    assert "queue.address=tcp://0.0.0.0:4321" in commands.queue(4321).argv
    assert "queue.address=tcp://127.0.0.1:4321" in some_commands(a_config()).queue(4321).argv


def test_the_users_own_thread_count_is_left_alone():
    assert "OMP_NUM_THREADS" not in some_commands(a_config(), {"OMP_NUM_THREADS": "3"}).learner(1)[0].environment


def test_a_dry_run_names_every_process_with_devices_and_threads():
    config = a_config(learner={"devices": [0]}, generator={"count": 2, "devices": [1, 2]})
    lines = describe_commands(config, some_commands(config))
    assert [line for line in lines if line.startswith("# ")][1:] == [
        "# GPUs: learner-0 on 0, generator-0 on 1, generator-1 on 2",
        "# queue", "# learner-0", "# generator-0", "# generator-1",
    ]  # fmt: skip
    assert re.match(r"CUDA_VISIBLE_DEVICES=2 OMP_NUM_THREADS=\d .* -m async_rl generator --connect ", lines[-1])


def test_without_keys_the_gpus_of_the_machine_are_dealt_and_the_plan_is_shown():
    config = a_config(learner={"nproc": 2}, generator={"backend": "transformers", "count": 1})
    commands = some_commands(config, gpus=("0", "1", "2"))
    assert [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in commands.learner(1)] == ["0,1", "0,1"]
    assert commands.generator(0, "tcp://127.0.0.1:5", 0).environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert describe_commands(config, commands)[1] == "# GPUs: learner-0 on 0, learner-1 on 1, generator-0 on 2"


# --- addresses and the lock


def test_a_busy_port_is_refused_and_a_free_one_is_not():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        with pytest.raises(AddressError, match=r"queue\.address: can't bind tcp://127"):
            check_bindable(QueueConfig(address=address), insecure=False)
    check_bindable(QueueConfig(address=address), insecure=False)


def test_an_open_address_is_refused_unless_insecure():
    with pytest.raises(AddressError, match="--insecure"):
        check_bindable(QueueConfig(address="tcp://0.0.0.0:0", advertise="tcp://10.0.0.1:5555"), insecure=False)
    check_bindable(QueueConfig(address="tcp://0.0.0.0:0", advertise="tcp://10.0.0.1:5555"), insecure=True)


def test_all_interfaces_without_an_advertised_address_are_refused():
    with pytest.raises(AddressError, match=r"tcp://0\.0\.0\.0:5555 stands for all interfaces.*set queue\.advertise = "):
        check_bindable(QueueConfig(address="tcp://0.0.0.0:5555"), insecure=True)


def test_ports_for_weights_that_are_in_use_are_found_before_the_start():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        ports = f"{port}-{port + 1}" if port < 65535 else f"{port - 1}-{port}"
        with pytest.raises(AddressError, match=r"weights\.port: expected two free ports.*are in use"):
            list(check_weights_ports(a_config(weights={"port": ports})))


@pytest.mark.parametrize("critic", [{}, {"trunk": "policy"}, {"path": "{model}"}])
def test_a_critic_that_can_be_read_is_fit(tmp_path: Path, critic: dict[str, str]):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    table: dict[str, object] = {key: value.replace("{model}", str(tmp_path)) for key, value in critic.items()}
    states = [found.state for found in check_critic(a_config(loss={"advantage": "gae"}, critic=table))]
    assert states == (["OK"] if "path" in critic else [])


def test_a_missing_model_of_the_critic_is_found_before_the_start(tmp_path: Path):
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"^critic\.path: .* no directory .*nowhere"):
        list(check_critic(a_config(loss={"advantage": "gae"}, critic={"path": nowhere})))


@pytest.mark.parametrize(
    ("count", "learner", "waits"),
    [
        (0, {}, True),
        (1, {}, False),
        (0, {"generate": True}, False),
        (0, {"generate": True, "generate_groups": 31}, True),
    ],
)
def test_a_launch_that_starts_nobody_who_samples_says_what_to_start(
    count: int, learner: dict[str, object], waits: bool
):
    line = nobody_samples_line(a_config(generator={"count": count}, learner=learner))
    assert ("async-rl generator --connect" in line) == waits == bool(line)


# --- the parent watch

PARENT = """
import subprocess, sys, os, signal
from pathlib import Path
from async_rl.process.child import ParentWatch
parent_watch = ParentWatch()
log = Path(sys.argv[3])
child = parent_watch.spawn([sys.executable, "-c", sys.argv[1], sys.argv[2]], environment=os.environ, log=log)
signal.pause()
"""
CHILD = """
import os, signal, subprocess, sys
from async_rl.process import child
from async_rl.process.child import exit_on_sigterm, watch_parent
child.GRACE_S = 0.5
PREPARE
watch_parent()
deaf = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
grandchild = subprocess.Popen([sys.executable, "-c", deaf])
with open(sys.argv[1] + ".partial", "w") as out:
    out.write(f"{os.getpid()} {grandchild.pid}")
os.rename(sys.argv[1] + ".partial", sys.argv[1])
while True: signal.pause()
"""


@pytest.mark.parametrize(
    "prepare", ["exit_on_sigterm()", "signal.signal(15, signal.SIG_IGN)", ""], ids=["polite", "deaf", "default"]
)
def test_a_killed_parent_takes_child_and_grandchild_with_it(tmp_path: Path, prepare: str):
    pids = tmp_path / "pids"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD.replace("PREPARE", prepare), str(pids), str(tmp_path / "log")]
    )
    try:
        poll(pids.exists, "the child to start")
        child, grandchild = map(int, pids.read_text().split())
        assert is_alive(child)
        assert is_alive(grandchild)
    finally:
        parent.kill()
        parent.wait()
    poll(lambda: not is_alive(child), "the child to end")
    poll(lambda: not is_alive(grandchild), "the grandchild to end")


def test_a_child_outlives_nothing_but_its_parent(tmp_path: Path):
    parent_watch = ParentWatch()
    code = "from async_rl.process.child import watch_parent; watch_parent(); import signal; print('up'); signal.pause()"
    log = tmp_path / "log"
    child = parent_watch.spawn([sys.executable, "-uc", code], environment=os.environ, log=log)
    poll(lambda: "up" in log.read_text(), "the child to start")
    assert child.poll() is None
    parent_watch.close()
    assert child.wait(DEADLINE_S) != 0


# --- the supervisor

QUEUE = """
import json, os, signal, sys
from pathlib import Path
record = Path(RUN) / "queue.json"
record.with_suffix(".tmp").write_text(json.dumps({"run_id": "r1", "pid": os.getpid(), "address": "tcp://127.0.0.1:7"}))
record.with_suffix(".tmp").rename(record)
signal.pause()
"""
WAIT = "import signal; signal.pause()"
FINISH = "open(RUN + '/finished.json', 'w').write('{}')\n"


def when_it_exists(name: str, then: str) -> str:
    """A child that polls for ``name`` in the run directory, then runs ``then``."""
    return f"import os, sys, time\nwhile not os.path.exists(RUN + '/{name}'): time.sleep(0.01)\n{then}"


@dataclass
class FakeCommands:
    """Children that are a few lines of Python, each told the run directory."""

    run: Path
    queue_code: str = QUEUE
    learner_codes: list[str] = field(default_factory=list)  # one a start; the last repeats
    generator_codes: list[str] = field(default_factory=list)
    num_ranks: int = 1
    ports: list[int | None] = field(default_factory=list)
    learner_starts: int = 0
    generator_starts: list[int] = field(default_factory=list)

    service_codes: dict[str, str] = field(default_factory=dict)

    @property
    def num_generators(self) -> int:
        return len(self.generator_codes)

    @property
    def services(self) -> Sequence[Command]:
        return [self._python(name, code) for name, code in self.service_codes.items()]

    def _python(self, name: str, code: str) -> Command:
        return Command(name, (sys.executable, "-c", f"RUN = {str(self.run)!r}\n{code}"))

    def queue(self, bound_port: int | None) -> Command:
        self.ports.append(bound_port)
        return self._python("queue", self.queue_code)

    def learner(self, master_port: int) -> list[Command]:
        code = self.learner_codes[min(self.learner_starts, len(self.learner_codes) - 1)]
        self.learner_starts += 1
        return [self._python(f"learner-{rank}", f"RANK = {rank}\n{code}") for rank in range(self.num_ranks)]

    def generator(self, index: int, address: str, num_restarts: int) -> Command:
        assert address == "tcp://127.0.0.1:7"
        self.generator_starts.append(num_restarts)
        return self._python(f"generator-{index}", self.generator_codes[index])


@dataclass
class FakeView:
    """Keeps what it is shown; ``on_refresh`` lets a test act at a moment of its choice."""

    on_refresh: Callable[[Sequence[ProcessStatus]], None] = lambda processes: None
    notes: list[str] = field(default_factory=list)

    def refresh(self, processes: Sequence[ProcessStatus]) -> None:
        self.on_refresh(processes)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def watch_queue(self, address: str) -> None:
        self.notes.append(f"queue {address}")


def supervise(
    commands: FakeCommands, view: FakeView | None = None, timing: Timing = FAST, memory: MemoryDeaths | None = None
) -> Outcome:
    run_dir = prepare_run_dir(a_config(commands.run))
    supervisor = Supervisor(
        commands, run_dir, environment=dict(os.environ), view=view or FakeView(), timing=timing, memory_deaths=memory
    )
    outcome = supervisor.run()
    assert [m for m in supervisor.processes() if m.state == "running"] == []
    return outcome


def test_a_run_ends_with_0_when_the_learner_does_and_the_rest_is_ended(tmp_path: Path):
    learner = f"print('trained')\n{FINISH}" + when_it_exists("told", "sys.exit(0)")
    told = when_it_exists("finished.json", "open(RUN + '/told', 'w')")
    commands = FakeCommands(tmp_path / "run", learner_codes=[learner], generator_codes=[WAIT, told])
    assert supervise(commands) == Outcome(0)
    assert "trained" in (tmp_path / "run" / "logs" / "learner-0.log").read_text()
    assert commands.generator_starts == [0, 0]


def test_a_dead_generator_is_restarted_while_the_others_go_on(tmp_path: Path):
    once = "import os, sys\nif not os.path.exists(RUN + '/died'): open(RUN + '/died', 'w'); sys.exit(7)\n"
    commands = FakeCommands(
        tmp_path / "run",
        learner_codes=[when_it_exists("back", "sys.exit(0)")],
        generator_codes=[f"{once}open(RUN + '/back', 'w')", WAIT],
    )
    view = FakeView()
    assert supervise(commands, view) == Outcome(0)
    assert commands.generator_starts == [0, 0, 1]
    assert any("generator-0 exited with code 7; restarting" in note for note in view.notes)


@pytest.mark.parametrize("name", ["scorer-judge", "relay"])
def test_a_dead_service_is_restarted_and_ends_with_the_run(tmp_path: Path, name: str):
    once = "import os, sys\nif not os.path.exists(RUN + '/died'): open(RUN + '/died', 'w'); sys.exit(7)\n"
    commands = FakeCommands(
        tmp_path / "run",
        learner_codes=[when_it_exists("back", f"{FINISH}sys.exit(0)")],
    )
    commands.service_codes = {name: f"{once}open(RUN + '/back', 'w')\n{WAIT}"}
    view = FakeView()
    assert supervise(commands, view) == Outcome(0)
    assert any(f"{name} exited with code 7; restarting" in note for note in view.notes)


@pytest.mark.parametrize("leaver", ["queue", "generator-0"])
def test_an_end_in_good_order_before_the_run_is_finished_is_a_death(tmp_path: Path, leaver: str):
    once = when_it_exists("up", "if not os.path.exists(RUN + '/left'): open(RUN + '/left', 'w'); sys.exit(0)\n")
    again = f"{once}open(RUN + '/back', 'w')\n"
    commands = FakeCommands(
        tmp_path / "run",
        queue_code=QUEUE.replace("signal.pause()", again if leaver == "queue" else "") + WAIT,
        learner_codes=[when_it_exists("back", "sys.exit(0)")],
        generator_codes=[(again if leaver == "generator-0" else "") + WAIT],
    )

    def tell(processes: Sequence[ProcessStatus]) -> None:
        if any(m.name == "learner-0" for m in processes):
            (tmp_path / "run" / "up").touch()

    view = FakeView(tell)
    assert supervise(commands, view) == Outcome(0)
    assert any(f"{leaver} exited with code 0; restarting" in note for note in view.notes)


def test_a_generator_that_keeps_dying_stops_the_run_with_its_own_words(tmp_path: Path):
    commands = FakeCommands(
        tmp_path / "run", learner_codes=[WAIT], generator_codes=["import sys; sys.exit('no such engine')"]
    )
    outcome = supervise(commands)
    assert outcome.exit_code == 1
    assert outcome.stopped_by == "generator-0 exited with code 1, after 5 restarts"
    assert commands.generator_starts == [0, 1, 2, 3, 4, 5]
    lines = explain(outcome)
    assert lines[-1].strip() == "no such engine"


class MemoryRanOut(MemoryDeaths):
    def cause(self, name: str) -> str:
        return "because memory ran out (the limit of the cgroup /x, 2 GiB)"


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_a_generator_that_is_always_killed_for_memory_stops_the_run_with_the_limit_and_a_remedy(tmp_path: Path):
    commands = FakeCommands(tmp_path / "run", learner_codes=[WAIT], generator_codes=[KILLED])
    view = FakeView()
    outcome = supervise(commands, view, memory=MemoryRanOut())
    why = "generator-0 was killed by SIGKILL, because memory ran out (the limit of the cgroup /x, 2 GiB)"
    assert outcome.stopped_by == f"{why}, after 5 restarts"
    assert [note.partition("; restarting")[0] for note in view.notes if "restarting" in note] == [why] * 5
    remedies = [note for note in view.notes if note.startswith("against it: ")]
    assert len(remedies) == 1
    assert "generator.batch_size" in remedies[0]
    assert explain(outcome)[-1] == remedies[0].replace("against it", "remedy")


def test_a_learner_that_is_killed_for_memory_before_a_checkpoint_stops_the_run_with_a_remedy(tmp_path: Path):
    commands = FakeCommands(tmp_path / "run", learner_codes=[KILLED])
    lines = explain(supervise(commands, memory=MemoryRanOut()))
    assert "learner-0 was killed by SIGKILL, because memory ran out" in lines[0]
    assert lines[-1].startswith("remedy: raise the limit; or lower learner.max_tokens")


def test_a_kill_by_somebody_is_not_taken_for_a_lack_of_memory(tmp_path: Path):
    commands = FakeCommands(tmp_path / "run", learner_codes=[KILLED])
    lines = explain(supervise(commands))
    assert "learner-0 was killed by SIGKILL" in lines[0]
    assert not [line for line in lines if "memory" in line or "remedy" in line]


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux only")
def test_the_kernel_is_asked_to_kill_launch_and_the_queue_server_last(tmp_path: Path):
    names = ("queue", "learner", "generator")
    tell = {name: f"import os\nopen(RUN + '/{name}', 'w').write(f'{{os.getpid()}} ')\n" for name in names}
    commands = FakeCommands(
        tmp_path / "run",
        queue_code=tell["queue"] + QUEUE,
        learner_codes=[tell["learner"] + when_it_exists("seen", "sys.exit(0)")],
        generator_codes=[tell["generator"] + WAIT],
    )
    found: dict[str, int] = {}

    def look(processes: Sequence[ProcessStatus]) -> None:
        files = [(name, tmp_path / "run" / name) for name in names]
        pids = {name: file.read_text() for name, file in files if file.exists()}
        if len(processes) == 3 and all(pids.get(name, "").endswith(" ") for name in names) and not found:
            found.update({name: int(Path(f"/proc/{int(pid)}/oom_score_adj").read_text()) for name, pid in pids.items()})
            (tmp_path / "run" / "seen").touch()

    assert supervise(commands, FakeView(look)) == Outcome(0)
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert found == {"queue": own, "learner": max(own, 200), "generator": max(own, 200)}


def test_bad_input_is_never_tried_again(tmp_path: Path):
    commands = FakeCommands(tmp_path / "run", learner_codes=[WAIT], generator_codes=["import sys; sys.exit(2)"])
    assert supervise(commands).stopped_by == "generator-0 exited with code 2"
    assert commands.generator_starts == [0]


def test_a_dead_queue_server_is_restarted_on_its_port(tmp_path: Path):
    second_life = "if os.path.exists(RUN + '/up'): open(RUN + '/back', 'w')"
    dies_when_known = when_it_exists("up", "os.kill(os.getpid(), 9)")
    queue_code = f"{QUEUE.replace('signal.pause()', second_life)}\nif os.path.exists(RUN + '/back'): signal.pause()\n"
    commands = FakeCommands(
        tmp_path / "run",
        queue_code=queue_code + dies_when_known,
        learner_codes=[when_it_exists("back", "sys.exit(0)")],
    )

    def tell(processes: Sequence[ProcessStatus]) -> None:
        if any(m.name == "learner-0" for m in processes):
            (tmp_path / "run" / "up").touch()

    assert supervise(commands, FakeView(tell)) == Outcome(0)
    assert commands.ports == [None, 7]


def test_a_learner_is_restarted_once_per_new_checkpoint(tmp_path: Path):
    def commit(name: str) -> str:
        return (
            f"import os, sys\nos.makedirs(RUN + '/checkpoints', exist_ok=True)\n"
            f"open(RUN + '/checkpoints/latest', 'w').write('{name}')\nsys.exit('fell after {name}')"
        )

    commands = FakeCommands(tmp_path / "run", learner_codes=[commit("step-1"), commit("step-2"), "raise SystemExit(3)"])
    outcome = supervise(commands)
    assert commands.learner_starts == 3  # two restarts with progress, then a death without
    assert outcome.stopped_by == "learner-0 exited with code 3"


def test_a_learner_that_dies_after_its_last_file_is_started_once_more_to_tell_the_others(tmp_path: Path):
    fall = f"{FINISH}raise SystemExit(3)"
    commands = FakeCommands(tmp_path / "run", learner_codes=[fall, "pass"])
    assert supervise(commands) == Outcome(0)
    commands = FakeCommands(tmp_path / "again", learner_codes=[fall])
    assert supervise(commands).stopped_by == "learner-0 exited with code 3"
    assert commands.learner_starts == 2


def test_a_learner_that_dies_when_the_run_and_its_queue_have_ended_ends_the_launch_and_is_named(tmp_path: Path):
    ends = QUEUE.replace("signal.pause()", when_it_exists("finished.json", "sys.exit(0)"))
    fall = "import json, os\npid = json.load(open(RUN + '/queue.json'))['pid']\n" + FINISH
    fall += "try:\n    while True: os.kill(pid, 0)\nexcept ProcessLookupError: os.kill(os.getpid(), 9)"
    commands = FakeCommands(tmp_path / "run", queue_code=ends, learner_codes=[fall])
    assert explain(supervise(commands)) == [
        "async-rl: learner-0 was killed by SIGKILL, which came after the end of the run"
    ]
    assert commands.learner_starts == 1


@pytest.mark.parametrize("dies", ["generator", "learner"])
def test_a_run_directory_that_is_moved_stops_the_run_with_one_message_that_names_it(tmp_path: Path, dies: str):
    moves = f"import os\nos.rename(RUN, {str(tmp_path / 'moved')!r})\nraise SystemExit(7)"
    codes = {"generator": [WAIT], "learner": [WAIT]} | {dies: [moves]}
    commands = FakeCommands(tmp_path / "run", learner_codes=codes["learner"], generator_codes=codes["generator"])
    outcome = supervise(commands)
    said = "\n".join(explain(outcome))
    assert outcome.exit_code == 1
    assert f"{dies}-0 exited with code 7" in said
    assert "can't be read: [Errno 2] No such file or directory" in said


def test_an_error_that_is_not_of_the_run_directory_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*arguments: object) -> Command:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(FakeCommands, "generator", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        supervise(FakeCommands(tmp_path / "run", learner_codes=[WAIT], generator_codes=[WAIT]))


def test_a_learner_that_dies_before_its_first_checkpoint_stops_the_run(tmp_path: Path):
    commands = FakeCommands(tmp_path / "run", learner_codes=["raise ValueError('nan')"], generator_codes=[WAIT])
    outcome = supervise(commands)
    assert commands.learner_starts == 1
    assert explain(outcome)[-1].strip() == "ValueError: nan"


def test_one_dead_rank_ends_the_other_ranks(tmp_path: Path):
    code = "import signal, sys\nif RANK == 1: sys.exit('rank 1 fell')\nsignal.pause()"
    outcome = supervise(FakeCommands(tmp_path / "run", learner_codes=[code], num_ranks=3))
    assert outcome.stopped_by == "learner-1 exited with code 1"


def test_an_error_above_the_lines_of_ending_libraries_is_shown_first(tmp_path: Path):
    error, leaks = "WeightsError: vLLM did not take over version 12", [f" - leaked type {n}" for n in range(30)]
    lines = ["Traceback (most recent call last):", "  File ...", "KeyError: 1", "", "During handling:", ""]
    lines += ["Traceback (most recent call last):", "  File ...", error, "nanobind: leaked 4 instances!", *leaks]
    log = tmp_path / "generator-0.log"
    log.write_text("\n".join(lines) + "\n")
    death = Death("generator-0", 1, log, 0, log.stat().st_size)
    assert death.tail() == [error, "...", *leaks[5:]]
    without_error = replace(death, log_start=len("\n".join(lines[: lines.index(error)])))
    assert without_error.tail() == leaks[5:]
    assert replace(death, log_end=len("\n".join(lines[:20]))).tail() == lines[:20], "the error is among the last lines"


def test_the_first_cause_comes_last_when_one_death_led_to_another(tmp_path: Path):
    # The generator dies and waits for its restart; then the learner dies, before that restart.
    commands = FakeCommands(
        tmp_path / "run",
        learner_codes=[when_it_exists("noted", "sys.exit('lost the generator')")],
        generator_codes=["import sys; sys.exit('out of memory')"],
    )

    def tell(processes: Sequence[ProcessStatus]) -> None:
        if any(m.state == "restarting" for m in processes):
            (tmp_path / "run" / "noted").touch()

    outcome = supervise(commands, FakeView(tell), Timing(poll_s=0.02, backoff_s=30.0, grace_s=5.0))
    assert outcome.stopped_by == "learner-0 exited with code 1"
    assert [d.name for d in outcome.deaths] == ["learner-0", "generator-0"]
    assert explain(outcome)[-1].strip() == "out of memory"


def test_a_queue_server_that_does_not_come_up_stops_the_run_with_its_words(tmp_path: Path):
    bad = FakeCommands(tmp_path / "bad", queue_code="import sys; sys.exit('address in use')", learner_codes=[WAIT])
    assert explain(supervise(bad))[-1].strip() == "address in use"
    silent = FakeCommands(tmp_path / "silent", queue_code=WAIT, learner_codes=[WAIT])
    outcome = supervise(silent, timing=Timing(poll_s=0.02, queue_start_s=0.2))
    assert "did not write" in outcome.stopped_by
    assert (bad.learner_starts, silent.learner_starts) == (0, 0)


def killed_at_its_first_starts(number: int) -> str:
    """A queue server that is killed before it writes its address."""
    return (
        "import os, signal\nwith open(RUN + '/starts', 'a+') as file:\n"
        "    file.write('x'); file.seek(0); n = len(file.read())\n"
        f"if n <= {number}: os.kill(os.getpid(), signal.SIGKILL)\n"
    )


def test_a_queue_server_killed_before_it_is_ready_is_restarted(tmp_path: Path):
    commands = FakeCommands(
        tmp_path / "run", queue_code=killed_at_its_first_starts(3) + QUEUE, learner_codes=[FINISH], generator_codes=[]
    )
    view = FakeView()
    assert supervise(commands, view) == Outcome(0)
    assert (commands.ports, commands.learner_starts) == ([None] * 4, 1)
    assert sum("queue was killed by SIGKILL; restarting" in note for note in view.notes) == 3


def test_a_queue_server_that_is_always_killed_before_it_is_ready_stops_the_run(tmp_path: Path):
    commands = FakeCommands(tmp_path / "run", queue_code=killed_at_its_first_starts(99), learner_codes=[WAIT])
    outcome = supervise(commands)
    assert outcome.stopped_by == "queue was killed by SIGKILL, after 5 restarts"
    assert (len(commands.ports), commands.learner_starts) == (6, 0)


def test_a_queue_server_that_ends_by_itself_after_a_kill_stops_the_run_with_both_causes(tmp_path: Path):
    code = killed_at_its_first_starts(1) + "import sys; sys.exit('the journal is locked')"
    commands = FakeCommands(tmp_path / "run", queue_code=code, learner_codes=[WAIT])
    outcome = supervise(commands)
    assert outcome.stopped_by == "queue exited with code 1"
    assert any("the journal is locked" in line for line in explain(outcome))
    assert len(commands.ports) == 2


def test_a_launch_whose_run_directory_was_taken_over_ends_and_restarts_nothing(tmp_path: Path):
    run_dir = prepare_run_dir(a_config(tmp_path / "run"))
    older = acquire(run_dir, "launch")
    commands = FakeCommands(tmp_path / "run", learner_codes=["open(RUN + '/up', 'w')\n" + WAIT], generator_codes=[WAIT])
    newer: list[RunLock] = []

    def take_over(processes: Sequence[ProcessStatus]) -> None:
        if (tmp_path / "run" / "up").exists() and not newer:
            newer.append(acquire(run_dir, "launch", takeover=True))
            for process in processes:
                if process.name == "queue":
                    os.kill(read_pid(tmp_path / "run"), signal.SIGKILL)

    supervisor = Supervisor(
        commands, run_dir, environment=dict(os.environ), view=FakeView(take_over), timing=FAST, lock=older
    )
    assert supervisor.run().stopped_by.startswith(f"another process has taken over {run_dir.path}; ")
    assert (commands.ports, commands.learner_starts) == ([None], 1)
    for lock in (older, *newer):
        lock.close()


def test_a_quiet_launch_prints_only_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class NothingToDo:
        def __init__(self, *arguments: object, view: PlainView, **options: object) -> None:
            self._view = view

        def run(self) -> Outcome:
            self._view.note("the learner is done")
            return Outcome(0)

    monkeypatch.setattr(launch_module, "Supervisor", NothingToDo)
    monkeypatch.setattr(launch_module, "preflight", lambda config, **options: math.inf)
    monkeypatch.setenv("COLUMNS", "200")
    for quiet in (True, False):
        launch_module.launch(a_config(tmp_path / "run"), fresh=False, insecure=False, quiet=quiet)
        lines = capsys.readouterr().out.splitlines()
        assert ("the learner is done" in lines) == (not quiet)
        assert lines[-1] == f"run directory: {tmp_path / 'run'}"
        assert len(lines) == (2 if quiet else 4)  # the state and the directory; else also the title and the note


@pytest.mark.parametrize("end", ["finished", "failed", "SIGINT", "a bug"])
def test_the_curve_is_drawn_at_every_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str):
    # Within the first ten seconds, in which nothing is drawn while the run goes.
    run_dir = RunDir(tmp_path / "run")

    class Ends:
        def __init__(self, *arguments: object, **options: object) -> None: ...

        def run(self) -> Outcome:
            run_dir.metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
            if end == "a bug":
                raise ZeroDivisionError
            return {"finished": Outcome(0), "failed": Outcome(1, "why"), "SIGINT": Outcome(130, "SIGINT")}[end]

    monkeypatch.setattr(launch_module, "Supervisor", Ends)
    monkeypatch.setattr(launch_module, "preflight", lambda config, **options: math.inf)
    with pytest.raises(ZeroDivisionError) if end == "a bug" else nullcontext():
        launch_module.launch(a_config(run_dir.path), fresh=False, insecure=False, quiet=True)
    assert run_dir.curve.exists()


def test_a_launch_is_refused_a_run_directory_in_use_and_takes_it_over_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = a_config(tmp_path / "run")
    started: list[RunLock] = []
    monkeypatch.setattr(launch_module, "preflight", lambda config, *, insecure: math.inf)
    monkeypatch.setattr(launch_module, "_run", lambda config, run_dir, lock, *rest, **options: started.append(lock))
    older = acquire(prepare_run_dir(config), "launch")
    with pytest.raises(RunError, match="`async-rl launch --takeover` takes the run over"):
        launch_module.launch(config, fresh=False, insecure=False)
    assert started == []
    launch_module.launch(config, fresh=False, insecure=False, takeover=True)
    assert len(started) == 1
    assert not older.is_current
    older.close()


def read_pid(run: Path) -> int:
    return json.loads((run / "queue.json").read_text())["pid"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_in_order(tmp_path: Path, signum: int, code: int):
    last_words = "import signal, time, sys\ndef leave(*_):\n    print('NAME', time.time(), flush=True); sys.exit(0)\n"
    last_words += "signal.signal(15, leave); signal.signal(2, leave)\n"
    commands = FakeCommands(
        tmp_path / "run",
        queue_code=last_words + QUEUE,
        learner_codes=[f"{last_words}open(RUN + '/up', 'w')\nsignal.pause()"],
    )

    def send(processes: Sequence[ProcessStatus]) -> None:
        if (tmp_path / "run" / "up").exists():
            os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    assert supervise(commands, FakeView(send)).exit_code == code
    assert signal.getsignal(signum) is before
    logs = tmp_path / "run" / "logs"
    at = {n: float((logs / f"{n}.log").read_text().split("NAME ")[-1]) for n in ("learner-0", "queue")}
    assert at["learner-0"] <= at["queue"]


@pytest.mark.parametrize("ends", ["waits", "is told"])
def test_a_signal_after_the_end_of_the_run_interrupts_nothing(tmp_path: Path, ends: str):
    # The learner has written its last file, and still notifies the others; or it has ended, and they have not.
    then = WAIT if ends == "waits" else "pass"
    commands = FakeCommands(tmp_path / "run", learner_codes=[FINISH + then], generator_codes=[WAIT])

    def send(processes: Sequence[ProcessStatus]) -> None:
        if (tmp_path / "run" / "finished.json").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = supervise(commands, FakeView(send), Timing(poll_s=0.02, finish_s=30.0, grace_s=5.0))
    assert outcome == Outcome(0, "SIGTERM came after the end of the run")
    assert explain(outcome, checkpoint="step-000005") == ["async-rl: SIGTERM came after the end of the run"]


def test_a_learner_has_a_grace_of_its_own_and_saves_while_generators_and_queue_serve(tmp_path: Path):
    last_words = "import signal, sys\ndef leave(*_):\n    open(RUN + '/over', 'a').write('NAME\\n'); sys.exit(0)\n"
    last_words += "signal.signal(15, leave); signal.signal(2, leave)\n"
    slow = "import signal, time\ndef save(*_):\n    time.sleep(0.6); assert not os.path.exists(RUN + '/over')\n"
    slow += "    open(RUN + '/saved', 'w'); sys.exit(143)\n"
    slow = f"import os, sys\n{slow}signal.signal(15, save)\nopen(RUN + '/up', 'w')\nsignal.pause()"
    commands = FakeCommands(
        tmp_path / "run",
        queue_code=last_words.replace("NAME", "queue") + QUEUE,
        learner_codes=[slow],
        generator_codes=[last_words.replace("NAME", "generator") + "open(RUN + '/sampling', 'w')\nsignal.pause()"],
    )

    def send(processes: Sequence[ProcessStatus]) -> None:
        if (tmp_path / "run" / "up").exists() and (tmp_path / "run" / "sampling").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    timing = Timing(poll_s=0.02, grace_s=20.0, learner_grace_s=40.0)
    assert supervise(commands, FakeView(send), timing).exit_code == 143
    assert (tmp_path / "run" / "saved").exists()
    assert (tmp_path / "run" / "over").read_text() == "generator\nqueue\n"


def test_a_second_signal_ends_all_at_once(tmp_path: Path):
    deaf = "import signal\nsignal.signal(15, signal.SIG_IGN)\nsignal.signal(2, signal.SIG_IGN)\n"
    commands = FakeCommands(
        tmp_path / "run",
        queue_code=deaf + QUEUE,
        learner_codes=[f"{deaf}open(RUN + '/up', 'w')\n" + "while True: signal.pause()"],
    )

    class Impatient(FakeView):
        def note(self, line: str) -> None:
            super().note(line)
            if "a second signal" in line:
                threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()

    def send(processes: Sequence[ProcessStatus]) -> None:
        if (tmp_path / "run" / "up").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    # Without the second signal this test would not end in time.
    timing = Timing(poll_s=0.02, grace_s=3600.0, learner_grace_s=3600.0)
    assert supervise(commands, Impatient(send), timing).exit_code == 143


def test_a_learner_without_a_queue_server_is_not_waited_for(tmp_path: Path):
    # The queue server can't be started again; the learner is deaf.
    deaf = "import signal\nsignal.signal(15, signal.SIG_IGN)\nopen(RUN + '/up', 'w')\nwhile True: signal.pause()"
    queue = QUEUE.replace("signal.pause()", when_it_exists("up", "sys.exit(2)"))
    commands = FakeCommands(tmp_path / "run", queue_code=queue, learner_codes=[deaf])
    timing = Timing(poll_s=0.02, grace_s=5.0, learner_grace_s=3600.0)
    assert supervise(commands, timing=timing).stopped_by == "queue exited with code 2"


def test_a_deaf_child_is_killed_after_the_grace(tmp_path: Path):
    deaf = "import signal\nsignal.signal(15, signal.SIG_IGN)\nopen(RUN + '/up', 'w')\nwhile True: signal.pause()"
    commands = FakeCommands(
        tmp_path / "run", learner_codes=[when_it_exists("up", "sys.exit(0)")], generator_codes=[deaf]
    )
    assert supervise(commands, timing=Timing(poll_s=0.02, finish_s=0.05, grace_s=0.2)) == Outcome(0)


# --- what is shown


def a_row(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "version": step, "time_s": 2.0 * step, "tokens/trained": 64, **more}


def append(path: Path, *rows: dict[str, float]) -> None:
    with path.open("a") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows))


def test_the_tail_gives_each_new_row_once_and_history_apart(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    append(path, a_row(1))
    tail = StepLogTail(path)
    assert [row["step"] for row in tail.history] == [1]
    append(path, a_row(2))
    with path.open("a") as out:
        out.write('{"step": 3')
    assert [row["step"] for row in tail.poll()] == [2]
    assert tail.poll() == []
    with path.open("a") as out:
        out.write("}\n")
    assert tail.poll() == [{"step": 3}]


def test_the_history_of_a_long_run_is_read_row_by_row_and_none_is_kept(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    append(path, *(a_row(step, **{f"metric/{number}": number + 0.5 for number in range(50)}) for step in range(2000)))
    tracemalloc.start()
    try:
        tail = StepLogTail(path)
        progress = RunProgress(3000, tail.history)
        Hints(tail.history)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert progress.step_row["step"] == 1999
    assert peak < 1 << 20  # 2,000 rows of more than 3 kB would be 6 MB


def test_the_tail_survives_a_rollback_that_replaces_the_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = StepLogTail(path)
    assert tail.poll() == []
    append(path, a_row(1), a_row(2))
    assert len(tail.poll()) == 2
    append(tmp_path / "kept", a_row(1))
    (tmp_path / "kept").replace(path)
    assert tail.poll() == []
    append(path, a_row(2))
    assert [row["step"] for row in tail.poll()] == [2]


def test_the_eta_is_the_pace_of_this_launch_times_what_is_left():
    progress = RunProgress(10, history=[a_row(1)])
    assert progress.eta_s is None
    progress.add({"step": 2, "version": 2, "tokens/trained": 1, "time_s": 100.0})
    progress.add({"step": 4, "version": 4, "tokens/trained": 1, "time_s": 106.0})
    assert progress.eta_s == 18.0  # 3 s a step, 6 steps left


def test_an_eval_row_is_read_by_dataset_whatever_its_name():
    row = {"step": 3, "eval/a/b/accuracy": 0.5, "eval/c/accuracy": None, "eval/c/pass_at_k": 1.0}
    assert eval_accuracies(row) == {"a/b": 0.5}


def test_a_step_is_one_line_and_missing_figures_are_left_out():
    row = a_row(3, **{"reward/mean": 0.25, "staleness/mean": 1.5, "staleness/max": 4, "idle/learner": 0.125})
    assert step_line(row, 10, 65.0) == "step 3/10 | reward 0.25 | staleness 1.5 (max 4) | idle learner 12% | ETA 1m05s"
    taught = a_row(3, **{"reward/mean": 0.0, "distill/kl": 0.0134})
    assert step_line(taught, 10, None) == "step 3/10 | reward 0 | KL to the teacher 0.0134"


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "5s"), (61, "1m01s"), (3723, "1h02m")])
def test_durations_are_short(seconds: float, text: str):
    assert duration(seconds) == text


def test_rows_without_an_answer_are_told_beside_the_accuracy():
    row = {"step": 3, "eval/a/accuracy": 0.5, "eval/a/unanswered": 2, "eval/a/rows": 8, "eval/b/accuracy": 1.0}
    assert eval_lines({**row, "eval/b/unanswered": 0}) == [
        "eval a of step 3: accuracy 0.500 (2 of 8 rows without an answer)",
        "eval b of step 3: accuracy 1.000",
    ]


def test_an_evaluation_beside_training_names_the_versions_that_answered():
    row = {"step": 40, "eval/a/accuracy": 0.5, "eval/a/version_min": 40, "eval/a/version_max": 43}
    assert eval_lines(row) == ["eval a of step 40 (versions 40 to 43): accuracy 0.500"]
    assert eval_lines({**row, "eval/a/version_max": 40}) == ["eval a of step 40: accuracy 0.500"]


def test_the_plain_view_prints_one_line_a_step_and_an_evaluation(tmp_path: Path):
    console = Console(width=60, force_terminal=False, record=True, file=io.StringIO())
    view = PlainView(console, tmp_path / "metrics.jsonl", 10)
    append(tmp_path / "metrics.jsonl", {"step": 0, "eval/gsm8k/accuracy": 0.5}, a_row(1, **{"reward/mean": 1.0}))
    view.refresh([])
    view.close()
    assert console.export_text().splitlines() == [
        "eval gsm8k of step 0: accuracy 0.500",
        "step 1/10 | reward 1",
    ]


def shown_lines(tmp_path: Path, *rows: dict[str, float]) -> list[str]:
    """What the plain view prints for these rows."""
    console = Console(width=60, force_terminal=False, record=True, file=io.StringIO())
    view = PlainView(console, tmp_path / "metrics.jsonl", 10)
    append(tmp_path / "metrics.jsonl", *rows)
    view.close()
    return console.export_text().splitlines()


def test_the_figures_of_the_generators_stay_on_every_line_until_the_next_ones(tmp_path: Path):
    generators = {"throughput/generated_tokens_per_s": 500.0, "idle/generators": 0.25}
    lines = shown_lines(tmp_path, a_row(1), a_row(2, **generators), a_row(3))
    assert ["generated 500 tok/s" in line and "idle generators 25%" in line for line in lines] == [False, True, True]
    (line,) = shown_lines(tmp_path, a_row(4))  # of another launch, with other generators
    assert "generated" not in line


COLLAPSED = {"ratio/ess": 0.01, "ratio/kl": 2.5, "entropy": 0.125, "grad_norm": 7.5}


def test_a_step_has_the_figures_that_show_a_collapse(tmp_path: Path):
    (line,) = shown_lines(tmp_path, a_row(1, **COLLAPSED))
    assert line == "step 1/10 | ESS 0.01 | KL 2.5 | entropy 0.125 | gradient 7.5"


def test_a_collapse_is_told_once_also_by_the_next_launch(tmp_path: Path):
    (note,) = [line for line in shown_lines(tmp_path, *(a_row(n, **COLLAPSED) for n in range(1, 6))) if "note:" in line]
    assert note.startswith("note: step 2: the policy has left the samples that it trains on: effective sample size")
    assert not any("note:" in line for line in shown_lines(tmp_path, a_row(6, **COLLAPSED)))
    assert note in summary(RunDir(tmp_path), 3.0)


def test_an_evaluation_that_is_much_worse_is_told_below_its_line(tmp_path: Path):
    evals = [{"step": n, "eval/a/accuracy": right, "eval/a/accuracy_se": 0.01} for n, right in ((0, 0.5), (9, 0.125))]
    lines = shown_lines(tmp_path, evals[0], a_row(9), evals[1])
    assert lines[-2] == "eval a of step 9: accuracy 0.125"
    worse = "note: step 9: the answers have become worse: accuracy 50 % -> 12.5 % (evaluations on a at steps 0 and 9)"
    assert lines[-1].startswith(worse)
    assert lines[-1] in summary(RunDir(tmp_path), 3.0)


def test_the_live_view_keeps_what_goes_wrong_in_its_table(tmp_path: Path):
    append(tmp_path / "metrics.jsonl", *(a_row(n, **COLLAPSED) for n in range(1, 4)))
    console = Console(width=200, force_terminal=True, record=True, file=io.StringIO())
    view = LiveView(console, tmp_path / "metrics.jsonl", 10)
    append(tmp_path / "metrics.jsonl", a_row(4, **COLLAPSED))
    view.close()
    table = console.export_text()
    assert "step 2: the policy has left the samples that it trains on" in table
    rows = {line.split("  ")[0]: line.rstrip().rpartition("  ")[2] for line in table.splitlines()}
    assert (rows["ESS, KL"], rows["entropy, gradient"]) == ("0.01, 2.5", "0.125, 7.5")


def test_the_live_view_says_who_waits_for_whom(tmp_path: Path):
    console = Console(width=200, force_terminal=True, record=True, file=io.StringIO())
    view = LiveView(console, tmp_path / "metrics.jsonl", 10)
    shares = {"idle/learner": 0.0, "idle/generators": 0.45, "idle/leases": 0.4, "idle/spare": 0.6}
    append(tmp_path / "metrics.jsonl", a_row(1, **{"time/step_s": 1.0}, **shares))
    view.close()
    table = " ".join(console.export_text().split())
    assert "idle learner 0%, generators 45% (40% for leases) who waits for whom generators have 60% to spare" in table


def test_most_answers_cut_at_the_limit_are_told_once_with_what_it_costs(tmp_path: Path):
    cut = {"length/truncated": 0.75, "reward/overlong": -0.5, "masked/truncated": 6}
    # Means over the last five steps: 0, 0.375, 0.5, 0.5625.
    notes = [
        line for line in shown_lines(tmp_path, a_row(1), *(a_row(n, **cut) for n in range(2, 9))) if "note" in line
    ]
    assert notes == [
        "note: 56% of the answers of the last 4 steps were cut at sampling.max_new_tokens. They lower the mean "
        "reward by 0.38 (reward.soft_overlong) and are left out of the loss (loss.mask_truncated). Raise "
        "sampling.max_new_tokens, or let the prompt ask for shorter answers. If they are complete and go on, the model "
        "does not end its turns: async-rl doctor lists the tokens that end one"
    ]


@pytest.mark.parametrize(
    ("key", "of_agents", "limit", "raised"),
    [
        ("length/cut_turn", {}, "environment.max_turn_tokens", "environment.max_turn_tokens"),
        ("length/cut_context", {}, "the end of the context", "sampling.max_prompt_tokens or sampling.max_new_tokens"),
        ("length/cut_context", {"agent/sessions": 8.0}, "the end of the context",
         "environment.max_rollout_tokens, sampling.max_prompt_tokens or sampling.max_new_tokens"),
    ],
)  # fmt: skip
def test_the_note_about_cut_answers_names_the_limit_that_cut_most(
    tmp_path: Path, key: str, of_agents: dict[str, float], limit: str, raised: str
):
    cut = {"length/truncated": 0.75, key: 0.5, "skip/steps": 1, "masked/truncated": 6, **of_agents}
    of_step, of_answers = (
        line for line in shown_lines(tmp_path, *(a_row(n, **cut) for n in range(1, 4))) if "note" in line
    )
    assert of_answers.startswith(f"note: 75% of the answers of the last 3 steps were cut at {limit}. They are left out")
    assert f"Raise {raised}, or let the prompt" in of_answers
    assert f"(6 truncated); raise {raised}, or set loss.mask_truncated = false" in of_step


def write_ledger(directory: Path, lineage: str, **notes: str) -> None:
    (directory / "ledger.json").write_text(json.dumps({"lineage": lineage, "group_notes": notes}), encoding="utf-8")


def test_notes_of_the_queue_are_shown_once_for_each_cause_and_not_those_of_an_earlier_launch(tmp_path: Path):
    write_ledger(tmp_path, "before", wrong="of the launch before")
    plain = Console(width=60, force_terminal=False, record=True, file=io.StringIO())
    live = Console(width=60, force_terminal=True, record=True, file=io.StringIO())
    views = [PlainView(plain, tmp_path / "metrics.jsonl", 10), LiveView(live, tmp_path / "metrics.jsonl", 10)]
    for number, notes in enumerate(({}, {"wrong": "all 8 \x1b[2J"}, {"wrong": "all 9", "too_slow": "1 prompt"})):
        write_ledger(tmp_path, "now" if number else "before", **notes)
        for view in views:
            view.refresh([])
    for view in views:
        view.close()
    assert plain.export_text() == "note: all 8 \\x1b[2J\nnote: 1 prompt\n"
    assert "note: 1 prompt" in live.export_text()


def test_a_damaged_ledger_has_no_notes(tmp_path: Path):
    (tmp_path / "ledger.json").write_text("{", encoding="utf-8")
    notes = LedgerNotes(RunDir(tmp_path))
    (tmp_path / "ledger.json").write_text("[]", encoding="utf-8")
    assert notes.poll() == []
    write_ledger(tmp_path, "now", wrong="all 8")
    assert notes.poll() == ["note: all 8"]


def test_a_step_that_trained_nothing_says_why_once(tmp_path: Path):
    empty = {"skip/steps": 1, "masked/truncated": 16}
    skipped = {"skip/steps": 1, "loss/policy": 0.1, "grad_norm": 1.0}
    of_critic = {"skip/steps": 0, "masked/policy_frozen": 16}
    rows = [of_critic, empty, empty, skipped, skipped]
    lines = shown_lines(tmp_path, *(a_row(step, **row) for step, row in enumerate(rows)))
    notes = [line for line in lines if line.startswith("note")]
    assert [note.partition(" (")[0] for note in notes] == [
        "note: step 1 trained nothing, because all its answers are left out of the loss",
        "note: an optimizer step of step 3 was skipped",
    ]
    assert "(16 truncated); raise sampling.max_new_tokens" in notes[0]


@pytest.mark.parametrize(
    ("shares", "more", "said"),
    [
        ((0.25, 0.5, 0.75), {}, "50% of the groups of the last 3 steps"),
        ((0.25, None, 0.25, 0.25), {}, "25% of the groups of the last 3 steps"),
        ((0.25, 0.25), {}, ""),
        ((0.2, 0.2, 0.2, 0.2), {}, ""),
        ((1.0, 1.0, 1.0, 1.0), {}, ""),  # run.health says it
        ((0.5, 0.5, 0.5, 0.5), {"distill/kl": 0.1}, ""),
    ],
)
def test_a_note_says_how_many_groups_train_nothing(shares: Sequence[float | None], more: dict[str, float], said: str):
    hints = Hints()
    rows = [{**a_row(step, **more), "advantage/zero_groups": share} for step, share in enumerate(shares)]
    notes = [note for row in rows for note in hints.add(row) if "train nothing" in note]
    assert [note.removeprefix("note: ").partition(" train nothing")[0] for note in notes] == ([said] if said else [])
    assert all("queue.filter_range" in note for note in notes)


def test_the_live_view_shows_step_members_and_evaluations(tmp_path: Path):
    console = Console(width=100, force_terminal=True, record=True, file=io.StringIO())
    view = LiveView(console, tmp_path / "metrics.jsonl", 10)
    append(tmp_path / "metrics.jsonl", {"step": 0, "eval/gsm8k/accuracy": 0.5}, a_row(1, **{"reward/mean": 1.0}))
    view.refresh([ProcessStatus("queue", "running", 0), ProcessStatus("generator-0", "restarting", 2)])
    view.close()
    text = console.export_text()
    for shown in ("1/10", "0.500 @0", "queue: running", "generator-0: restarting, 2 restarts"):
        assert shown in text


def log_message(directory: Path, process: str, *lines: str) -> None:
    (directory / "logs").mkdir(exist_ok=True)
    with (directory / "logs" / f"{process}.log").open("a") as log:
        log.write("".join(f"{line}\n" for line in lines))


LOADING = "2026-01-02 03:04:05,678 INFO async_rl.learner.loop.start: loading the model m"


def test_the_newest_message_of_a_log_is_that_of_the_last_start(tmp_path: Path):
    log = tmp_path / "logs" / "learner-0.log"
    assert newest_message(log) == ""
    log_message(tmp_path, "learner-0", "--- 2026-01-02 03:04:05 python", LOADING, "Traceback (most recent call last):")
    with log.open("a") as file:
        file.write(LOADING + " and more, but the line is not comple")
    assert newest_message(log) == "loading the model m"
    log_message(tmp_path, "learner-0", "", "--- 2026-01-02 03:05:00 python")
    assert newest_message(log) == ""


def test_the_views_say_what_the_processes_do_until_a_step_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("async_rl.launch.live_view.LINE_EVERY_S", 0.0)
    monkeypatch.setattr("async_rl.launch.live_view.REFRESH_S", 0.0)
    processes = [ProcessStatus("learner-0", "running", 0)]
    plain = Console(width=100, force_terminal=False, record=True, file=io.StringIO())
    live = Console(width=100, force_terminal=True, record=True, file=io.StringIO())
    views = [PlainView(plain, tmp_path / "metrics.jsonl", 10), LiveView(live, tmp_path / "metrics.jsonl", 10)]
    log_message(tmp_path, "learner-0", LOADING)
    log_message(tmp_path, "generator-0", LOADING.replace("loading the model m", "joining \x1b[2J"))
    for view in views:
        view.refresh(processes)
    assert plain.export_text() == "0s so far; learner-0: loading the model m; generator-0: joining \\x1b[2J\n"
    shown = live.export_text()
    assert "loading the model m" in shown
    assert "joining \\x1b[2J" in shown
    append(tmp_path / "metrics.jsonl", a_row(1))
    for view in views:
        view.refresh(processes)
        view.refresh(processes)
        view.close()
    assert plain.export_text() == "step 1/10\n"
    assert "loading the model m" not in live.export_text().partition("1/10")[2]


def test_the_live_view_is_calm_when_the_queue_of_a_finished_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    failed = threading.Event()

    def ask(*_: object) -> dict[str, object]:
        if failed.is_set():
            raise QueueError("the queue at tcp://127.0.0.1:7 did not answer")
        failed.set()
        return {"ledger": {"groups": {"in_flight": 0}}, "waits": [{"who": "g", "for": "lease", "since_s": 9.0}]}

    monkeypatch.setattr("async_rl.launch.live_view.ask_status", ask)
    monkeypatch.setattr("async_rl.launch.live_view.POLL_S", 0.001)
    monkeypatch.setattr("async_rl.launch.live_view.REFRESH_S", 0.0)
    console = Console(width=100, force_terminal=True, record=True, file=io.StringIO())
    view = LiveView(console, tmp_path / "metrics.jsonl", 10)
    view.watch_queue("tcp://127.0.0.1:7")
    poll(lambda: view._poller is not None and view._poller.error, "a request that fails")
    view.refresh([ProcessStatus("queue", "running", 0)])
    assert "no answer: the queue at" in console.export_text()
    view.refresh([ProcessStatus("queue", "done", 0), ProcessStatus("learner-0", "running", 0)])
    view.close()
    text = console.export_text()
    assert "learner-0: running" in text
    assert "no answer" not in text
    assert "waiting" not in text


def test_the_live_view_breaks_no_member_over_two_lines_and_counts_many(tmp_path: Path):
    console = Console(width=60, force_terminal=True, record=True, file=io.StringIO())
    view = LiveView(console, tmp_path / "metrics.jsonl", 10)
    few = [ProcessStatus("queue", "running", 0), *(ProcessStatus(f"generator-{i}", "running", 0) for i in range(5))]
    view.refresh(few)
    text = console.export_text()
    assert [m.name for m in few if f"{m.name}: running" not in text] == []
    view.close()
    console.export_text()
    view = LiveView(console, tmp_path / "metrics.jsonl", 10)
    view.refresh(
        [
            *(ProcessStatus(f"generator-{i}", "running", i) for i in range(3)),
            *few,
            ProcessStatus("learner-0", "done", 0),
        ]
    )
    text = console.export_text()
    assert "generator: 8 running, 3 restarts" in text  # 0 + 1 + 2 restarts
    assert "generator-0" not in text
    view.close()


def test_a_second_start_says_from_where_it_goes_on_and_what_code_changed(tmp_path: Path):
    source = tmp_path / "reward.py"
    source.write_text("def score(*args): return 0.0\n")
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    raw = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}, "reward": {"type": f"{source}:score"}}
    config = parse_config({**raw, "run": {"dir": str(run_dir.path)}}, "test")
    assert continuation_lines(run_dir, config, None) == []

    write_digests(run_dir.path, config.code_names)
    run_dir.metrics.write_text('{"step": 7}\n')
    (line,) = continuation_lines(run_dir, config, None)
    assert line.startswith("starts again at step 0: the earlier start made 7 steps and no checkpoint")

    source.write_text("def score(*args): return 1.0\n")
    run_dir.checkpoints.mkdir()
    (run_dir.checkpoints / "latest").write_text("step-000005\n")
    line, change = continuation_lines(run_dir, config, None)
    assert line == "goes on from checkpoint step-000005; the earlier start had made 7 steps"
    assert change.startswith(f"the source of {source}:score has changed, SHA-256 ")


def test_a_second_launch_names_each_key_that_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(launch_module, "preflight", lambda config, *, insecure: math.inf)
    monkeypatch.setattr(launch_module, "_run", lambda *arguments, **options: 0)
    monkeypatch.setenv("COLUMNS", "200")
    run_dir = prepare_run_dir(a_config(tmp_path / "run", optimizer={"lr": 5e-5}, learner={"steps": 200}))
    run_dir.checkpoints.mkdir()
    (run_dir.checkpoints / "latest").write_text("step-000200\n")
    changed = a_config(tmp_path / "run", optimizer={"lr": 1e-6}, learner={"steps": 400})
    for expected in (["learner.steps: 200 -> 400", "optimizer.lr: 5e-05 -> 1e-06"], []):
        launch_module.launch(changed, fresh=False, insecure=False)
        line, *lines = capsys.readouterr().out.splitlines()
        assert line.startswith("goes on from checkpoint step-000200")
        assert lines == [f"changed since the last launch: {change}" for change in expected]
