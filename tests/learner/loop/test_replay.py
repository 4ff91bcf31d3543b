"""A replay trains on recorded groups what the run did, or what a run with its other loss would have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml, load_config
from async_rl.errors import ConfigError, RunError
from async_rl.learner.checkpoints.fork import find_fork_point, fork_run
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.loop.recorder import log_rollouts
from async_rl.learner.loop.replay import FIXED, RecordedRun, check_replayable
from async_rl.learner.loop.start import LearnerContext, train_with
from async_rl.learner.ranks import init_ranks
from async_rl.records import Span, Turn
from async_rl.run.directory import RunDir
from async_rl.run.reuse import prepare_run_dir
from tests.config.made import a_config
from tests.learner.data.test_batch import rollout, taken
from tests.learner.loop.scripted_run import Run, make_run
from tests.learner.loop.test_rollout_records import config, record
from tests.learner.test_predecessors_training import BASE, answered, nested
from tests.learner.tiny import tiny_model

Weights = Mapping[str, torch.Tensor]


def weights_of(engine: FsdpEngine) -> Weights:
    found = {name: tensor.clone() for name, tensor in engine.gather()}
    engine.close()
    return found


def recorded(directory: Path, **settings: str) -> tuple[Run, Weights]:
    """A run that recorded all. A step has two groups of four; the bound is 4, and its data comes to be 4 versions old.

    Its answers depend on the prompt's position alone, so that every run with these settings gets the same.
    """
    tiny_model(directory / "model")
    base = {**BASE, "model.path": json.dumps(str(directory / "model")), "queue.run_ahead": '"bound"'}
    own = {"queue.max_staleness": "4", "log.replayable": "true", "log.rollouts_tokens": "0", "checkpoint.every": "6"}
    run = make_run(directory, num_rows=200, **nested({**base, **own, **settings}))
    engine = FsdpEngine(run.config, init_ranks(run.config))
    run.engine = engine  # pyright: ignore[reportAttributeAccessIssue]
    prepare_run_dir(run.config)
    run.start(answer=answered)
    return run, weights_of(engine)


def replay_config(run: Run, name: str, *overrides: str) -> Config:
    place = f"run.dir={run.path.parent / name}"
    path = run.path.parent / "recorded.toml"
    path.write_text(config_to_toml(run.config), encoding="utf-8")
    return load_config(path, [place, *overrides, *FIXED])


def replayed(config: Config, run: Run) -> tuple[list[dict[str, Any]], Weights]:
    engine = FsdpEngine(config, init_ranks(config))
    rows = train_with(config, engine, LearnerContext(replay=RecordedRun.find(run.path)))
    return rows, weights_of(engine)


def assert_same_bits(got: Weights, expected: Weights) -> None:
    assert got.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)] == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> tuple[Run, Weights]:
    return recorded(tmp_path_factory.mktemp("plain"))


def test_unchanged_settings_give_the_same_bits_and_the_same_figures(plain: tuple[Run, Weights]):
    run, weights = plain
    rows, again = replayed(replay_config(run, "same"), run)
    assert_same_bits(again, weights)
    after = [row for row in rows if "version" in row]
    assert len(after) == len(run.rows) == 12
    names = ("entropy", "staleness/mean", "staleness/max", "ratio/ess", "reward/mean", "masked/truncated", "grad_norm")
    assert [[row[name] for name in names] for row in after] == [[row[name] for name in names] for row in run.rows]
    assert after[-1]["staleness/max"] == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"loss.preset": '"gspo"', "optimizer.lr": "3e-3"},
        # Two versions a step: the tokens are as many versions old as they were.
        {"learner.updates_per_batch": "2", "queue.max_staleness": "8"},
    ],
    ids=["preset", "updates"],
)
def test_another_loss_gives_the_bits_of_a_run_with_it_and_the_same_groups(
    plain: tuple[Run, Weights], settings: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
):
    run, weights = plain
    name = request.node.callspec.id
    _, again = replayed(replay_config(run, name, *(f"{key}={value}" for key, value in settings.items())), run)
    assert any(not torch.equal(again[key], tensor) for key, tensor in weights.items())
    if name != "updates":  # of its own, such a run samples with other versions
        assert_same_bits(again, recorded(tmp_path, **settings)[1])


def test_a_replay_goes_on_from_a_checkpoint_of_the_run_and_ends_where_the_records_end(plain: tuple[Run, Weights]):
    run, weights = plain
    for steps in (12, 20):
        resumed = replay_config(run, f"from-6-to-{steps}", f"learner.steps={steps}")
        prepare_run_dir(resumed)
        fork_run(find_fork_point(f"{run.path}@6"), resumed)
        rows, again = replayed(resumed, run)
        assert [row["step"] for row in rows if "version" in row] == list(range(7, 13))
        assert_same_bits(again, weights)
        assert RunDir(Path(resumed.run.dir)).is_finished


def test_turns_parts_of_answers_and_their_rewards_come_back_exactly(tmp_path: Path):
    one = rollout(0.1 + 0.2, [5, 4, 4])
    two_sequences = structs.replace(one, sequences=one.sequences * 2, turns=(Turn(4, 1 / 3, 2.0), Turn(2, 0.0, 0.0)))
    judged = structs.replace(one, spans=(Span(1, 0.7), Span(3, -1e-9)), metrics={"calls": 2.0}, extracted="x")
    group = taken(two_sequences, judged, rollout(0.0, [5], "error"), masked=True)
    record(tmp_path, (group,), {}, rollouts_every=0, replayable=True)
    log_rollouts(tmp_path, (group,), step=3, version=5, config=config(tmp_path, replayable=True), decode=str)
    for version, shift in ((5, 0), (7, 2)):
        (back,) = RecordedRun.find(tmp_path).read(3, version)
        assert (back.group.temperature, back.masked) == (0.7, True)
        for got, sent in zip(back.group.rollouts, group.group.rollouts, strict=True):
            fields = [name for name in got.__struct_fields__ if name != "sequences"]
            assert [getattr(got, name) for name in fields] == [getattr(sent, name) for name in fields]
            for found, expected in zip(got.sequences, sent.sequences, strict=True):
                assert found.loss_mask.tolist() == expected.loss_mask.tolist()
                assert found.token_ids.tolist() == expected.token_ids.tolist()
                kept = expected.loss_mask
                assert found.behavior_logprobs[kept].tolist() == expected.behavior_logprobs[kept].tolist()
                assert found.versions.tolist() == np.where(kept, expected.versions + shift, -1).tolist()


def test_what_is_not_recorded_is_refused_by_name(tmp_path: Path):
    with pytest.raises(RunError, match=r"has recorded no rollouts; train it with log\.replayable"):
        RecordedRun.find(tmp_path)
    run, _ = recorded(tmp_path, **{"learner.steps": "2"})
    found = RecordedRun.find(run.path)
    text = run.path / "rollouts" / "step-000002.jsonl"
    text.write_text("".join(text.read_text().splitlines(keepends=True)[:-4]))
    with pytest.raises(RunError, match=r"step 2 trained on 8 rollouts, of which .*step-000002\.jsonl has 4;"):
        found.read(2, 1)
    text.unlink()
    columns = run.path / "rollouts" / "step-000001.tokens.parquet"
    columns.write_bytes(columns.read_bytes()[:100])
    for step, named in ((2, r"step-000002\.jsonl"), (1, r"step-000001\.tokens\.parquet")):
        with pytest.raises(RunError, match=named):
            found.read(step, step - 1)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"sampling": {"top_p": 0.9}}, r"sampling: .* top_p, top_k and min_p"),
        (
            {"model": {"path": "m", "routing_replay": True}, "generator": {"backend": "transformers"}},
            r"model\.routing_replay: .* routes of experts",
        ),
    ],
)
def test_a_config_that_needs_more_than_the_records_is_refused(sections: dict[str, Any], named: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=named):
        check_replayable(a_config(tmp_path, **{"data": {"train": "t"}, **sections}))
