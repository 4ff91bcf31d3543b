"""Whether all processes that share a device fit its memory: the learner's ranks, generators, scorers and teachers.

Of the learner ``learner.memory_plan`` is the prediction. vLLM takes the share that its key says; another engine its
weights, and keys and values for as many tokens as it can have.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from async_rl.config.config import Config
from async_rl.config.generator import BACKENDS, has_model
from async_rl.config.parallel import Layout
from async_rl.generator.vllm.adapter import workers_receive
from async_rl.launch.checks.capacity import backend_here, has_gpu
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.learner_memory import MARGIN, RESERVED_BYTES, needed_bytes, propose, shape_of
from async_rl.launch.checks.placement import VISIBLE, Placement, place, visible_devices
from async_rl.learner.cards import Machines
from async_rl.learner.memory_plan import MemoryPlan, ModelShape, UnknownShapeError, compute_bytes, plan_memory
from async_rl.output import size_text
from async_rl.process.cgroup import available_memory

ASLEEP_BYTES = 2 << 30
"""Memory of a GPU that vLLM has beside its share, and keeps while it sleeps: for CUDA's context and libraries; and its
graphs, which it keeps, too."""
_SURE = 0.85
"""The part of the learner's predicted peak without which it does not run: the prediction's error is below 15 %."""

_WATCH = "look at memory/peak_bytes in the first steps, and lower learner.max_tokens if the room is small"


@dataclass(frozen=True, slots=True)
class Part:
    """What one process takes of a device.

    Attributes:
        name: of the process.
        most: bytes that it should have.
        least: bytes without which it can't run.
        text: what they are for.
        key: of a vLLM engine: the key of its share.
        weights: of a vLLM engine: the bytes of its weights, which must fit its share. 0 if they are not known.
    """

    name: str
    most: float
    least: float
    text: str
    key: str = ""
    weights: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} {size_text(int(self.most))} ({self.text})"


def device_sizes() -> Sequence[int]:
    """Return the memory in bytes of each CUDA device that torch finds. No context is made on them."""
    if not has_gpu():
        return ()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_properties(index).total_memory for index in range(count)]


def check_device_memory(
    config: Config, num_ranks: int, *, is_alone: bool, machines: Machines | None = None
) -> list[Finding]:
    """Check that there is room on the fullest device; and that there is while a rank samples with vLLM.

    A finding is a FAIL if the processes can't run so, and a WARN if the room is within the prediction's error; the fix
    says with which settings there would be.

    Without GPUs the learner's ranks must fit the memory that is available; that never fails, because the answers may be
    shorter than the longest, and a machine may swap. ``capacity`` knows what all processes need there at least.

    Args:
        num_ranks: number of the learner's ranks.
        is_alone: only ranks of the learner start here, and no generators and scorers.
        machines: whose devices these are. None: this one.

    Raises:
        ConfigError: the ranks can't be divided as ``[parallel]`` says, or there are too few devices.
    """
    sizes_in_order = device_sizes() if machines is None else [machines.card.memory_bytes] * machines.total_gpus
    if not sizes_in_order:
        each = available_memory(with_swap=True) / num_ranks
        where = "this machine" if num_ranks == 1 else f"its share of this machine, one of {num_ranks},"
        room = _Device(config, num_ranks, each, "cpu", where).room("device memory", ["learner"], is_training=True)
        return [Finding(room.check, "WARN" if room.state == "FAIL" else room.state, room.found, room.fix)]
    named = visible_devices(os.environ) if machines is None else []
    visible = named or [str(index) for index in range(len(sizes_in_order))]
    sizes = dict(zip(visible, sizes_in_order, strict=False))
    if is_alone:
        chosen = config.learner.devices or range(min(num_ranks, len(visible)))
        processes = {visible[index]: ["learner"] for index in chosen if index < len(visible)}
    else:
        processes = _processes(config, place(config, visible, is_limited=bool(machines) or VISIBLE in os.environ))
    devices = [
        (_Device(config, num_ranks, sizes[name], "cuda", f"GPU {name}"), own)
        for name, own in processes.items() if name in sizes
    ]  # fmt: skip
    rooms: list[Finding] = []
    phases = [("device memory", True)]
    if config.learner_uses_vllm:
        phases.append(("memory to sample", False))
    for check, is_training in phases:
        all_of_them = [device.room(check, own, is_training=is_training) for device, own in devices]
        rooms += sorted(all_of_them, key=lambda room: ("FAIL", "WARN", "OK").index(room.state))[:1]
    return rooms


def _processes(config: Config, placement: Placement) -> dict[str, list[str]]:
    """Return the processes on each device: ``learner``, ``generator``, and scorers by the names of their tables."""
    users: dict[str, list[str]] = {}
    launched = [f"scorer.{name}" for name, scorer in config.scorer.items() if scorer.launch]
    named = [("learner", device) for device in placement.learner or ()]
    named += [("generator", device) for own in placement.generators or () for device in own]
    for name, device in [*named, *zip(launched, placement.scorers, strict=False)]:
        users.setdefault(device, []).append(name)
    return users


@dataclass(frozen=True, slots=True)
class _Device:
    """A device of ``size`` bytes, ``kind`` "cuda" or "cpu", and the config of the run on it."""

    config: Config
    num_ranks: int
    size: float
    kind: str
    name: str

    def room(self, check: str, processes: Sequence[str], *, is_training: bool) -> Finding:
        """Return whether the ``processes`` fit while the learner trains; or while it samples with vLLM."""
        parts, unknown = self._parts(processes, is_training=is_training)
        most, least = sum(part.most for part in parts), sum(part.least for part in parts)
        if not parts:
            return Finding(check, "WARN", f"not predicted: {'; '.join(unknown)}", _WATCH)
        who = f"the {parts[0].name} takes" if len(parts) == 1 else "processes take"
        text = f"on {self.name} {who} about {size_text(int(most))} of {size_text(int(self.size))}: "
        texts = [parts[0].text] if len(parts) == 1 else list(map(str, parts))
        text += ", ".join([*texts, *(f"{text}, and is not counted" for text in unknown)])
        too_small = [p for p in parts if p.key and p.weights >= p.most - ASLEEP_BYTES]
        if most <= self.size and not too_small:
            return Finding(check, "WARN", text, _WATCH) if unknown else Finding(check, "OK", text)
        state = "FAIL" if least > self.size or too_small else "WARN"
        text += "" if state == "FAIL" else f"; only {size_text(int(least))} of that are sure, so it may fit"
        return Finding(check, state, text, self._fix(parts, is_training=is_training))

    def _parts(self, processes: Sequence[str], *, is_training: bool) -> tuple[list[Part], list[str]]:
        parts: list[Part] = []
        unknown: list[str] = []
        for process in processes:
            try:
                parts += self._of(process, is_training=is_training)
            except UnknownShapeError as error:
                unknown.append(f"of {process} {error}")
        return parts, unknown

    def _of(self, process: str, *, is_training: bool) -> Iterator[Part]:
        """Yield what a ``process`` takes, of the names of ``_processes``."""
        config = self.config
        if process == "learner":
            yield from self._of_learner(is_training=is_training)
        elif process == "generator":
            name = backend_here(config)
            if name == "vllm":
                # A second version, if workers receive it, is inside of the share, too.
                copies = (1 + workers_receive(config, device=self.kind)) / config.generator.tensor_parallel_size
                yield self._of_vllm(process, "generator.memory_fraction", config.generator.memory_fraction, copies)
            elif name in BACKENDS and has_model(name):
                shape, size = shape_of(config.model.path), compute_bytes(config, self.kind)
                yield _of_engine(process, shape.num_parameters * size, _cache_bytes(shape, config, size), "its cache")
        else:
            scorer = config.scorer[process.removeprefix("scorer.")]
            if scorer.backend == "vllm":
                yield self._of_vllm(process, f"{process}.memory_fraction", scorer.memory_fraction, 1, scorer.model)
            else:
                shape, size = shape_of(scorer.model), 4 if scorer.dtype == "float32" else 2
                # One layer's activations at a time.
                widths = 4 * shape.width + shape.queries + 2 * shape.keys + 3 * shape.mlp
                yield _of_engine(process, shape.num_parameters * size, scorer.max_tokens * size * widths, "a batch")

    def _plan(self) -> tuple[ModelShape, MemoryPlan]:
        config, shape = self.config, shape_of(self.config.model.path)
        layout = Layout.of(config.parallel, self.num_ranks)
        return shape, plan_memory(shape, config, layout, device=self.kind, has_reference=config.has_reference_model)

    def _of_learner(self, *, is_training: bool) -> Iterator[Part]:
        config, (shape, plan) = self.config, self._plan()
        if not is_training:
            waiting = plan.weights + plan.optimizer + RESERVED_BYTES
            yield Part("a rank that waits", waiting, waiting, "weights and optimizer")
            yield self._of_vllm("its vLLM", "generator.memory_fraction", config.generator.memory_fraction, 1)
            return
        what = {
            "weights": plan.weights, "gradients": plan.gradients, "optimizer": plan.optimizer,
            "gathered": plan.gathered, "activations and logits": plan.activations + plan.head,
        }  # fmt: skip
        for_cuda = f" and {size_text(RESERVED_BYTES)} for CUDA" if self.kind == "cuda" else ""
        text = ", ".join(f"{name} {size_text(int(size))}" for name, size in what.items())
        text += f"; with {MARGIN - 1:.0%} for gaps{for_cuda}"
        yield Part("learner", needed_bytes(plan, self.kind), _SURE * plan.total, text)
        if config.learner_uses_vllm and self.kind == "cuda":
            yield Part("its vLLM", ASLEEP_BYTES, ASLEEP_BYTES, "while it sleeps")
        elif config.learner.generate and has_model(config.generator.backend) and self.kind == "cuda":
            cache = _cache_bytes(shape, config, compute_bytes(config, self.kind))
            yield Part("its engine", MARGIN * cache, 0, "the cache to sample with")

    def _of_vllm(self, name: str, key: str, fraction: float, copies: float, model: str | None = None) -> Part:
        share = fraction * self.size
        taken = share + ASLEEP_BYTES  # vLLM does not start if its share is not free beside its context
        try:
            number = shape_of(model or self.config.model.path).num_parameters
        except UnknownShapeError:  # its share is known
            number = 0
        weights = copies * number * compute_bytes(self.config, self.kind)
        text = f"{key} = {fraction} of it, and {size_text(ASLEEP_BYTES)} beside that"
        if weights:
            text += f"; its weights{', with a second version,' if copies > 1 else ''} are {size_text(int(weights))}"
        return Part(name, taken, taken, text, key, weights)

    def _fix(self, parts: Sequence[Part], *, is_training: bool) -> str:
        """Return settings with which the ``parts`` fit."""
        engines = [part for part in parts if part.key]
        learner = sum(part.most for part in parts if part.name == "learner")
        others = sum(part.most for part in parts if not part.key and part.name != "learner")
        rest = self.size - others - len(engines) * ASLEEP_BYTES
        if fractions := _fractions(engines, rest - learner, self.size):
            return f"set {fractions}"
        if learner and is_training:
            smallest = sum(2 * part.weights for part in engines)
            shape, number = self._plan()[0], self.num_ranks
            more = (number << power for power in range(11 if self.kind == "cuda" and not engines else 1))
            for count in more:
                if proposal := propose(shape, self.config, count, rest - smallest, self.kind):
                    room = rest - needed_bytes(proposal.plan, self.kind)
                    fractions = _fractions(engines, room, self.size)
                    where = "" if count == number else ", on as many devices of this size"
                    return f"it fits with {proposal}{where}" + (f", and {fractions}" if fractions else "")
        if not is_training:
            return "shard the learner over more GPUs"
        if len(parts) > 1:
            return "give them GPUs of their own (learner.devices, generator.devices, scorer.NAME.device)"
        return "set lora.rank, take a smaller model, or shorten the longest sequence (sampling.max_new_tokens)"


def _fractions(engines: Sequence[Part], room: float, size: float) -> str:
    """Return the keys of vLLM ``engines``, with a share with which they have ``room`` bytes of ``size`` together.

    Empty if that is too little for their weights, or there are none.
    """
    if not engines:
        return ""
    most = math.floor(100 * room / size / len(engines)) / 100
    if any(part.weights >= most * size for part in engines) or most <= 0:
        return ""
    return " and ".join(f"{key} = {most}" for key in dict.fromkeys(part.key for part in engines))


def _of_engine(name: str, weights: float, beside: float, what: str) -> Part:
    text = f"weights {size_text(int(weights))}, {what} {size_text(int(beside))}"
    return Part(name, MARGIN * (weights + beside) + RESERVED_BYTES, weights, text)


def _cache_bytes(shape: ModelShape, config: Config, size: int) -> float:
    """Return the bytes of keys and values of as many sequences as the built-in engine samples at the same time."""
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    return 2 * size * shape.num_layers * shape.keys * config.generator.batch_size * longest
