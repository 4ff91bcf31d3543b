"""What rank processes of the tests do."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.config.config import Config
from async_rl.config.learner import OptimizerName
from async_rl.config.parallel import Layout
from async_rl.errors import RunError, TrainingError
from async_rl.learner.checkpoints import stored_tensors
from async_rl.learner.checkpoints.digests import write_part
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.interface import UpdateStats
from async_rl.learner.layouts.mesh import Mesh
from async_rl.learner.ranks import Ranks, init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.tiny import random_sequences, tiny_config, with_behavior

# Budgets that leave one rank idle, split unevenly, and take everything at once.
VARIANTS: dict[str, dict[str, Any]] = {
    "small": {"learner": {"max_tokens": 32}},
    "large": {"learner": {"max_tokens": 4096}},
    "kept for a micro-batch": {"learner": {"max_tokens": 32, "reshard": "after_backward"}},
    "kept for a step": {"learner": {"max_tokens": 32, "reshard": "none"}},
    "recomputed": {"learner": {"max_tokens": 64}, "model": {"gradient_checkpointing": "full"}},
    "recomputed in part": {"learner": {"max_tokens": 64}, "model": {"gradient_checkpointing": "selective"}},
    "shared": {
        "learner": {"max_tokens": 16, "reshard": "none"}, "model": {"gradient_checkpointing": "selective"},
        "parallel": {"sequence": 2},
    },
}  # fmt: skip
# The first moment is then the gradient itself, and nothing is clipped away.
PLAIN = {"optimizer": {"lr": 1e-3, "betas": [0.0, 0.999], "max_grad_norm": 1e9, "schedule": "cosine"}}


OWN_LOSS = Path(__file__).resolve().parents[2] / "examples" / "own_loss.py"

# What a step's gradient depends on differs: each adds its own sums over tokens, sequences and the step.
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo with KL in the loss": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo"},
    "reinforce with entropy": {"preset": "reinforce", "entropy_coef": 0.1},
    "gspo": {"preset": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "cispo, tokens in a range": {"preset": "cispo", "token_range": [0.8, 1.3]},
    "decoupled_ppo": {"preset": "decoupled_ppo", "clip_low": 0.05, "clip_high": 0.05, "importance_cap": 1.1},
    "gmpo": {"preset": "gmpo", "clip_low": 0.05, "clip_high": 0.05},
    "dppo and a sequence mask": {"preset": "dppo_tv", "rules": [
        {"level": "token", "statistic": "tv", "above": 0.001, "when": "outward", "action": "clip"},
        {"level": "sequence", "statistic": "abs_log_ratio", "above": 0.1, "when": "negative"}]},
    "decoupled_ppo, interpolated": {"preset": "decoupled_ppo", "anchor": "interpolated", "clip_high": 0.05},
    "a loss of the user's own": {"function": f"{OWN_LOSS}:dapo", "clip_low": 0.05, "clip_high": 0.05},
}  # fmt: skip
GUARDED = {"min_ess": 0.999}
"""Off-policy sequences never reach it, so the step is skipped."""
VERSION = 3
"""The learner's, where tokens are of versions 0 to 3."""


def loss_config(directory: Path, loss: dict[str, Any], **learner: Any) -> Config:
    """A step that reports its gradient (PLAIN) and moves no weight: 1e-30 is lost beside any of them."""
    reference = {"kl_reference": str(directory / "reference")} if loss.get("preset") == "grpo" else {}
    optimizer = PLAIN["optimizer"] | {"lr": 1e-30}
    return tiny_config(directory, "model", optimizer=optimizer, loss=loss | reference, learner=learner)


def off_policy_sequences() -> list[TrainSequence]:
    """Seven of 10 to 30 tokens, of versions 0 to 3, with advantages of both signs.

    The first three have one prompt; number 3 is far above the skip threshold; number 5 is masked. Proximal logprobs
    lie about the behavior logprobs.
    """
    generator = np.random.default_rng(0)
    sequences = [_aged(s, generator) for s in random_sequences(7, 20, spread=10)]
    prompt = sequences[0].token_ids[: int(sequences[0].loss_mask.argmax())]
    sequences[1:3] = [_with_prompt(s, prompt) for s in sequences[1:3]]
    sequences[3] = replace(with_behavior(sequences[3], -12.0), proximal_logprobs=sequences[3].proximal_logprobs)
    sequences[5] = replace(sequences[5], loss_mask=np.zeros_like(sequences[5].loss_mask))
    return sequences


