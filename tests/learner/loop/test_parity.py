"""The parity gate over an engine and a queue that say what a test wants: who is compared, when, what stops a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from async_rl.errors import ParityError
from async_rl.learner.data.batch import PreparedBatch, prepare_batch
from async_rl.learner.interface import Engine
from async_rl.learner.loop.parity import ParityGate
from async_rl.learner.sequences import TrainSequence
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import TakenGroup
from async_rl.queue.parity import Answer, decode_probe
from async_rl.records import Group, Prompt, Rollout, TokenSequence
from tests.learner.tiny import tiny_config

Scores = Callable[[TrainSequence], np.ndarray]


def by_temperature(sequence: TrainSequence) -> np.ndarray:
    """Two likely tokens by turns: the logits differ by 3, so that a temperature shows. No sampling mask is heeded."""
    gap = 3.0 / sequence.temperature
    likely, unlikely = -np.log1p(np.exp(-gap)), -gap - np.log1p(np.exp(-gap))
    return np.where(sequence.token_ids[sequence.loss_mask] % 3 > 0, likely, unlikely).astype(np.float32)


class FakeEngine:
    def __init__(self, scores: Scores = by_temperature) -> None:
        self.scores = scores
        self.asked: list[list[TrainSequence]] = []

    def score(self, sequences: Sequence[TrainSequence], *, of: str) -> dict[int, np.ndarray]:
        assert of == "policy"
        self.asked.append(list(sequences))
        return {s.sequence_id: self.scores(s) for s in sequences}


class FakeQueue:
    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[int] = []
        self.quarantined: dict[str, str] = {}

    def quarantine(self, lineage: str, generator_id: str, reason: str) -> None:
        self.quarantined[generator_id] = reason

    def parity_answers(self, lineage: str, since: int) -> dict[str, Answer]:
        self.asked.append(since)
        return {who: answer for who, answer in self.answers.items() if answer.version >= since}


class Scene:
    def __init__(self, tmp_path: Path, *, experimental: Mapping[str, Any] | None = None, **weights: Any) -> None:
        self.engine, self.queue = FakeEngine(), FakeQueue()
        config = tiny_config(tmp_path, "model", weights=weights, experimental=experimental or {})
        self.gate = ParityGate(config, cast(Engine, self.engine), cast(LearnerQueue, self.queue), dtype="float32")

    def check(self, groups: Sequence[Group], version: int) -> PreparedBatch:
        taken = tuple(TakenGroup(g, Prompt(g.position, 0, 0, (), {}), 0.0, version) for g in groups)
        prepared = prepare_batch(taken, mask_truncated=False, num_updates=1, known_weights=lambda group: True)
        return self.gate.check_sampled(taken, prepared, "lineage", version=version)

    def probed(self, version: int) -> bool:
        """Whether the announcement of ``version`` carries a probe."""
        self.gate.prepare_probe("lineage", version)
        self.probe = self.gate.take_probe(version)
        return bool(self.probe)

    def answer(self, who: str, *, shift: float = 0.0, cause: str = "", version: int | None = None) -> None:
        """As generator ``who`` would, its log-probabilities ``shift`` above the learner's."""
        probe = decode_probe(self.probe)
        found = np.concatenate(probe.logprobs) + np.float32(shift)
        self.queue.answers[who] = Answer(
            version or probe.version, "transformers", "float32", found, cause, ("weights",)
        )

    def observe(self, version: int, *alive_generators: str) -> Mapping[str, float]:
        return self.gate.observe("lineage", version, alive_generators)


def make_group(
    who: str, version: int, *, temperature: float = 1.0, versions: Sequence[int] = (), behaves: Scores = by_temperature,
    shift: float = 0.0, position: int = 0,
) -> Group:  # fmt: skip
    """Two rollouts of six sampled tokens after two given ones, sampled by ``version``, or each by its own."""
    rollouts = []
    for index in range(2):
        ids = np.arange(8, dtype=np.int32) + index + position
        mask = np.arange(8) >= 2
        of_tokens = np.where(mask, np.array([-1, -1, *(versions or [version] * 6)]), -1).astype(np.int32)
        nothing = np.zeros(8, np.float32)
        plain = TrainSequence(
            sequence_id=0, token_ids=ids, loss_mask=mask, temperature=temperature,
            behavior_logprobs=nothing, versions=of_tokens, advantages=nothing,
        )  # fmt: skip
        logprobs = np.zeros(8, np.float32)
        logprobs[mask] = behaves(plain) + shift
        rollouts.append(Rollout((TokenSequence(ids, mask, logprobs, of_tokens),), {}, 0.0, "stop"))
    return Group(f"{who}-{position}", "train", position, who, "lineage", temperature, tuple(rollouts))


def test_what_each_generator_sampled_at_the_learners_version_is_compared_once(tmp_path: Path):
    scene = Scene(tmp_path)
    scene.check([make_group("a", 0), make_group("b", 0, position=1)], version=0)
    row = scene.observe(1, "a", "b")
    assert row["parity/sampled_tokens"] == 24
    assert row["parity/sampled_max"] == 0
    scene.check([make_group("a", 1)], version=1)
    assert len(scene.engine.asked) == 1


