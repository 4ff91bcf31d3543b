"""Compares advantages, value targets and the value loss of a critic with verl's code, on random batches.

    python -m benchmarks.critic_peers VERL

VERL is a checkout of verl. Only the functions that compute are taken from it, so none of its packages is needed. The
batches have tokens of the environment between sampled ones, which verl masks and we leave out. verl whitens advantages
in its own way (unbiased variance), so its advantages are taken from its value targets: A = G - V. Prints the largest
differences; the exit code is 1 if one is above 1e-6.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.learner.losses.credit import generalised_advantages
from async_rl.learner.losses.value import value_loss

FUNCTIONS = {
    "verl/utils/torch_functional.py": (
        "clip_by_value", "masked_sum", "masked_mean", "masked_var", "masked_whiten",
    ),
    "verl/trainer/ppo/core_algos.py": ("compute_gae_advantage_return", "agg_loss", "compute_value_loss"),
}  # fmt: skip
LIMIT = 1e-6


def functions_of(verl: Path) -> dict[str, Any]:
    """Return verl's functions by name, compiled without the rest of their modules."""
    names: dict[str, Any] = {"torch": torch, "np": np, "Optional": None}
    names["verl_F"] = type("functional", (), {})
    for file, wanted in FUNCTIONS.items():
        tree = ast.parse((verl / file).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in wanted:
                node.decorator_list, node.returns = [], None
                for argument in (*node.args.args, *node.args.kwonlyargs):
                    argument.annotation = None
                exec(compile(ast.Module([node], []), file, "exec"), names)
                setattr(names["verl_F"], node.name, staticmethod(names[node.name]))
    return names


def differences(names: dict[str, Any], seed: int) -> dict[str, float]:
    """Return the largest difference of each figure on one random batch."""
    rng = np.random.default_rng(seed)
    shape, gamma, lam, clip = (4, 12), rng.uniform(0.9, 1.0), rng.uniform(0.0, 1.0), 0.5
    mask = rng.uniform(size=shape) < 0.7
    mask[:, 0] = True
    rewards, old, values = rng.normal(size=shape) * mask, rng.normal(size=shape), rng.normal(size=shape)
    tensors = [torch.from_numpy(array) for array in (rewards, old, mask.astype(np.float64))]
    _, returns = names["compute_gae_advantage_return"](*tensors, gamma, lam)
    credits = [
        generalised_advantages(rewards[row][mask[row]], old[row][mask[row]], gamma=gamma, lam=lam)
        for row in range(shape[0])
    ]
    theirs = returns.numpy()
    found = {
        "advantage": max(np.abs(c.advantages - (theirs - old)[i][mask[i]]).max() for i, c in enumerate(credits)),
        "value target": max(np.abs(c.value_targets - theirs[i][mask[i]]).max() for i, c in enumerate(credits)),
    }
    one, other = (torch.from_numpy(values).requires_grad_() for _ in range(2))
    loss, clipped = names["compute_value_loss"](one, returns, tensors[1], tensors[2], clip)
    at = torch.from_numpy(mask)
    ours, is_clipped = value_loss(other[at], returns[at], tensors[1][at], clip)
    loss.backward()
    ours.mean().backward()
    assert one.grad is not None
    assert other.grad is not None
    return found | {
        "value loss": abs(loss.item() - ours.mean().item()),
        "its gradient": (one.grad - other.grad).abs().max().item(),
        "clip fraction": abs(float(clipped) - is_clipped.double().mean().item()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verl", type=Path)
    args = parser.parse_args()
    names, batches = functions_of(args.verl), 100
    rows = [differences(names, seed) for seed in range(batches)]
    worst = {key: max(row[key] for row in rows) for key in rows[0]}
    print(f"{batches} batches, largest differences: " + ", ".join(f"{key} {value:.1e}" for key, value in worst.items()))
    sys.exit(int(max(worst.values()) > LIMIT))


if __name__ == "__main__":
    main()
