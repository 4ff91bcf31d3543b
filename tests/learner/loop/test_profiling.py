"""Traces of chosen steps: which files a run writes, and which ranges a step of the engine has in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.loop.profiling import StepProfiler
from async_rl.learner.ranks import init_ranks
from tests.learner.loop.scripted_run import make_run
from tests.learner.tiny import random_sequences, tiny_config, tiny_model


def ranges(path: Path) -> set[str]:
    """Names of the ranges in a trace that the program itself marked."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_a_run_writes_traces_of_the_steps_that_its_config_names(tmp_path: Path):
    run = make_run(tmp_path, log={"profile": "2-3"})
    run.start()
    found = sorted((run.path / "profile").iterdir())
    assert [path.name for path in found] == ["step-000002.json.gz", "step-000003.json.gz"]
    for path in found:
        # A checkpoint is under way at some of these steps.
        assert ranges(path) - {"checkpoint"} == {"wait", "train", "prepare", "publish"}


def test_the_phases_of_a_step_are_ranges(tmp_path: Path):
    config = tiny_config(tmp_path, tiny_model(tmp_path / "model"))
    engine = FsdpEngine(config, init_ranks(config))
    profiler = StepProfiler(range(1, 2), tmp_path / "profile")
    for number in (1, 2):
        with profiler.step(number):
            engine.update(random_sequences(2, 16), version=0)
    (path,) = (tmp_path / "profile").iterdir()
    assert {"pack", "scatter", "forward", "backward", "optimizer"} <= ranges(path)
