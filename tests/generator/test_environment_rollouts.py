"""Scripted rollouts of the example environments: tokens, masks, rewards and signs of advantage, worked by hand."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.config.generator import EnvironmentConfig
from async_rl.config.loss import LossConfig
from async_rl.generator.environment_rollouts import EnvironmentRollouts
from async_rl.generator.rollouts import Graded
from async_rl.learner.data.batch import prepare_batch
from async_rl.learner.losses.advantages import with_advantages
from async_rl.net.codec import encode_group
from async_rl.queue.core.groups import read_summary, why_unfit
from async_rl.queue.messages import TakenGroup
from async_rl.records import NO_VERSION, TEXT_ROLE, Group, Lease, Rollout
from tests.end_to_end.harness import wait_until
from tests.environments.pools import pool_of
from tests.generator.leases import make_lease
from tests.generator.scripted import END, CharacterText, ScriptedBackend

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = str(ROOT / "tests/environments/samples.py")
GUESS = str(ROOT / "examples/environments/guess_number.py")


class Play:
    """Leases played with an environment, answers from a script."""

    def __init__(self, backend: ScriptedBackend, rollouts: EnvironmentRollouts) -> None:
        self.backend, self.rollouts = backend, rollouts
        self.graded: list[Graded] = []

    def submit(self, lease: Lease) -> None:
        self.rollouts.submit(lease, self.rollouts.encode(lease))

    def pump(self) -> None:
        if self.backend.num_running:
            self.rollouts.take(self.backend.step())
        self.graded += self.rollouts.collect()

    def finished(self, lease: Lease) -> list[Graded]:
        """The lease's rollouts by index, once all are there."""

        def probe() -> list[Graded] | None:
            self.pump()
            mine = [graded for graded in self.graded if graded.lease is lease]
            return sorted(mine, key=lambda g: g.index) if len(mine) == lease.group_size else None

        return wait_until("the lease's rollouts", probe, deadline_s=30.0)

    def play(self, lease: Lease) -> list[Rollout]:
        self.submit(lease)
        rollouts = [graded.rollout for graded in self.finished(lease)]
        assert None not in rollouts
        return [rollout for rollout in rollouts if rollout is not None]


@contextlib.contextmanager
def playing(
    name: str, script: Callable[[int, int], str], *, text: CharacterText | None = None, **settings: Any
) -> Iterator[Play]:
    config = EnvironmentConfig(name=name, **settings)
    backend = ScriptedBackend(script)
    with contextlib.closing(pool_of(config)) as pool:
        yield Play(backend, EnvironmentRollouts(backend, pool, text or CharacterText(), config))


def row(content: str, group_size: int, max_new_tokens: int = 64, **reward_data: Any) -> Lease:
    lease = make_lease(group_size=group_size, max_new_tokens=max_new_tokens, max_prompt_tokens=200)
    messages = ({"role": "user", "content": content},) if content else ()
    return replace(lease, prompt=replace(lease.prompt, messages=messages, reward_data=reward_data))


def signs(rollouts: list[Rollout]) -> list[list[int]]:
    """Signs of the advantages of each rollout's sampled tokens: of all of them, so a set."""
    group = Group("a", "train", 0, "g", "first", 1.0, tuple(rollouts))
    taken = TakenGroup(group, row("", 1).prompt, arrival_version=3, queued_s=0.0)
    prepared = prepare_batch([taken], mask_truncated=False, num_updates=1, known_weights=lambda _: True)
    prepared = with_advantages(prepared, LossConfig(preset="grpo", kl_coef=0.0))
    found: list[set[int]] = [set() for _ in rollouts]
    for sequence in prepared.mini_batches[0]:
        assert not sequence.advantages[~sequence.loss_mask].any()
        found[prepared.rollout_of[sequence.sequence_id]] |= set(
            np.sign(sequence.advantages[sequence.loss_mask]).astype(int).tolist()
        )
    return [sorted(values) for values in found]


def text_of(ids: np.ndarray) -> str:
    return "".join("$" if i == END else chr(i) for i in ids.tolist())


