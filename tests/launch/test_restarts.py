"""Which deaths ``launch`` outlives, and that its generators are known to the queue server as one owner's."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from async_rl.launch import launch as launch_module
from async_rl.launch import supervisor
from async_rl.launch.supervisor import MAX_RESTARTS, Outcome
from async_rl.net.keys import SECRET_VARIABLE
from tests.config.made import a_config
from tests.launch.test_launch import FakeCommands, supervise, when_it_exists


def test_a_process_that_lived_long_in_between_is_restarted_more_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "HEALTHY_S", 0.0)  # every life is a long one
    num_deaths = MAX_RESTARTS + 2
    dies = (
        f"import os, signal\nwith open(RUN + '/deaths', 'a+') as file:\n"
        f"    file.write('x'); file.seek(0); n = len(file.read())\n"
        f"if n <= {num_deaths}: os.kill(os.getpid(), signal.SIGKILL)\nopen(RUN + '/lives', 'w'); signal.pause()"
    )
    commands = FakeCommands(
        tmp_path / "run", learner_codes=[when_it_exists("lives", "sys.exit(0)")], generator_codes=[dies]
    )
    assert supervise(commands) == Outcome(0)
    assert commands.generator_starts == list(range(num_deaths + 1))


def test_all_generators_of_a_launch_have_one_secret_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    environments: list[dict[str, str]] = []

    class NothingToDo:
        def __init__(self, *_: object, environment: dict[str, str], **__: object) -> None:
            environments.append(environment)

        def run(self) -> Outcome:
            return Outcome(0)

    monkeypatch.setattr(launch_module, "Supervisor", NothingToDo)
    monkeypatch.setattr(launch_module, "preflight", lambda config, **options: math.inf)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    for name in ("one", "two"):
        launch_module.launch(a_config(tmp_path / name), fresh=False, insecure=False, quiet=True)
    first, second = (environment[SECRET_VARIABLE] for environment in environments)
    assert len(first) == len(second) == 32
    assert first != second
    assert SECRET_VARIABLE not in os.environ
