"""Does a critic with rewards of turns learn faster than credit for whole rollouts? A task of two turns, in one process.

    python -m benchmarks.credit

Each turn shows a digit, and the policy must answer with its successor: one token, reward 1. The second turn also pays
luck, normal with deviation ``--luck``, which depends on nothing. Credit for the whole rollout passes the luck on to the
first answer, and so does the reward from a turn to the end. A critic knows the second turn's mean reward, so the first
answer is judged by its own (lambda is 0). What the policy learns in one turn helps it in the other.

All arms have the same model, data per step, optimizer and clipped loss; each batch is sampled one version before it is
trained, as in an asynchronous run. The engine, batches, advantages and critic are those of a run; the queue and the
generators are left out. Printed: the share of right answers in each turn over the last ``LAST`` steps, and over all
steps, mean and standard error over the seeds.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.learner.data.batch import prepare_batch, with_scores
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.loop.critic import train_critic, with_values
from async_rl.learner.losses.advantages import with_advantages
from async_rl.learner.ranks import init_ranks
from async_rl.queue.messages import TakenGroup
from async_rl.records import Group, Prompt, Rollout, TokenSequence, Turn

DIGITS, EQUALS, VOCAB = 4, 4, 8
GROUPS, GROUP_SIZE = 8, 4
LAST = 25
ARMS: dict[str, dict[str, Any]] = {
    "whole rollout (group_norm)": {"loss": {"preset": "ppo_clip", "advantage": "group_norm"}},
    "whole rollout (reinforce_pp)": {"loss": {"preset": "ppo_clip", "advantage": "reinforce_pp"}},
    "turns (per_turn_norm)": {"loss": {"preset": "ppo_clip", "advantage": "per_turn_norm"}},
    "critic (gae)": {
        "loss": {"preset": "ppo", "dual_clip": 3.0},
        "critic": {"lam": 0.0, "lr": 3e-3, "value_clip": 0.0},
    },
    "head on the policy (gae)": {
        "loss": {"preset": "ppo", "dual_clip": 3.0},
        "critic": {"trunk": "policy", "lam": 0.0, "lr": 3e-2, "value_clip": 0.0},
    },
}


def write_model(directory: Path, seed: int) -> Path:
    """A Qwen2 of some thousand random weights and 8 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    config: Any = Qwen2Config(
        vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False, eos_token_id=7,
        **shape,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def config_of(root: Path, model: Path, arm: dict[str, Any], seed: int, num_steps: int) -> Config:
    return parse_config(
        {
            "run": {"dir": str(root / "run"), "seed": seed},
            "model": {"path": str(model)},
            "sampling": {"group_size": GROUP_SIZE, "max_new_tokens": 4, "max_prompt_tokens": 4},
            "learner": {"steps": num_steps, "groups_per_step": GROUPS},
            "optimizer": {"lr": 3e-3},
            "queue": {"max_staleness": 1},
            **arm,
        },
        "the benchmark's config",
    )


@torch.no_grad()
def sampled(model: Any, contexts: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the next token after each of ``contexts`` [R, T], and its logprob in nats."""
    logprobs = model(torch.from_numpy(contexts).long()).logits[:, -1].float().log_softmax(-1).numpy()
    tokens = np.array([rng.choice(VOCAB, p=np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum())
                       for row in logprobs])  # fmt: skip
    return tokens, logprobs[np.arange(len(tokens)), tokens]


def play(model: Any, version: int, rng: np.random.Generator, luck: float) -> tuple[list[TakenGroup], np.ndarray]:
    """Return the groups of a step, and whether each answer is right, bool [rollouts, 2]."""
    first = np.repeat(rng.integers(0, DIGITS, GROUPS), GROUP_SIZE)
    second = rng.integers(0, DIGITS, len(first))
    equals = np.full(len(first), EQUALS)
    one, logprob_1 = sampled(model, np.stack([first, equals], 1), rng)
    two, logprob_2 = sampled(model, np.stack([first, equals, one, second, equals], 1), rng)
    tokens = np.stack([first, equals, one, second, equals, two], 1).astype(np.int32)
    right = np.stack([one == (first + 1) % DIGITS, two == (second + 1) % DIGITS], 1)
    mask = np.array([False, False, True, False, False, True])
    rollouts: list[Rollout] = []
    for index, row in enumerate(tokens):
        logprobs = np.zeros(6, np.float32)
        logprobs[mask] = logprob_1[index], logprob_2[index]
        rewards = right[index] + np.array([0.0, rng.normal(0.0, luck)])
        rollouts.append(Rollout(
            (TokenSequence(row, mask, logprobs, np.where(mask, version, -1).astype(np.int32)),),
            {"environment": float(rewards.sum())}, float(right[index].mean()), "stop",
            turns=tuple(Turn(1, reward, 0.0) for reward in rewards.tolist()),
        ))  # fmt: skip
    groups = [rollouts[start : start + GROUP_SIZE] for start in range(0, len(rollouts), GROUP_SIZE)]
    return [
        TakenGroup(Group("", "train", i, "g", "l", 1.0, tuple(of)), Prompt(i, 0, 0, (), {}), 0.0, version)
        for i, of in enumerate(groups)
    ], right


def run(root: Path, arm: dict[str, Any], seed: int, num_steps: int, luck: float) -> np.ndarray:
    """Train one arm. Return the share of right answers, [steps, turns]."""
    from transformers import AutoModelForCausalLM

    directory = write_model(root / f"model-{seed}", seed)
    config = config_of(root, directory, arm, seed, num_steps)
    engine, rng = FsdpEngine(config, init_ranks(config)), np.random.default_rng(seed)
    model, version = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), 0
    waiting, shares = play(model, 0, rng, luck), []
    for _ in range(num_steps):
        (taken, right), waiting = waiting, play(model, version, rng, luck)
        shares.append(right.mean(0))
        step = prepare_batch(taken, mask_truncated=False, num_updates=1, known_weights=lambda _: True)
        step = with_scores(step, engine, config.loss)
        if engine.critic is not None:
            step = with_values(step, engine.critic)
        step = with_advantages(step, config.loss, version=version, critic=config.critic)
        if engine.critic is not None:
            train_critic(engine.critic, step, num_epochs=1, version=version)
        version += engine.update(step.sequences, version=version).stepped
        model.load_state_dict(dict(engine.gather()))
    engine.close()
    return np.array(shares)


def mean_and_error(values: np.ndarray) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{values.mean():.3f} +- {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--luck", type=float, default=2.0)
    args = parser.parse_args()
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    torch.set_num_threads(1)
    disable_progress_bar()
    set_verbosity_error()
    print(f"{platform.machine()}, 1 thread, torch {torch.__version__}; {args.seeds} seeds, {args.steps} steps of "
          f"{GROUPS * GROUP_SIZE} rollouts, luck {args.luck:g}")  # fmt: skip
    for name, arm in ARMS.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as root:
            found = np.array([run(Path(root), arm, seed, args.steps, args.luck) for seed in range(args.seeds)])
        last, whole = found[:, -LAST:].mean(1), found.mean((1, 2))
        turns = ", ".join(f"turn {turn + 1} {mean_and_error(last[:, turn])}" for turn in (0, 1))
        took = time.monotonic() - began
        print(f"{name:30s} {turns}; all steps {mean_and_error(whole)}  ({took:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