def _aged(sequence: TrainSequence, generator: np.random.Generator) -> TrainSequence:
    size = len(sequence.token_ids)
    proximal = sequence.behavior_logprobs + generator.normal(0.0, 0.2, size)
    versions = np.sort(generator.integers(0, VERSION + 1, size))
    return replace(sequence, versions=versions.astype(np.int32), proximal_logprobs=proximal.astype(np.float32))


def _with_prompt(sequence: TrainSequence, prompt: np.ndarray) -> TrainSequence:
    """``sequence`` with its first tokens replaced; at least one stays trained on."""
    size = min(len(prompt), len(sequence.token_ids) - 1)
    token_ids = sequence.token_ids.copy()
    token_ids[:size] = prompt[:size]
    return replace(sequence, token_ids=token_ids, loss_mask=np.arange(len(token_ids)) >= size)


def sequences_with_a_group() -> list[TrainSequence]:
    """Six of 6 to 18 tokens, the first three with one prompt."""
    sequences = random_sequences(6, 12, spread=6)
    prompt = sequences[0].token_ids[: int(sequences[0].loss_mask.argmax())]
    return [sequences[0], *(_with_prompt(s, prompt) for s in sequences[1:3]), *sequences[3:]]


def padded_config(directory: Path, sections: dict[str, Any]) -> Config:
    """A step that reports its gradient (PLAIN), in several micro-batches."""
    learner = {"max_tokens": 40} | sections.get("learner", {})
    return tiny_config(directory, "model", **(PLAIN | sections | {"learner": learner}))


def sharded(directory: Path) -> None:
    """One step of any model: its statistics, its checkpoint, and what the learner then publishes."""
    config = padded_config(directory, {})
    ranks = init_ranks(config)
    engine = FsdpEngine(config, ranks)
    if leads(engine):
        engine.self_test()
        stats = engine.update(sequences_with_a_group(), version=0)
        save(engine, directory / f"ranks_{ranks.world_size}", 1)
        published = {name: tensor.detach().clone() for name, tensor in engine.gather()}
        torch.save((stats.loss, stats.grad_norm, published), directory / f"published_{ranks.world_size}")
        stop_following(engine)
    ranks.close()


