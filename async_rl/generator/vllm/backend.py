"""The backend that samples leases with vLLM, and changes the engine's weights while sequences run.

The engine runs in separate processes, and ``step`` collects its outputs. Each rollout is a request with its own seed.
The requests of a group have the same prompt and cache salt, so they share a prefill through the prefix cache. A rollout
enters the engine when a slot is free. Its cache salt is the number of activations until then, so no rollout begins with
keys and values of older weights.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.engine_arguments import shown
from async_rl.config.generator import BACKENDS
from async_rl.data.answer_text import answer_decoder, prompt_opened
from async_rl.data.chat import load_tokenizer, render_prompt
from async_rl.data.turn_end import turn_ends
from async_rl.data.vocabulary import check_embedded
from async_rl.errors import EngineError, ModelError, WeightsError
from async_rl.generator.backend import Sampled
from async_rl.generator.hf.causal_model import WeightTable, describe_model
from async_rl.generator.parity import ScoringMode
from async_rl.generator.vllm.adapter import (
    Gathered,
    check_installed,
    check_model_runner,
    engine_arguments,
    logprob_of,
    num_listed,
    prepare_environment,
    sampling_parameters,
    scoring_parameters,
    seeds,
    token_versions,
    workers_receive,
)
from async_rl.generator.vllm.engine import KvCacheCapacity, Piece, VllmEngine
from async_rl.generator.vllm.lora_versions import LoraVersions
from async_rl.generator.vllm.shared_staging import SharedStaging
from async_rl.queue.parity import ProbeSequence
from async_rl.records import NO_VERSION, FinishReason, Lease
from async_rl.weights.channel.engine_ranks import EngineRanks, HeldByEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_STEP_S = 0.02
"""How long a step waits for outputs of the engine."""
_SCORE_LIMIT_S = 120.0
_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(slots=True, eq=False)
class _Rollout:
    """One sample of a lease that runs in the engine or waits for a slot. ``index`` is its number in the lease.

    If versions are adapters, ``adapter`` is the engine's id of those that sample it, and ``version`` their version.
    """

    lease: Lease
    index: int
    prompt_ids: np.ndarray
    parameters: Any
    gathered: Gathered
    adapter: int = 0
    version: int = NO_VERSION


@dataclass(slots=True, eq=False)
class _Progress:
    """How far one lease is. ``num_open`` is its number of unfinished rollouts.

    ``num_finished_tokens`` counts the tokens of finished rollouts. ``running`` holds those in the engine by request id.
    """

    num_open: int
    num_finished_tokens: int = 0
    running: dict[str, _Rollout] = field(default_factory=dict)


class VllmBackend:
    """Samples with vLLM in separate processes.

    It implements ``Backend``, ``MultiRankBackend``, ``ScoringBackend`` and ``SleepingBackend``.
    """

    capabilities = BACKENDS["vllm"]

    def __init__(
        self,
        engine: VllmEngine,
        tokenizer: PreTrainedTokenizerBase,
        table: WeightTable,
        *,
        eos_ids: frozenset[int],
        max_running: int,
        max_length: int,
        recompute: bool,
        ranks: EngineRanks | None,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        lora: LoraVersions | None = None,
    ) -> None:
        self._engine, self._table, self._lora = engine, table, lora
        self._tokenizer: Any = tokenizer
        self._text_of = answer_decoder(tokenizer, eos_ids)
        self._template_arguments = template_arguments
        self._eos_ids = eos_ids
        self._max_length = max_length
        self._recompute = recompute
        self.ranks = ranks
        self._capacity = KvCacheCapacity(max_running)
        self._staging = SharedStaging()
        self.version = NO_VERSION
        self._source: Mapping[str, Any] = {}
        self._num_activations = 0
        self._num_requests = 0
        self._waiting: deque[_Rollout] = deque()
        self._running: dict[str, _Rollout] = {}
        self._leases: dict[str, _Progress] = {}
        self._early: list[Piece] = []
        self._num_scorings = 0

    @classmethod
    def from_files(cls, directory: str | Path, config: Config, *, device: str, can_sleep: bool = False) -> VllmBackend:
        """Start the engine for the model and tokenizer in ``directory``. It has no weights until ``activate``.

        ``can_sleep``: allocate the engine's memory on a GPU so that ``sleep`` gives it up.

        Raises:
            ConfigError: vLLM does not know an argument of ``generator.engine``.
            ModelError: vLLM is not installed, a file is missing or unreadable, vLLM can't run the model, or the config
                sets ``generator.devices``.
        """
        if config.generator.devices is not None:
            raise ModelError(
                f"generator.devices: a vLLM generator that is started by hand gets its devices by "
                f"CUDA_VISIBLE_DEVICES={','.join(map(str, config.generator.devices))}; leave the key out"
            )
        runner = config.experimental.vllm.model_runner
        prepare_environment(config.generator.num_threads, runner)
        check_installed()
        check_model_runner(runner)
        directory = Path(directory)
        tokenizer = load_tokenizer(directory)
        model = describe_model(directory)
        text_config: Any = model.config.get_text_config(decoder=True)
        answers = [config.eval.of(name).max_new_tokens or 0 for name in config.data.eval]
        wanted = config.sampling.max_prompt_tokens + max(config.sampling.max_new_tokens, *answers, 0)
        max_length = min(wanted, getattr(text_config, "max_position_embeddings", None) or wanted)
        arguments = engine_arguments(directory, config, device=device, max_length=max_length, can_sleep=can_sleep)
        logger.info("vLLM's engine gets %s", shown(arguments.items()))
        engine = VllmEngine.start(arguments)
        logger.info("vLLM computes in %s, with model runner %s", engine.dtype, engine.model_runner)
        has_adapters = config.lora.publishes_adapters
        return cls(
            engine,
            tokenizer,
            WeightTable(model),
            lora=LoraVersions(engine, model, config, directory) if has_adapters else None,
            eos_ids=turn_ends(tokenizer, directory, config.data.template_arguments).ids,
            max_running=config.generator.batch_size,
            max_length=max_length,
            recompute=config.generator.kv_after_update == "recompute",
            ranks=None if has_adapters else _engine_ranks(engine, config, device),
            template_arguments=config.data.template_arguments,
        )

    @property
    def max_running(self) -> int:
        return self._capacity.max_running

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def num_tokens(self) -> int:
        return self._engine.load.num_tokens

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        ids = render_prompt(self._tokenizer, messages, self._template_arguments)
        check_embedded(ids, self._engine.vocab_size, self._tokenizer, "a prompt")
        return ids

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        """Queue the lease's samples of this prompt, and start those for which slots are free. See ``backend.Backend``.

        Raises:
            ModelError: prompt and answer may be longer than the engine's sequences, or vLLM can't sample like that.
        """
        if self.version == NO_VERSION:
            raise RuntimeError("submit() was called before the first activate(); activate a version first")
        sampling = lease.sampling
        longest = len(prompt_ids) + sampling.max_new_tokens
        if longest > self._max_length:
            raise ModelError(
                f"a prompt of {len(prompt_ids)} tokens with an answer of up to {sampling.max_new_tokens} may be "
                f"{longest} tokens long, but the engine holds at most {self._max_length}; lower "
                f"sampling.max_new_tokens (eval.max_new_tokens for evaluations), or sampling.max_prompt_tokens, above "
                f"which prompts are left out"
            )
        vocab_size = self._engine.vocab_size
        listed = num_listed(sampling, vocab_size) if lease.wants_sampling_mask else 0
        self._leases[lease.lease_id] = _Progress(lease.group_size)
        for index, seed in enumerate(seeds(lease)):
            parameters = sampling_parameters(sampling, seed, listed=listed, eos_ids=self._eos_ids)
            gathered = Gathered(vocab_size if lease.wants_sampling_mask else None)
            self._waiting.append(_Rollout(lease, index, prompt_ids, parameters, gathered))
        self._admit_waiting()

    def cancel(self, lease_id: str) -> None:
        self._waiting = deque(r for r in self._waiting if r.lease.lease_id != lease_id)
        if (progress := self._leases.pop(lease_id, None)) is not None:
            for request_id in progress.running:
                del self._running[request_id]
            self._engine.abort(list(progress.running))
            self._early = [piece for piece in self._early if piece.request_id not in progress.running]
        self._admit_waiting()

    def step(self) -> list[Sampled]:
        """Collect what the engine has sampled, and return the finished samples. See ``backend.Backend``.

        The engine decodes by itself. If it has no new output, wait a few hundredths of a second for one.

        Raises:
            EngineError: the engine has died, or a request failed.
            WeightsError: the active weights give NaN.
        """
        self._wake()
        early, self._early = self._early, []
        pieces = [*early, *self._engine.poll(0.0 if early else _STEP_S)]
        finished = [sampled for piece in pieces if (sampled := self._take(piece)) is not None]
        load = self._engine.load
        self._capacity.observe(load.num_running, load.kv_usage)
        self._admit_waiting()
        return finished

    def progress(self) -> dict[str, int]:
        return {
            lease_id: lease.num_finished_tokens + sum(len(r.gathered) for r in lease.running.values())
            for lease_id, lease in self._leases.items()
        }

    def tokens_after(self, counts: Mapping[str, int]) -> dict[str, np.ndarray]:
        return {
            one.lease.lease_id: np.array(one.gathered.token_ids[counts[one.lease.lease_id] :], np.int32)
            for one in self._running.values()
            if one.lease.lease_id in counts
        }

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        """Sample with ``weights`` from now on. See ``backend.Backend``.

        Return the pause: the seconds in which vLLM's engine could not run a decode step (see
        ``VllmEngine.load_paused``). If ``weights`` are adapters, running sequences keep theirs.
        """
        if self._lora is not None:
            self._wake()
            self._lora.check(weights)
            pause_s = self._lora.activate(weights, self._adapters_in_flight())
            self.version = version
            self._num_activations += 1
            return pause_s
        self._table.check(weights)
        if isinstance(weights, HeldByEngine):
            self._source = {"received": weights.number}
        else:
            # The engine goes on decoding during this copy.
            self._staging.write(weights)
            memory = self._staging
            self._source = {"path": memory.path, "size_bytes": memory.size_bytes, "rows": memory.rows}
        pause_s = self._engine.load_paused(version, self._source, recompute=self._recompute)
        self.version = version
        self._num_activations += 1
        return pause_s

    def sleep(self) -> None:
        # The weights are still in shared memory, from where the next version or the same one is loaded. Below adapters
        # they are only in vLLM.
        self._engine.sleep(keeps_weights=self._lora is not None)

    def _wake(self) -> None:
        """Go on where ``sleep`` has stopped, with the same version."""
        if not self._engine.is_asleep:
            return
        if self._lora is not None:
            self._engine.wake()
        else:
            self._engine.load_paused(self.version, self._source, recompute=self._recompute)

    @property
    def name(self) -> str:
        return "vllm"

    @property
    def dtype(self) -> str:
        return self._engine.dtype

    def score_tokens(
        self, sequences: Sequence[ProbeSequence], temperature: float, mode: ScoringMode = "cached_decode"
    ) -> np.ndarray | None:
        """Return the scored tokens' log-probabilities, float32 [N]. See ``parity.ScoringBackend``.

        Each scored token is one request whose prompt is the tokens before it. The engine samples a token as in rollouts
        and reports the log-probability of the given one. ``cached_decode`` may use the prefix cache; ``full_forward``
        does not. The result is None for ``float32_head``, and while a running rollout has a sampling mask: in a step
        with such a rollout vLLM would not return all log-probabilities.

        Raises:
            EngineError: the engine has died, or does not answer.
        """
        if mode == "float32_head" or any(rollout.gathered.lists for rollout in self._running.values()):
            return None
        self._wake()
        self._num_scorings += 1
        salt = f"{self._num_activations}" if mode == "cached_decode" else f"full_forward {self._num_scorings}"
        wanted: list[tuple[str, int]] = []
        for given in sequences:
            ids = given.token_ids.tolist()
            for position in range(len(ids) - given.num_scored, len(ids)):
                name = f"given {self._num_scorings} {len(wanted)}"
                wanted.append((name, ids[position]))
                parameters = scoring_parameters(temperature, ids[position])
                self._engine.add(name, ids[:position], parameters, cache_salt=salt, adapter=self._newest_adapter)
        return self._scored(wanted)

    def _scored(self, wanted: Sequence[tuple[str, int]]) -> np.ndarray:
        """Wait for the outputs of scoring requests. Return the log-probabilities, float32 [N].

        ``wanted`` has the request id and the scored token of each request. Outputs of rollouts that arrive meanwhile
        are kept for the next step.

        Raises:
            EngineError: the engine has died, or does not answer.
        """
        found: dict[str, float] = {}
        tokens = dict(wanted)
        deadline = time.monotonic() + _SCORE_LIMIT_S
        while len(found) < len(wanted):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"expected vLLM to score {len(wanted)} tokens within {_SCORE_LIMIT_S:.0f} s, got {len(found)}; "
                    f"look for the cause in the generator's log"
                )
            for piece in self._engine.poll(_STEP_S):
                if piece.request_id not in tokens:
                    self._early.append(piece)
                elif piece.logprobs is not None and len(piece.token_ids):
                    found[piece.request_id] = logprob_of(tokens[piece.request_id], piece.logprobs)
        return np.array([found[name] for name, _ in wanted], np.float32)

    def digests(self) -> Mapping[str, str]:
        """Return the digest of each parameter in vLLM's workers. See ``parity.ScoringBackend``.

        The names are vLLM's. Some of its parameters join several of the model's. The newest adapters follow, if there
        are any.
        """
        self._wake()
        return self._engine.digests(self._newest_adapter)

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._leases.clear()
        self._engine.close()
        self._staging.close()
        if self.ranks is not None:
            self.ranks.end()

    @property
    def _newest_adapter(self) -> int:
        return 0 if self._lora is None else self._lora.newest

    def _adapters_in_flight(self) -> set[int]:
        return {rollout.adapter for rollout in self._running.values()}

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._running) < self._capacity.max_running:
            if self._lora is not None and not self._lora.may_start(self._adapters_in_flight()):
                return
            rollout = self._waiting.popleft()
            rollout.adapter, rollout.version = self._newest_adapter, self.version
            self._num_requests += 1
            # vLLM adds a part that makes the name unique; outputs have our name.
            request_id = f"{self._num_requests}"
            self._running[request_id] = self._leases[rollout.lease.lease_id].running[request_id] = rollout
            self._engine.add(
                request_id, rollout.prompt_ids.tolist(), rollout.parameters, cache_salt=f"{self._num_activations}",
                adapter=rollout.adapter,
            )  # fmt: skip

    def _take(self, piece: Piece) -> Sampled | None:
        """Add an output of the engine to its rollout.

        Return the finished sample if this was the rollout's last output, else None.
        """
        rollout = self._running[piece.request_id]
        if len(piece.token_ids):
            rollout.gathered.add(piece.token_ids, piece.logprobs)
        if piece.finish_reason is None:
            return None
        if piece.finish_reason not in _FINISH_REASONS:
            raise EngineError(
                f"vLLM: expected a sequence to end with the reason stop or length, got {piece.finish_reason!r}; "
                f"report it with the installed version of vLLM"
            )
        lease_id = rollout.lease.lease_id
        progress = self._leases[lease_id]
        del self._running[piece.request_id], progress.running[piece.request_id]
        progress.num_open -= 1
        progress.num_finished_tokens += len(rollout.gathered)
        if progress.num_open == 0:
            del self._leases[lease_id]
        return self._sampled(rollout, piece, _FINISH_REASONS[piece.finish_reason])

    def _sampled(self, rollout: _Rollout, piece: Piece, finish_reason: FinishReason) -> Sampled:
        token_ids, logprobs = rollout.gathered.arrays()
        if rollout.adapter:
            versions = np.full(len(token_ids), rollout.version, np.int32)
        else:
            versions = token_versions(piece.spans, len(token_ids))
        if np.isnan(logprobs).any():
            raise WeightsError(
                f"version {versions[np.isnan(logprobs)][0]} gives NaN logprobs for {int(np.isnan(logprobs).sum())} of "
                f"{len(logprobs)} tokens; its weights are broken, so look for a non-finite loss in the "
                f"learner's log, or lower optimizer.lr"
            )
        return Sampled(
            lease_id=rollout.lease.lease_id,
            index=rollout.index,
            prompt_ids=rollout.prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            finish_reason=finish_reason,
            text=self._text_of(token_ids),
            sampling_mask=rollout.gathered.sampling_mask(),
            prompt_opened=prompt_opened(rollout.prompt_ids, self._text_of),
        )


def _engine_ranks(engine: VllmEngine, config: Config, device: str) -> EngineRanks | None:
    """Let the engine's workers take part in collectives, and return them as ranks. None: this process does."""
    if not workers_receive(config, device=device):
        engine.set_up_transfer([], "")
        return None
    ranks = EngineRanks(config.generator.tensor_parallel_size)
    engine.set_up_transfer(ranks.order_paths, ranks.report_path)
    return ranks
