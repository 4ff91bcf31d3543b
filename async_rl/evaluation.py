"""Offline evaluation: answer the rows of a dataset with a model and score them. The body of ``async-rl eval``.

The generator's own backend samples, so an answer here is what a generator of the run would have said.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from async_rl.chat import model_directory, quiet_progress_bars
from async_rl.config import Config
from async_rl.config_file import parse_config
from async_rl.data import load_rows_of
from async_rl.errors import DataError, ModelError
from async_rl.eval_records import Decode, answer_record, eval_metrics, write_json_lines
from async_rl.generator.backend import Backend, Sampled
from async_rl.generator.grading import graded_rollouts
from async_rl.preflight import check_writable
from async_rl.records import Group, Lease, Prompt, Rollout, Sampling
from async_rl.rewards.records import Reward
from async_rl.rewards.registry import build_reward

Progress = Callable[[int, int], None]
"""Called with (rows answered, rows)."""


def run_eval(
    model: str,
    *,
    dataset: Path,
    num_samples: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int = 3584,
    max_prompt_tokens: int = 4096,
    reward_type: str = "boxed",
    system_prompt: str | None = None,
    batch_size: int = 64,
    seed: int = 0,
    out: Path | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Figures of ``model`` on ``dataset``: accuracy, pass@k, length, and how many prompts were too long to be asked.

    Args:
        model: a Hugging Face directory, a hub id, or a checkpoint of a run.
        max_prompt_tokens: longer prompts are not asked; they are counted, and left out of the figures.
        out: a directory for ``answers.jsonl``; it must not hold one yet.

    Raises:
        UserError: the model, the dataset or an option is unfit.
    """
    settings = {
        "run": {"dir": "unused", "seed": seed},
        "model": {"path": model},
        "data": {} if system_prompt is None else {"system_prompt": system_prompt},
        "sampling": {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens},
        "reward": {"type": reward_type},
        # Who names code on this command line allows it.
        "generator": {"batch_size": batch_size, "allow_code": [reward_type.rpartition(":")[0]]},
    }
    config = parse_config(settings, "the command line")
    answers = None if out is None else _answers_path(out)
    prompts = _prompts(config, dataset, limit)
    with ExitStack() as stack:
        directory = _model_directory(model, stack)
        backend, decode = _backend(config, directory)
        stack.enter_context(closing(backend))
        reward = stack.enter_context(closing(build_reward(config)))
        leases = [_lease(config, prompt, num_samples=num_samples, temperature=temperature) for prompt in prompts]
        groups, num_too_long = sample_leases(backend, reward, leases, progress=progress)
    if answers is not None:
        write_json_lines(answers, (answer_record(p, r, decode) for p, g in groups for r in g.rollouts))
    figures = {key.removeprefix("eval/dataset/"): value for key, value in eval_metrics("dataset", groups).items()}
    return {**figures, "too_long": num_too_long}


_MEANINGS = {
    "accuracy": "share of answers that are right",
    "pass_at_k": "share of rows with a right answer among their samples",
    "length_mean": "tokens an answer",
    "truncated": "share of answers cut at --max-new-tokens",
    "rows": "rows answered",
    "too_long": "rows left out: prompts above --max-prompt-tokens",
}


def describe_figures(figures: Mapping[str, float]) -> list[str]:
    """One line a figure: key, value, meaning."""
    return [
        f"{key:<12} {value:<10.4g} {_MEANINGS.get(key, '')}".rstrip()
        for key, value in figures.items()
        if key not in ("version_min", "version_max")  # of a run's weights; a model on disk has none
    ]


def sample_leases(
    backend: Backend, reward: Reward, leases: Sequence[Lease], *, progress: Progress | None = None
) -> tuple[list[tuple[Prompt, Group]], int]:
    """Every lease's group, in the order of ``leases``, and the number of prompts too long to be asked."""
    open_leases: dict[str, Lease] = {}
    samples: dict[str, list[Sampled]] = {}
    rollouts: dict[str, list[Rollout]] = {}
    for lease in leases:
        prompt_ids = backend.encode_prompt(lease.prompt.messages)
        if len(prompt_ids) <= lease.sampling.max_prompt_tokens:
            open_leases[lease.lease_id], samples[lease.lease_id] = lease, []
            backend.submit(lease, prompt_ids)
    while backend.num_running:
        for sample in backend.step():
            lease, answers = open_leases[sample.lease_id], samples[sample.lease_id]
            answers.append(sample)
            if len(answers) == lease.group_size:
                answers.sort(key=lambda one: one.index)
                rollouts[sample.lease_id] = graded_rollouts(reward, lease, answers)
            if progress is not None:
                progress(len(rollouts), len(open_leases))
    groups = [(lease.prompt, _group(lease, rollouts[lease_id])) for lease_id, lease in open_leases.items()]
    return groups, len(leases) - len(groups)


def _group(lease: Lease, rollouts: Sequence[Rollout]) -> Group:
    return Group(
        lease_id=lease.lease_id,
        kind="eval",
        position=lease.prompt.position,
        generator_id="eval",
        lineage="",
        temperature=lease.sampling.temperature,
        rollouts=tuple(rollouts),
    )


def _prompts(config: Config, dataset: Path, limit: int | None) -> list[Prompt]:
    rows = load_rows_of(config, str(dataset)).rows[:limit]
    return [Prompt(i, i, 0, row.messages, row.reward_data) for i, row in enumerate(rows)]


def _lease(config: Config, prompt: Prompt, *, num_samples: int, temperature: float) -> Lease:
    sampling = Sampling(
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        max_new_tokens=config.sampling.max_new_tokens,
        max_prompt_tokens=config.sampling.max_prompt_tokens,
        stop=(),
    )
    seed = (config.run.seed << 32) + prompt.position
    return Lease(f"eval-{prompt.position}", "eval", prompt, num_samples, sampling, "", 0, 0, 0, seed)


def _answers_path(out: Path) -> Path:
    """Where the answers go; found to be writable before an hour of sampling, not after.

    Raises:
        UserError: there are answers already, or nothing can be written there.
    """
    answers = out / "answers.jsonl"
    if answers.exists():
        raise DataError(f"{answers} exists; choose another --out")
    check_writable(out, "--out")
    return answers


def _model_directory(model: str, stack: ExitStack) -> Path:
    """Where the model's files lie; a checkpoint is exported to a directory that goes when ``stack`` closes."""
    from async_rl.learner.checkpoint import resolve_checkpoint

    path = Path(model)
    if not path.is_dir() and (path.is_absolute() or model.startswith(".") or model.count("/") > 1):  # no hub id
        raise ModelError(f"expected a model, a checkpoint or a run directory at {model}, got none")
    if path.is_dir() and not (path / "config.json").exists():
        checkpoint = resolve_checkpoint(path)
        from async_rl.learner.export import export_checkpoint

        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-rl-eval-")))
        export_checkpoint(checkpoint, scratch / "model")
        return scratch / "model"
    return model_directory(model, weights=True)


def _backend(config: Config, directory: Path) -> tuple[Backend, Decode]:
    import torch

    from async_rl.chat import load_tokenizer
    from async_rl.generator.transformers_backend import TransformersBackend

    quiet_progress_bars()
    tokenizer = load_tokenizer(directory)
    backend = TransformersBackend.from_files(
        directory,
        config.generator,
        device="cuda" if torch.cuda.is_available() else "cpu",
        load_pretrained=True,
    )
    return backend, lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))
