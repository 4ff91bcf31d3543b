"""What a run on GPUs that are not here will take, from its config and the model's config.json: ``doctor --on``.

Sums over the rates of ``learner.cards``; memory is that of ``device_memory``. Bytes of kernels that are neither
products nor attention are those that ``benchmarks.predicted`` counts in a micro-batch of Qwen2 on fake tensors; a test
compares them. Left out: waits of the host, padding, uneven ranks, prefills, scorers and a critic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from async_rl.config.config import Config
from async_rl.config.generator import AUTO
from async_rl.config.learner import Recomputation
from async_rl.config.loading import flat
from async_rl.config.parallel import Layout
from async_rl.errors import ConfigError
from async_rl.generator.vllm.adapter import workers_receive
from async_rl.launch.checks.capacity import checkpoint_bytes
from async_rl.launch.checks.device_memory import ASLEEP_BYTES
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.learner_memory import Proposal, propose, shape_of, with_changes
from async_rl.learner import cards
from async_rl.learner.cards import Machines
from async_rl.learner.memory_plan import ModelShape, logits_chunk_bytes
from async_rl.output import size_text

UNCONFIRMED = "predicted: no card has confirmed it"
_MEAN_SHARE = 0.4
"""Mean of an answer's length over ``sampling.max_new_tokens``, where none is given. Assumed."""
SIGMA = 0.9
"""Standard deviation of the logarithm of a length; lengths are cut at the limit. Assumed."""
_AGAIN: Mapping[Recomputation, tuple[bool, bool, bool]] = {
    "none": (False, False, False),
    "selective": (False, False, True),
    "attention": (True, False, True),
    "full": (True, True, True),
}
"""By ``model.gradient_checkpointing``: whether matrix products, attention and all other kernels of a layer's forward
pass are computed again."""
_GAINS = 0.8
"""A split with a step of less than so much of the config's time is worth a change; others are within the error."""
_VLLM_BYTES = 4e9
"""Memory that vLLM takes of its share on each GPU for activations and graphs. Assumed."""


class Tokens(NamedTuple):
    """The tokens of an optimizer step: those of the learner's rows (a shared prompt counts once), those sampled, how
    many a sampled one attends to; and of an answer on average.
    """

    rows: float
    sampled: float
    attended: float
    mean: float


class Engine(NamedTuple):
    """A generator, as vLLM: how many sequences of the longest length its cache holds, how many usual ones it samples at
    once, and the seconds of a decode step without its sequences and more for each of these.
    """

    held: int
    at_once: int
    step_s: float
    sequence_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens that it samples in a second. 0 if its weights don't fit."""
        return self.at_once / (self.step_s + self.at_once * self.sequence_s) if self.held else 0.0


class Step(NamedTuple):
    """The seconds of a step: of the learner by part and in all, of the generators, and of the slower side; of both, if
    they share GPUs. ``changes`` are the keys that were chosen.
    """

    learner: Mapping[str, float]
    learner_s: float
    generators_s: float
    seconds: float
    changes: Mapping[str, Any]


def tokens_of(config: Config, mean_tokens: float | None = None) -> Tokens:
    """Return what a step will have, with answers of ``mean_tokens``, by default ``_MEAN_SHARE`` of the limit, and
    prompts of half of theirs.

    Raises:
        ConfigError: the limit is below that mean.
    """
    groups, prompt = config.learner.groups_per_step, config.sampling.max_prompt_tokens / 2
    limit = config.sampling.max_new_tokens
    mean = _MEAN_SHARE * limit if mean_tokens is None else mean_tokens
    if mean > limit:
        raise ConfigError(f"--mean-tokens: expected at most sampling.max_new_tokens, {limit}, got {mean:.0f}; lower it")
    sampled = groups * config.sampling.group_size * mean
    # Of log-normal lengths of ``SIGMA``, cut at the limit, a token attends to about so many of its own answer.
    return Tokens(groups * prompt + sampled, sampled, prompt + mean * (1 - mean / limit / 2), mean)


