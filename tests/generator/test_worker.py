"""The generator's loop over fakes of the queue and of the weights receiver. The fake queue's poll scripts time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml, machine_overrides
from async_rl.errors import ConfigError, QueueError
from async_rl.generator.fake import FakeBackend
from async_rl.generator.loop import HEARTBEAT_S, Device, Worker
from async_rl.generator.rollouts import Graded, SingleTurnRollouts, ThreadGrader
from async_rl.generator.start.worker import generator_config, own_filter, write_files
from async_rl.queue.messages import (
    Announced,
    Announcement,
    Cancelled,
    Failure,
    Finished,
    GeneratorEvent,
    GeneratorStats,
    LeasesGranted,
)
from async_rl.queue.parity import Answer, Probe, ProbeSequence, encode_probe
from async_rl.records import NO_VERSION, Group
from async_rl.rewards.records import RewardInput, RewardOutput
from tests.config.made import a_config
from tests.generator.leases import make_lease
from tests.generator.scripted import InlineGrader


@dataclass(frozen=True)
class FakeStaged:
    lineage: str
    version: int
    digest: str
    tensors: Mapping[str, Any] = field(default_factory=dict)


class FakeReceiver:
    """Stages what a test puts into ``staged``."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.followed: list[Announcement] = []
        self.staged: FakeStaged | None = None
        self.handed_out: FakeStaged | None = None

    def follow(self, announcement: Announcement) -> None:
        self.followed.append(announcement)

    def poll(self) -> FakeStaged | None:
        self.handed_out = self.staged
        return self.staged

    def activated(self, staged: FakeStaged) -> None:
        assert staged is self.handed_out
        if staged is self.staged:
            self.staged = None


