"""Continuous batching over a Hugging Face causal LM.

A slot is the place of one sequence in the batch. In each ``step``, waiting samples take the free slots, one forward
pass decodes one token for every running sequence (row), and finished sequences free their slots. The prompt of a group
is computed once, and its keys and values are copied to the slots of the group. Shape letters: R = running rows, V =
vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from async_rl.config.generator import BACKENDS, GeneratorConfig
from async_rl.config.learner import LoraConfig
from async_rl.data.answer_text import answer_decoder, prompt_opened
from async_rl.data.chat import load_tokenizer, render_prompt
from async_rl.data.turn_end import turn_ends
from async_rl.data.vocabulary import check_embedded
from async_rl.errors import ModelError, WeightsError
from async_rl.generator.backend import Sampled, uniforms
from async_rl.generator.hf.adapter_table import AdapterTable
from async_rl.generator.hf.causal_model import WeightTable, build_model
from async_rl.generator.hf.routing import RouteRecorder
from async_rl.generator.hf.rows import Rows
from async_rl.generator.hf.sampler import SamplingPlan, cached_decode, full_forward, make_plan, pack_masks, sample
from async_rl.generator.hf.self_test import choose_rows
from async_rl.generator.hf.slots import RunningSequences
from async_rl.generator.parity import ScoringMode
from async_rl.queue.parity import ProbeSequence
from async_rl.records import NO_VERSION, FinishReason, Lease
from async_rl.routes import RouteArray
from async_rl.sampling_mask import join

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTypeName = Literal["auto", "float32", "bfloat16"]

_REFILL_SHARE = 8
"""Fill free slots when they are an eighth of all slots, or when nothing runs."""

_TOKENS_PER_CHARACTER = 4
"""The most tokens that a byte-level tokenizer needs for one character."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A lease with samples that wait for a slot. The first of them has index ``next_index``.

    ``prefix`` is the state of the cache after the prompt without its last token, and ``routes`` are the routes of these
    tokens, if the lease wants them; None until they are computed.
    """

    lease: Lease
    prompt_ids: np.ndarray
    next_index: int = 0
    prefix: Any | None = None
    routes: RouteArray | None = None

    @property
    def num_samples(self) -> int:
        return self.lease.group_size - self.next_index


class TransformersBackend:
    """Samples with a Hugging Face model in this process.

    It implements ``backend.Backend`` and ``parity.ScoringBackend``.

    ``deterministic`` makes a group's logits a function of the weights and the group, to the last bit. The last bits of
    a matrix product depend on its shape, may depend on strides, and on the CPU even on the addresses of its operands.
    So groups run one at a time, each in a cache of its own, with weights in the model's own (aligned) memory.
    """

    capabilities = BACKENDS["transformers"]

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: frozenset[int],
        config: GeneratorConfig,
        *,
        deterministic: bool = False,
        version: int = NO_VERSION,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        adapters: LoraConfig | None = None,
    ) -> None:
        self._model = model
        self._tokenizer: Any = tokenizer
        self._text_of = answer_decoder(tokenizer, eos_ids)
        self._template_arguments = template_arguments
        self._weights = WeightTable(model) if adapters is None else AdapterTable(model, adapters)
        self._device = model.device
        self._deterministic = deterministic
        self._recompute = config.kv_after_update == "recompute"
        self.version = version
        text_config: Any = model.config.get_text_config(decoder=True)
        self._vocab_size: int = text_config.vocab_size
        self._max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self._is_eos_V = np.zeros(self._vocab_size, np.bool_)
        self._is_eos_V[[i for i in eos_ids if i < self._vocab_size]] = True
        self._running = RunningSequences(config.batch_size)
        # Filling slots costs a prefill and a new sampling plan, which is too much for a single free slot.
        self._refill_from = max(1, config.batch_size // _REFILL_SHARE)
        self._waiting: deque[_Waiting] = deque()
        self._sampled_by_finished: dict[str, int] = {}
        self._plan: SamplingPlan | None = None
        self._recorder: RouteRecorder | None = None
        self.num_tokens = 0
        self._chosen_rows: Rows | None = None
        if version != NO_VERSION:
            self._chosen_rows = choose_rows(model, config.batch_size)

    @classmethod
    def from_files(
        cls,
        directory: str | Path,
        config: GeneratorConfig,
        *,
        device: str | torch.device = "cpu",
        dtype: DTypeName = "auto",
        deterministic: bool = False,
        load_pretrained: bool = False,
        needs_template: bool = True,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        adapters: LoraConfig | None = None,
    ) -> TransformersBackend:
        """Build a backend for the model and tokenizer in ``directory``.

        The backend has no weights until ``activate``. With ``load_pretrained`` it has those in ``directory``, as
        version 0. ``dtype`` auto is bfloat16 on CUDA and float32 on the CPU. Without ``needs_template`` prompts are
        plain text. ``template_arguments`` are the variables of the chat template in addition to the messages. If
        ``adapters`` is given, versions hold only these, and the frozen weights are those in ``directory``.

        Raises:
            ModelError: a file is missing or unreadable, or this backend can't run the model.
        """
        directory, device = Path(directory), torch.device(device)
        name = dtype if dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
        tokenizer = load_tokenizer(directory, needs_template=needs_template)
        has_weights = load_pretrained or adapters is not None
        model = build_model(directory, device=device, dtype=getattr(torch, name), load_pretrained=has_weights)
        eos_ids = turn_ends(tokenizer, directory, template_arguments).ids
        version = 0 if load_pretrained else NO_VERSION
        return cls(
            model,
            tokenizer,
            eos_ids,
            config,
            deterministic=deterministic,
            version=version,
            template_arguments=template_arguments,
            adapters=adapters,
        )

    @property
    def _rows(self) -> Rows:
        """The running rows' caches. They are chosen when the first weights are there."""
        if self._chosen_rows is None:
            raise RuntimeError("expected active weights, got none; this is a bug in async-rl, please report it")
        return self._chosen_rows

    @property
    def max_running(self) -> int:
        return len(self._running.position)

    @property
    def num_running(self) -> int:
        return self._running.num_rows + sum(w.num_samples for w in self._waiting)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        ids = render_prompt(self._tokenizer, messages, self._template_arguments)
        check_embedded(ids, self._vocab_size, self._tokenizer, "a prompt")
        return ids

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        """Queue the lease's samples of this prompt; ``step`` starts them. See ``backend.Backend``.

        Raises:
            ModelError: prompt and answer may need more positions than the model has, or the lease wants routes and the
                model's routers are not understood.
        """
        if self.version == NO_VERSION:
            raise RuntimeError("submit() was called before the first activate(); activate a version first")
        longest = len(prompt_ids) + lease.sampling.max_new_tokens
        if self._max_positions is not None and longest > self._max_positions:
            raise ModelError(
                f"a prompt of {len(prompt_ids)} tokens with an answer of up to {lease.sampling.max_new_tokens} may be "
                f"{longest} tokens long, but the model has max_position_embeddings = {self._max_positions}; lower "
                f"sampling.max_new_tokens (eval.max_new_tokens for evaluations), or sampling.max_prompt_tokens, above "
                f"which prompts are left out"
            )
        if lease.wants_routes and self._recorder is None:
            self._recorder = RouteRecorder(self._model)
        self._sampled_by_finished[lease.lease_id] = 0
        self._waiting.append(_Waiting(lease, prompt_ids))

    @torch.inference_mode()
    def cancel(self, lease_id: str) -> None:
        self._waiting = deque(w for w in self._waiting if w.lease.lease_id != lease_id)
        self._sampled_by_finished.pop(lease_id, None)
        self._leave([row for row, o in enumerate(self._running.sequences) if o.lease.lease_id == lease_id])

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """Run one decode step and return the samples that it finished. See ``backend.Backend``.

        Raises:
            WeightsError: the active weights give NaN.
        """
        self._admit_waiting()
        if self._running.num_rows == 0:
            return []
        logits_RV = self._decode()
        columns = self._sample(logits_RV)
        self._running.record(columns)
        self.num_tokens += self._running.num_rows
        return self._finish(columns["token_ids"])

    def progress(self) -> dict[str, int]:
        tokens = dict(self._sampled_by_finished)
        counts = self._running.num_sampled[: self._running.num_rows].tolist()
        for sequence, count in zip(self._running.sequences, counts, strict=True):
            tokens[sequence.lease.lease_id] += count
        return tokens

    def tokens_after(self, counts: Mapping[str, int]) -> dict[str, np.ndarray]:
        return {
            name: self._running.last_tokens(row, int(self._running.num_sampled[row]) - counts[name])
            for row, name in enumerate(one.lease.lease_id for one in self._running.sequences)
            if name in counts
        }

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        started_s = time.perf_counter()
        self._weights.check(weights)
        self._weights.replace(weights, copy=self._deterministic)
        if self._chosen_rows is None:
            self._chosen_rows = choose_rows(self._model, self.max_running)
        self.version = version
        # Prefill waiting prompts again with the new weights, and running sequences if the config requires it.
        for waiting in self._waiting:
            waiting.prefix = None
        if self._recompute:
            self._prefill_running()
        return time.perf_counter() - started_s

    @property
    def name(self) -> str:
        return "transformers"

    @property
    def dtype(self) -> str:
        return str(self._model.dtype).removeprefix("torch.")

    def score_tokens(
        self, sequences: Sequence[ProbeSequence], temperature: float, mode: ScoringMode = "cached_decode"
    ) -> np.ndarray:
        """Return the scored tokens' log-probabilities, float32 [N]. See ``parity.ScoringBackend``.

        Scoring uses a separate cache.
        """
        if mode != "cached_decode":
            return full_forward(self._model, sequences, temperature, float32_head=mode == "float32_head")
        return cached_decode(self._rows.fresh(len(sequences)), sequences, temperature, vocab_size=self._vocab_size)

    def digests(self) -> Mapping[str, str]:
        return self._weights.digests()

    def close(self) -> None:
        self._waiting.clear()
        self._sampled_by_finished.clear()
        self._leave(list(range(self._running.num_rows)))

    def _admit_waiting(self) -> None:
        """Give the free slots to waiting samples, in order of submission."""
        chosen: list[tuple[_Waiting, int]] = []
        free = self._running.num_free
        if self._running.num_rows and free < self._refill_from and not self._deterministic:
            return
        for waiting in self._waiting:
            if free == 0 or (self._deterministic and not self._may_join(waiting, chosen)):
                break
            count = min(free, waiting.num_samples)
            chosen.append((waiting, count))
            free -= count
        if not chosen:
            return
        if self._deterministic and not self._running.num_rows:
            self._rows.forget()
        self._prefill([w for w, _ in chosen if w.prefix is None and len(w.prompt_ids) > 1])
        for waiting, count in chosen:
            first_row = self._running.add(waiting.lease, waiting.prompt_ids, waiting.next_index, count, waiting.routes)
            self._rows.add(
                first_row, count, waiting.prefix, length=self._running.length, max_length=self._running.max_length
            )
            waiting.next_index += count
        while self._waiting and self._waiting[0].num_samples == 0:
            self._waiting.popleft()
        self._plan = None

    def _may_join(self, waiting: _Waiting, chosen: Sequence[object]) -> bool:
        """Return whether the samples of ``waiting`` may enter the batch when groups run one at a time.

        They may if the batch is empty or holds only samples of the same lease.
        """
        if chosen:
            return False
        return not self._running.sequences or self._running.sequences[0].lease is waiting.lease

    def _prefill(self, prompts: Sequence[_Waiting]) -> None:
        """Compute the ``prefix`` and ``routes`` of each prompt: those of all its tokens but the last."""
        sequences = [waiting.prompt_ids[:-1] for waiting in prompts]
        if self._recorder is None or not any(waiting.lease.wants_routes for waiting in prompts):
            for waiting, prefix in zip(prompts, self._rows.prefixes(sequences), strict=True):
                waiting.prefix = prefix
            return
        recorded = self._rows.record_prefixes(sequences, self._recorder)
        for waiting, (prefix, routes) in zip(prompts, recorded, strict=True):
            waiting.prefix = prefix
            waiting.routes = routes if waiting.lease.wants_routes else None

    @torch.inference_mode()
    def _prefill_running(self) -> None:
        """Compute the caches of all running rows again, after new weights.

        Their routes stay those with which the sampled tokens were computed.
        """
        running = self._running
        rows = [row for row in range(running.num_rows) if running.position[row] > 0]
        # The next step feeds the newest token; everything before it is in the cache.
        sampled = [running.last_tokens(row, int(running.num_sampled[row])) for row in rows]
        fed = [
            np.concatenate([running.sequences[row].prompt_ids, tokens])[: int(running.position[row])]
            for row, tokens in zip(rows, sampled, strict=True)
        ]
        self._rows.recompute(dict(zip(rows, fed, strict=True)))

    def _decode(self) -> Tensor:
        """Feed the newest token of every running row to the model. Return the logits [R, V] of the next tokens."""
        running, rows = self._running, slice(0, self._running.num_rows)
        ids, positions = running.next_ids[rows], running.position[rows]
        if self._recorder is None or all(sequence.routes is None for sequence in running.sequences):
            return self._rows.decode(ids, positions, max_length=running.max_length)
        logits_RV, routes_RLK = self._rows.record_decode(ids, positions, self._recorder, max_length=running.max_length)
        running.record_routes(routes_RLK)
        return logits_RV

    def _sample(self, logits_RV: Tensor) -> dict[str, np.ndarray]:
        """Choose the next token of every running row. Return its columns in ``Sampled``, [R] each."""
        running, rows = self._running, slice(0, self._running.num_rows)
        if self._plan is None:
            self._plan = make_plan(
                running.temperature[rows],
                running.top_p[rows],
                running.top_k[rows],
                min_ps=running.min_p[rows],
                vocab_size=logits_RV.shape[1],
                device=self._device,
            )
        uniforms_R = torch.from_numpy(uniforms(running.key[rows], running.num_sampled[rows])).to(self._device)
        columns_R, allowed_FV = sample(logits_RV, self._plan, uniforms_R)
        if allowed_FV is not None:
            running.record_masks(pack_masks(allowed_FV))
        columns = _to_host(columns_R)
        if num_nan := int(np.isnan(columns["logprobs"]).sum()):
            raise WeightsError(
                f"version {self.version} gives NaN logprobs for {num_nan} of {len(uniforms_R)} sequences; its weights "
                f"are broken, so look for a non-finite loss in the learner's log, or lower optimizer.lr"
            )
        return columns | {"versions": np.full(len(uniforms_R), self.version, np.int32)}

    def _finish(self, tokens_R: np.ndarray) -> list[Sampled]:
        """Remove the rows that ended with their newest tokens, ``tokens_R``. Return their samples."""
        running, rows = self._running, slice(0, self._running.num_rows)
        stopped_R = self._is_eos_V[tokens_R]
        if running.has_stop[rows].any():
            for row in np.flatnonzero(running.has_stop[rows] & ~stopped_R).tolist():
                stopped_R[row] = self._ends_with_stop(row)
        done_R = stopped_R | (running.num_sampled[rows] >= running.max_sampled[rows])
        if not done_R.any():
            return []
        done = np.flatnonzero(done_R).tolist()
        finished = [self._sampled(row, "stop" if stopped_R[row] else "length") for row in done]
        for sampled in finished:
            self._sampled_by_finished[sampled.lease_id] += len(sampled.token_ids)
        self._leave(done)
        alive = {o.lease.lease_id for o in running.sequences} | {w.lease.lease_id for w in self._waiting}
        for lease_id in {s.lease_id for s in finished} - alive:
            del self._sampled_by_finished[lease_id]
        return finished

    def _ends_with_stop(self, row: int) -> bool:
        """Return whether the row's newest token is one of the lease's stop tokens, or completed a stop string.

        An earlier one would have ended the row already.
        """
        sampling = self._running.sequences[row].lease.sampling
        if sampling.stop_token_ids and self._running.last_tokens(row, 1)[-1] in sampling.stop_token_ids:
            return True
        stop = sampling.stop
        if not stop:
            return False
        window = _TOKENS_PER_CHARACTER * (max(map(len, stop)) + 1)
        tail = self._text_of(self._running.last_tokens(row, window))
        return any(text in tail for text in stop)

    def _sampled(self, row: int, finish_reason: FinishReason) -> Sampled:
        sequence = self._running.sequences[row]
        columns = self._running.sampled(row)
        return Sampled(
            lease_id=sequence.lease.lease_id,
            index=sequence.index,
            prompt_ids=sequence.prompt_ids,
            finish_reason=finish_reason,
            text=self._text_of(columns["token_ids"]),
            sampling_mask=join(sequence.sampling_mask)
            if sequence.sampling_mask and sequence.lease.wants_sampling_mask
            else None,
            routes=None if sequence.routes is None else np.concatenate(sequence.routes),
            prompt_opened=prompt_opened(sequence.prompt_ids, self._text_of),
            **columns,
        )

    def _leave(self, rows: Sequence[int]) -> None:
        if rows:
            sources, destinations = self._running.remove(rows)
            self._rows.remove(rows, sources, destinations)
            self._plan = None


def _to_host(columns_R: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the columns, [R] each, as NumPy arrays.

    From a GPU all take one transfer as float64, which holds every int32 and every float32 exactly.
    """
    if all(column.device.type == "cpu" for column in columns_R.values()):
        return {name: column.numpy() for name, column in columns_R.items()}
    packed = torch.stack([column.double() for column in columns_R.values()]).cpu()
    return {name: row.to(c.dtype).numpy() for (name, c), row in zip(columns_R.items(), packed, strict=True)}
