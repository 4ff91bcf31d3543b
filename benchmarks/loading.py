"""How much memory a rank of the learner needs to load a model that is sharded, and how long it takes.

A model with random weights in bfloat16 files, whose float32 parameters have ``--gigabytes``, is loaded by ``--ranks``
processes on the CPU (gloo), without its optimizer: by ``FsdpEngine`` as it is, where every rank reads its own shard,
and with the whole model on every rank, which is then sharded. Prints for each rank the largest growth of its anonymous
memory (RssAnon of /proc/self/status) over that before the engine, and what it should be at most: the shard, the largest
FSDP group and 200 MB. Linux only. The second way needs ``ranks * gigabytes`` of memory; ``--ways shards`` omits it.

    python -m benchmarks.loading [--gigabytes 2] [--ranks 4] [--ways shards whole]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

MB = 1_000_000
ALLOWANCE_BYTES = 200 * MB
_LAYER: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
_LAYER_PARAMETERS = 4 * 1024**2 + 3 * 1024 * 4096
_VOCABULARY = 32_768


class PeakAnon:
    """The largest anonymous memory of this process, sampled by a thread from its start on.

    Attributes:
        start_bytes: at the start.
        peak_bytes: the largest so far.
    """

    def __init__(self, interval_s: float = 0.002) -> None:
        self.start_bytes = self.peak_bytes = anonymous_bytes()
        self._interval_s, self._stopping = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def growth(self) -> int:
        """Stop and return the growth to the peak, bytes."""
        self._stopping.set()
        self._thread.join()
        return self.peak_bytes - self.start_bytes

    def _sample(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """Return the resident memory of this process that no file has, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def write_model(directory: Path, num_bytes: int, *, vocabulary: int = _VOCABULARY) -> tuple[int, int]:
    """Write a Qwen2 with random weights into bfloat16 files. Return the float32 bytes of all of it, and of its largest
    FSDP group.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    root = 2 * vocabulary * _LAYER["hidden_size"]
    num_layers = max(2, round((num_bytes / 4 - root) / _LAYER_PARAMETERS))
    config = Qwen2Config(vocab_size=vocabulary, num_hidden_layers=num_layers, tie_word_embeddings=False, **_LAYER)
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return 4 * sum(p.numel() for p in model.parameters()), 4 * max(root, _LAYER_PARAMETERS)


def load(model: str, way: str) -> NoReturn:
    """Load ``model`` on this rank, print its growth and time as JSON, and end before the optimizer is built."""
    from async_rl.config.loading import parse_config
    from async_rl.learner.engine import fsdp_engine, loading, trained_model
    from async_rl.learner.ranks import init_ranks

    config = parse_config({"run": {"dir": f"{model}/run"}, "model": {"path": model}}, "the benchmark")
    if way == "whole":
        loading.open_model = lambda section: (loading.load_model(section), None)
    ranks = init_ranks(config)
    began, peak = time.monotonic(), PeakAnon()

    def finish(*arguments: object) -> NoReturn:
        ranks.barrier()
        print(json.dumps([peak.growth(), time.monotonic() - began]), flush=True)
        os._exit(0)

    trained_model.build_optimizer = finish
    fsdp_engine.FsdpEngine(config, ranks)
    raise AssertionError("the engine has built no optimizer")


def run_ranks(model: Path, way: str, num_ranks: int) -> list[tuple[int, float]]:
    """Return each rank's growth in bytes, and its time in seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "benchmarks.loading", "--rank-of", str(model), "--ways", way]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=shared | {"RANK": r, "LOCAL_RANK": r})
        for r in map(str, range(num_ranks))
    ]
    outputs = [process.communicate()[0] for process in processes]
    return [tuple(json.loads(output.splitlines()[-1])) for output in outputs]


def main() -> None:
    """Print both ways, rank by rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the float32 parameters")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ways", nargs="+", choices=("shards", "whole"), default=["shards", "whole"])
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        load(options.rank_of, options.ways[0])
    with tempfile.TemporaryDirectory() as directory:
        num_bytes, group_bytes = write_model(Path(directory), int(options.gigabytes * 1e9))
        limit = num_bytes / options.ranks + group_bytes + ALLOWANCE_BYTES
        print(
            f"model {num_bytes / MB:.0f} MB in float32, {options.ranks} ranks: shard "
            f"{num_bytes / options.ranks / MB:.0f} MB, largest group {group_bytes / MB:.0f} MB, at most "
            f"{limit / MB:.0f} MB a rank"
        )
        for way in options.ways:
            results = run_ranks(Path(directory), way, options.ranks)
            grown = " ".join(f"{growth / MB:6.0f}" for growth, _ in results)
            worst = max(growth for growth, _ in results)
            print(
                f"{way:7s} growth MB by rank {grown}; {worst / limit:.2f} of the limit, {worst / num_bytes:.2f} of the "
                f"model; {max(seconds for _, seconds in results):.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
