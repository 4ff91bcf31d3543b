"""Does distillation bring a student to its teacher, and are its terms those of TRL?

The task is the quickstart's: two-digit sums. The student is its warm start, a careless pupil who forgets two carries in
three. The teacher is a model of the same size that was trained on faultless workings. Each run is the whole product
(``launch``: queue, learner, generator, scorer) and learns from the teacher alone. Before and after it the student
answers the held-out prompts, and KL(student || teacher) over the whole vocabulary is computed at every token that it
sampled. TRL's GKD and server distillation (the program's environment must have them) score the same tensors as ours.

    python -m benchmarks.distillation [--seeds 3] [--steps 400] [--forms FORM ...] [--compare-only]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from async_rl.learner.losses.distill import top_k_kl
from async_rl.quickstart import sums

ROOT = Path(__file__).resolve().parent.parent
STUDY = ROOT / "runs" / "distillation"
FORMS: Mapping[str, Mapping[str, Any]] = {
    "advantage": {"form": "advantage"},
    "loss": {"form": "loss"},
    "loss, top_k = 4": {"form": "loss", "top_k": 4},
}
LR, GROUPS_PER_STEP = 4e-4, 16
NUM_PROMPTS = 256
MAX_NEW_TOKENS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS), help="which forms to train with")
    parser.add_argument("--compare-only", action="store_true", help="compare with TRL, and train nothing")
    options = parser.parse_args()
    for name, (values, gradients) in compare_with_trl().items():
        print(f"{name}: largest difference of values {values:.1e}, of gradients {gradients:.1e}", flush=True)
    if options.compare_only:
        return
    student, teacher = models()
    before = reverse_kl(student, teacher)
    print(f"KL(student || teacher) before: {before:.4f} nats a token", flush=True)
    results: dict[str, list[float]] = {form: [] for form in options.forms}
    for seed in range(options.seeds):
        for form in options.forms:
            results[form].append(run(form, FORMS[form], student, teacher, seed, options.steps))
            print(f"{form}, seed {seed}: {results[form][-1]:.5f}", flush=True)
    for form, after in results.items():
        error = stdev(after) / math.sqrt(len(after)) if len(after) > 1 else math.nan
        shares = f"{mean(after) / before:.3f} of the start, at most {max(after) / before:.3f}"
        print(f"{form}: {mean(after):.5f} +- {error:.5f} after {options.steps} steps, {shares}", flush=True)


def compare_with_trl() -> dict[str, tuple[float, float]]:
    """Return the largest differences of values and gradients from TRL's code, float64, by the name of the
    comparison.
    """
    from trl.experimental.gkd.gkd_trainer import GKDTrainer  # pyright: ignore[reportMissingImports]
    from trl.experimental.server_distillation import (  # pyright: ignore[reportMissingImports]
        server_distillation_trainer as server,
    )

    torch.manual_seed(0)
    logits = [3 * torch.randn(2, 20, 50, dtype=torch.float64) for _ in range(2)]
    kept = torch.ones(40, dtype=torch.bool)

    def whole(student: Tensor, teacher: Tensor) -> Tensor:
        policy, other = (each.flatten(0, 1).div(0.8).log_softmax(-1) for each in (student, teacher))
        return top_k_kl(policy, other, kept).mean()

    def gkd(student: Tensor, teacher: Tensor) -> Tensor:
        labels = torch.zeros(student.shape[:2], dtype=torch.long)
        return GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=1, temperature=0.8)

    def of_top_k(student: Tensor, teacher: Tensor) -> Tensor:
        policy, other = (each.flatten(0, 1).div(0.8).log_softmax(-1) for each in (student, teacher))
        top = other.topk(8, dim=-1)
        return top_k_kl(policy.gather(-1, top.indices), top.values, kept).mean()

    def with_tail(student: Tensor, teacher: Tensor) -> Tensor:
        policy, other = (each.div(0.8).log_softmax(-1) for each in (student, teacher))
        top = other.topk(8, dim=-1)
        mask = torch.ones_like(top.indices, dtype=torch.bool)
        policy, _ = server._add_tail_bucket(policy.gather(-1, top.indices), mask)
        other, _ = server._add_tail_bucket(top.values, mask)
        return torch.nn.functional.kl_div(other, policy, reduction="none", log_target=True).sum(-1).mean()

    return {
        "top_k = vocabulary, against GKDTrainer.generalized_jsd_loss(beta=1)": _differences(whole, gkd, logits),
        "top_k = 8, against the tail bucket of ServerDistillationTrainer": _differences(of_top_k, with_tail, logits),
    }


def _differences(
    ours: Callable[[Tensor, Tensor], Tensor], theirs: Callable[[Tensor, Tensor], Tensor], logits: Sequence[Tensor]
) -> tuple[float, float]:
    found: list[tuple[Tensor, Tensor]] = []
    for function in (ours, theirs):
        student = logits[0].clone().requires_grad_()
        value = function(student, logits[1])
        (gradient,) = torch.autograd.grad(value, student)
        found.append((value.detach(), gradient))
    (value, gradient), (other_value, other_gradient) = found
    # GKD divides the sum by the number of tokens, as we do.
    return float((value - other_value).abs()), float((gradient - other_gradient).abs().max())


def models() -> tuple[Path, Path]:
    """Return the directories of student and teacher, which are made first if they are missing."""
    task = STUDY / "task"
    if not (task / "held_out.jsonl").exists():
        sums.write_task(task, seed=0)
    faultless = [
        {"prompt": f"{a}+{b}:", "response": sums.working(a, b, carry=a % 10 + b % 10 >= 10)}
        for a, b in sums.split_pairs(0)["sft"] * 2
    ]
    random.Random(0).shuffle(faultless)
    (task / "faultless.jsonl").write_text("".join(json.dumps(row) + "\n" for row in faultless), encoding="utf-8")
    found: list[Path] = []
    for name, rows, seed in (("student", "sft.jsonl", 0), ("teacher", "faultless.jsonl", 1)):
        out = STUDY / name / "model"
        if not (out / "config.json").exists():
            sums.write_model(STUDY / name / "random", seed=seed)
            _async_rl(
                "sft", str(ROOT / "configs" / "quickstart.toml"),
                *_set({
                    "run.dir": STUDY / name / "run", "model.path": STUDY / name / "random",
                    "sft.data": task / rows, "sft.out": out,
                }),
            )  # fmt: skip
        found.append(out)
    return found[0], found[1]


def run(form: str, settings: Mapping[str, Any], student: Path, teacher: Path, seed: int, steps: int) -> float:
    """Distil ``student`` and return its KL to ``teacher`` afterwards, nats a token."""
    directory = STUDY / f"{form.replace(', ', '-').replace(' = ', '-')}-{steps}-{LR}-{seed}"
    if not (directory / "export" / "config.json").exists():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        task = STUDY / "task"
        _async_rl(
            "launch", str(ROOT / "configs" / "quickstart.toml"), "--fresh", "--quiet",
            *_set({
                "run.dir": directory, "run.seed": seed, "model.path": student, "data.train": task / "train.jsonl",
                "data.eval": {"held_out": str(task / "held_out.jsonl")}, "eval.every": 0,
                "learner.steps": steps, "optimizer.lr": LR,
                "optimizer.schedule": "linear", "learner.groups_per_step": GROUPS_PER_STEP,
                "queue.filter_range": [],
                "scorer.teacher.model": teacher, "scorer.teacher.address": f"tcp://127.0.0.1:{port}",
                "distill.teacher": "teacher", "distill.rewards": False,
                **{f"distill.{key}": value for key, value in settings.items()},
            }),
        )  # fmt: skip
    return reverse_kl(directory / "export", teacher)


def _set(values: Mapping[str, Any]) -> list[str]:
    def toml(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"
        return json.dumps(str(value) if isinstance(value, Path) else value)

    return [word for key, value in values.items() for word in ("--set", f"{key}={toml(value)}")]


def _async_rl(*arguments: str) -> None:
    command = [sys.executable, "-m", "async_rl", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


@torch.no_grad()
def reverse_kl(student: Path, teacher: Path) -> float:
    """Return KL(student || teacher) over the whole vocabulary, the mean over the tokens that the student samples at
    temperature 1 for held-out prompts, nats.
    """
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    load: Any = AutoModelForCausalLM.from_pretrained
    policy, other = (load(path, dtype=torch.float32).eval() for path in (student, teacher))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(teacher)
    pairs = sums.split_pairs(0)["held_out"][:NUM_PROMPTS]
    prompts = torch.tensor([tokenizer(f"{a}+{b}:")["input_ids"] for a, b in pairs])  # all of one length
    torch.manual_seed(0)
    ids = policy.generate(prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS)
    answers = ids[:, prompts.shape[1] :]
    ended = (answers == tokenizer.eos_token_id).cumsum(1)
    sampled = (ended == 0) | ((answers == tokenizer.eos_token_id) & (ended == 1))
    logprobs, others = (
        model(input_ids=ids).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1) for model in (policy, other)
    )
    return float((logprobs.exp() * (logprobs - others)).sum(-1)[sampled].mean())


if __name__ == "__main__":
    main()
