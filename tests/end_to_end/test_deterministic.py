"""``sampling.deterministic`` at ``max_staleness = 0``: separate processes train what a plain loop does, bit for bit.

The plain loop below is the whole algorithm in one process: no queue, no sockets, no threads. Why the queue must come
to the same batches: at a bound of 0 it draws the next position only while the groups in flight and queued are fewer
than a step's, so the last position drawn for a step is never one that the filter takes (it would leave room for one
more). What is drawn is thus the shortest stretch of the stream with a step's number of passing groups, in whatever
order they were given out, lost, given out again and returned.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.data.dataset import load_train_rows
from async_rl.extensions.offline.tasks import train
from async_rl.extensions.quickstart import sums
from async_rl.generator.backend import Sampled
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.generator.rollouts import graded_rollouts
from async_rl.learner.checkpoints.files import latest_checkpoint
from async_rl.learner.checkpoints.stored_tensors import load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.losses.advantages import group_normalised
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from async_rl.net.keys import make_keys
from async_rl.process.child import package_path
from async_rl.queue.core.admission import lease_seed, train_sampling
from async_rl.queue.core.prompts import PromptStream
from async_rl.records import Lease, Prompt, Rollout
from async_rl.rewards.registry import build_reward
from async_rl.run.records.eval_records import answer_record
from tests.end_to_end.conftest import Network
from tests.end_to_end.harness import (
    ROOT,
    check_ledger,
    launched,
    metrics,
    queue_address,
    roles,
    steps,
    wait_until,
    write_config,
)
from tests.end_to_end.tiny import tiny_config

NUM_STEPS = 4
NUM_ROWS = 48
GROUPS_PER_STEP = 4
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trained:
    """Weights by name, and the logged rollouts of every step."""

    weights: dict[str, Tensor]
    rollouts: list[list[Record]]


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model that answers one of three digits at random, and rows of which every digit is right for a third."""
    directory = tmp_path_factory.mktemp("task")
    sums.write_model(directory / "base", seed=0)
    prompts = [f"{a}+{b}:" for a, b in sums.split_pairs(0)["rl"][:NUM_ROWS]]
    said = [{"prompt": p, "response": f"\\boxed{{{digit}}}"} for p in prompts for digit in "123"]
    asked = [{"messages": [{"role": "user", "content": p}], "gt_answer": str(1 + i % 3)} for i, p in enumerate(prompts)]
    for name, rows in (("sft", said), ("train", asked), ("held_out", asked[:6])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    raw = tiny_config(directory, {"model": str(directory / "base"), "train": "", "held_out": ""})
    raw["sft"] = {
        "data": str(directory / "sft.jsonl"), "out": str(directory / "model"), "steps": 60, "batch_size": 24,
        "lr": 3e-3,
    }  # fmt: skip
    train("sft", parse_config(raw, "the test's config"))
    return {name: str(directory / file) for name, file in _FILES.items()}


_FILES = {"model": "model", "train": "train.jsonl", "held_out": "held_out.jsonl"}


def deterministic_config(directory: Path, task: dict[str, str], **changes: dict[str, Any]) -> dict[str, Any]:
    """A run whose learning rate is large enough to change what the next step samples."""
    raw = tiny_config(
        directory,
        task,
        sampling={"group_size": 4, "max_new_tokens": 14, "deterministic": True},
        queue={"max_staleness": 0, "filter_range": [0.01, 0.99]},
        learner={"steps": NUM_STEPS, "groups_per_step": GROUPS_PER_STEP},
        optimizer={"lr": 1e-3},
        generator={"backend": "transformers", "batch_size": 16},
        checkpoint={"every": 2},
        eval={"every": 0},
        log={"rollouts_every": 1, "rollouts_groups": GROUPS_PER_STEP},
    )
    for section in ("learner", "generator"):
        del raw[section]["num_threads"]  # one thread without being told
    for section, keys in changes.items():
        raw[section].update(keys)
    return raw


def plain_loop(config: Config) -> Trained:
    """Sample, grade, filter, train, again: synchronous reinforcement learning in one process."""
    rows = load_train_rows(config).rows
    stream = PromptStream(len(rows), seed=config.run.seed, curriculum=config.data.curriculum)
    engine = FsdpEngine(config, init_ranks(config))
    backend = TransformersBackend.from_files(config.model.path, config.generator, deterministic=True)
    reward = build_reward(config)
    low, high = config.queue.filter_range or (-1.0, 2.0)
    logged: list[list[Record]] = []

    def sampled_group(position: int) -> tuple[Prompt, list[Rollout]]:
        row, epoch = stream.locate(position)
        prompt = Prompt(position, row, epoch, rows[row].messages, rows[row].reward_data)
        seed = lease_seed(config.run.seed, "train", "", position)
        lease = Lease(
            str(position), "train", prompt, config.sampling.group_size, train_sampling(config), "", 0, 0, 1, seed
        )
        backend.submit(lease, backend.encode_prompt(prompt.messages))
        found: list[Sampled] = []
        while backend.num_running:
            found += backend.step()
        return prompt, graded_rollouts(reward, lease, sorted(found, key=lambda s: s.index))

    for step in range(config.learner.steps):
        backend.activate(step, dict(engine.gather()))
        groups: list[tuple[Prompt, list[Rollout]]] = []
        while len(groups) < config.learner.groups_per_step:
            position = stream.draw()
            assert position is not None
            prompt, rollouts = sampled_group(position)
            stream.observe(position, float(np.mean([r.accuracy for r in rollouts])))
            if low < np.mean([r.accuracy for r in rollouts]) < high:
                groups.append((prompt, rollouts))
        logged.append([answer_record(p, r, _decoder(backend)) for p, rollouts in groups for r in rollouts])
        stats = engine.update(train_sequences([r for _, r in groups], config.sampling.temperature), version=step)
        assert stats.stepped, stats.reason
    weights = {name: tensor.clone() for name, tensor in engine.gather()}
    reward.close()
    return Trained(weights, logged)


def train_sequences(groups: Sequence[Sequence[Rollout]], temperature: float) -> list[TrainSequence]:
    found: list[TrainSequence] = []
    for rollouts in groups:
        advantages = group_normalised(np.array([r.reward for r in rollouts]))
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            (s,) = rollout.sequences
            spread = np.full(len(s.token_ids), advantage, np.float32)
            found.append(
                TrainSequence(
                    sequence_id=len(found),
                    token_ids=s.token_ids,
                    loss_mask=s.loss_mask,
                    temperature=temperature,
                    behavior_logprobs=s.behavior_logprobs,
                    versions=s.versions,
                    advantages=spread,
                )
            )
    return found


def _decoder(backend: TransformersBackend) -> Any:
    return lambda token_ids: str(backend._tokenizer.decode(token_ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def expected(task: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("plain")
    trained = plain_loop(parse_config(deterministic_config(directory, task), "the test's config"))
    # The test would prove little if nothing were filtered or learned, or if all rewards were alike.
    drawn = PromptStream(NUM_ROWS, seed=0)
    first_rows = {drawn.locate(position)[0] for position in range(NUM_STEPS * GROUPS_PER_STEP)}
    assert {r["row"] for step in trained.rollouts for r in step} != first_rows
    assert len({r["reward"] for step in trained.rollouts for r in step}) > 2
    initial = load_file(Path(task["model"]) / "model.safetensors")
    assert all(not torch.equal(trained.weights[name], tensor) for name, tensor in initial.items())
    return trained


def result_of(run_dir: Path) -> Trained:
    checkpoint = latest_checkpoint(run_dir)
    assert checkpoint is not None
    files = [run_dir / "rollouts" / f"step-{step:06d}.jsonl" for step in range(1, NUM_STEPS + 1)]
    rollouts = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    # What the log has beside what the plain loop notes, too.
    of_the_log = {"position", "lease_id", "generator", "trained_at", "masked", "temperature", "index"}
    plain = [[{key: of[key] for key in of if key not in of_the_log} for of in step] for step in rollouts]
    return Trained(load_tensors(checkpoint), plain)


def assert_same_bits(got: Trained, expected: Trained) -> None:
    assert got.rollouts == expected.rollouts
    assert got.weights.keys() == expected.weights.keys()
    differing = [name for name, tensor in expected.weights.items() if not torch.equal(got.weights[name], tensor)]
    assert not differing


@pytest.mark.slow
def test_a_launched_run_equals_the_plain_loop_bit_for_bit_and_so_does_its_replay(
    tmp_path: Path, task: dict[str, str], expected: Trained
):
    raw = deterministic_config(tmp_path, task, log={"replayable": True})
    del raw["data"]["eval"]  # to be quicker
    config, run_dir = write_config(tmp_path / "config.toml", raw), tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed()
        start("replay", "replay", str(run_dir)).succeed()
        again = start("again", "launch", str(tmp_path / "run-replay" / "config.toml"), "--set", "learner.steps=9")
        assert again.wait() != 0
    assert "got that of a replay, which had no queue; go on with async-rl replay" in again.log
    assert_same_bits(result_of(run_dir), expected)
    assert_same_bits(result_of(tmp_path / "run-replay"), expected)
    assert check_ledger(tmp_path / "run")["groups"]["filtered"] > 0


@pytest.mark.slow
def test_three_generators_with_evaluations_between_and_weights_as_differences_give_the_same_bits(
    tmp_path: Path, task: dict[str, str], expected: Trained
):
    raw = deterministic_config(
        tmp_path, task, generator={"count": 3, "batch_size": 4}, eval={"every": 1},
        weights={"transport": "tcp", "deltas": "on"},
    )  # fmt: skip
    launched(tmp_path, raw)
    assert_same_bits(result_of(tmp_path / "run"), expected)
    check_pulled_by_deltas(tmp_path / "run")


def launch_twice(directory: Path, raw: dict[str, Any]) -> None:
    """Kill a run once it has a checkpoint, and let the same command finish it."""
    config = write_config(directory / "config.toml", raw)
    with roles(directory / "logs") as start:
        launch = start("launch", "launch", str(config))
        wait_until("a checkpoint", (directory / "run" / "checkpoints" / "latest").exists, deadline_s=150)
        launch.kill(signal.SIGKILL)
        launch.wait()
        start("again", "launch", str(config)).succeed()


@pytest.mark.slow
def test_a_run_killed_and_resumed_gives_the_same_bits(tmp_path: Path, task: dict[str, str], expected: Trained):
    launch_twice(tmp_path, deterministic_config(tmp_path, task, generator={"count": 2}))
    assert steps(tmp_path / "run") == list(range(1, NUM_STEPS + 1))
    assert_same_bits(result_of(tmp_path / "run"), expected)


def check_pulled_by_deltas(run_dir: Path) -> None:
    """Every version came by the stream, and after the first one as what had changed."""
    last = [row for row in metrics(run_dir) if "version" in row][-1]
    assert last["version"] == NUM_STEPS
    assert last["weights/delta_bytes"] > 0
    assert 0 < last["weights/pulled_bytes"] < 0.95 * last["weights/pulled_full_bytes"]
    assert (last["weights/failures"], last["weights/corrupt"], last["weights/dropped_members"]) == (0, 0, 0)


@pytest.mark.slow
def test_a_generator_elsewhere_that_sees_only_the_network_gives_the_same_bits_by_sealed_weights(
    tmp_path: Path, task: dict[str, str], expected: Trained, network: Network
):
    make_keys(tmp_path / "keys", ["far"])
    key = tmp_path.with_name(f"{tmp_path.name}.key")
    (tmp_path / "keys" / "far.key").rename(key)
    address = f"tcp://{network.host_address}:0"
    raw = deterministic_config(
        tmp_path, task, weights={"transport": "tcp"}, queue={"address": address, "keys": str(tmp_path / "keys")}
    )
    config, run_dir = write_config(tmp_path / "config.toml", raw), tmp_path / "run"
    with roles(tmp_path / "logs") as start:
        start("queue", "queue", str(config))
        connect = wait_until("the queue's address", lambda: queue_address(run_dir))
        learner = start("learner", "learner", str(config))
        # Empty file systems over the directories of the run and of the model; the checkout stays readable.
        hidden = (tmp_path, Path(task["model"]).parent)
        hide = " && ".join(f"mount -t tmpfs none {directory}" for directory in hidden)
        generator = f"{sys.executable} -m async_rl generator --connect {connect} --id far --keys {key}"
        inside = f"{hide} && test ! -e {task['model']} && exec {generator}"
        with (tmp_path / "far.log").open("wb") as log:
            far = subprocess.Popen(
                ["ip", "netns", "exec", network.namespace, "unshare", "--mount", "sh", "-c", inside],
                cwd=ROOT, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1",
                               "PYTHONPATH": package_path({})},
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            learner.succeed()
            assert far.wait(60) == 0, (tmp_path / "far.log").read_text()
        finally:
            far.kill()
            far.wait(10)
        assert f"weights travel by tcp from {network.host_address}" in learner.log
    assert_same_bits(result_of(run_dir), expected)
    check_pulled_by_deltas(run_dir)
    check_ledger(run_dir)
