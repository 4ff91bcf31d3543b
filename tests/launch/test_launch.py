"""Launch: the commands it makes, the processes it keeps, the children that end with it, and when it starts none."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.errors import RunError
from async_rl.launch import launch as launch_module
from async_rl.launch.launch import RunCommands, continuation_lines, describe_commands, explain, nobody_samples_line
from async_rl.launch.live_view import PlainView
from async_rl.launch.memory_deaths import MemoryDeaths
from async_rl.launch.supervisor import Command, Death, Outcome, ProcessStatus, Supervisor, Timing
from async_rl.process.child import DEVICES_ARE_DEALT, PACKAGE_ROOT, PACKAGE_SOURCES
from async_rl.process.user_code import write_digests
from async_rl.run.directory import RunDir
from async_rl.run.lock import RunLock, acquire
from async_rl.run.reuse import prepare_run_dir
from tests.config.made import a_config
from tests.end_to_end.harness import state_of, wait_until

FAST = Timing(poll_s=0.02, queue_start_s=20.0, backoff_s=0.02, max_backoff_s=0.1, finish_s=0.3, grace_s=5.0)


# --- commands


def some_commands(
    config: Config, inherited: dict[str, str] | None = None, cores: tuple[int, ...] = (), gpus: tuple[str, ...] = ()
) -> RunCommands:
    return RunCommands(
        config, ["run.toml", "--set", "run.seed=1"], run_id="r1", insecure=False, inherited=inherited or {},
        num_cores=8, cores=cores, gpus=gpus,
    )  # fmt: skip


def generator_command(commands: RunCommands, index: int = 0, num_restarts: int = 0) -> Command:
    return commands.generator(index, "tcp://127.0.0.1:5", num_restarts)


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


def test_generators_are_dealt_their_devices_in_order():
    config = a_config(generator={"count": 2, "tensor_parallel_size": 2, "devices": [3, 2, 1, 0], "num_threads": 5})
    commands = [generator_command(some_commands(config), index) for index in range(2)]
    assert [command.environment["CUDA_VISIBLE_DEVICES"] for command in commands] == ["3,2", "1,0"]
    assert commands[0].environment["OMP_NUM_THREADS"] == "5"


def test_the_package_is_once_on_the_path_of_every_process():
    for before, after in (("", []), (PACKAGE_ROOT, []), (f"/mine:{PACKAGE_ROOT}:/other", ["/mine", "/other"])):
        command = some_commands(a_config(), {"PYTHONPATH": before}).queue(None)
        assert command.environment["PYTHONPATH"].split(":") == [PACKAGE_ROOT, *PACKAGE_SOURCES, *after]


def cores_of(config: Config, cores: tuple[int, ...], inherited: dict[str, str] | None = None) -> list[tuple[int, ...]]:
    commands = some_commands(config, inherited, cores)
    generators = [generator_command(commands, index) for index in range(commands.num_generators)]
    assert commands.queue(None).cores == ()
    return [command.cores for command in (*commands.learner(1), *generators)]


def test_ranks_and_generators_share_the_cores_unless_somebody_chooses_threads():
    config = a_config(learner={"nproc": 1}, generator={"count": 2})
    assert cores_of(config, (0, 1, 2, 5, 6)) == [(0, 1), (2, 5), (6,)]
    assert cores_of(config, (0, 1)) == [(), (), ()]
    line = some_commands(config, cores=(3, 4, 7)).learner(1)[0].shell_line()
    assert f" taskset -c 3 {sys.executable} -m async_rl learner" in line
    chosen = {"OMP_NUM_THREADS": "3"}
    assert cores_of(a_config(), (0, 1), chosen) == [(), ()]
    assert "OMP_NUM_THREADS" not in some_commands(a_config(), chosen).learner(1)[0].environment
    assert cores_of(a_config(learner={"num_threads": 2}), (0, 1)) == [(), ()]
    assert cores_of(a_config(generator={"num_threads": 2}), (0, 1)) == [(), ()]


def test_a_restarted_process_takes_its_place_again():
    again = generator_command(some_commands(a_config()), num_restarts=2)
    assert again.argv[-4:] == ("--id", "generator-0-2", "--replaces", "generator-0-1")
    assert "--replaces" not in generator_command(some_commands(a_config())).argv
    assert again.name == "generator-0"  # and so its log
    commands = some_commands(a_config(queue={"address": "tcp://0.0.0.0:*"}))
    assert not any("queue.address" in part for part in commands.queue(None).argv)
    assert "queue.address=tcp://0.0.0.0:4321" in commands.queue(4321).argv


def test_a_dry_run_names_every_process_with_devices_and_threads():
    config = a_config(learner={"nproc": 2}, generator={"backend": "transformers"}, loss={"preset": "dr_grpo"})
    lines = describe_commands(config, some_commands(config, gpus=("0", "1", "2")))
    assert [line for line in lines if line.startswith("# ")][1:] == [
        "# GPUs: learner-0 on 0, learner-1 on 1, generator-0 on 2",
        '# preset dr_grpo sets loss.advantage = "group_mean", loss.clip_high = 0.2, '
        'loss.aggregation = "sequence_sum", loss.mask_truncated = false',
        "# queue", "# learner-0", "# learner-1", "# generator-0",
    ]  # fmt: skip
    assert re.match(r"CUDA_VISIBLE_DEVICES=2 OMP_NUM_THREADS=\d .* -m async_rl generator --connect ", lines[-1])


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
        wait_until("the child", pids.exists)
        child, grandchild = map(int, pids.read_text().split())
        assert not {state_of(child), state_of(grandchild)} & {None, "Z"}
    finally:
        parent.kill()
        parent.wait()
    for pid in (child, grandchild):
        wait_until("its end", lambda pid=pid: state_of(pid) in (None, "Z"))


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
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
ONCE = "import os, sys\nif not os.path.exists(RUN + '/died'): open(RUN + '/died', 'w'); sys.exit(7)\n"
"""A child that exits with 7 at its first start."""
DEAF = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nsignal.signal(2, signal.SIG_IGN)\n"
UP = "open(RUN + '/up', 'w')\nwhile True: signal.pause()"


def when_it_exists(name: str, then: str) -> str:
    """A child that polls for ``name`` in the run directory, then runs ``then``."""
    return f"import os, sys, time\nwhile not os.path.exists(RUN + '/{name}'): time.sleep(0.01)\n{then}"


def last_words(then: str) -> str:
    """What a child does at SIGTERM or SIGINT."""
    return f"import os, signal, sys, time\ndef leave(*_):\n    {then}\nfor n in (2, 15): signal.signal(n, leave)\n"


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


def signals(run: Path, *needed: str, signum: int = signal.SIGTERM) -> FakeView:
    """A view that sends this process a signal once the run directory has these files."""

    def send(_: Sequence[ProcessStatus]) -> None:
        if all((run / name).exists() for name in needed):
            os.kill(os.getpid(), signum)

    return FakeView(send)


def says_up_with_the_learner(run: Path) -> FakeView:
    """A view that writes the file ``up`` once a learner has been started."""

    def tell(processes: Sequence[ProcessStatus]) -> None:
        if any(m.name == "learner-0" for m in processes):
            (run / "up").touch()

    return FakeView(tell)


def test_a_run_ends_with_0_when_the_learner_does_and_the_rest_is_ended(tmp_path: Path):
    learner = f"print('trained')\n{FINISH}" + when_it_exists("told", "sys.exit(0)")
    told = when_it_exists("finished.json", "open(RUN + '/told', 'w')")
    commands = FakeCommands(tmp_path / "run", learner_codes=[learner], generator_codes=[WAIT, told])
    assert supervise(commands) == Outcome(0)
    assert "trained" in (tmp_path / "run" / "logs" / "learner-0.log").read_text()
    assert commands.generator_starts == [0, 0]


@pytest.mark.parametrize("name", ["generator-0", "scorer-judge"])
def test_a_dead_generator_or_service_is_restarted_while_the_others_go_on(tmp_path: Path, name: str):
    dies = f"{ONCE}open(RUN + '/back', 'w')\n{WAIT}"
    commands = FakeCommands(
        tmp_path / "run",
        learner_codes=[when_it_exists("back", f"{FINISH}sys.exit(0)")],
        generator_codes=[dies if name == "generator-0" else WAIT, WAIT],
    )
    commands.service_codes = {"scorer-judge": dies if name == "scorer-judge" else WAIT}
    view = FakeView()
    assert supervise(commands, view) == Outcome(0)
    assert commands.generator_starts == ([0, 0, 1] if name == "generator-0" else [0, 0])
    assert any(f"{name} exited with code 7; restarting" in note for note in view.notes)


@pytest.mark.parametrize(
    ("leaver", "leaves", "how"),
    [
        ("queue", "sys.exit(0)", "exited with code 0"),
        ("queue", "os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("generator-0", "sys.exit(0)", "exited with code 0"),
    ],
)
def test_any_end_before_the_run_is_finished_is_a_death_also_in_good_order(
    tmp_path: Path, leaver: str, leaves: str, how: str
):
    once = when_it_exists("up", f"if not os.path.exists(RUN + '/left'): open(RUN + '/left', 'w'); {leaves}\n")
    again = f"{once}open(RUN + '/back', 'w')\n"
    commands = FakeCommands(
        tmp_path / "run",
        queue_code=QUEUE.replace("signal.pause()", again if leaver == "queue" else "") + WAIT,
        learner_codes=[when_it_exists("back", "sys.exit(0)")],
        generator_codes=[(again if leaver == "generator-0" else "") + WAIT],
    )
    view = says_up_with_the_learner(tmp_path / "run")
    assert supervise(commands, view) == Outcome(0)
    assert any(f"{leaver} {how}; restarting" in note for note in view.notes)
    assert commands.ports == ([None, 7] if leaver == "queue" else [None])  # on the port that it had


def test_a_generator_that_keeps_dying_stops_the_run_with_its_own_words(tmp_path: Path):
    commands = FakeCommands(
        tmp_path / "run", learner_codes=[WAIT], generator_codes=["import sys; sys.exit('no such engine')"]
    )
    outcome = supervise(commands)
    assert outcome.exit_code == 1
    assert outcome.stopped_by == "generator-0 exited with code 1, after 5 restarts"
    assert commands.generator_starts == [0, 1, 2, 3, 4, 5]
    assert explain(outcome)[-1].strip() == "no such engine"


def test_bad_input_is_never_tried_again(tmp_path: Path):
    commands = FakeCommands(tmp_path / "run", learner_codes=[WAIT], generator_codes=["import sys; sys.exit(2)"])
    assert supervise(commands).stopped_by == "generator-0 exited with code 2"
    assert commands.generator_starts == [0]


class MemoryRanOut(MemoryDeaths):
    def cause(self, name: str) -> str:
        return "because memory ran out (the limit of the cgroup /x, 2 GiB)"


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


@pytest.mark.parametrize("memory", [MemoryRanOut(), None], ids=["memory", "somebody"])
def test_a_learner_that_is_killed_before_a_checkpoint_stops_the_run_and_a_lack_of_memory_has_a_remedy(
    tmp_path: Path, memory: MemoryDeaths | None
):
    commands = FakeCommands(tmp_path / "run", learner_codes=[KILLED])
    lines = explain(supervise(commands, memory=memory))
    assert commands.learner_starts == 1
    assert "learner-0 was killed by SIGKILL" in lines[0]
    assert ("because memory ran out" in lines[0]) == (memory is not None)
    assert any("remedy: raise the limit; or lower learner.max_tokens" in line for line in lines) == (memory is not None)


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


@pytest.mark.parametrize(
    ("num_kills", "then", "stopped_by", "num_starts"),
    [
        (3, QUEUE, "", 4),
        (99, "", "queue was killed by SIGKILL, after 5 restarts", 6),
        (1, "import sys; sys.exit('the journal is locked')", "queue exited with code 1", 2),
    ],
    ids=["at last ready", "always killed", "ends by itself"],
)
def test_a_queue_server_killed_before_it_is_ready_is_restarted_up_to_five_times_unless_it_ends_by_itself(
    tmp_path: Path, num_kills: int, then: str, stopped_by: str, num_starts: int
):
    killed_at_first = (
        "import os, signal\nwith open(RUN + '/starts', 'a+') as file:\n"
        "    file.write('x'); file.seek(0); n = len(file.read())\n"
        f"if n <= {num_kills}: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    commands = FakeCommands(tmp_path / "run", queue_code=killed_at_first + then, learner_codes=[FINISH])
    outcome = supervise(commands)
    assert outcome.stopped_by == stopped_by
    assert (commands.ports, commands.learner_starts) == ([None] * num_starts, int(not stopped_by))
    assert any("the journal is locked" in line for line in explain(outcome)) == ("locked" in then)


def read_pid(run: Path) -> int:
    return json.loads((run / "queue.json").read_text())["pid"]


def test_a_launch_whose_run_directory_was_taken_over_ends_and_restarts_nothing(tmp_path: Path):
    run_dir = prepare_run_dir(a_config(tmp_path / "run"))
    older = acquire(run_dir, "launch")
    commands = FakeCommands(tmp_path / "run", learner_codes=["open(RUN + '/up', 'w')\n" + WAIT], generator_codes=[WAIT])
    newer: list[RunLock] = []

    def take_over(processes: Sequence[ProcessStatus]) -> None:
        if (tmp_path / "run" / "up").exists() and not newer:
            newer.append(acquire(run_dir, "launch", takeover=True))
            os.kill(read_pid(tmp_path / "run"), signal.SIGKILL)

    supervisor = Supervisor(
        commands, run_dir, environment=dict(os.environ), view=FakeView(take_over), timing=FAST, lock=older
    )
    assert supervisor.run().stopped_by.startswith(f"another process has taken over {run_dir.path}; ")
    assert (commands.ports, commands.learner_starts) == ([None], 1)
    for lock in (older, *newer):
        lock.close()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_learner_save_within_its_own_grace_while_generators_and_queue_serve(
    tmp_path: Path, signum: int, code: int
):
    over = last_words("open(RUN + '/over', 'a').write('NAME\\n'); sys.exit(0)")
    saves = last_words("time.sleep(0.6); assert not os.path.exists(RUN + '/over'); open(RUN + '/saved', 'w')")
    commands = FakeCommands(
        tmp_path / "run",
        queue_code=over.replace("NAME", "queue") + QUEUE,
        learner_codes=[f"{saves}open(RUN + '/up', 'w')\nsignal.pause()"],
        generator_codes=[over.replace("NAME", "generator") + "open(RUN + '/sampling', 'w')\nsignal.pause()"],
    )
    before = signal.getsignal(signum)
    timing = Timing(poll_s=0.02, grace_s=20.0, learner_grace_s=40.0)
    view = signals(tmp_path / "run", "up", "sampling", signum=signum)
    assert supervise(commands, view, timing).exit_code == code
    assert signal.getsignal(signum) is before
    assert (tmp_path / "run" / "saved").exists()
    assert (tmp_path / "run" / "over").read_text() == "generator\nqueue\n"


@pytest.mark.parametrize("ends", ["waits", "is told"])
def test_a_signal_after_the_end_of_the_run_interrupts_nothing(tmp_path: Path, ends: str):
    # The learner has written its last file, and still notifies the others; or it has ended, and they have not.
    then = WAIT if ends == "waits" else "pass"
    commands = FakeCommands(tmp_path / "run", learner_codes=[FINISH + then], generator_codes=[WAIT])
    timing = Timing(poll_s=0.02, finish_s=30.0, grace_s=5.0)
    outcome = supervise(commands, signals(tmp_path / "run", "finished.json"), timing)
    assert outcome == Outcome(0, "SIGTERM came after the end of the run")
    assert explain(outcome, checkpoint="step-000005") == ["async-rl: SIGTERM came after the end of the run"]


def test_a_second_signal_ends_all_at_once(tmp_path: Path):
    commands = FakeCommands(tmp_path / "run", queue_code=DEAF + QUEUE, learner_codes=[DEAF + UP])

    class Impatient(FakeView):
        def note(self, line: str) -> None:
            super().note(line)
            if "a second signal" in line:
                threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()

    # Without the second signal this test would not end in time.
    timing = Timing(poll_s=0.02, grace_s=3600.0, learner_grace_s=3600.0)
    view = Impatient(signals(tmp_path / "run", "up").on_refresh)
    assert supervise(commands, view, timing).exit_code == 143


def test_a_learner_without_a_queue_server_is_not_waited_for(tmp_path: Path):
    # The queue server can't be started again; the learner is deaf.
    queue = QUEUE.replace("signal.pause()", when_it_exists("up", "sys.exit(2)"))
    commands = FakeCommands(tmp_path / "run", queue_code=queue, learner_codes=[DEAF + UP])
    timing = Timing(poll_s=0.02, grace_s=5.0, learner_grace_s=3600.0)
    assert supervise(commands, timing=timing).stopped_by == "queue exited with code 2"


def test_a_deaf_child_is_killed_after_the_grace(tmp_path: Path):
    commands = FakeCommands(
        tmp_path / "run", learner_codes=[when_it_exists("up", "sys.exit(0)")], generator_codes=[DEAF + UP]
    )
    assert supervise(commands, timing=Timing(poll_s=0.02, finish_s=0.05, grace_s=0.2)) == Outcome(0)


# --- a launch before and after its processes


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each config is fit."""
    monkeypatch.setattr(launch_module, "preflight", lambda config, **options: math.inf)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("no_checks")
