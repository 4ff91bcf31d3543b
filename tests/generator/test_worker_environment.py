"""The generator's loop with an environment: real processes, fakes of the queue and the weights, a scripted backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.pool import EnvironmentPool
from async_rl.generator.environment_rollouts import EnvironmentRollouts
from async_rl.generator.loop import Worker
from async_rl.queue.messages import GeneratorEvent
from tests.environments.pools import pool_of
from tests.generator.leases import make_lease
from tests.generator.scripted import CharacterText, InlineGrader, ScriptedBackend
from tests.generator.test_environment_rollouts import SAMPLES
from tests.generator.test_worker import Scene, grade, granted


class EnvironmentScene(Scene):
    """A ``Scene`` whose rollouts are played, with answers from ``script``."""

    def __init__(self, script: Callable[[int, int], str], pool: EnvironmentPool, config: EnvironmentConfig) -> None:
        super().__init__()
        self.scripted = ScriptedBackend(script)
        self.scripted.version = -1
        self.worker = Worker(
            queue=self.queue,
            receiver=self.receiver,
            backend=self.scripted,
            rollouts=EnvironmentRollouts(self.scripted, pool, CharacterText(), config),
            grader=InlineGrader(grade),
            config=self.config,
            generator_id="g",
            wait_s=600.0,
            clock=self.clock,
        )

    def until(self, done: Callable[[], bool]) -> None:
        """More empty polls, of the real time that environments take, until ``done``."""

        def wait() -> list[GeneratorEvent]:
            if not done():
                self.queue.script.appendleft(wait)
            return []

        self.queue.script.append(wait)


@contextlib.contextmanager
def scene(script: Callable[[int, int], str]) -> Iterator[EnvironmentScene]:
    config = EnvironmentConfig(name=SAMPLES, timeout_s=10.0)
    with contextlib.closing(pool_of(config)) as pool:
        yield EnvironmentScene(script, pool, config)


def test_a_swap_of_weights_between_two_turns_shows_in_their_tokens():
    with scene(lambda _, turn: ["go", "stop"][turn]) as made:
        answered = 0

        def first_turn_is_over() -> bool:
            nonlocal answered
            answered = len(made.scripted.requests)
            return answered >= 2

        made.queue.script.append(made.announce(3))
        made.queue.script.append(granted(make_lease("a")))
        made.until(first_turn_is_over)
        made.queue.script.append(made.announce(4))
        made.until(lambda: bool(made.queue.returned))
        made.worker.run()
    (group,) = made.queue.returned
    assert set(group.weights_digest) <= {3, 4}
    assert 4 in group.weights_digest
    assert [[turn.num_tokens for turn in r.turns] for r in group.rollouts] == [[3, 5], [3, 5]]


def test_a_group_with_a_failed_rollout_is_returned_and_one_of_failures_alone_is_given_back():
    script = {0: "stop", 1: "exit"}
    with scene(lambda index, _: script[index]) as made:
        made.queue.script.extend([made.announce(3), granted(make_lease("a"), make_lease("b", group_size=1))])
        made.until(lambda: len(made.queue.returned) == 2)
        made.worker.run()
    reasons = {g.lease_id: [r.finish_reason for r in g.rollouts] for g in made.queue.returned}
    assert reasons == {"a": ["stop", "error"], "b": ["stop"]}
    with scene(lambda _, __: "raise") as made:
        made.queue.script.extend([made.announce(3), granted(make_lease("c"))])
        made.until(lambda: bool(made.queue.failed))
        made.worker.run()
    ((lease_id, cause, detail),) = made.queue.failed
    assert (lease_id, cause, made.queue.returned) == ("c", "environment_error", [])
    assert "KeyError: 'no such key'" in detail


def test_rollouts_that_wait_for_their_environment_keep_their_slots():
    # 16 slots. Two groups of 6 hold 12: room for one group more, and one in line.
    with scene(lambda _, __: "stop") as made:
        leases = [make_lease(name, group_size=6) for name in "ab"]
        made.queue.script.extend([made.announce(3), granted(*leases)])
        made.until(lambda: len(made.queue.requests) > 1)
        made.worker.run()
    assert made.queue.requests[1][2] == 2