class FakeQueue:
    """Hands out one entry of ``script`` a poll: events, or a callable that returns events. Ends with ``Finished``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.script: deque[list[GeneratorEvent] | Callable[[], list[GeneratorEvent]]] = deque()
        self.lease_request_outstanding = False
        self.num_unanswered_returns = 0
        self.silent_s, self.trouble = 0.0, ""
        self.requests: list[tuple[str, int, int]] = []
        self.returned: list[Group] = []
        self.answered: list[tuple[str, Answer]] = []
        self.failed: list[tuple[str, str, str]] = []
        self.failed_rollouts: list[tuple[str, str, int]] = []
        self.heartbeats: list[tuple[dict[str, int], GeneratorStats]] = []
        self.troubles: list[str] = []
        self.timeouts: list[float] = []

    def request_leases(self, lineage: str, version: int, max_leases: int, wait_s: float) -> None:
        assert not self.lease_request_outstanding
        assert wait_s > 0
        self.lease_request_outstanding = True
        self.requests.append((lineage, version, max_leases))

    def heartbeat(self, progress: dict[str, int], stats: GeneratorStats, trouble: str) -> None:
        self.heartbeats.append((progress, stats))
        self.troubles.append(trouble)

    def return_group(self, group: Group, failed: Mapping[Failure, int]) -> None:
        self.returned.append(group)
        self.failed_rollouts += [(why.cause, why.detail, count) for why, count in failed.items()]

    def answer_probe(self, lineage: str, answer: Answer) -> None:
        self.answered.append((lineage, answer))

    def fail(self, lease_id: str, failure: Failure) -> None:
        self.failed.append((lease_id, failure.cause, failure.detail))

    def poll(self, timeout_s: float) -> list[GeneratorEvent]:
        self.timeouts.append(timeout_s)
        self.clock.now_s += max(timeout_s, 0.001)
        if not self.script:
            return [Finished()]
        entry = self.script.popleft()
        events = entry() if callable(entry) else entry
        if any(isinstance(event, LeasesGranted) for event in events):
            assert self.lease_request_outstanding
            self.lease_request_outstanding = False
        return events


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        # Every look at the clock takes a little, so that polls are not throttled for ever.
        self.now_s += 0.001
        return self.now_s


def grade(item: RewardInput) -> RewardOutput:
    if item.reward_data["gt_answer"] == "raise":
        raise ZeroDivisionError("no such answer")
    return RewardOutput({"correct": 1.0, "length": -0.25}, 1.0, item.text[-3:])


class Scene:
    """A worker with its fakes. Answers have four tokens each, so a lease takes four steps."""

    def __init__(
        self,
        *,
        data: dict[str, Any] | None = None,
        engine: type[FakeBackend] = FakeBackend,
        mean_tokens: float = 4.0,
        device: Device | None = None,
        grader: ThreadGrader | None = None,
        reward: dict[str, Any] | None = None,
        filter_function: str | None = None,
        **generator: Any,
    ) -> None:
        self.config = a_config(
            sampling={"group_size": 2, "max_new_tokens": 8},
            generator={"backend": "fake", "batch_size": 4} | generator,
            experimental={"fake": {"mean_tokens": mean_tokens}},
            data=data or {},
            reward=reward or {},
            queue={} if filter_function is None else {"filter_function": filter_function},
        )
        self.clock = Clock()
        self.queue, self.receiver = FakeQueue(self.clock), FakeReceiver()
        self.backend = engine(self.config.generator, self.config.experimental.fake)
        grader = grader or InlineGrader(grade)
        self.worker = Worker(
            queue=cast(Any, self.queue),
            receiver=self.receiver,
            backend=self.backend,
            rollouts=SingleTurnRollouts(self.backend, grader, truncates=self.config.data.on_long_prompt == "truncate"),
            grader=grader,
            config=self.config,
            generator_id="g",
            wait_s=60.0,
            clock=self.clock,
            device=device,
            group_filter=own_filter(self.config, None),
        )

    def announce(
        self, version: int, lineage: str = "first", *, staged: bool = True
    ) -> Callable[[], list[GeneratorEvent]]:
        def play() -> list[GeneratorEvent]:
            if staged:
                self.receiver.staged = FakeStaged(lineage, version, f"{lineage}-{version}")
            return [Announced(Announcement(lineage, version, f"{lineage}-{version}", "tcp://127.0.0.1:1"))]

        return play

    def run(self, *script: list[GeneratorEvent] | Callable[[], list[GeneratorEvent]]) -> None:
        self.queue.script.extend(script)
        self.worker.run()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def granted(*leases: Any, activate: int | None = None) -> list[GeneratorEvent]:
    return [LeasesGranted(leases, reason="the learner is behind", activate=activate)]


def quiet(polls: int) -> list[list[GeneratorEvent]]:
    return [[] for _ in range(polls)]


def test_a_sampled_group_is_returned_with_its_versions_and_their_digests(scene):
    # Version 3 for the first steps, then 4: both are in the group, and both digests.
    scene.run(scene.announce(3), granted(make_lease("a", max_new_tokens=8)), scene.announce(4), *quiet(8))
    (group,) = scene.queue.returned
    assert (group.lease_id, group.generator_id, group.lineage, group.kind) == ("a", "g", "first", "train")
    assert group.weights_digest == {3: "first-3", 4: "first-4"}
    prompt_ids = scene.backend.encode_prompt(({"role": "user", "content": "1+1"},))
    assert len(group.rollouts) == 2
    for rollout in group.rollouts:
        (sequence,) = rollout.sequences
        versions = sequence.versions[sequence.loss_mask]
        assert set(versions.tolist()) == {3, 4}
        assert sequence.token_ids[: len(prompt_ids)].tolist() == prompt_ids.tolist()
        assert sequence.loss_mask.tolist() == [False] * len(prompt_ids) + [True] * 4
        assert (sequence.versions[: len(prompt_ids)] == NO_VERSION).all()
        assert not sequence.behavior_logprobs[: len(prompt_ids)].any()
        assert (rollout.reward, rollout.accuracy, rollout.finish_reason) == (0.75, 1.0, "stop")
    assert group.sampling_time_s > 0


@pytest.mark.parametrize(
    ("settings", "leases", "wanted"),
    [
        # 4 slots of groups of 2: two leases fill them, one more waits in line. Nothing is asked for before weights.
        ({}, [], [3]),
        ({"max_concurrent_groups": 2}, [make_lease("a"), make_lease("b")], [2, 1]),
        # After a lease of one sample: 3 free slots and one in line.
        ({}, [make_lease("e", kind="eval", group_size=1)], [3, 4]),
    ],
    ids=["none", "bounded", "small groups"],
)
def test_as_many_leases_are_requested_as_fill_the_slots(settings: dict[str, Any], leases: list[Any], wanted: list[int]):
    scene = Scene(**settings)
    scene.run(scene.announce(1, staged=False), [], [], scene.announce(1), *map(granted, leases), [])
    assert [count for _, _, count in scene.queue.requests] == wanted
    assert all(request[:2] == ("first", 1) for request in scene.queue.requests)


def test_another_lineage_voids_all_leases_and_its_versions_start_anew(scene):
    def check() -> list[GeneratorEvent]:
        assert scene.backend.num_running == 0
        return []

    scene.run(
        scene.announce(5),
        granted(make_lease("a")),
        scene.announce(2, "second", staged=False),
        check,
        # Granted before the queue knew better: of the old lineage, so it is left alone.
        granted(make_lease("late")),
        check,
        scene.announce(2, "second"),
        [],
        granted(make_lease("b", lineage="second")),
        *quiet(8),
    )
    assert [(g.lease_id, g.weights_digest) for g in scene.queue.returned] == [("b", {2: "second-2"})]
    assert scene.queue.requests[-1][:2] == ("second", 2)
    assert scene.queue.failed == []


@pytest.mark.parametrize(
    ("bad", "cause", "detail"),
    [
        (make_lease("bad", answer="raise"), "reward_error", f"ZeroDivisionError: no such answer ({__file__}, line "),
        (make_lease("bad", max_prompt_tokens=2), "prompt_too_long", "tokens, sampling.max_prompt_tokens = 2"),
    ],
)
def test_a_lease_that_fails_is_given_back_with_the_cause_and_the_worker_goes_on(scene, bad, cause: str, detail: str):
    scene.run(scene.announce(0), granted(bad, make_lease("good")), *quiet(8))
    ((lease_id, got, why),) = scene.queue.failed
    assert (lease_id, got) == ("bad", cause)
    assert detail in why
    assert [group.lease_id for group in scene.queue.returned] == ["good"]


def test_a_cancelled_lease_is_neither_sampled_on_nor_returned(scene):
    scene.run(scene.announce(0), granted(make_lease("a"), make_lease("b")), [Cancelled(("a", "unknown"))], *quiet(8))
    assert [group.lease_id for group in scene.queue.returned] == ["b"]
    assert scene.backend.num_running == 0


def test_a_lease_waits_for_the_version_it_must_be_sampled_with(scene):
    seen: list[int] = []

    def look() -> list[GeneratorEvent]:
        seen.append(scene.backend.num_running)
        return []

    lease = make_lease("a", min_version=2)
    scene.run(
        scene.announce(1), granted(lease), look, scene.announce(2, staged=False), look, scene.announce(2), *quiet(8)
    )
    assert seen == [0, 0]
    (group,) = scene.queue.returned
    assert group.weights_digest == {2: "first-2"}


def test_an_answer_that_names_a_version_is_followed_by_silence_until_it_is_active(scene):
    scene.run(scene.announce(1), granted(activate=3), *quiet(5), scene.announce(2), *quiet(5), scene.announce(3), [])
    assert [version for _, version, _ in scene.queue.requests] == [1, 3]


def test_the_question_of_a_prompt_that_is_too_long_may_be_cut():
    # Four characters a token: of "<user>1...1<assistant>", 8 tokens leave 32 - 17 = 15 ones.
    scene = Scene(data={"on_long_prompt": "truncate"})
    lease = make_lease("a", max_prompt_tokens=8)
    long = replace(lease, prompt=replace(lease.prompt, messages=({"role": "user", "content": "1" * 40},)))
    scene.run(scene.announce(0), granted(long), *quiet(9))
    ((group,), failed) = scene.queue.returned, scene.queue.failed
    assert failed == []
    expected = scene.backend.encode_prompt([{"role": "user", "content": "1" * 15}])
    for rollout in group.rollouts:
        (sequence,) = rollout.sequences
        assert sequence.token_ids[~sequence.loss_mask].tolist() == expected.tolist()


def test_a_group_with_a_failed_rollout_is_returned_with_the_failure():
    calls: list[RewardInput] = []

    def picky(item: RewardInput) -> RewardOutput:
        calls.append(item)
        return RewardOutput({"correct": 1.0 / (len(calls) - 1)}, 1.0)

    scene = Scene(grader=InlineGrader(picky))
    scene.run(scene.announce(0), granted(make_lease("a")), *quiet(8))
    (group,) = scene.queue.returned
    assert sorted(rollout.finish_reason for rollout in group.rollouts) == ["error", "stop"]
    ((cause, detail, count),) = scene.queue.failed_rollouts
    assert (cause, count, scene.queue.failed) == ("reward_error", 1, [])
    assert detail.startswith("ZeroDivisionError")


def test_heartbeats_carry_progress_by_lease_and_cumulative_stats():
    # One slot and 1500 tokens an answer, at 1 ms and more a step: several heartbeats pass meanwhile.
    scene = Scene(batch_size=1, mean_tokens=1500.0)
    lease, waiting = make_lease("a", group_size=1, max_new_tokens=2000), make_lease("b", group_size=1)
    scene.run(scene.announce(0), granted(lease, waiting), *quiet(900))
    progress = [p for p, _ in scene.queue.heartbeats if "a" in p]
    assert len(progress) >= 3
    assert [p["a"] for p in progress] == sorted({p["a"] for p in progress})
    # The lease in line is kept alive by the steps that are taken before it.
    assert [p["b"] for p in progress] == list(range(progress[0]["b"], progress[0]["b"] + len(progress)))
    stats = scene.queue.heartbeats[-1][1]
    assert (stats.max_running, stats.num_activations) == (1, 1)
    assert 0 < stats.busy_s <= stats.wall_s
    assert stats.busy_sequence_s == pytest.approx(stats.busy_s)
    assert stats.num_tokens >= progress[-1]["a"]
    (alone,) = stats.decoded  # never more than one sequence
    assert (alone.busy_s, alone.busy_sequence_s) == pytest.approx((stats.busy_s, stats.busy_sequence_s))
    assert alone.num_tokens == stats.num_tokens


class HeldGrader(InlineGrader):
    """Returns nothing while its scorer ``is_away``."""

    is_away = True

    @property
    def num_waiting(self) -> int:
        return 2 if self.is_away else 0

    @property
    def trouble(self) -> str:
        return "the scorer judge is away" if self.is_away else ""

    def collect(self) -> list[Graded]:
        return [] if self.is_away else super().collect()


def test_leases_outlive_the_absence_of_a_scorer_and_heartbeats_say_why():
    grader = HeldGrader(grade)
    scene = Scene(grader=grader)

    def back() -> list[GeneratorEvent]:
        assert scene.queue.returned == []
        grader.is_away = False
        return []

    scene.run(scene.announce(0), granted(make_lease("a")), *quiet(2000), back, *quiet(300))
    progress = [p["a"] for p, _ in scene.queue.heartbeats if "a" in p]
    # A lease expires if its count stands still: it grows with each heartbeat once nothing else can happen.
    assert len(progress) >= 3
    assert progress == sorted(set(progress))
    assert "the scorer judge is away" in scene.queue.troubles
    assert scene.queue.troubles[-1] == ""
    assert [group.lease_id for group in scene.queue.returned] == ["a"]


def test_an_idle_worker_blocks_in_poll_and_a_busy_one_does_not(scene):
    scene.run(scene.announce(0), *quiet(5), granted(make_lease("a")), *quiet(1))
    assert scene.queue.timeouts[2:6] == pytest.approx([1.0] * 4, abs=0.1)
    assert scene.queue.timeouts[7] == 0.0


def test_a_long_wait_for_weights_or_grading_is_polled_less_and_less_often(scene):
    # 200 generators that wait for one version kept each other, and so the learner, from the processor.
    scene.run(scene.announce(1, staged=False), *quiet(60))
    timeouts = scene.queue.timeouts[1:-1]
    assert timeouts[0] == pytest.approx(0.005)
    assert timeouts[-1] == pytest.approx(0.1)
    # Each poll is at most a tenth of the wait so far longer than the first: what arrives is seen soon.
    waited = 0.0
    for timeout in timeouts:
        assert timeout <= 0.005 + waited / 10 + 1e-9
        waited += timeout


def test_empty_answers_don_t_make_the_worker_spin(scene):
    scene.run(scene.announce(0), granted(), [], granted(), [], granted(), [])
    # The pause before the next request is spent in poll, too.
    assert len(scene.queue.requests) == 4
    assert all(timeout > 0.01 for timeout in scene.queue.timeouts[2:])


def test_a_silent_queue_is_given_up_on(scene):
    def fall_silent() -> list[GeneratorEvent]:
        scene.queue.silent_s = 61.0
        return []

    with pytest.raises(QueueError, match=r"within 60 s \(--wait\), got none for 61 s"):
        scene.run(fall_silent)


def test_trouble_with_the_weights_is_told_until_a_version_arrives(scene):
    def report(error: str | None) -> Callable[[], list[GeneratorEvent]]:
        def play() -> list[GeneratorEvent]:
            scene.receiver.error = error
            scene.clock.now_s += HEARTBEAT_S
            return []

        return play

    # Connected again, it has no version yet, so the trouble is still told.
    scene.run(
        scene.announce(0, staged=False), report("away"), [], report(None), [], scene.announce(0), report(None), []
    )
    assert scene.queue.troubles[-1] == ""
    assert scene.queue.troubles.count("away") == 2


def test_a_generator_takes_generator_keys_only(scene):
    text = config_to_toml(scene.config)
    config = generator_config(text, ["generator.batch_size=7", "generator.devices=[1]", "generator.num_threads=2"])
    assert (config.generator.batch_size, config.generator.devices, config.generator.num_threads) == (7, (1,), 2)
    with pytest.raises(ConfigError, match=r"only generator\.\* keys"):
        generator_config(text, ["sampling.temperature=2"])
    with pytest.raises(ConfigError, match=r"generator\.batch_sizes: unknown key"):
        generator_config(text, ["generator.batch_sizes=7"])


def test_a_generator_may_not_decide_whether_rollouts_are_agents(scene):
    raw = scene.config.model_dump()
    text = config_to_toml(Config.model_validate({**raw, "environment": {"name": "mine.py"}}))
    assert not generator_config(text, ["generator.serve=false"]).generator.serve
    with pytest.raises(ConfigError, match=r"--set generator.serve: expected the run's false, got true"):
        generator_config(text, ["generator.serve=true"])


CODE = {
    "type": "code",
    "code": {"allow_unsafe": True, "endpoint": "http://10.0.0.1:8000", "packages": ("numpy", "torch")},
}
ASKS = {"endpoint": "http://10.0.0.1:8000", "model": "m", "api_key_env": "OTHERS_KEY", "cache": "notes"}


@pytest.mark.parametrize(
    ("reward", "keys"),
    [
        (CODE, ["allow_unsafe", "endpoint", "packages"]),
        ({"type": "judge", "judge": ASKS}, ["endpoint", "api_key_env", "cache"]),
    ],
    ids=["programs", "judge"],
)
def test_a_queue_does_not_decide_what_another_machine_runs_and_tells(scene, reward: dict[str, Any], keys: list[str]):
    # A queue could else have programs run without a sandbox, or ask for any variable of the environment, or any file.
    asking = Config.model_validate({**scene.config.model_dump(), "reward": scene.config.reward.model_dump() | reward})
    text, overrides = config_to_toml(asking), machine_overrides(asking)
    section = f"reward.{reward['type']}"
    assert [one.partition("=")[0] for one in overrides] == [f"{section}.{key}" for key in keys]
    for missing in overrides:
        with pytest.raises(ConfigError, match=f"the queue's config sets {re.escape(missing)}"):
            generator_config(text, [one for one in overrides if one != missing])
    # `launch` and doctor agree for the machine that the config is written for. An operator may also decide otherwise.
    assert generator_config(text, overrides).reward == asking.reward
    own = generator_config(text, [*overrides, f'{section}.endpoint="http://127.0.0.1:9"']).reward
    assert getattr(own, reward["type"]).endpoint == "http://127.0.0.1:9"


def test_a_queue_does_not_decide_which_code_another_machines_engine_runs(scene):
    engine = {"scheduler_cls": "theirs:It", "compilation_config": {"backend": "theirs"}, "block_size": 32}
    generator = scene.config.generator.model_copy(update={"engine": engine})
    asking = scene.config.model_copy(update={"generator": generator})
    text, overrides = config_to_toml(asking), machine_overrides(asking)
    key = "generator.engine.compilation_config"
    assert overrides == ['generator.engine.scheduler_cls="theirs:It"', key + '={"backend": "theirs"}']
    for missing in overrides:
        with pytest.raises(ConfigError, match=f"the queue's config sets {re.escape(missing)}"):
            generator_config(text, [one for one in overrides if one != missing])
    assert generator_config(text, overrides).generator.engine == engine
    with pytest.raises(ConfigError, match=f"the queue's config sets {key}="):
        generator_config(text, [overrides[0], f"{key}.mode=3"])  # it agrees to nothing else in that table
    assert generator_config(text, ["generator.engine={block_size=16}"]).generator.engine == {"block_size": 16}


def test_keys_of_a_reward_that_is_not_used_ask_for_nothing(scene):
    reward = scene.config.reward.model_dump() | CODE | {"type": "boxed"}
    generator_config(config_to_toml(Config.model_validate({**scene.config.model_dump(), "reward": reward})), [])


def test_deterministic_runs_use_one_thread_on_every_machine(scene):
    changed = scene.config.model_copy(
        update={"sampling": scene.config.sampling.model_copy(update={"deterministic": True})}
    )
    assert generator_config(config_to_toml(changed), []).generator.num_threads == 1


def test_files_from_the_queue_stay_in_their_directory(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_files(directory, {"config.json": b"{}"})
    assert (directory / "config.json").read_bytes() == b"{}"
    for name in ("../config.json", "/etc/config.json", "a/b", "..", "", "a\\b"):
        with pytest.raises(QueueError, match="expected a file name without a folder"):
            write_files(directory, {name: b""})
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "model"]


def probe_of(version: int) -> bytes:
    given = ProbeSequence(np.array([1, 2], np.int32), 1)
    return encode_probe(Probe("first", version, 1.0, (given,), (np.zeros(1, np.float32),), "float32"))


def test_a_probe_is_answered_once_when_its_version_is_active_and_dropped_when_passed_over():
    scene = Scene()

    def announced(version: int, probe: bytes) -> list[GeneratorEvent]:
        return [Announced(Announcement("first", version, f"first-{version}", "tcp://127.0.0.1:1", probe))]

    def stage(version: int) -> Callable[[], list[GeneratorEvent]]:
        def play() -> list[GeneratorEvent]:
            scene.receiver.staged = FakeStaged("first", version, f"first-{version}")
            return []

        return play

    # Version 1 arrives after version 2 was announced and is answered; version 2 is passed over for version 3.
    scene.run(
        announced(1, probe_of(1)), announced(2, probe_of(2)), stage(1), [], announced(3, b""), stage(3), [], [],
    )  # fmt: skip
    assert [(lineage, answer.version) for lineage, answer in scene.queue.answered] == [("first", 1)]


class SlowGrader(InlineGrader):
    """A reward whose call runs for ``call_s`` seconds of the scene's clock."""

    def __init__(self, call_s: float) -> None:
        super().__init__(grade)
        self.call_s, self.began_s = call_s, 0.0
        self.clock = Clock()

    @property
    def calls_s(self) -> tuple[float, ...]:
        return (self.clock.now_s - self.began_s,) if self.num_pending else ()

    def submit(self, lease: Any, sample: Any) -> None:
        self.began_s = self.began_s if self.num_pending else self.clock.now_s
        super().submit(lease, sample)

    def collect(self) -> list[Graded]:
        if not self.num_pending or self.calls_s[0] < self.call_s:
            return []
        return super().collect()