def test_tokens_of_older_versions_and_of_several_are_not_compared_as_sampled(tmp_path: Path):
    scene = Scene(tmp_path)
    scene.check([make_group("a", 4, shift=9.0), make_group("b", 5, versions=[4, 4, 5, 5, 5, 5], shift=9.0)], version=5)
    assert scene.engine.asked == []


def test_a_temperature_that_was_not_applied_stops_the_run_and_is_named(tmp_path: Path):
    scene = Scene(tmp_path)

    def at_1(sequence: TrainSequence) -> np.ndarray:
        return by_temperature(replace(sequence, temperature=1.0))

    with pytest.raises(
        ParityError, match=r"generator a .* its lease has 0\.7, but .* those of 1, as if no temperature"
    ):
        scene.check([make_group("a", 0, temperature=0.7, behaves=at_1)], version=0)


def test_a_mask_that_is_not_reported_stops_the_run_and_is_named(tmp_path: Path):
    scene = Scene(tmp_path)
    with pytest.raises(ParityError, match="a top-p or top-k mask that it does not report"):
        scene.check([make_group("a", 0, shift=0.7)], version=0)


def noisy(sequence: TrainSequence) -> np.ndarray:
    return by_temperature(sequence) + np.resize(np.array([0.5, -0.5], np.float32), int(sequence.loss_mask.sum()))


def test_what_the_learner_cant_explain_is_asked_of_the_generator_which_proves_its_weights(tmp_path: Path):
    scene = Scene(tmp_path)
    scene.check([make_group("a", 0, behaves=noisy)], version=0)
    scene.observe(0, "a")
    assert scene.probed(1)
    scene.answer("a")
    with pytest.raises(ParityError, match=r"It scores probe sequences as the learner does .* keys and values"):
        scene.observe(1, "a")


def test_a_probe_goes_out_at_the_start_for_a_newcomer_and_every_so_many_versions(tmp_path: Path):
    scene = Scene(tmp_path, experimental={"parity_every": 10})
    scene.check([make_group("a", 0)], version=0)
    scene.observe(0, "a")
    sent = []
    for version in range(1, 25):
        alive_generators = ("a", "b") if version >= 5 else ("a",)
        if scene.probed(version):
            sent.append(version)
            for who in alive_generators:
                scene.answer(who)
        row = scene.observe(version, *alive_generators)
        assert ("parity/mean" in row) == (version in sent)
    # Version 6 is the first that is published with b alive; both are then due together.
    assert sent == [1, 6, 16]


def test_parity_every_0_compares_each_generator_once(tmp_path: Path):
    scene = Scene(tmp_path, experimental={"parity_every": 0})
    scene.check([make_group("a", 0)], version=0)
    scene.observe(0, "a")
    assert scene.probed(1)
    scene.answer("a")
    scene.observe(1, "a")
    assert not any(scene.probed(version) for version in range(2, 300))


def test_a_generator_that_never_answers_is_asked_again_now_and_then_and_nothing_waits(tmp_path: Path):
    scene = Scene(tmp_path)
    scene.check([make_group("a", 0)], version=0)
    sent = []
    for version in range(1, 14):
        scene.observe(version - 1, "a")
        sent += [version] if scene.probed(version) else []
    assert sent == [1, 6, 11]
    # Once it has gone, nobody is due, and the queue is not asked any more.
    scene.observe(13)
    asked = len(scene.queue.asked)
    scene.observe(14)
    assert len(scene.queue.asked) == asked


def test_an_answer_past_the_limit_stops_the_run_with_its_cause(tmp_path: Path):
    scene = Scene(tmp_path)
    scene.check([make_group("a", 0), make_group("b", 0, position=1)], version=0)
    scene.observe(0, "a", "b")
    assert scene.probed(1)
    scene.answer("a")
    scene.answer(
        "b", shift=0.25, cause="stale or corrupt tensors: the engine held other bytes than ... of lm_head.weight"
    )
    with pytest.raises(ParityError) as caught:
        scene.observe(1, "a", "b")
    text = str(caught.value)
    assert "generator b (transformers, float32)" in text
    assert "version 1" in text
    assert "mean |difference| 0.25 nats" in text
    assert "limit 0.001" in text
    assert "lm_head.weight" in text


def test_with_parity_warn_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    scene = Scene(tmp_path, parity="warn")
    scene.check([make_group("a", 0)], version=0)
    scene.observe(0, "a")
    assert scene.probed(1)
    scene.answer("a", shift=0.9, cause="temperature")
    row = scene.observe(1, "a")
    assert row["parity/mean"] == pytest.approx(0.9)
    assert not scene.queue.quarantined
    assert "Likely cause: temperature" in caplog.text


