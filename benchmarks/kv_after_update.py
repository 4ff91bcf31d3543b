"""What it costs to keep keys and values across a swap of weights, apart from policy staleness.

``python -m benchmarks.kv_after_update MODEL [--backend vllm]`` samples with a small model, swaps weights in the middle
for those of one AdamW step later, and scores every token by a full forward pass of the very version that sampled it.
What differs then is due to the cache alone: policy staleness is 0 by construction. Beside it, what policy staleness
of one version does to the same tokens.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.config.loading import parse_config
from async_rl.data.chat import model_files
from async_rl.data.dataset import load_rows
from async_rl.generator.backend import Backend, Sampled
from async_rl.generator.start.backends import build_backend
from async_rl.generator.start.worker import write_files
from async_rl.records import Lease, Prompt, Sampling

GROUP_SIZE = 8
MAX_RUNNING = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory, say runs/quickstart-task/seed-0/warm_start")
    parser.add_argument("--data", help="prompts, JSONL; none: train.jsonl beside the model's directory")
    parser.add_argument("--backend", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--lr", type=float, default=1e-4, help="of the step between the two versions")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Path(options.data or Path(options.model).parent / "train.jsonl")
    rows = load_rows(str(data)).rows[: options.groups]
    prompts = [Prompt(i, i, 0, row.messages, row.reward_data) for i, row in enumerate(rows)]
    old = load_model(options.model)
    table: list[tuple[str, np.ndarray, float]] = []
    new = None
    for after_update in ("keep", "recompute"):
        with tempfile.TemporaryDirectory() as directory:
            write_files(Path(directory), model_files(options.model))
            backend = build_backend(make_config(options, after_update), Path(directory))
            backend.activate(0, dict(old.named_parameters()))
            if new is None:
                new = stepped(options.model, sample_over_swap(backend, prompts, options, None)[0], lr=options.lr)
            weights = {name: parameter.detach() for name, parameter in new.named_parameters()}
            samples, pause_s = sample_over_swap(backend, prompts, options, weights)
            backend.close()
        swapped = [s for s in samples if set(s.versions.tolist()) == {0, 1}]
        table.append((after_update, of_cache(new, swapped), pause_s))
        if after_update == "recompute":
            table.append(("policy staleness 1", of_policy(old, new, swapped), math.nan))
    print(f"{options.backend}, one AdamW step of {options.lr:g}; nats")
    print(f"{'':20} {'tokens':>7} {'mean |d|':>9} {'p99 |d|':>9} {'max |d|':>9} {'k3':>9} {'pause':>9}")
    for name, delta, pause_s in table:
        size, k3 = np.abs(delta), np.exp(delta) - 1 - delta
        print(
            f"{name:20} {len(delta):7} {size.mean():9.2e} {np.quantile(size, 0.99):9.2e} {size.max():9.2e} "
            f"{k3.mean():9.2e} {pause_s * 1e3:6.1f} ms"
        )


def make_config(options: argparse.Namespace, after_update: str) -> Any:
    raw = {
        "run": {"dir": "unused"},
        "model": {"path": options.model},
        "sampling": {"max_new_tokens": options.max_new_tokens, "max_prompt_tokens": 64},
        "generator": {
            "backend": options.backend,
            "batch_size": MAX_RUNNING,
            "kv_after_update": after_update,
            "num_threads": 1,
        },
        "experimental": {"vllm": {"kv_cache_bytes": 256 << 20}},
    }
    return parse_config(raw, "the benchmark")


def load_model(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def sample_over_swap(
    backend: Backend, prompts: Iterable[Prompt], options: argparse.Namespace, weights: Mapping[str, Any] | None
) -> tuple[list[Sampled], float]:
    """A group a prompt; ``weights`` become version 1 once a quarter of the first slots' tokens are sampled.

    The pause in seconds beside the samples; NaN without ``weights``.
    """
    sampling = Sampling(1.0, 1.0, 0, options.max_new_tokens, 64, ())
    for prompt in prompts:
        lease = Lease(f"{prompt.position}", "train", prompt, GROUP_SIZE, sampling, "", 0, 0, 0, prompt.position)
        backend.submit(lease, backend.encode_prompt(prompt.messages))
    enough = backend.num_tokens + MAX_RUNNING * options.max_new_tokens // 4
    finished: list[Sampled] = []
    pause_s = math.nan
    while backend.num_running:
        finished += backend.step()
        if weights is not None and backend.version == 0 and backend.num_tokens >= enough:
            pause_s = backend.activate(1, weights)
    return finished, pause_s


def stepped(path: str, samples: Iterable[Sampled], *, lr: float) -> Any:
    """The model one AdamW step later, by a policy gradient with advantages of 1 and -1 in turn."""
    model = load_model(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for index, sampled in enumerate(samples):
        (scores(model, sampled).sum() * (1 if index % 2 else -1)).backward()
    optimizer.step()
    return model


def scores(model: Any, sampled: Sampled) -> torch.Tensor:
    """Log-probabilities of the sampled tokens, float32 [N]."""
    ids = torch.tensor(np.concatenate([sampled.prompt_ids, sampled.token_ids])[None].astype(np.int64))
    logits = model(input_ids=ids).logits[0, len(sampled.prompt_ids) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(sampled.prompt_ids) :, None])[:, 0]


@torch.no_grad()
def of_cache(new: Any, samples: Iterable[Sampled]) -> np.ndarray:
    """The exact log-probability of each token that version 1 sampled, minus the behavior's."""
    return np.concatenate([(scores(new, s).numpy() - s.logprobs)[s.versions == 1].astype(np.float64) for s in samples])


@torch.no_grad()
def of_policy(old: Any, new: Any, samples: Iterable[Sampled]) -> np.ndarray:
    """The exact log-probability of the same tokens by version 1 minus that by version 0."""
    return np.concatenate([(scores(new, s) - scores(old, s)).numpy()[s.versions == 1] for s in samples])


if __name__ == "__main__":
    main()