def run_slow_reward(call_s: float, **reward: Any) -> Scene:
    grader = SlowGrader(call_s)
    scene = Scene(grader=grader, reward=reward)
    grader.clock = scene.clock
    polls: list[list[GeneratorEvent]] = [[]] * int(200 * call_s)
    scene.run(scene.announce(0), granted(make_lease("a")), *polls)
    return scene


def test_a_running_call_of_the_reward_is_progress_of_its_leases_up_to_its_limit(caplog):
    for limit_s, grows in ((600.0, True), (35.0, False)):
        scene = run_slow_reward(50.0, max_call_s=limit_s)
        seen = [progress["a"] for progress, _ in scene.queue.heartbeats if "a" in progress]
        assert len(seen) > 45
        assert (seen == sorted(set(seen))) == grows
        assert len(set(seen[:30])) == 30
        assert [group.lease_id for group in scene.queue.returned] == ["a"]
        assert "generator g: a call of the reward or filter has run for more than 30 s" in caplog.text
        assert scene.queue.troubles[40].startswith("a call of the reward or filter has run for more than")
        assert scene.queue.troubles[5] == ""


FILTERS = {
    "return all(r.accuracy == 1.0 for r in rollouts) and row['gt_answer'] == '2'": (True, ""),
    "return any(len(text) > 99 for text in texts)": (False, ""),
    "return len(rollouts) - 2": (None, "expected .*filter.py:keep to return True or False, got 0; correct it"),
    "return row['rewards']": (None, "KeyError: 'rewards' .*filter.py, line 2, in keep"),
    "raise SystemExit('away')": (None, "SystemExit: away"),
}


