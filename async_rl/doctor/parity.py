"""Compare the generators' engine with the learner's model at the same weights, in one process, without a run.

The engine samples answers to the first prompts as in the run, and the learner scores them. Then both score the same
token sequences. If they differ, the experiments of the run's parity gate look for the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from async_rl.config.backends import has_model
from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml, parse_config
from async_rl.data.chat import model_files, quiet_progress_bars
from async_rl.data.dataset import load_train_rows
from async_rl.doctor.findings import Finding
from async_rl.errors import UserError
from async_rl.generator.backend import Backend, Sampled
from async_rl.generator.backends import build_backend
from async_rl.generator.parity import answer_probe
from async_rl.generator.worker import generator_config, scratch_directory, write_files
from async_rl.queue.parity import Probe, compare, parity_limit
from async_rl.records import Lease, Prompt, Sampling

_PROMPTS = 4
_GROUP_SIZE = 2
_NEW_TOKENS = 32
_ASKED: tuple[Mapping[str, str], ...] = ({"role": "user", "content": "1 + 1 = ?"},)
_FIX = "remove the cause; a run would stop for this (weights.parity, weights.parity_limit)"


def check_parity(config: Mapping[str, Any]) -> list[Finding]:
    """One finding about sampled tokens, one about given token sequences. Runs in a process of its own."""
    resolved = parse_config(dict(config), "the doctor's config")
    if not has_model(resolved.generator.backend):
        return [Finding("parity", "skip", f'generator.backend = "{resolved.generator.backend}" has no model')]
    quiet_progress_bars()
    with ExitStack() as stack:
        return _compared(resolved, stack)


def _compared(config: Config, stack: ExitStack) -> list[Finding]:
    from async_rl.learner.engine.fsdp_engine import FsdpEngine
    from async_rl.learner.engine.ranks import compute_dtype, init_ranks
    from async_rl.learner.parity import cause_of_sampled, joined, probe_sequence_of, to_train

    directory = stack.enter_context(scratch_directory())
    write_files(directory, model_files(config.model.path))
    engine_config = generator_config(config_to_toml(config), [])
    backend = stack.enter_context(closing(build_backend(engine_config, directory)))
    ranks = init_ranks(config)
    learner = stack.enter_context(closing(FsdpEngine(config, ranks)))
    dtype = str(compute_dtype(config, ranks.device)).removeprefix("torch.")
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in learner.gather()}
    backend.activate(0, weights)
    samples = _sample(config, backend)
    sequences = [_to_sequence(index, sample, config.sampling.temperature) for index, sample in enumerate(samples)]
    behavior = np.concatenate([sample.logprobs for sample in samples])
    scored = joined(sequences, learner.score(sequences, of="policy"))
    engine_dtype = getattr(backend, "dtype", dtype)
    limit = parity_limit(config.weights.parity_limit, (dtype, engine_dtype))
    found = compare(behavior, scored)
    sides = f"{getattr(backend, 'name', 'engine')} ({engine_dtype}) and learner ({dtype})"
    rows: list[Finding] = []
    if found.mean <= limit:
        rows.append(Finding("parity, sampled", "OK", f"{sides}: {found}"))
    else:
        cause = cause_of_sampled(learner, sequences, behavior, found, limit) or "not found from sampled tokens alone"
        text = f"{sides}: {found}, limit {limit:g}. Likely cause: {cause}"
        rows.append(Finding("parity, sampled", "FAIL", text, fix=_FIX))
    given = [probe_sequence_of(sequence) for sequence in sequences]
    trained = [to_train(index, one, 0, config.sampling.temperature) for index, one in enumerate(given)]
    scores = learner.score(trained, of="policy")
    logprobs = tuple(np.asarray(scores[s.sequence_id], np.float32) for s in trained)
    probe = Probe("doctor", 0, config.sampling.temperature, tuple(given), logprobs, dtype, config.weights.parity_limit)
    return [*rows, _given_row(backend, probe, weights, sides, limit)]


def _given_row(backend: Backend, probe: Probe, weights: Mapping[str, Any], sides: str, limit: float) -> Finding:
    answer = answer_probe(backend, probe, weights)
    if answer.logprobs is None:
        return Finding("parity, given", "skip", f"{answer.backend} can't score given tokens")
    found = compare(answer.logprobs, np.concatenate(probe.logprobs))
    if found.mean <= limit:
        return Finding("parity, given", "OK", f"{sides}: {found}")
    cause = answer.cause or "not found by the engine's experiments"
    excluded = f" Excluded: {'; '.join(answer.excluded)}." if answer.excluded else ""
    return Finding(
        "parity, given", "FAIL", f"{sides}: {found}, limit {limit:g}. Likely cause: {cause}.{excluded}", fix=_FIX
    )


def _sample(config: Config, backend: Backend) -> list[Sampled]:
    """Sample short answers to the first prompts, with the run's sampling settings."""
    settings = config.sampling
    sampling = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=min(_NEW_TOKENS, settings.max_new_tokens),
        max_prompt_tokens=settings.max_prompt_tokens,
        stop=settings.stop,
    )
    for index, messages in enumerate(_prompts(config)):
        prompt = Prompt(index, index, 0, messages, {})
        ids = backend.encode_prompt(messages)[-settings.max_prompt_tokens :]
        backend.submit(Lease(f"{index}", "train", prompt, _GROUP_SIZE, sampling, "doctor", 0, 0, 0, index), ids)
    finished: list[Sampled] = []
    while backend.num_running:
        finished += backend.step()
    return finished


def _prompts(config: Config) -> Sequence[tuple[Mapping[str, str], ...]]:
    try:
        rows = load_train_rows(config).rows[:_PROMPTS]
    except UserError:
        rows = ()
    return [row.messages for row in rows if row.messages] or [_ASKED]


def _to_sequence(index: int, sample: Sampled, temperature: float) -> Any:
    from async_rl.learner.packing import TrainSequence

    num_prompt, num_sampled = len(sample.prompt_ids), len(sample.token_ids)
    size = num_prompt + num_sampled
    behavior = np.zeros(size, np.float32)
    behavior[num_prompt:] = sample.logprobs
    return TrainSequence(
        sequence_id=index,
        token_ids=np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int32),
        loss_mask=np.arange(size) >= num_prompt,
        behavior_logprobs=behavior,
        versions=np.zeros(size, np.int32),
        advantages=np.zeros(size, np.float32),
        temperature=temperature,
        sampling_mask=sample.sampling_mask,
    )