def test_scripted_games_get_their_rewards_and_signs_of_advantage():
    # The number is 7. Found at once; found in the third turn; never found; says something else, then finds it.
    games = [["7"], ["5", "9", "7"], ["1", "2", "3"], ["x", "7"]]
    with playing(GUESS, lambda index, turn: games[index][turn], max_turns=3) as play:
        rollouts = play.play(row("1-9", 4, extra_info={"number": 7}))
    assert [[turn.reward for turn in r.turns] for r in rollouts] == [[1.0], [0.0, 0.0, 1.0], [0.0] * 3, [-0.5, 1.0]]
    assert [r.reward for r in rollouts] == pytest.approx([1.0, 1.0, 0.0, 0.5])
    assert [r.accuracy for r in rollouts] == [1.0, 1.0, 0.0, 1.0]
    assert [r.score for r in rollouts] == [1.0, 1.0, 0.0, 1.0]
    assert [r.finish_reason for r in rollouts] == ["stop"] * 4
    # The mean reward is 0.625: the last was right in the end (its score says so), but is below it all the same.
    assert signs(rollouts) == [[1], [1], [-1], [-1]]


def test_what_was_sampled_is_kept_token_by_token_and_what_was_told_is_off_the_mask():
    with playing(GUESS, lambda _, turn: ["5", "9", "7"][turn]) as play:
        lease = row("1-9", 1, extra_info={"number": 7})
        (rollout,) = play.play(lease)
    (sequence,) = rollout.sequences
    # The end-of-turn tokens ($) that the model sampled stay; "user: 1-9|", "a:" and the hints were told.
    assert text_of(sequence.token_ids) == "u:1-9|a:5$>9$<7$"
    mask = "........##.##.##"
    assert ["#" if m else "." for m in sequence.loss_mask] == list(mask)
    told = ~sequence.loss_mask
    assert (sequence.versions[told] == NO_VERSION).all()
    assert (sequence.versions[sequence.loss_mask] == 3).all()
    # The scripted logprob of turn t is -1 - t.
    assert sequence.behavior_logprobs.tolist() == [0.0] * 8 + [-1, -1, 0, -2, -2, 0, -3, -3]
    assert [turn.num_tokens for turn in rollout.turns] == [2, 2, 2]
    # Each turn asked the backend to continue all tokens so far.
    asked = [text_of(np.array(ids)) for _, ids in play.backend.requests]
    assert asked == ["u:1-9|a:", "u:1-9|a:5$>", "u:1-9|a:5$>9$<"]


CONVERSATION = """
async def reset(extra_info):
    return extra_info["messages"]

async def step(state, action, extra_info):
    state = [*state, {"role": "assistant", "content": action if extra_info["keep"] else action.upper()}]
    return {"next_state": [*state, {"role": "user", "content": "on"}], "reward": 1.0, "score": 0.25}
"""


@pytest.mark.parametrize("keep", [True, False])
def test_the_prefix_rule_decides_between_one_sequence_and_several(tmp_path, keep):
    path = tmp_path / "conversation.py"
    path.write_text(CONVERSATION)
    with playing(str(path), lambda _, turn: "ab"[turn], max_turns=2) as play:
        (rollout,) = play.play(row("go", 1, extra_info={"keep": keep}))
    texts = [text_of(sequence.token_ids) for sequence in rollout.sequences]
    if keep:
        # The rendered conversation spells out the end of turn that was sampled: it is not there twice.
        assert texts == ["u:go|a:a$u:on|a:b$"]
    else:
        assert texts == ["u:go|a:a$", "u:go|a:A$u:on|a:b$"]
    assert sum(int(s.loss_mask.sum()) for s in rollout.sequences) == 4
    assert (rollout.reward, rollout.score, rollout.accuracy) == (2.0, 0.5, 0.5)


def test_what_the_queue_judges_finds_nothing_wrong_with_rollouts_of_several_sequences_and_failed_ones(tmp_path):
    path = tmp_path / "conversation.py"
    path.write_text(CONVERSATION.replace("state = [*state,", 'state = [*state, *([1 / 0] if action == "x" else ()),'))
    said = [["a", "b"], ["a", "x"], ["x", ""]]
    with playing(str(path), lambda index, turn: said[index][turn], max_turns=2) as play:
        lease = row("go", 3, extra_info={"keep": False})
        rollouts = play.play(lease)
    assert [r.finish_reason for r in rollouts] == ["stop", "error", "error"]
    assert [len(r.sequences) for r in rollouts] == [2, 2, 1]
    group = Group(
        lease.lease_id, "train", lease.prompt.position, "g", lease.lineage, lease.sampling.temperature, tuple(rollouts)
    )
    facts = read_summary(encode_group(group))
    assert (facts.oldest_version, facts.newest_version, facts.num_tokens) == (3, 3, 10)  # a$b$ a$x$ x$
    assert why_unfit(facts, lease, newest_version=3) == ""