def routed(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """``sequences`` with random routes through 3 layers, 2 of 8 experts in each."""
    generator = np.random.default_rng(0)

    def routes(num_tokens: int) -> np.ndarray:
        ranked = generator.random((num_tokens, 3, 8)).argsort(axis=-1)
        return ranked[..., :2].astype(np.uint8)

    return [replace(s, routes=routes(len(s.token_ids) - 1)) for s in sequences]


def routed_config(directory: Path, **sections: Any) -> Config:
    """A step that reports its gradient (PLAIN), with routing replay."""
    plain = PLAIN | {"generator": {"backend": "transformers"}, "model": {"routing_replay": True}}
    merged = {name: plain.get(name, {}) | sections.get(name, {}) for name in plain.keys() | sections.keys()}
    return tiny_config(directory, "model", **merged)


BALANCED: dict[str, dict[str, Any]] = {
    "shards": {}, "experts": {"experts": 2}, "tensor": {"tensor": 2}, "parts": {"sequence": 2},
}  # fmt: skip
"""Layouts of two ranks: the section ``parallel``."""


def balanced_config(directory: Path, **sections: Any) -> Config:
    """A step that reports its gradient (PLAIN) with the load-balancing loss, each sequence in its own micro-batch."""
    own = {"loss": {"load_balancing_coef": 0.1}, "learner": {"max_tokens": 18 // sections.pop("num_parts", 1)}}
    return tiny_config(directory, "model", **(PLAIN | own | sections))


def balanced(directory: Path) -> None:
    """Under each layout one step with the load-balancing loss, saved."""
    ranks = init_ranks(balanced_config(directory))
    for name, parallel in BALANCED.items():
        model = {"gradient_checkpointing": "full"}
        num_parts = parallel.get("sequence", 1)
        config = balanced_config(directory, model=model, parallel=parallel, num_parts=num_parts)
        engine = laid_out_engine(config, ranks)
        if not leads(engine):
            continue
        stats = engine.update(random_sequences(5, 14, spread=3), version=0)
        save(engine, directory / name, 1)
        torch.save((stats.balance_loss, stats.expert_load), directory / name / "balance.pt")
        stop_following(engine)
    ranks.close()


def engine_config(directory: Path, variant: dict[str, Any]) -> Any:
    return tiny_config(directory, "model", **(PLAIN | variant))


def batch_for(step: int) -> list[Any]:
    """Seven sequences of 10 to 30 tokens; number 3 is far above the skip threshold."""
    sequences = random_sequences(7, 20, seed=step, spread=10)
    sequences[3] = with_behavior(sequences[3], -12.0)
    return sequences


def plain_stats(stats: UpdateStats) -> dict[str, Any]:
    """For JSON."""
    arrays = {"by_lag": stats.by_lag.tolist(), "expert_load": stats.expert_load.tolist()}
    return asdict(replace(stats, tokens={})) | arrays


class CountedGathers(TorchDispatchMode):
    """Counts the gathers of FSDP groups while it is active."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather_base" in str(func)
        return func(*args, **(kwargs or {}))


BROKEN = "broken"
"""Name of a checkpoint that the ranks other than 0 can't write."""


def failing_write_part(directory: Path, rank: int, paths: Iterable[Path]) -> None:
    if directory.name == BROKEN:
        raise OSError(28, "No space left on device")
    write_part(directory, rank, paths)


def updates(directory: Path) -> None:
    """For every variant two steps, the second on one sequence alone, saved.

    ``gathers.json`` has the first step's number of micro-batches of a rank, and of gathers of parameters.
    """
    ranks = init_ranks(engine_config(directory, {}))
    for name, variant in VARIANTS.items():
        config = engine_config(directory, variant)
        engine = laid_out_engine(config, ranks)
        if not ranks.is_leader:
            stored_tensors.write_part = failing_write_part
            follow_once(engine)
            continue
        engine.tick()
        with CountedGathers() as gathers:
            stats = [engine.update(batch_for(0), version=0)]
        target = directory / "two" / name
        (target / "first").mkdir(parents=True)
        (target / "gathers.json").write_text(json.dumps([len(engine.policy.pack(batch_for(0))[0]), gathers.count]))
        saving = engine.begin_save(target / "first", {"step": 1})
        stats.append(engine.update(batch_for(1)[:1], version=0))  # meanwhile
        saving.result()
        save(engine, target / "second", 2)
        (target / "stats.json").write_text(json.dumps([plain_stats(s) for s in stats]))
        if name == "small":
            (target / BROKEN).mkdir()
            try:
                engine.begin_save(target / BROKEN, {}).result()
            except RunError as error:
                (directory / "two" / "write_error.txt").write_text(str(error))
        stop_following(engine)
    ranks.layout = Layout.of(engine_config(directory, {}).parallel, ranks.world_size)
    fail_between_commands(directory, FsdpEngine(engine_config(directory, {}), ranks))


def losses(directory: Path, sequence_size: int = 1) -> None:
    """For every loss one step on off-policy sequences, then one on two of them, one masked: other ranks are idle.

    Writes gradients and statistics by loss, and the scores of both models, into ``ranks_<world size>``, with a budget
    that makes several micro-batches a rank.
    """
    from async_rl.learner.losses.objective import policy_objective

    # The loss that loads a reference.
    config = loss_config(directory, LOSSES["grpo with KL in the loss"], max_tokens=40)
    ranks = init_ranks(config)
    if sequence_size > 1:
        ranks.layout = Layout(sequence=sequence_size)
    engine = FsdpEngine(config, ranks)
    target = directory / f"{'parts' if sequence_size > 1 else 'ranks'}_{ranks.world_size}"
    target.mkdir(exist_ok=True)
    for name, loss in {**LOSSES, "guarded": GUARDED}.items():
        engine.policy.objective = policy_objective(loss_config(directory, loss))
        for chosen in (range(7), (0, 5)):
            stem = target / f"{name}, {len(chosen)}"
            if leads(engine):
                sequences = with_reference(engine, off_policy_sequences())
                stats = engine.update([sequences[i] for i in chosen], version=VERSION)
                stem.with_suffix(".json").write_text(json.dumps(plain_stats(stats)))
                if name == "dapo":
                    np.savez(target / "policy.npz", **by_name(engine.score(sequences, of="policy")))
                    np.savez(target / "reference.npz", **by_name(engine.score(sequences, of="reference")))
                    entropies = {i: scores.entropies for i, scores in engine.score_policy(sequences).items()}
                    np.savez(target / "entropies.npz", **by_name(entropies))
                stop_following(engine)
            tensors: dict[str, Any] = engine.policy.optimizer.tensors()
            whole = {name: tensor.full_tensor().numpy() for name, tensor in tensors.items()}
            if ranks.is_leader:
                np.savez(stem.with_suffix(".npz"), **whole)
    ranks.close()


def split_losses(directory: Path) -> None:
    """As ``losses``, by two ranks that share every sequence. Writes into ``parts_2``."""
    losses(directory, sequence_size=2)


def leaving(directory: Path) -> None:
    """Rank 1 is done first. Rank 0 checks that it has not left, and is done."""
    ranks = init_ranks(tiny_config(directory, "model"))
    if ranks.is_leader:
        assert ranks._store is not None
        ranks._store.wait(["done_1"], timedelta(seconds=60))
        assert not (directory / "left_1").exists()
    ranks.close()
    (directory / f"left_{ranks.rank}").touch()


def loading(directory: Path) -> None:
    """Build an engine, and stop before it has an optimizer. Writes by how much the anonymous memory has grown."""
    from async_rl.learner.engine import fsdp_engine, trained_model
    from tests.learner.loaded import PeakAnon

    config = tiny_config(directory, "model", parallel=json.loads((directory / "parallel.json").read_text()))
    ranks = init_ranks(config)
    peak = PeakAnon()

    def write(*arguments: object) -> None:
        (directory / f"growth_{ranks.rank}.json").write_text(json.dumps(peak.growth()))

    trained_model.build_optimizer = write
    fsdp_engine.FsdpEngine(config, ranks)
    ranks.close()


LORA = {"rank": 4, "alpha": 8.0}


def adapted_config(directory: Path, variant: dict[str, Any]) -> Config:
    """Adapters, a KL to the model that the run began from, and steps that are large beside rounding."""
    loss = {"preset": "grpo", "kl_coef": 0.1}
    lora = LORA | variant.get("lora", {})
    return tiny_config(directory, "model", **{"loss": loss, "optimizer": {"lr": 1e-2}} | variant | {"lora": lora})


def with_reference(engine: Any, sequences: list[TrainSequence]) -> list[TrainSequence]:
    """``sequences`` with the reference's logprobs, as the engine scores them."""
    scored = []
    of_id = {sequence.sequence_id: sequence for sequence in sequences}
    for sequence_id, logprobs in engine.score(sequences, of="reference").items():
        sequence = of_id[sequence_id]
        along = np.zeros(len(sequence.token_ids), dtype=np.float32)
        along[sequence.loss_mask] = logprobs
        scored.append(replace(sequence, reference_logprobs=along))
    return sorted(scored, key=lambda s: s.sequence_id)


def by_name(logprobs: Mapping[int, np.ndarray]) -> dict[str, Any]:
    return {str(sequence_id): values for sequence_id, values in logprobs.items()}


def fail_between_commands(directory: Path, engine: Any) -> None:
    """Rank 0 gives up with a cause; what the other rank hears goes to ``two/cause.txt``."""
    if engine._ranks.is_leader:
        engine.close("StaleRolloutError: group 5f3a is too old")
        return
    try:
        engine.follow()
    except TrainingError as error:
        (directory / "two" / "cause.txt").write_text(str(error))


def save(engine: Any, directory: Path, step: int) -> None:
    directory.mkdir(parents=True)
    engine.save(directory, {"step": step})


def laid_out_engine(config: Config, ranks: Ranks, **settings: Any) -> FsdpEngine:
    """An engine under the layout that ``config`` names."""
    ranks.layout = Layout.of(config.parallel, ranks.world_size)
    return FsdpEngine(config, ranks, **settings)


def leads(engine: Any) -> bool:
    """Whether this rank leads. Another one follows until ``stop_following``."""
    if not engine._ranks.is_leader:
        follow_once(engine)
    return engine._ranks.is_leader


def follow_once(engine: Any) -> None:
    """Follow until ``stop_following``, and keep the process group for the next engine."""
    engine._ranks.close, kept = (lambda: None), engine._ranks.close
    engine.follow()
    engine._ranks.close = kept


def stop_following(engine: Any) -> None:
    """The other ranks' ``follow_once`` returns; the engine may be used on."""
    engine._ranks.close, kept = (lambda: None), engine._ranks.close
    engine.close()
    engine._ranks.close, engine._is_closed = kept, False


def ranks_with_timeout(directory: Path, timeout_s: float) -> Ranks:
    return init_ranks(tiny_config(directory, "model", experimental={"distributed_timeout_s": timeout_s}))


def talking(directory: Path) -> None:
    """Frames of different sizes out and back; then rank 0 waits longer than the timeout, ticking."""
    ranks = ranks_with_timeout(directory, 2.0)
    outgoing = [bytes([rank]) * (1 + 1000 * rank) for rank in range(ranks.world_size)]
    own = ranks.scatter(outgoing) if ranks.is_leader else ranks.receive()
    assert own == outgoing[ranks.rank]
    assert ranks.gather(own) == (outgoing if ranks.is_leader else [])
    if ranks.is_leader:
        for _ in range(5):
            threading.Event().wait(0.5)
            ranks.broadcast(b"tick")
        ranks.broadcast(b"close")
    else:
        while ranks.receive() != b"close":
            pass
    ranks.close()


def follower_fails(directory: Path) -> None:
    """Rank 1 fails in the middle of a step; rank 0 is in the step's collective by then."""
    ranks = ranks_with_timeout(directory, 60.0)
    with ranks.together("update"):
        if ranks.rank == 1:
            raise ValueError("no memory left on device 1")
        ranks.all_reduce_sum(torch.zeros(1))


def follower_is_killed(directory: Path) -> None:
    ranks = ranks_with_timeout(directory, 60.0)
    with ranks.together("update"):
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.all_reduce_sum(torch.zeros(1))


def group_with_a_silent_rank(directory: Path) -> None:
    """Rank 3 of two times two hangs. Rank 2, which shares a layer with it, must not wait for torch's half an hour."""
    ranks = ranks_with_timeout(directory, 2.0)
    mesh = Mesh.build(Layout(shards=2, tensor=2), "cpu", ranks.timeout)
    assert mesh.tensor is not None
    ranks.all_reduce_sum(torch.zeros(1))
    if ranks.rank == 3:
        signal.pause()
    with ranks.together("update"):
        dist.all_reduce(torch.ones(1), group=mesh.tensor.get_group())
        ranks.all_reduce_sum(torch.zeros(1))


def offline(directory: Path) -> None:
    from tests.extensions.offline.offline_run import start

    start(directory)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    f"{name}, {what}": {"optimizer": {"name": name, "lr": 1e-2}, **sections}
    for name in get_args(OptimizerName)
    if name != "adamw"
    for what, sections in {"all weights": {}, "adapters": {"lora": LORA}}.items()
}


def optimized(directory: Path) -> None:
    """With every optimizer two steps, the second once more from the checkpoint between them.

    One rank loads it into a new engine. Two ranks also save the state that they load from one rank. Each checkpoint's
    tensors are written as ``ranks_<world size>/<case>/<name>.pt``.
    """
    ranks = init_ranks(tiny_config(directory, "model"))
    for name, sections in OPTIMIZERS.items():
        engine = FsdpEngine(tiny_config(directory, "model", **sections), ranks)
        if not leads(engine):
            continue
        target = directory / f"ranks_{ranks.world_size}" / name
        engine.update(batch_for(0), version=0)
        save(engine, target / "first", 1)
        engine.update(batch_for(1), version=1)
        save(engine, target / "second", 2)
        if ranks.world_size == 1:
            engine = FsdpEngine(tiny_config(directory, "model", **sections), ranks)
        engine.load(target / "first")
        engine.update(batch_for(1), version=1)
        save(engine, target / "resumed", 2)
        if ranks.world_size > 1:
            engine.load(directory / "ranks_1" / name / "first")
            save(engine, target / "of_one", 1)
        stop_following(engine)
        for path in list(target.iterdir()):
            torch.save(stored_tensors.load_tensors(path, ""), path.with_suffix(".pt"))
    ranks.close()


ELSEWHERE = {
    "resumed": "resumed_run.start", "laid_out": "rank_layouts.run_cases",
    "passed_on": "rank_layouts.pass_on",
    "split_attention": "model.split_attention.compare_parts", "variants": "engine.shared_cases.run_variants",
    "staged": "layouts.staged.run_staged", "stopped": "stopped_ranks.start",
}  # fmt: skip
"""Scenario -> the function of another module here, which imports this one."""


def run_scenario(name: str, directory: Path) -> None:
    """The body of a rank's process."""
    torch.set_num_threads(1)  # the library read OMP_NUM_THREADS before the fork
    if name in ELSEWHERE:
        module, _, function = ELSEWHERE[name].rpartition(".")
        getattr(import_module(f"tests.learner.{module}"), function)(directory)
    else:
        globals()[name](directory)
