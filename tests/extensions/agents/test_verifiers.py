"""Tasksets of verifiers: rows, rollouts and their ends, with a package that stands in for it, in another Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.data.dataset import load_rows_of
from async_rl.errors import ConfigError, DataError
from async_rl.extensions.agents.programs.verifiers_program import DIGEST, TASK
from async_rl.generator.rollouts import Graded
from async_rl.launch.checks.rewards import check_code
from async_rl.records import Lease
from tests.extensions.agents.stand_in_verifiers import write_python
from tests.extensions.agents.test_agent_rollouts import world
from tests.extensions.agents.world import World, failure_of, rollout_of
from tests.generator.leases import make_lease

NAME = "verifiers:words"


def config_of(directory: Path, extra: dict[str, Any] | None = None, **generator: Any) -> Config:
    environment = {"name": NAME, "python": write_python(directory / "other"), "extra": extra or {}}
    return parse_config(
        {
            "run": {"dir": str(directory / "run")}, "model": {"path": "m"}, "environment": environment,
            "generator": {"serve": True, "backend": "fake", **generator},
        },
        "test",
    )  # fmt: skip


class Tasksets:
    """A generator's rollouts with the taskset, and the digest that its rows have."""

    def __init__(self, played: World, directory: Path, digest: str) -> None:
        self.played, self._notes, self.digest = played, directory / "other" / "notes", digest

    def lease(self, word: str, *, digest: str = "") -> Lease:
        lease = make_lease(f"of {word}", group_size=1, max_new_tokens=20)
        fields = {TASK: f'{{"word": "{word}"}}', DIGEST: digest or self.digest}
        return replace(lease, prompt=replace(lease.prompt, messages=(), reward_data=fields))

    def play(self, lease: Lease) -> Graded:
        self.played.done.clear()
        self.played.rollouts.submit(lease, self.played.rollouts.encode(lease))
        self.played.until(lambda: self.played.done)
        return self.played.done[0]

    @property
    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []


@contextmanager
def tasksets(directory: Path) -> Iterator[Tasksets]:
    config = config_of(directory)
    digest = load_rows_of(config, f"{NAME}[:1]").rows[0].reward_data[DIGEST]
    settings = config.environment
    with world(directory, "", name=settings.name, python=settings.python) as played:
        yield Tasksets(played, directory, digest)


@pytest.mark.parametrize(("part", "words"), [("", ["one", "two", "three", "four"]), ("[1:3]", ["two", "three"])])
def test_the_rows_of_a_taskset_are_training_data(tmp_path: Path, part: str, words: list[str]):
    rows = load_rows_of(config_of(tmp_path), NAME + part).rows
    assert [word for row in rows for word in words if f'"word":"{word}"' in row.reward_data[TASK]] == words
    assert len(rows) == len(words)
    assert {len(row.reward_data[DIGEST]) for row in rows} == {64}


@pytest.mark.parametrize(
    ("source", "extra", "said"),
    [
        (NAME, {"taskset": {"endless": True}}, r"expected a last row for the endless taskset words"),
        (NAME, {"taskset": {"broken": "no such game"}}, r"ValueError: no such game"),
        (NAME, {"agent": {"retries": 2}}, r"expected no retries"),
        (NAME, {"user": {}}, r"expected one agent that asks the policy, got \['agent', 'user'\]"),
        ("verifiers:others[:2]", {}, r"verifiers:others\[:2\]: .* environment.name = 'verifiers:words'"),
    ],
)
def test_a_taskset_without_rows_for_this_run_is_refused(tmp_path: Path, source: str, extra: dict[str, Any], said: str):
    with pytest.raises(DataError, match=said):
        load_rows_of(config_of(tmp_path, extra), source)


def test_the_python_and_the_taskset_must_be_allowed_together(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"environment.python: the config names .*bin/python verifiers:words, but"):
        check_code(config_of(tmp_path))
    check_code(config_of(tmp_path / "b", allow_code=[f"{tmp_path}/b/other/bin/python {NAME}"]))


def test_one_process_plays_all_rollouts_and_says_their_rewards_and_metrics(tmp_path: Path):
    with tasksets(tmp_path) as run:
        played = [run.play(run.lease(word)) for word in ("one", "two")]
        assert run.played.rollouts.counters()["agent/continued"] == 2
        assert run.played.pool.counts["started"] == 2  # each waits for the one that plays
        assert (len(run.notes), len(set(run.notes))) == (2, 1)
    for rollout in map(rollout_of, played):
        assert (rollout.reward, rollout.accuracy) == (0.25, 0.25)
        assert rollout.metrics == {"right": 0.5, "length": 3.0, "turns": 2.0}


@pytest.mark.parametrize(
    ("word", "kind", "said"),
    [
        ("TaskError", "TaskError", "TaskError: it broke"),
        ("SandboxError", "SandboxError", "SandboxError: it broke"),
        ("raises", "KeyError", "KeyError: 'task'"),
        ("twice", "traces", "expected one trace of the policy, got 2"),
        ("other version", "", "another version of it"),
    ],
)
def test_an_error_of_verifiers_is_counted_by_its_class(tmp_path: Path, word: str, kind: str, said: str):
    with tasksets(tmp_path) as run:
        failure = failure_of(run.play(run.lease(word, digest="" if kind else "0" * 64)))
        assert run.played.rollouts.counters().get(f"agent/failed_{kind}") == (1 if kind else None)
        assert bool(run.notes) == bool(kind)  # nothing of another version is played
    assert said in failure.detail
    assert failure.is_transient == (kind == "SandboxError")


def test_a_process_of_verifiers_that_dies_is_started_again(tmp_path: Path):
    with tasksets(tmp_path) as run:
        assert run.play(run.lease("dies")).failure is not None
        # The next rollout may have begun before the fork server of the dead program ended, and ends with it.
        failures = [run.play(run.lease("one")).failure for _ in range(2)]
        assert failures[1] is None
        assert len(set(run.notes)) == 2


def test_a_rollout_that_is_stopped_stops_in_verifiers_too(tmp_path: Path):
    with tasksets(tmp_path) as run:
        lease = run.lease("hangs")
        run.played.rollouts.submit(lease, run.played.rollouts.encode(lease))
        run.played.until(lambda: "hangs" in run.notes)
        run.played.rollouts.cancel(lease.lease_id)
        run.played.until(lambda: "stopped" in run.notes)
        assert run.play(run.lease("one")).failure is None