def test_a_failed_rollout_is_kept_with_its_tokens_and_moves_nobody_elses_advantage():
    orders = [["go", "stop"], ["go", "exit"], ["stop"]]
    with playing(SAMPLES, lambda index, turn: orders[index][turn]) as play:
        rollouts = play.play(row("", 3))
    assert [r.finish_reason for r in rollouts] == ["stop", "error", "stop"]
    assert [r.reward for r in rollouts] == [6.0, 0.0, 4.0]
    assert (rollouts[1].num_sampled, rollouts[1].turns) == (8, ())  # go$exit$
    # The mean is that of 6 and 4 alone; the failed one trains nothing.
    assert signs(rollouts) == [[1], [], [-1]]


class WithStart(CharacterText):
    """A tokenizer that begins texts with ``^``."""

    def encode_start(self, text: str) -> np.ndarray:
        return self.encode("^" + text)


@pytest.mark.parametrize(
    ("role", "begin", "has_start"),
    [(TEXT_ROLE, "", True), (TEXT_ROLE, "?", True), ("user", "", False), ("user", "?", True)],
)
def test_a_text_state_begins_as_a_text_prompt_does(tmp_path, role: str, begin: str, has_start: bool):
    path = tmp_path / "starts.py"
    path.write_text(
        "def reset(extra_info):\n    return extra_info['begin'] or None\n"
        "def step(state, action, extra_info):\n    return {'next_state': None, 'reward': 1.0, 'done': True}\n"
    )
    lease = row("1+1=", 1, begin=begin)
    lease = replace(lease, prompt=replace(lease.prompt, messages=({"role": role, "content": "1+1="},)))
    with playing(str(path), lambda _, __: "2", text=WithStart()) as play:
        (rollout,) = play.play(lease)
    assert text_of(rollout.sequences[0].token_ids).startswith("^") == has_start


class WithoutTilde(CharacterText):
    """A tokenizer that knows no ``~`` and leaves it out."""

    def encode(self, text: str, before: str = "") -> np.ndarray:
        return super().encode(text.replace("~", ""))


def test_a_later_state_without_a_token_fails_its_rollout_and_not_the_generator(tmp_path):
    path = tmp_path / "silent.py"
    path.write_text("def step(state, action, extra_info):\n    return {'next_state': '~', 'reward': 0.0}\n")
    with playing(str(path), lambda _, __: "go", text=WithoutTilde()) as play:
        (rollout,) = play.play(row("hello", 1))
    assert rollout.finish_reason == "error"


def test_tokens_that_are_used_up_end_a_rollout_as_cut():
    # 5 tokens for all turns: "go$" takes 3, then 2 are left for "stop".
    with playing(SAMPLES, lambda _, turn: ["go", "stop"][turn]) as play:
        play.submit(lease := row("", 1, max_new_tokens=5))
        (graded,) = play.finished(lease)
        rollout = graded.rollout
    assert rollout is not None
    assert graded.text == "st", "the newest answer"
    assert [lease.sampling.max_new_tokens for lease, _ in play.backend.requests] == [5, 2]
    assert rollout.finish_reason == "length"
    assert [(t.num_tokens, t.reward) for t in rollout.turns] == [(3, 2.0), (2, 2.0)]


LONG_ANSWER = """
def reset(extra_info):
    return "find it: "


def step(state, action, extra_info):
    size = {"look": 30, "dump": 400}[action]
    return {"next_state": extra_info.get("again", state + action) + "." * size, "reward": 1.0}
"""


