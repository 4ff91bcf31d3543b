"""How fast is ``async-rl sft`` beside TRL's ``SFTTrainer`` with packing? The same rows, steps that alternate.

TRL packs the rows of a dataset into sequences of ``max_length`` tokens. A round takes the next of these, and both sides
make one optimizer step on the rows in them, in float32 with AdamW. Both run in this process, with the same threads. The
first round does not count. Printed are trained tokens per second of both, and how many times as long TRL takes: by the
clock, and in processor seconds, which other programs on the machine change less.

    nice .venv/bin/python -m benchmarks.sft [--rounds 5] [--vocabulary 32000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

from async_rl.data.chat import load_tokenizer, quiet_progress_bars
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.losses.objective import SupervisedObjective
from async_rl.learner.offline.rows import train_sequence
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.tiny import tiny_config, tiny_model

MAX_LENGTH, NUM_ROWS, PACKS_PER_STEP = 512, 400, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=32000)
    options = parser.parse_args()
    quiet_progress_bars()
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    print(f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _write_model(root / "model", options.vocabulary)
        trainer = _trainer(root, options.vocabulary)
        config = tiny_config(root, "model", learner={"max_tokens": 4096}, optimizer={"weight_decay": 0.0})
        engine = FsdpEngine(config, init_ranks(config), objective=SupervisedObjective(), max_length=MAX_LENGTH)
        _compare(trainer, engine, options.rounds)


def _write_model(directory: Path, vocabulary: int) -> None:
    """A Qwen2 of 4 layers, 256 wide."""
    tiny_model(directory)  # for the tokenizer
    shape = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(shape).save_pretrained(directory)


def _trainer(root: Path, vocabulary: int) -> Any:
    """TRL's trainer with packed rows of log-normal lengths, two thirds of each an answer."""
    generator = np.random.default_rng(0)
    sizes = np.clip(generator.lognormal(4.6, 0.8, NUM_ROWS), 8, MAX_LENGTH).astype(int)
    rows = [
        {
            "input_ids": generator.integers(4, vocabulary, size).tolist(),
            "completion_mask": [int(place >= size // 3) for place in range(size)],
        }
        for size in sizes.tolist()
    ]
    args = SFTConfig(
        output_dir=str(root / "trl"), report_to="none", use_cpu=True, bf16=False, packing=True, max_length=MAX_LENGTH,
        per_device_train_batch_size=PACKS_PER_STEP, gradient_checkpointing=False, completion_only_loss=True,
        disable_tqdm=True,
    )  # fmt: skip
    return SFTTrainer(
        str(root / "model"), args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=load_tokenizer(str(root / "model")),
    )  # fmt: skip


def _compare(trainer: Any, engine: FsdpEngine, rounds: int) -> None:
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-4, weight_decay=0.0)
    packs = list(trainer.train_dataset)
    trainer.model.train()
    times: list[tuple[float, ...]] = []
    for number in range(rounds + 1):
        chosen = [packs[(number * PACKS_PER_STEP + i) % len(packs)] for i in range(PACKS_PER_STEP)]
        batch = _rows_of(chosen)
        began, began_cpu = time.perf_counter(), time.process_time()
        stats = engine.update(batch, version=0)
        between, between_cpu = time.perf_counter(), time.process_time()
        inputs = trainer._prepare_inputs(trainer.data_collator(chosen))
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ended, ended_cpu = time.perf_counter(), time.process_time()
        if not number:
            print(
                f"first loss: ours {stats.loss:.5f}, TRL {loss.item():.5f}; {stats.tokens_trained} tokens", flush=True
            )
            continue
        own_s, other_s, own_cpu_s = between - began, ended - between, between_cpu - began_cpu
        times.append((other_s / own_s, (ended_cpu - between_cpu) / own_cpu_s))
        tokens = stats.tokens_trained
        print(
            f"round {number}: ours {tokens / own_s:.0f} tokens/s, TRL {tokens / other_s:.0f}: {times[-1][0]:.2f} times "
            f"by the clock, {times[-1][1]:.2f} times the processor seconds",
            flush=True,
        )
    by_clock, by_cpu = (median(of) for of in zip(*times, strict=True))
    print(f"medians: {by_clock:.2f} times by the clock, {by_cpu:.2f} times the processor seconds")


def _rows_of(packs: Sequence[dict[str, Any]]) -> list[TrainSequence]:
    """Return the rows that TRL has packed."""
    rows: list[TrainSequence] = []
    for pack in packs:
        labels = np.array(pack["labels"] if "labels" in pack else pack["completion_mask"])
        trained = labels != -100 if "labels" in pack else labels > 0
        for start, end in pairwise([0, *accumulate(pack["seq_lengths"])]):
            mask = trained[start:end].copy()
            mask[:1] = False
            rows.append(train_sequence(len(rows), pack["input_ids"][start:end], mask))
    return rows


if __name__ == "__main__":
    main()