@pytest.mark.parametrize("body", FILTERS)
def test_a_filter_of_the_users_own_judges_each_group_of_training_and_fails_the_lease_if_it_fails(tmp_path, body: str):
    kept, why = FILTERS[body]
    source = tmp_path / "filter.py"
    source.write_text(f"def keep(row, rollouts, texts):\n    {body}\n")
    with pytest.raises(ConfigError, match="this machine does not allow it"):
        Scene(filter_function=f"{source}:keep")
    scene = Scene(filter_function=f"{source}:keep", allow_code=[str(source)])
    scene.run(scene.announce(0), granted(make_lease("a"), make_lease("e", kind="eval")), *quiet(8))
    assert {"a": None} | {group.lease_id: group.kept for group in scene.queue.returned} == {"a": kept, "e": True}
    assert [(lease_id, cause) for lease_id, cause, _ in scene.queue.failed] == [("a", "filter_error")] * bool(why)
    assert all(re.search(why, detail) for *_, detail in scene.queue.failed)


def test_idle_time_is_counted_by_what_the_generator_waits_for():
    scene = run_slow_reward(20.0)
    _, stats = scene.queue.heartbeats[-1]
    assert stats.grading_s == pytest.approx(20.0, abs=1.5)
    assert stats.idle_grading_s == pytest.approx(20.0, abs=1.5)
    assert (stats.environment_s, stats.idle_environment_s) == (0.0, 0.0)
    idle = stats.idle_grading_s + stats.idle_weights_s + stats.idle_leases_s
    assert idle <= stats.wall_s
    assert stats.idle_leases_s > 0.0
    scene = Scene()
    scene.run(scene.announce(0, staged=False), *quiet(300))
    _, stats = scene.queue.heartbeats[-1]
    assert stats.idle_weights_s > 0.9 * stats.wall_s