@pytest.mark.parametrize("again", [{}, {"again": "from the beginning: "}])
def test_an_answer_of_a_tool_that_does_not_fit_ends_the_rollout_as_cut_after_its_last_sampled_token(tmp_path, again):
    path = tmp_path / "tool.py"
    path.write_text(LONG_ANSWER)
    with playing(str(path), lambda _, turn: ["look", "dump"][turn]) as play:
        lease = row("", 1, extra_info=again)
        rollouts = play.play(lease)
    (rollout,) = rollouts
    assert (rollout.finish_reason, rollout.reward, [t.num_tokens for t in rollout.turns]) == ("length", 2.0, [5, 5])
    assert [bool(sequence.loss_mask[-1]) for sequence in rollout.sequences] == [True] * (2 if again else 1)
    group = Group(
        lease.lease_id, "train", lease.prompt.position, "g", lease.lineage, lease.sampling.temperature, tuple(rollouts)
    )
    assert why_unfit(read_summary(encode_group(group)), lease, newest_version=3) == ""


def die_after_asking(play: Play) -> None:
    """Kill the environment's process once its message is there, and wait until it is gone."""
    (process,) = play.rollouts._pool._processes.values()
    poller = select.poll()
    poller.register(process.channel.socket, select.POLLIN)
    assert poller.poll(30_000)
    os.kill(process.pid, signal.SIGKILL)
    poller.modify(process.channel.socket, select.POLLRDHUP)
    assert poller.poll(30_000)


@pytest.mark.parametrize(
    ("max_new_tokens", "answer"), [(3, "no room for a turn"), (64, "~ has no token"), (64, "it goes on")]
)
def test_an_environment_that_asks_and_dies_fails_its_own_rollout(tmp_path, max_new_tokens: int, answer: str):
    path = tmp_path / "dying.py"
    state = "'~'" if "~" in answer else "state + action + 'x'"
    reset = "def reset(extra_info):\n    return 'start:'\n"
    path.write_text(
        f"{reset}def step(state, action, extra_info):\n    return {{'next_state': {state}, 'reward': 0.0}}\n"
    )
    with playing(str(path), lambda _, __: "go", text=WithoutTilde()) as play:
        lease = row("", 1, max_new_tokens=max_new_tokens)
        play.submit(lease)
        wait_until("the first turn", lambda: (play.rollouts.collect(), play.backend.num_running)[1])
        play.rollouts.take(play.backend.step())
        die_after_asking(play)
        (graded,) = play.finished(lease)
    assert graded.rollout is not None
    assert graded.rollout.finish_reason == "error"
    assert (play.rollouts.num_open, play.backend.num_running) == (0, 0)


def test_a_first_state_that_is_too_long_fails_the_lease_as_a_prompt_that_is_too_long():
    with playing(SAMPLES, lambda _, __: "stop") as play:
        lease = row("", 1)
        lease = replace(lease, sampling=replace(lease.sampling, max_prompt_tokens=4))
        play.submit(lease)
        (graded,) = play.finished(lease)
    assert graded.failure is not None
    assert (graded.rollout, graded.failure.cause) == (None, "prompt_too_long")


def test_a_cancelled_lease_leaves_nothing_in_the_backend_or_in_its_environments():
    with playing(SAMPLES, lambda _, turn: ["go", "stop"][turn]) as play:
        gone, stays = row("", 3), replace(row("", 2), lease_id="b")
        play.submit(gone)
        play.submit(stays)
        wait_until("requests", lambda: (play.rollouts.collect(), play.backend.num_running == 5)[1])
        play.rollouts.cancel("a")
        assert play.backend.num_running == 2
        assert play.rollouts.num_open == 2
        assert len(play.finished(stays)) == 2
    assert {graded.lease.lease_id for graded in play.graded} == {"b"}


def test_progress_grows_with_every_turn():
    with playing(SAMPLES, lambda _, turn: ["go", "go", "stop"][turn]) as play:
        play.submit(row("", 1))
        seen: list[int] = []
        wait_until(
            "the rollout", lambda: (seen.append(play.rollouts.progress().get("a", 10**6)), play.pump(), play.graded)[2]
        )
    assert seen == sorted(seen)
    assert len(set(seen)) >= 4


def test_a_turns_random_numbers_depend_on_seed_index_and_turn_alone():
    seeds: list[dict[str, int]] = []
    for order in (["go", "stop"], ["go", "raise"]):
        with playing(SAMPLES, lambda index, turn, order=order: order[turn] if index else "stop") as play:
            play.play(row("", 2))
        seeds.append({lease.lease_id: lease.seed for lease, _ in play.backend.requests})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 3