@pytest.mark.parametrize("end", ["finished", "failed", "SIGINT", "a bug"])
def test_the_curve_is_drawn_at_every_exit_and_a_quiet_launch_prints_only_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
):
    # Within the first ten seconds, in which nothing is drawn while the run goes.
    run_dir = RunDir(tmp_path / "run")

    class Ends:
        def __init__(self, *arguments: object, view: PlainView, **options: object) -> None:
            self._view = view

        def run(self) -> Outcome:
            run_dir.metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
            self._view.note("the learner is done")
            if end == "a bug":
                raise ZeroDivisionError
            return {"finished": Outcome(0), "failed": Outcome(1, "why"), "SIGINT": Outcome(130, "SIGINT")}[end]

    monkeypatch.setattr(launch_module, "Supervisor", Ends)
    with pytest.raises(ZeroDivisionError) if end == "a bug" else nullcontext():
        launch_module.launch(a_config(run_dir.path), fresh=False, insecure=False, quiet=end != "failed")
    assert run_dir.curve.exists()
    lines = capsys.readouterr().out.splitlines()
    assert ("the learner is done" in lines) == (end == "failed")
    if end != "a bug":
        assert lines[0].startswith("run: " if end == "failed" else "not finished: ")
        assert lines[-1] == f"run directory: {run_dir.path} (curve.png)"


@pytest.mark.usefixtures("no_checks")
def test_a_launch_is_refused_a_run_directory_in_use_and_takes_it_over_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = a_config(tmp_path / "run")
    started: list[RunLock] = []
    monkeypatch.setattr(launch_module, "_run", lambda config, run_dir, lock, *rest, **options: started.append(lock))
    older = acquire(prepare_run_dir(config), "launch")
    with pytest.raises(RunError, match="`async-rl launch --takeover` takes the run over"):
        launch_module.launch(config, fresh=False, insecure=False)
    assert started == []
    launch_module.launch(config, fresh=False, insecure=False, takeover=True)
    assert len(started) == 1
    assert not older.is_current
    older.close()


def test_a_second_start_says_from_where_it_goes_on_and_what_code_changed(tmp_path: Path):
    source = tmp_path / "reward.py"
    source.write_text("def score(*args): return 0.0\n")
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    config = a_config(run_dir.path, data={"train": "d.jsonl"}, reward={"type": f"{source}:score"})
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
