"""How evenly ranks are loaded in a step, and how long packing it takes. Nothing is trained: the work is arithmetic.

A step is 64 groups of 8 answers whose lengths are log-normal (median 4,000 tokens, sigma 1, cut at 32,768) after a
prompt that the group shares. Ranks run the micro-batches of a round in lockstep, so a step takes the sum over rounds of
the most work of a rank. ``lockstep`` divides it by the mean over ranks, ``of ideal`` by what ranks would need that are
even and repeat no prompt. Balancing by row tokens alone stands beside balancing by work.

    python -m benchmarks.balance
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from async_rl.learner.data.balance import Work
from async_rl.learner.data.packing import MicroBatch, pack
from async_rl.learner.sequences import TrainSequence

NUM_RANKS = 8
NUM_GROUPS = 64
GROUP_SIZE = 8
MEDIAN_TOKENS = 4000.0
SIGMA = 1.0
LONGEST = 32_768

MODELS = {
    # Layers' parameters without embeddings, layers, attention channels, vocabulary times hidden size (Qwen 2.5).
    "0.5B": (357.9e6, 24, 896, 151_936 * 896),
    "1.5B": (1.310e9, 28, 1536, 151_936 * 1536),
    "7B": (6.526e9, 28, 3584, 152_064 * 3584),
}


class Balance(NamedTuple):
    """Figures of one packed step, see the module's docstring; and the number of micro-batches per rank."""

    lockstep: float
    of_ideal: float
    num_rounds: int


def work_of_shape(name: str) -> Work:
    """Return the work of a model of ``MODELS``, as ``engine.work.work_of`` computes it from a loaded one."""
    num_parameters, num_layers, num_channels, head = MODELS[name]
    return Work(prediction=head / num_parameters, pair=2 * num_layers * num_channels / num_parameters)


def make_step(
    *, num_groups: int = NUM_GROUPS, prompt: int = 300, median: float = MEDIAN_TOKENS, sigma: float = SIGMA,
    longest: int = LONGEST, seed: int = 0,
) -> list[TrainSequence]:  # fmt: skip
    """Return the sequences of a step. Tokens are random, except that a group's sequences begin with its prompt."""
    rng = np.random.default_rng(seed)
    sequences: list[TrainSequence] = []
    for _ in range(num_groups):
        prompt_ids = rng.integers(0, 1 << 17, prompt, dtype=np.int32)
        answers = np.exp(rng.normal(np.log(median), sigma, GROUP_SIZE)).astype(int).clip(1, longest - prompt)
        for size in answers.tolist():
            is_sampled = np.arange(prompt + size) >= prompt
            sequences.append(
                TrainSequence(
                    sequence_id=len(sequences),
                    token_ids=np.concatenate([prompt_ids, rng.integers(0, 1 << 17, size, dtype=np.int32)]),
                    loss_mask=is_sampled,
                    behavior_logprobs=np.zeros(prompt + size, np.float32),
                    versions=np.where(is_sampled, 3, -1).astype(np.int32),
                    advantages=np.zeros(prompt + size, np.float32),
                    temperature=1.0,
                )
            )
    return sequences


def balance_of(sequences: Sequence[TrainSequence], work: Work, *, max_tokens: int, by: Work | None = None) -> Balance:
    """Return the figures of a step that is packed for ``NUM_RANKS`` ranks and balanced by ``by`` (unset: ``work``)."""
    parts = pack(sequences, max_tokens=max_tokens, num_ranks=NUM_RANKS, work=work if by is None else by)
    by_rank = np.array([[_work_of_batch(batch, work) for batch in part] for part in parts])
    lockstep = by_rank.max(axis=0).sum() * NUM_RANKS
    [[whole]] = pack(sequences, max_tokens=1 << 40, num_ranks=1)  # repeats no prompt
    return Balance(lockstep / by_rank.sum(), lockstep / _work_of_batch(whole, work), by_rank.shape[1])


def _work_of_batch(batch: MicroBatch, work: Work) -> float:
    if batch.sequence_ids[0] == -1:
        return 0.0
    lengths = np.diff(batch.cu_seqlens).tolist()
    trained = np.bincount(batch.sequence_index, minlength=len(lengths)).tolist()
    return len(batch.token_ids) + sum(map(work.beside, lengths, trained))


def pack_seconds(sequences: Sequence[TrainSequence], *, max_tokens: int, rounds: int = 3) -> float:
    """Return the fewest seconds of processor time that packing took."""
    taken: list[float] = []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        pack(sequences, max_tokens=max_tokens, num_ranks=NUM_RANKS, work=work_of_shape("0.5B"))
        taken.append(time.process_time() - start)
    return min(taken)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{NUM_RANKS} ranks; mean of three seeds: lockstep, of ideal, micro-batches per rank")
    print(f"{'model':6} {'max_tokens':>10} {'prompt':>6}   {'by row tokens':22} {'by work':22}")
    for name in MODELS:
        work = work_of_shape(name)
        for max_tokens, prompt, median in ((32_768, 300, 4000.0), (65_536, 300, 4000.0), (32_768, 8000, 500.0)):
            steps = [make_step(prompt=prompt, median=median, seed=seed) for seed in range(3)]
            rows = [
                np.mean([balance_of(step, work, max_tokens=max_tokens, by=by) for step in steps], axis=0)
                for by in (Work(), None)
            ]
            cells = "   ".join(f"{row[0]:6.3f} {row[1]:6.3f} {row[2]:6.1f}" for row in rows)
            print(f"{name:6} {max_tokens:10,} {prompt:6,}   {cells}")
    many = make_step(num_groups=12_500, prompt=50, median=200.0, sigma=0.5, longest=1000)
    num_tokens = sum(len(sequence.token_ids) for sequence in many)
    for max_tokens, what in ((16_384, "many to a micro-batch"), (1000, "three to a micro-batch")):
        seconds = pack_seconds(many, max_tokens=max_tokens)
        print(
            f"packing {len(many):,} sequences of {num_tokens:,} tokens, {what}: {seconds:.2f} s, "
            f"{1e6 * seconds / len(many):.1f} us a sequence, {1e9 * seconds / num_tokens:.1f} ns a token"
        )


if __name__ == "__main__":
    main()
