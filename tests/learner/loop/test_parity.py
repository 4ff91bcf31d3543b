"""The parity gate over an engine and a queue that say what a test wants: who is compared, when, what stops a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from async_rl.errors import ParityError
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.data.batch import PreparedBatch, prepare_batch
from async_rl.learner.interface import Engine
from async_rl.learner.loop.parity import ParityGate
from async_rl.learner.loop.step_result import StepResult
from async_rl.learner.sequences import TrainSequence
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import Acked, Batch, GeneratorStats, QueueStats, TakenGroup
from async_rl.queue.parity import Answer, decode_probe
from async_rl.records import Group, Prompt, Rollout, TokenSequence
from tests.learner.tiny import tiny_config

Scores = Callable[[TrainSequence], np.ndarray]


def by_temperature(sequence: TrainSequence) -> np.ndarray:
    """Two likely tokens by turns: the logits differ by 3, so that a temperature shows. No sampling mask is heeded."""
    gap = 3.0 / sequence.temperature
    likely, unlikely = -np.log1p(np.exp(-gap)), -gap - np.log1p(np.exp(-gap))
    return np.where(sequence.token_ids[sequence.loss_mask] % 3 > 0, likely, unlikely).astype(np.float32)


def at_temperature_1(sequence: TrainSequence) -> np.ndarray:
    return by_temperature(replace(sequence, temperature=1.0))


def noisy(size: float) -> Scores:
    """``size`` above and below ``by_temperature`` by turns."""

    def scores(sequence: TrainSequence) -> np.ndarray:
        noise = np.array([size, -size], np.float32)
        return by_temperature(sequence) + np.resize(noise, int(sequence.loss_mask.sum()))

    return scores


class FakeEngine:
    def __init__(self) -> None:
        self.asked: list[list[TrainSequence]] = []

    def score(self, sequences: Sequence[TrainSequence], *, of: str) -> dict[int, np.ndarray]:
        assert of == "policy"
        self.asked.append(list(sequences))
        return {s.sequence_id: by_temperature(s) for s in sequences}


class FakeQueue:
    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.quarantined: dict[str, str] = {}

    def quarantine(self, lineage: str, generator_id: str, reason: str) -> None:
        self.quarantined[generator_id] = reason

    def parity_answers(self, lineage: str, since: int) -> dict[str, Answer]:
        return {who: answer for who, answer in self.answers.items() if answer.version >= since}


class Scene:
    def __init__(self, tmp_path: Path, *, experimental: Mapping[str, Any] | None = None, **weights: Any) -> None:
        self.engine, self.queue = FakeEngine(), FakeQueue()
        config = tiny_config(tmp_path, "model", weights=weights, experimental=experimental or {})
        self.state = TrainerState(lineage="lineage")
        engine, queue = cast(Engine, self.engine), cast(LearnerQueue, self.queue)
        self.gate = ParityGate(config, self.state, engine, queue, dtype="float32")

    def check(self, groups: Sequence[Group], version: int) -> PreparedBatch:
        taken = tuple(TakenGroup(g, Prompt(g.position, 0, 0, (), {}), 0.0, version) for g in groups)
        prepared = prepare_batch(taken, mask_truncated=False, num_updates=1, known_weights=lambda group: True)
        return self.gate.check(Batch(taken), prepared, version=version)

    def begin(self, *groups: Group) -> None:
        """Compare what was sampled at version 0, and publish version 1 with a probe for who sampled it."""
        self.check(groups, version=0)
        self.observe(0, *(group.generator_id for group in groups))
        assert self.probed(1)

    def probed(self, version: int) -> bool:
        """Whether the announcement of ``version`` carries a probe."""
        self.state.version = version
        self.gate.prepare_probe()
        self.probe = self.gate.take_probe(version)
        return bool(self.probe)

    def answer(self, who: str, *, shift: float = 0.0, cause: str = "", dtype: str = "float32") -> None:
        """As generator ``who`` would, its log-probabilities ``shift`` above the learner's."""
        probe = decode_probe(self.probe)
        found = np.concatenate(probe.logprobs) + np.float32(shift)
        self.queue.answers[who] = Answer(probe.version, "transformers", dtype, found, cause, ("weights",))

    def observe(self, version: int, *alive_generators: str) -> Mapping[str, float]:
        self.state.version = version
        reports = dict.fromkeys(alive_generators, GeneratorStats())
        self.gate.acknowledged(Acked(QueueStats(0, 0, 0, len(reports), GeneratorStats(), {}, reports=reports)))
        return self.gate.record(cast(StepResult, None))


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