def learner_parts(
    shape: ModelShape, config: Config, sizes: Layout, machines: Machines, tokens: Tokens
) -> dict[str, float]:
    """Return the seconds of the learner's step by part, in the layout ``sizes``, whose ranks all work alike."""
    card, ranks, layers = machines.card, sizes.num_ranks, shape.num_layers
    copied_per_s = cards.COPIED * card.bandwidth
    products_again, attention_again, others_again = _AGAIN[config.model.gradient_checkpointing]
    mlp, frozen = shape.width * shape.mlp * shape.experts_per_token, config.lora.is_set
    layer, passes = shape.attention_parameters + 3 * mlp, 4 if frozen else 6
    # Recomputation ends before a layer's last product, whose output is not needed.
    products = tokens.rows * layers * (passes * layer + 2 * (layer - mlp) * products_again)
    products += tokens.sampled * passes * shape.table_parameters
    forward, backward = card.attended_per_s(config.model.attention)
    pairs = tokens.sampled * tokens.attended * layers * shape.queries
    chunk = logits_chunk_bytes("cuda", 0 if frozen else 4 * shape.table_parameters) / (4 * shape.vocab)
    others = 296 * shape.width + 28 * shape.mlp * shape.experts_per_token + 68 * (shape.queries + shape.keys)
    moved = tokens.rows * (layers * others * (1.295 if others_again else 1) + 229 * shape.width)
    moved += tokens.sampled * shape.vocab * (47.5 + (0 if frozen else 12.7 * shape.width / chunk))
    parts = {
        "products": products / (cards.COMPUTED * card.peak) / ranks,
        "attention": pairs * (4 * (1 + attention_again) / forward + 10 / backward) / ranks,
        "other kernels": moved / copied_per_s / ranks,
    }
    if config.loss.needs_reference:
        once = 2 * (tokens.rows * layers * layer + tokens.sampled * shape.table_parameters)
        seconds = once / (cards.COMPUTED * card.peak) + 4 * pairs / forward + moved / 3 / copied_per_s
        parts["reference"] = seconds / ranks
    # FSDP: two gathers in bfloat16 and a sum in float32 for each micro-batch; 28 and 26 bytes of copies, and the links.
    rank_tokens = config.learner.max_tokens * sizes.sequence * sizes.num_data_ranks
    micro_batches = max(math.ceil(tokens.rows / rank_tokens), config.learner.updates_per_batch)
    held = shape.num_parameters / sizes.tensor / sizes.pipeline
    sent = micro_batches * held * (4 if frozen else 8) / machines.link(ranks // sizes.replicas) if ranks > 1 else 0
    copied = micro_batches * held * (28 if frozen else 54) / copied_per_s
    parts["FSDP"] = copied + max(0.0, sent - sum(parts.values()))
    parts["optimizer"] = 0 if frozen else config.learner.updates_per_batch * 40 * held / ranks / copied_per_s
    parts["pause for a version"] = sum(version_seconds(2 * shape.num_parameters, ranks))
    return parts


def version_seconds(size_bytes: float, num_ranks: int) -> tuple[float, float]:
    """Return the seconds for which the learner gathers a version; and of its copies to the host and digests, which run
    beside each other. Together they are its pause.
    """
    return size_bytes / cards.NVLINK if num_ranks > 1 else 0.0, size_bytes / min(cards.PCIE, cards.HASH_ALL)


def engine_of(shape: ModelShape, config: Config, card: cards.Card, tokens: Tokens) -> Engine:
    """Return what each generator does."""
    parts, weights = config.generator.tensor_parallel_size, 2 * shape.num_parameters
    decoded_per_s = cards.DECODED * card.bandwidth
    share = config.generator.memory_fraction * card.memory_bytes - _VLLM_BYTES
    room = max(0.0, parts * share - weights * (1 + workers_receive(config, device="cuda")))
    of_token = 4 * shape.num_layers * shape.keys
    held = int(room / of_token / (config.sampling.max_prompt_tokens + config.sampling.max_new_tokens))
    # On average a running sequence has as many tokens as one attends to. A tenth of the cache stays free.
    at_once = min(config.generator.batch_size, int(0.9 * room / of_token / tokens.attended))
    products = 2 * at_once * shape.num_parameters / (cards.COMPUTED * card.peak)
    step_s = max(weights / decoded_per_s, products) / parts + cards.DECODE_S * (1 + (parts > 1))
    return Engine(held, at_once, step_s, of_token * tokens.attended / decoded_per_s / parts)


def step_of(
    shape: ModelShape, config: Config, machines: Machines, tokens: Tokens, changes: Mapping[str, Any] | None = None
) -> Step:
    """Predict the step of ``config``, whose ``generator.count`` is that of all nodes.

    Raises:
        ConfigError: its ranks can't be divided as ``[parallel]`` says.
    """
    ranks, generator = config.learner.nproc, config.generator
    learner = learner_parts(shape, config, Layout.of(config.parallel, ranks), machines, tokens)
    per_s = engine_of(shape, config, machines.card, tokens).tokens_per_s
    per_s *= ranks if config.learner_uses_vllm else generator.count
    both = sum(learner.values()), tokens.sampled / per_s if per_s else math.inf
    shares = ranks + generator.count * generator.tensor_parallel_size > machines.total_gpus or config.learner_uses_vllm
    return Step(learner, *both, sum(both) if shares else max(both), changes or {})


def fits(shape: ModelShape, config: Config, machines: Machines) -> Proposal | None:
    """Return what makes the learner of ``config`` fit; on a single GPU beside vLLM's share.

    Raises:
        ConfigError: its ranks can't be divided as ``[parallel]`` says.
    """
    taken = config.generator.memory_fraction * machines.card.memory_bytes + ASLEEP_BYTES
    room = machines.card.memory_bytes - (taken if machines.total_gpus == 1 else 0)
    return propose(shape, config, config.learner.nproc, room, "cuda")


def best_step(shape: ModelShape, config: Config, machines: Machines, tokens: Tokens) -> Step | None:
    """Return the fastest step of all divisions of the GPUs between ranks and generators, each with as little recomputed
    as fits. None: nothing fits.
    """
    total, found, own = machines.total_gpus, list[Step](), flat(config.model_dump())
    least = {} if config.learner.compile else {"model.gradient_checkpointing": "none"}
    sizes = [size for size in (1, 2, 4, 8) if size < max(2, total) and shape.num_heads % size == 0]
    for parts, count in ((size, count) for size in sizes for count in range(1, max(2, (total - 1) // size + 1))):
        changes = {"learner.nproc": max(1, total - count * parts), "generator.count": count}
        changes |= {"generator.tensor_parallel_size": parts} | least
        try:
            if proposal := fits(shape, with_changes(config, changes), machines):
                changes |= proposal.changes
                changed = {key: value for key, value in changes.items() if value != own[key]}
                found.append(step_of(shape, with_changes(config, changed), machines, tokens, changed))
        except ConfigError:  # so many ranks can't be divided as [parallel] says
            continue
    return min((step for step in found if step.seconds < math.inf), key=lambda step: step.seconds, default=None)


def smallest_that_fits(shape: ModelShape, config: Config, machines: Machines, tokens: Tokens) -> str:
    """Return what would do where ``best_step`` finds nothing: adapters, or more GPUs."""
    adapters = with_changes(config, {"lora.rank": 32})
    ways = ["set lora.rank = 32"] if best_step(shape, adapters, machines, tokens) else []
    sizes = [total for total in (2, 4, 8, 16, 32, 64) if total > machines.total_gpus]
    larger = (replace(machines, num_nodes=max(1, total // 8), num_gpus=min(8, total)) for total in sizes)
    ways += [f"take {more.total_gpus} of these GPUs" for more in larger if best_step(shape, config, more, tokens)][:1]
    return ", or ".join(ways) or "take a smaller model"


def on_machines(config: Config, machines: Machines) -> Config:
    """Return ``config`` as it runs there: vLLM is installed, and GPUs that it leaves free on more nodes than one are
    those of generators that join by ``--connect``.
    """
    changes: dict[str, Any] = {} if config.generator.backend != AUTO else {"generator.backend": "vllm"}
    if machines.num_nodes > 1:
        size = config.generator.tensor_parallel_size
        count = (machines.total_gpus - config.learner.nproc) // size
        changes |= {"learner.devices": None, "generator.devices": None, "generator.count": count}
    return with_changes(config, changes)


def find_prediction(config: Config, machines: Machines, tokens: Tokens) -> Iterator[Finding]:
    """Predict what a step of ``config`` takes, the best division of the GPUs, and sizes of versions and checkpoints.

    Raises:
        ModelError: the model is not there, or of an unknown kind.
    """
    shape, sampling = shape_of(config.model.path), config.sampling
    step, engine = step_of(shape, config, machines, tokens), engine_of(shape, config, machines.card, tokens)
    yield Finding(
        "prediction", "OK", f"{UNCONFIRMED}. Memory may be off by 15 %, seconds by the ranges in brackets. Assumed: "
        f"answers of {tokens.mean:.0f} tokens on average ({tokens.mean / sampling.max_new_tokens:.0%} of "
        f"sampling.max_new_tokens; --mean-tokens sets it), vLLM, {size_text(machines.host_bytes)} in each host, "
        f"the rates of async_rl/learner/cards.py",
    )  # fmt: skip
    yield Finding(
        "cache", "OK" if engine.held else "FAIL", f"each generator holds {engine.held} sequences of "
        f"{sampling.max_prompt_tokens + sampling.max_new_tokens} tokens; of usual ones it samples {engine.at_once} at "
        f"once, {engine.tokens_per_s:.0f} tokens/s (generator.batch_size = {config.generator.batch_size})",
        "" if engine.held else "raise generator.memory_fraction or tensor_parallel_size",
    )  # fmt: skip
    parts = ", ".join(f"{name} {_text(seconds)}" for name, seconds in step.learner.items())
    if step.seconds < math.inf:
        text = f"{_range(step.seconds)} for {tokens.sampled:,.0f} sampled tokens: learner {_text(step.learner_s)}"
        yield Finding("step", "OK", f"{text} ({parts}), generators {_text(step.generators_s)}")
    if not config.learner_uses_vllm:
        yield _split(step, shape, config, machines, tokens)
    size, pause = 2 * shape.num_parameters, step.learner["pause for a version"]
    whole = pause + transfer_s(size, machines)
    yield Finding("version", "OK", f"{size_text(size)}, from a step to the generators in {_range(whole)}")
    each, kept = checkpoint_bytes(config), config.checkpoint.keep_last
    text = f"{size_text(each)} of disk each; {size_text(each * kept)} for checkpoint.keep_last = {kept}"
    yield Finding("checkpoint", "OK", text if each else "adapters alone: small")


def transfer_s(size_bytes: float, machines: Machines) -> float:
    """Return the seconds from a version's publication to the generators."""
    return size_bytes / min(cards.PCIE, cards.HASH_ALL, machines.link(machines.total_gpus))


def _split(step: Step, shape: ModelShape, config: Config, machines: Machines, tokens: Tokens) -> Finding:
    best, own = best_step(shape, config, machines, tokens), fits(shape, config, machines)
    text = f"{config.learner.nproc} learner ranks, {config.generator.count} generators: {_text(step.seconds)} s"
    if not best:
        fix = smallest_that_fits(shape, config, machines, tokens)
        return Finding("split", "FAIL", f"no division of {machines.name} fits", fix)
    does_fit = own is not None and not own.changes
    if does_fit and best.seconds > _GAINS * step.seconds:
        return Finding("split", "OK", f"{text}; no other is much faster")
    fix = f"for {_text(best.seconds)} s " + " ".join(f"--set {key}={value}" for key, value in best.changes.items())
    return Finding("split", "WARN", f"{text}, which is slow" if does_fit else f"{text}, which does not fit", fix)


def _range(seconds: float) -> str:
    low, high = (_text(factor * seconds) for factor in cards.SECONDS_ERROR)
    return f"{_text(seconds)} s ({low} to {high})"


def _text(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
