"""The scripts of ``async-rl slurm``: their options, and what they do when Slurm's commands answer one thing or another.

The commands are fakes here: small programs in the first directory of ``PATH``. ``test_runs.py`` has whole runs on a
real Slurm.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.main import main
from async_rl.errors import ConfigError, RunError
from async_rl.extensions.ops.slurm.jobs import GENERATORS, LEARNER, JobOptions, Scripts, render, write_scripts
from tests.config.made import a_config

STATES = {"running": "RUNNING", "cancelled": "COMPLETING"}
OPTIONS = JobOptions(
    nodes=2, ranks_per_node=8, num_generators=4, sbatch=("time=04:00:00", "exclusive", "comment=two words")
)


def config(directory: Path, **sections: dict[str, Any]) -> Any:
    return a_config(directory / "my run's", data={"train": "t.jsonl"}, **sections)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_options_reach_the_scripts(tmp_path: Path):
    given = config(tmp_path, generator={"tensor_parallel_size": 2}, checkpoint={"grace_s": 40.0})
    both = {"time=04:00:00", "exclusive", "comment='two words'"}
    learner = directives(render(LEARNER, given, ["run.toml"], OPTIONS))
    # 40 s to save, 30 s for the queue server
    assert {"nodes=2", "ntasks-per-node=8", "gres=gpu:8", "signal=TERM@70", *both} <= set(learner)
    generators = directives(render(GENERATORS, given, ["run.toml"], OPTIONS))
    assert {"array=0-3", "ntasks=1", "gres=gpu:2", *both} <= set(generators)
    without_gpus = directives(render(LEARNER, given, [], JobOptions(1, 1, 1, has_gpus=False)))
    assert not any("gres" in line for line in without_gpus)


def test_what_the_config_chooses_is_kept(tmp_path: Path):
    code = {"generator": {"allow_code": ["mine"]}, "reward": {"type": "mine:reward"}}
    own = config(tmp_path, queue={"keys": "/safe/keys", "journal_dir": "/local/disk"}, **code)
    learner, generators = (render(script, own, ["run.toml"], OPTIONS) for script in (LEARNER, GENERATORS))
    assert all("keys=/safe/keys\n" in script for script in (learner, generators))
    assert "journal" not in learner
    assert "--set 'generator.allow_code=[\"mine\"]'" in generators
    assert 'journal_dir="$journal/queue"' in render(LEARNER, config(tmp_path), ["run.toml"], OPTIONS)


@pytest.mark.parametrize("checker", [("bash", "-n"), ("shellcheck", "--severity=info")], ids=lambda words: words[0])
@pytest.mark.parametrize("script", [LEARNER, GENERATORS])
def test_the_scripts_are_clean_shell(tmp_path: Path, script: str, checker: tuple[str, ...]):
    if shutil.which(checker[0]) is None:
        pytest.skip(f"{checker[0]} is not installed")
    given = config(tmp_path, generator={"allow_code": ["it's mine"]})
    path = tmp_path / script
    path.write_text(render(script, given, ["run.toml", "--set", "run.name=it's"], OPTIONS))
    done = subprocess.run([*checker, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_edited_script_is_not_replaced(tmp_path: Path):
    scripts = write_scripts(config(tmp_path), ["run.toml"], OPTIONS)
    assert write_scripts(config(tmp_path), ["run.toml"], OPTIONS) == scripts
    scripts.learner.write_text(scripts.learner.read_text() + "# mine\n")
    with pytest.raises(RunError, match=r"learner\.sbatch was edited, or written for other options"):
        write_scripts(config(tmp_path), ["run.toml"], OPTIONS)
    assert scripts.learner.read_text().endswith("# mine\n")


@pytest.mark.parametrize("option", ["--time=1", "time", "a=b\nrm -rf /", "", "=x"])
def test_only_options_of_sbatch_are_taken(tmp_path: Path, option: str):
    options = JobOptions(1, 1, 1, sbatch=(option,))
    if option == "time":  # some have no value
        write_scripts(config(tmp_path), [], options)
        return
    with pytest.raises(ConfigError, match="--sbatch: expected an option of sbatch without dashes"):
        write_scripts(config(tmp_path), [], options)


def test_both_jobs_are_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    # An installation with several clusters adds the cluster's name.
    fake(tmp_path, "sbatch", 'printf "%s\\n" "$*" >> calls; echo "$((40 + $(wc -l < calls)));main"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "run.toml").write_text('run.dir = "runs/my"\nmodel.path = "m"\ndata.train = "t.jsonl"\n')
    with pytest.raises(SystemExit) as ended:
        main(["slurm", "run.toml", "--generators", "3", "--submit"])
    assert ended.value.code == 0
    assert "submitted: queue server and learner as job 41, generators as job 42\n" in capsys.readouterr().out
    place = tmp_path / "runs" / "my-slurm"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"--parsable {place}/learner.sbatch",
        f"--parsable --dependency=after:41 {place}/generators.sbatch 41",
    ]


def test_a_missing_or_refusing_sbatch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    scripts = Scripts(tmp_path / LEARNER, tmp_path / GENERATORS)
    with pytest.raises(RunError, match="expected sbatch on this machine, found none"):
        scripts.submit()
    fake(tmp_path, "sbatch", 'case "$*" in *after*) echo "no such partition" >&2; exit 1 ;; *) echo 7 ;; esac')
    with pytest.raises(RunError, match=r"no such partition; .* the learner's job 7 is submitted, scancel 7 ends it"):
        scripts.submit()


def fake(directory: Path, name: str, text: str) -> None:
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run_script(
    directory: Path, script: str, srun: str, *, state: str, arguments: tuple[str, ...] = (), **variables: str
) -> Any:
    """Run a script with fakes of the commands that it calls. The fake ``srun`` knows its number as ``$n``."""
    run_dir = directory / "run"
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    fake(
        directory,
        "scontrol",
        'case $1 in show) echo "NodeName=n NodeAddr=127.0.0.1 Port=1 " ;; *) echo "$*" >> calls ;; esac',
    )
    fake(directory, "squeue", f"case $* in *--me*) echo 41 ;; *) echo {STATES[state]} ;; esac")
    fake(directory, "sleep", "read -rt 0.02 <> <(:)")
    fake(directory, "async-rl", "[ $1 != queue ] || { echo {} > run/queue.json; exec tail -f /dev/null; }")
    fake(directory, "srun", f"echo srun >> calls; n=$(grep -c srun calls)\n{srun}")
    given = a_config(run_dir, data={"train": "t.jsonl"})
    options = JobOptions(1, 1, 1, setup=(f"export PATH={directory}/bin:$PATH",))
    path = write_scripts(given, ["run.toml"], options).learner.with_name(script)
    environment = {
        "PATH": os.environ["PATH"], "SLURM_JOB_ID": "41", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1",
        "SLURMD_NODENAME": "n", **variables,
    }  # fmt: skip
    if script == GENERATORS:
        (run_dir / "queue.json").write_text('{\n "address": "tcp://127.0.0.1:5"\n}\n')
    return subprocess.run(
        ["bash", str(path), *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("locked", "holder", "restarts", "code", "said"),
    [
        ("run-slurm/learner.lock", "40", "", 2, "job 40 has the run in {run}"),
        ("run-slurm/learner.lock", "41", "1", 130, ""),  # what a failed node has left of this job
        ("run/run.lock", "the launch", "", 2, "a process uses {run}"),
        ("run/run.lock", "the learner", "1", 130, ""),
        ("other", "", "", 130, ""),
    ],
)
def test_a_run_in_use_is_left_alone(tmp_path: Path, locked: str, holder: str, restarts: str, code: int, said: str):
    (tmp_path / locked).parent.mkdir(exist_ok=True)
    (tmp_path / "run").mkdir(exist_ok=True)
    before = '{"address": "tcp://127.0.0.1:7"}'
    (tmp_path / "run" / "queue.json").write_text(before)
    real = shutil.which("flock")
    fake(tmp_path, "flock", f'[ "$1" != --wait ] || {{ shift 2; set -- --nonblock "$@"; }}; exec {real} "$@"')
    with (tmp_path / locked).open("w") as file:
        file.write(f"{holder}\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run_script(tmp_path, LEARNER, "exit 130", state="running", SLURM_RESTART_COUNT=restarts)
    assert (done.returncode, bool(done.stderr.strip())) == (code, bool(said)), done.stdout
    assert said.format(run=tmp_path / "run") in done.stderr
    is_refused = code == 2
    assert ((tmp_path / "run" / "queue.json").read_text() == before) == is_refused
    assert (tmp_path / "run-slurm" / "keys").exists() is False
    assert (tmp_path / "calls").exists() != is_refused
    assert (tmp_path / "run-slurm" / "learner.lock").read_text().strip() == (
        holder if is_refused and "slurm" in locked else "41"
    )


CHECKPOINT = 'echo "step-$n" > run/checkpoints/latest; '
CHECKPOINT_AT_FIRST = f"[ $n != 1 ] || {{ {CHECKPOINT}}}; "
TERM_AT_ALL = 'echo 137 > "$FIRST_FAILURE"; exit 143'
REQUEUE = "requeue 41"


@pytest.mark.parametrize(
    ("script", "srun", "state", "code", "calls"),
    [
        (LEARNER, "exit 143", "running", 143, ["srun", REQUEUE]),  # the time limit
        (LEARNER, "exit 143", "cancelled", 143, ["srun"]),  # scancel
        (LEARNER, "exit 130", "running", 130, ["srun"]),  # scancel --signal=INT
        (LEARNER, "exit 2", "running", 2, ["srun"]),  # a mistake in the config
        (LEARNER, "exit 1", "running", 1, ["srun"]),  # it died, and made no checkpoint
        (LEARNER, CHECKPOINT_AT_FIRST + "exit 1", "running", 1, ["srun", "srun", REQUEUE]),  # a node that has failed
        (LEARNER, CHECKPOINT_AT_FIRST + "exit 1", "cancelled", 1, ["srun", "srun"]),
        (LEARNER, CHECKPOINT + "[ $n = 3 ] || exit 1; kill $(pgrep -P $PPID tail)", "running", 0, ["srun"] * 3),
        (LEARNER, TERM_AT_ALL, "running", 137, ["srun"]),  # srun ended the other ranks
        (GENERATORS, "exit 0", "running", 0, ["srun"]),
        (GENERATORS, "exit 143", "running", 143, ["srun", REQUEUE]),
        (GENERATORS, "exit 143", "cancelled", 143, ["srun"]),
        (GENERATORS, "[ $n = 3 ] || exit 2", "running", 0, ["srun"] * 3),  # the queue server was away
        (GENERATORS, "exit 2", "running", 2, ["srun"] * 5),
    ],
)
def test_a_job_is_requeued(tmp_path: Path, script: str, srun: str, state: str, code: int, calls: list[str]):
    done = run_script(tmp_path, script, srun, state=state, arguments=("41",) if script == GENERATORS else ())
    assert done.returncode == code, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == calls


def test_a_generator_ends_with_the_learners_job(tmp_path: Path):
    done = run_script(tmp_path, GENERATORS, "exit 1", state="running", arguments=("40",))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "calls").exists()