def test_what_each_generator_sampled_at_the_learners_version_alone_is_compared_once(tmp_path: Path):
    scene = Scene(tmp_path)
    scene.check([make_group("a", 4, shift=9.0), make_group("b", 5, versions=[4, 4, 5, 5, 5, 5], shift=9.0)], version=5)
    assert scene.engine.asked == []
    scene.check([make_group("a", 5), make_group("b", 5, position=1)], version=5)
    row = scene.observe(6, "a", "b")
    assert (row["parity/sampled_tokens"], row["parity/sampled_max"]) == (24, 0)
    scene.check([make_group("a", 6)], version=6)
    assert len(scene.engine.asked) == 1


@pytest.mark.parametrize(
    ("differs", "cause"),
    [
        ({"temperature": 0.7, "behaves": at_temperature_1}, r"generator a .* 0\.7, but .* 1, as if no temperature"),
        ({"shift": 0.7}, "a top-p or top-k mask that it does not report"),
    ],
)
def test_a_setting_of_sampling_that_explains_a_difference_stops_the_run_and_is_named(
    tmp_path: Path, differs: dict[str, Any], cause: str
):
    with pytest.raises(ParityError, match=cause):
        Scene(tmp_path).check([make_group("a", 0, **differs)], version=0)


@pytest.mark.parametrize(
    ("noise", "dtype", "can_score", "cause"),
    [
        (0.5, "float32", True, r"It scores probe sequences as the learner does .* keys and values"),
        # Ten times the limit of two exact sides, a fifth of that where one rounds.
        (0.01, "float32", True, "its weights are right"),
        (0.01, "bfloat16", True, ""),
        (0.5, "float32", False, "Cause not found: transformers can't score probe sequences"),
    ],
)
def test_what_the_learner_cant_explain_is_asked_of_the_generator_and_judged_by_what_it_computes_in(
    tmp_path: Path, noise: float, dtype: str, can_score: bool, cause: str
):
    scene = Scene(tmp_path)
    scene.begin(make_group("a", 0, behaves=noisy(noise)))
    scene.answer("a", dtype=dtype)
    if not can_score:
        scene.queue.answers["a"] = replace(scene.queue.answers["a"], logprobs=None)
    if cause:
        with pytest.raises(ParityError, match=cause):
            scene.observe(1, "a")
    else:
        assert scene.observe(1, "a")["parity/max"] == 0


@pytest.mark.parametrize(("every", "expected"), [(10, [1, 6, 16]), (0, [1, 6])])
def test_a_probe_goes_out_at_the_start_for_a_newcomer_and_every_so_many_versions(
    tmp_path: Path, every: int, expected: list[int]
):
    # Version 6 is the first that is published with b alive; both are then due together.
    scene = Scene(tmp_path, experimental={"parity_every": every})
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
    assert sent == expected


def test_a_generator_that_never_answers_is_asked_again_now_and_then_until_it_has_gone(tmp_path: Path):
    scene = Scene(tmp_path)
    scene.check([make_group("a", 0)], version=0)
    sent = []
    for version in range(1, 14):
        scene.observe(version - 1, "a")
        sent += [version] if scene.probed(version) else []
    assert sent == [1, 6, 11]
    scene.observe(13)
    assert not any(scene.probed(version) for version in range(14, 30))


def test_an_answer_past_the_limit_stops_the_run_with_its_cause_or_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for parity in ("stop", "warn"):
        scene = Scene(tmp_path, parity=parity)
        scene.begin(make_group("a", 0), make_group("b", 0, position=1))
        scene.answer("a")
        scene.answer("b", shift=0.25, cause="stale or corrupt tensors: of lm_head.weight")
        if parity == "warn":
            assert scene.observe(1, "a", "b")["parity/mean"] == pytest.approx(0.125)
            assert "lm_head.weight" in caplog.text
            assert not scene.queue.quarantined
            continue
        with pytest.raises(ParityError) as caught:
            scene.observe(1, "a", "b")
        for part in ("generator b (transformers, float32)", "version 1", "0.25 nats", "limit 0.001", "lm_head.weight"):
            assert part in str(caught.value)


@pytest.mark.parametrize("parity", ["stop", "warn"])
def test_an_answer_far_past_the_limit_quarantines_its_generator_and_the_run_goes_on(tmp_path: Path, parity: str):
    # 20 times 0.05, the limit of rounding: 1 nat, whatever dtype the generator claims.
    scene = Scene(tmp_path, parity=parity)
    scene.begin(make_group("a", 0), make_group("b", 0, position=1))
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
    scene.begin(make_group("a", 0))
    num_scored = sum(map(len, decode_probe(scene.probe).logprobs))
    scene.queue.answers["a"] = Answer(1, "transformers", "float32", np.array(values[:num_scored], np.float32))
    scene.observe(1, "a")
    assert list(scene.queue.quarantined) == ["a"]
