"""Check that engine and learner compute the same log-probabilities with the same weights.

``check_parity`` loads both in one process. The engine samples answers to the first prompts, and the learner scores
them. Then both score the same token sequences. If the scores differ, the finding names the likely cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from msgspec import structs

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.config.loading import config_to_toml, machine_overrides
from async_rl.data.chat import model_files, quiet_progress_bars
from async_rl.data.dataset import Row
from async_rl.generator.backend import Backend, Sampled
from async_rl.generator.parity import answer_probe
from async_rl.generator.start.backends import build_backend
from async_rl.generator.start.worker import generator_config, scratch_directory, write_files
from async_rl.launch.checks.finding import Finding
from async_rl.queue.core.admission import train_sampling
from async_rl.queue.parity import Probe, compare, parity_limit
from async_rl.records import Lease, Prompt
from async_rl.weights.adapters import ADAPTER_BASE, BaseWeights

_PROMPTS = 4
_GROUP_SIZE = 2
_NEW_TOKENS = 32
_ASKED: tuple[Mapping[str, str], ...] = ({"role": "user", "content": "1 + 1 = ?"},)
_FIX = 'remove the cause, because a run would stop here too; weights.parity = "warn" only logs the difference'


def check_parity(config: Config, rows: Sequence[Row]) -> Iterator[Finding]:
    """Compare the log-probabilities of tokens that the engine sampled to prompts of ``rows``, and of token sequences
    that both only score.
    """
    if not has_model(config.generator.backend):
        backend = config.generator.backend
        text = f'generator.backend = "{backend}" uses no model, so nothing can differ'
        yield Finding("parity", "skip", text)
    elif config.lora.base_bits is not None and config.lora.publishes_adapters:
        text = f"the learner's frozen weights have {config.lora.base_bits} bits, those of generators do not"
        yield Finding("parity", "skip", f"{text}, so their log-probabilities differ")
    else:
        quiet_progress_bars()
        with ExitStack() as stack:
            yield from _compared(config, [row.messages for row in rows[:_PROMPTS] if row.messages], stack)


def _compared(config: Config, prompts: Sequence[Any], stack: ExitStack) -> list[Finding]:
    from async_rl.learner.engine.fsdp_engine import FsdpEngine
    from async_rl.learner.loop.parity import cause_of_sampled, joined, probe_sequence_of, to_train
    from async_rl.learner.ranks import compute_dtype, init_ranks

    directory = stack.enter_context(scratch_directory())
    write_files(directory, model_files(config.model.path))
    if config.lora.publishes_adapters:
        write_files(directory, {ADAPTER_BASE: BaseWeights.of(config.model.path).to_json()})
    engine_config = generator_config(config_to_toml(config), machine_overrides(config))
    backend = stack.enter_context(closing(build_backend(engine_config, directory)))
    ranks = init_ranks(config)
    learner = stack.enter_context(closing(FsdpEngine(config, ranks)))
    learner.self_test()
    dtype = str(compute_dtype(config, ranks.device)).removeprefix("torch.")
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in learner.gather()}
    backend.activate(0, weights)
    samples = _sample(config, backend, prompts or [_ASKED])
    sequences = [_to_sequence(index, sample, config.sampling.temperature) for index, sample in enumerate(samples)]
    behavior = np.concatenate([sample.logprobs for sample in samples])
    scored = joined(sequences, learner.score(sequences, of="policy"))
    engine_dtype = getattr(backend, "dtype", dtype)
    limit = parity_limit(config.experimental.parity_limit, (dtype, engine_dtype))
    difference = compare(behavior, scored)
    sides = f"{getattr(backend, 'name', 'engine')} ({engine_dtype}) and learner ({dtype})"
    rows: list[Finding] = []
    if difference.mean <= limit:
        rows.append(Finding("parity, sampled", "OK", f"{sides}: {difference}"))
    else:
        cause = (
            cause_of_sampled(learner, sequences, behavior, difference, limit)
            or "unknown, because the sampled tokens alone do not show it"
        )
        text = f"{sides}: {difference}, limit {limit:g}. Likely cause: {cause}"
        rows.append(Finding("parity, sampled", "FAIL", text, fix=_FIX))
    given = [probe_sequence_of(sequence) for sequence in sequences]
    trained = [to_train(index, sequence, 0, config.sampling.temperature) for index, sequence in enumerate(given)]
    scores = learner.score(trained, of="policy")
    logprobs = tuple(np.asarray(scores[s.sequence_id], np.float32) for s in trained)
    probe = Probe(
        "doctor", 0, config.sampling.temperature, tuple(given), logprobs, dtype, config.experimental.parity_limit
    )
    return [*rows, _given_row(backend, probe, weights, sides, limit)]


def _given_row(backend: Backend, probe: Probe, weights: Mapping[str, Any], sides: str, limit: float) -> Finding:
    answer = answer_probe(backend, probe, weights)
    if answer.logprobs is None:
        return Finding("parity, probe", "skip", f"{answer.backend} can't score tokens that it did not sample")
    difference = compare(answer.logprobs, np.concatenate(probe.logprobs))
    if difference.mean <= limit:
        return Finding("parity, probe", "OK", f"{sides}: {difference}")
    cause = answer.cause or "unknown, because the engine's experiments did not find it"
    excluded = f" Excluded: {'; '.join(answer.excluded)}." if answer.excluded else ""
    return Finding(
        "parity, probe", "FAIL", f"{sides}: {difference}, limit {limit:g}. Likely cause: {cause}.{excluded}", fix=_FIX
    )


def _sample(config: Config, backend: Backend, prompts: Sequence[Any]) -> list[Sampled]:
    """Let ``backend`` sample short answers to ``prompts``, with the run's sampling settings. Return them."""
    own = train_sampling(config)
    sampling = structs.replace(own, max_new_tokens=min(_NEW_TOKENS, own.max_new_tokens))
    for index, messages in enumerate(prompts):
        prompt = Prompt(index, index, 0, messages, {})
        ids = backend.encode_prompt(messages)[-own.max_prompt_tokens :]
        backend.submit(Lease(f"{index}", "train", prompt, _GROUP_SIZE, sampling, "doctor", 0, 0, 0, index), ids)
    finished: list[Sampled] = []
    while backend.num_running:
        finished += backend.step()
    return finished


def _to_sequence(index: int, sample: Sampled, temperature: float) -> Any:
    from async_rl.learner.sequences import train_sequence

    token_ids = np.concatenate([sample.prompt_ids, sample.token_ids])
    is_sampled = np.arange(len(token_ids)) >= len(sample.prompt_ids)
    behavior = np.zeros(len(token_ids), np.float32)
    behavior[is_sampled] = sample.logprobs
    return train_sequence(
        index, token_ids, is_sampled, temperature=temperature, behavior_logprobs=behavior,
        sampling_mask=sample.sampling_mask,
    )  # fmt: skip