@pytest.mark.parametrize("parity", ["stop", "warn"])
def test_an_answer_far_past_the_limit_quarantines_its_generator_and_the_run_goes_on(tmp_path: Path, parity: str):
    # 20 times 0.05, the limit of rounding: 1 nat, whatever dtype the generator claims.
    scene = Scene(tmp_path, parity=parity)
    scene.check([make_group("a", 0), make_group("b", 0, position=1)], version=0)
    scene.observe(0, "a", "b")
    assert scene.probed(1)
    scene.answer("a")
    scene.answer("b", shift=1.01, cause="a made-up one")
    scene.observe(1, "a", "b")
    assert list(scene.queue.quarantined) == ["b"]
    assert "mean |difference| 1 nats" in scene.queue.quarantined["b"]
    assert "a made-up one" in scene.queue.quarantined["b"]
    # The batch that was taken meanwhile may have groups of b; they are left out. The queue has dropped all others.
    prepared = scene.check([make_group("b", 1, position=2), make_group("a", 1, position=3)], version=1)
    assert prepared.masked == {0: "quarantined", 1: "quarantined"}
    assert scene.check([make_group("b", 2, position=4)], version=2).masked == {}


@pytest.mark.parametrize("values", [[0.0], [float("nan")] * 99, [-np.inf] * 99])
def test_an_answer_that_cant_be_compared_quarantines_its_generator(tmp_path: Path, values: list[float]):
    scene = Scene(tmp_path)
    scene.check([make_group("a", 0)], version=0)
    scene.observe(0, "a")
    assert scene.probed(1)
    num_scored = sum(map(len, decode_probe(scene.probe).logprobs))
    scene.queue.answers["a"] = Answer(1, "transformers", "float32", np.array(values[:num_scored], np.float32))
    scene.observe(1, "a")
    assert list(scene.queue.quarantined) == ["a"]


def test_a_generator_that_invents_its_logprobs_trains_nothing(tmp_path: Path):
    scene = Scene(tmp_path)

    def invented(sequence: TrainSequence) -> np.ndarray:
        # Random tokens to which the learner gives about -8.3 and -5.3, with the logprobs of likely ones.
        return by_temperature(sequence) + np.float32(7.3)

    groups = [make_group("a", 0), make_group("b", 0, behaves=invented, position=1)]
    prepared = scene.check(groups, version=0)
    assert list(scene.queue.quarantined) == ["b"]
    assert "7.3 nats" in scene.queue.quarantined["b"]
    assert prepared.masked == {2: "quarantined", 3: "quarantined"}
    assert set(prepared.rollout_of.values()) == {0, 1}


def test_a_larger_limit_lets_a_difference_pass(tmp_path: Path):
    scene = Scene(tmp_path, experimental={"parity_limit": 3.0})
    scene.check([make_group("a", 0, shift=2.0)], version=0)
    scene.observe(0, "a")
    assert scene.probed(1)
    scene.answer("a", shift=2.0)
    assert scene.observe(1, "a")["parity/p99"] == pytest.approx(2.0)


def test_an_engine_that_cant_score_is_not_compared_and_not_asked_again(tmp_path: Path):
    scene = Scene(tmp_path, experimental={"parity_every": 0})
    scene.check([make_group("a", 0, behaves=noisy)], version=0)
    scene.observe(0, "a")
    assert scene.probed(1)
    scene.queue.answers["a"] = Answer(1, "FakeBackend", "", None)
    assert "parity/mean" not in scene.observe(1, "a")
    assert not scene.probed(2)


@pytest.mark.parametrize(("dtype", "stops"), [("float32", True), ("bfloat16", False)])
def test_a_small_difference_of_sampled_tokens_is_judged_by_what_the_generator_computes_in(
    tmp_path: Path, dtype: str, stops: bool
):
    # 0.01 nats: ten times the limit of two exact sides, a fifth of that where one rounds.
    scene = Scene(tmp_path)
    slightly = [0.01, -0.01]

    def behaves(sequence: TrainSequence) -> np.ndarray:
        noise = np.resize(np.array(slightly, np.float32), int(sequence.loss_mask.sum()))
        return by_temperature(sequence) + noise

    scene.check([make_group("a", 0, behaves=behaves)], version=0)
    scene.observe(0, "a")
    assert scene.probed(1)
    scene.answer("a")
    scene.queue.answers["a"] = replace(scene.queue.answers["a"], dtype=dtype)
    if stops:
        with pytest.raises(ParityError, match="its weights are right"):
            scene.observe(1, "a")
    else:
        assert scene.observe(1, "a")["parity/max"] == 0


def test_sampled_tokens_that_differ_stop_the_run_where_the_engine_cant_score_given_ones(tmp_path: Path):
    scene = Scene(tmp_path)
    scene.check([make_group("a", 0, behaves=noisy)], version=0)
    scene.observe(0, "a")
    assert scene.probed(1)
    scene.queue.answers["a"] = Answer(1, "vllm", "float32", None)
    with pytest.raises(ParityError, match="Cause not found: vllm can't score probe sequences"):
        scene.observe(1, "a")
