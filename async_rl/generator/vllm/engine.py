"""vLLM's ``AsyncLLM``, driven step by step: its event loop runs only during calls of ``VllmEngine``.

The engine is another process and decodes all the time. Its outputs wait in a socket until the generator reads them. So
the generator's loop needs no second thread, and one call replaces the weights. ``KvCacheCapacity`` estimates from the
engine's figures how many sequences fit in its cache. More would wait inside the engine, or be preempted and computed
again, while their leases age.

``vllm.backend`` calls this module. vLLM's names are those of 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from async_rl.errors import EngineError, ModelError, WeightsError

_UPDATE_LIMIT_S = 300.0
_ALIVE_S = 1.0
"""How often a call to vLLM looks whether the engine is alive."""
_ABORT_S = 10.0
_CLOSE_S = 3.0
_T = TypeVar("_T")

_FILL = 0.9
"""The share of the cache to plan with. The rest is for the growth of running sequences."""
_FORGET = 0.995
"""The factor by which the largest observed need of a sequence shrinks from one step to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One output of a request: the tokens sampled since the last output, with vLLM's logprobs.

    ``finish_reason`` is None while the request runs. The last output has ``spans``, vLLM's ranges of tokens that were
    sampled with the same version.
    """

    request_id: str
    token_ids: Sequence[int]
    logprobs: Any
    finish_reason: str | None
    spans: Sequence[Any] | None


@dataclass(slots=True)
class Load:
    """How busy the engine was at its newest step. ``kv_usage`` is the used share of the KV cache, 0 to 1.

    ``num_tokens`` counts sampled tokens since the engine's start.
    """

    num_running: int = 0
    kv_usage: float = 0.0
    num_tokens: int = 0


class VllmEngine:
    """Drives one vLLM engine, which runs in separate processes. Create it by ``start``. Not thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop, llm: Any, load: Load) -> None:
        self._loop, self.load = loop, load
        self._llm: Any = llm
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._adapters: dict[int, Any] = {}
        self._pieces: list[Piece] = []
        self._failure: BaseException | None = None
        self._arrived = asyncio.Event()
        self.is_asleep = False
        """Whether the engine sleeps. While it does, requests may only be added and stopped."""

    @classmethod
    def start(cls, arguments: Mapping[str, Any]) -> VllmEngine:
        """Start the engine's processes, which takes a minute. ``arguments`` are those of vLLM's ``AsyncEngineArgs``.

        Raises:
            ModelError: vLLM refuses the model or the arguments.
        """
        from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        loop = asyncio.new_event_loop()
        load = Load()

        async def make() -> Any:
            engine = AsyncEngineArgs(**arguments)
            if engine.enable_chunked_prefill is False and engine.create_model_config().has_inner_state:
                # vLLM can cache the states of a recurrent model's prompts only if it may read them in parts.
                engine.enable_prefix_caching = False
            return AsyncLLM.from_engine_args(engine, stat_loggers=[lambda _config, _index=0: _stat_logger(load)])

        try:
            engine = cls(loop, loop.run_until_complete(make()), load)
        except Exception as error:  # whatever vLLM objects to: the config, the model, the device, its memory
            loop.close()
            raise _cannot_run("this model", error) from error
        try:
            engine._try_out()
        except EngineError as error:
            model = f"{engine._llm.model_config.architecture} in {engine.dtype}"
            engine.close()
            raise _cannot_run(model, error.__cause__ or error) from error
        return engine

    def _try_out(self) -> None:
        """Sample two tokens. Some kernels refuse a model only when it runs, and this should not be found in a rollout.

        Raises:
            EngineError: the engine has died.
        """
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        self.add("try-out", [0, 0], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False), cache_salt="-")
        while not any(piece.finish_reason for piece in self.poll(1.0)):
            pass

    @property
    def vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    @property
    def dtype(self) -> str:
        """The model's dtype by its name in torch, for example ``bfloat16``."""
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @property
    def model_runner(self) -> str:
        """The model runner of the workers, ``v1`` or ``v2``, by their own answer."""
        return self._run(asyncio.wait_for(self._llm.collective_rpc("runner_name"), _UPDATE_LIMIT_S))[0]

    def digests(self, adapter: int = 0) -> dict[str, str]:
        """Return the digests of all parameters of all workers, by ``RANK:NAME``, and those of an ``adapter`` if it is
        not 0.
        """
        call = self._llm.collective_rpc("held_digests", args=(adapter,))
        of_ranks = self._run(asyncio.wait_for(call, _UPDATE_LIMIT_S))
        return {f"{rank}:{name}": digest for rank, held in enumerate(of_ranks) for name, digest in held.items()}

    def add(
        self, request_id: str, prompt_ids: Sequence[int], parameters: Any, *, cache_salt: str, adapter: int = 0
    ) -> None:
        """Start a request; ``poll`` returns its outputs.

        Prompts with the same ``cache_salt`` may share cached keys and values. ``adapter`` is the id of the adapters
        that ``change_adapters`` has added, 0 for none.
        """
        from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]

        prompt = tokens_input(list(prompt_ids), cache_salt=cache_salt)
        self._tasks[request_id] = self._loop.create_task(
            self._follow(request_id, prompt, parameters, self._adapters.get(adapter))
        )

    async def _follow(self, request_id: str, prompt: Any, parameters: Any, adapter: Any) -> None:
        try:
            async for output in self._llm.generate(prompt, parameters, request_id, lora_request=adapter):
                answer = output.outputs[0]
                self._pieces.append(
                    Piece(request_id, answer.token_ids, answer.logprobs, answer.finish_reason, answer.weight_versions)
                )
                self._arrived.set()
        except Exception as error:  # the next poll raises it in the generator's loop
            self._failure = self._failure or error
            self._arrived.set()
        finally:
            self._tasks.pop(request_id, None)

    def poll(self, timeout_s: float) -> list[Piece]:
        """Return the outputs that have arrived. If there are none, wait for at most ``timeout_s`` seconds.

        Raises:
            EngineError: the engine has died, or a request failed.
        """
        if self._tasks or self._pieces:
            self._loop.run_until_complete(self._wait(timeout_s))
        if self._failure is not None:
            raise EngineError(
                f"vLLM failed: {self._failure!r}; the reason is above this line in the generator's log"
            ) from self._failure
        pieces, self._pieces = self._pieces, []
        self._arrived.clear()
        return pieces

    async def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these requests and drop their outputs. Unknown and finished requests are ignored."""
        tasks = [task for name in request_ids if (task := self._tasks.get(name)) is not None]
        gone = set(request_ids)
        if tasks:
            for task in tasks:
                task.cancel()
            self._run(asyncio.wait(tasks, timeout=_ABORT_S))
        for name in gone:
            self._tasks.pop(name, None)
        self._pieces = [piece for piece in self._pieces if piece.request_id not in gone]

    def set_up_transfer(self, order_paths: Sequence[str], report_path: str) -> None:
        """Have the workers take part in collectives. Call it once, before the first version.

        ``generator.vllm.weights.RanksInit`` explains the arguments.

        Raises:
            WeightsError: the workers can't open the pipes.
        """
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferInitRequest,
        )

        request = WeightTransferInitRequest(init_info={"order_paths": list(order_paths), "report_path": report_path})
        self._call("open the pipes for weights", self._llm.init_weight_transfer_engine(request))

    def load_paused(self, version: int, source: Mapping[str, Any], *, recompute: bool) -> float:
        """Pause the engine, load a version, and go on. Return the pause in seconds. An engine that sleeps wakes.

        The pause lasts from the request to stop or wake the engine to the answer that it goes on.

        Args:
            version: the version of all tokens from now on.
            source: where the workers find it, the fields of ``generator.vllm.weights.Source``.
            recompute: compute the keys and values of running sequences again, and forget all cached ones.

        Raises:
            WeightsError: the update failed; the engine can't be used any more.
        """
        return self._call(f"take over version {version}", self._load_paused(version, source, recompute=recompute))

    async def _load_paused(self, version: int, source: Mapping[str, Any], *, recompute: bool) -> float:
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferUpdateRequest,
        )

        llm = self._llm
        started_s = time.perf_counter()
        if self.is_asleep:
            await llm.wake_up(["weights"])
        else:
            # AsyncLLM.pause_generation does the same, then sleeps for 20 ms.
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=recompute)
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=dict(source)))
        await llm.finish_weight_update(str(version))
        if self.is_asleep:
            await llm.wake_up(["kv_cache"])
            self.is_asleep = False
        else:
            await llm.resume_generation()
        return time.perf_counter() - started_s

    def sleep(self, *, keeps_weights: bool) -> None:
        """Stop decoding, and give up the device's memory for weights, keys and values. On a CPU vLLM gives nothing up.

        Running requests go on when the engine wakes, and their keys and values are computed again. An engine that
        sleeps goes on sleeping.

        Args:
            keeps_weights: keep a copy of the weights on the host, for ``wake``. Without it only ``load_paused`` wakes
                the engine.

        Raises:
            WeightsError: the engine did not fall asleep; it can't be used any more.
        """
        if self.is_asleep:
            return
        self._call("give its memory up", self._llm.sleep(1 if keeps_weights else 2, "keep"))
        self.is_asleep = True

    def wake(self) -> None:
        """Go on with the weights that were kept.

        Raises:
            WeightsError: the engine did not wake; it can't be used any more.
        """
        self._call("take its memory again", self._llm.wake_up())
        self.is_asleep = False

    def change_adapters(self, number: int, directory: Path, *, remove: Sequence[int]) -> float:
        """Forget the adapters ``remove``, and load those in ``directory`` under the id ``number``. Running requests go
        on with their own. Return the seconds that it took; the engine runs no step while it loads.

        Raises:
            WeightsError: vLLM can't load them.
        """
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        request = LoRARequest(str(number), number, str(directory))
        pause_s = self._call("load the adapters of a new version", self._change_adapters(request, remove))
        self._adapters = {n: r for n, r in self._adapters.items() if n not in remove} | {number: request}
        return pause_s

    async def _change_adapters(self, request: Any, remove: Sequence[int]) -> float:
        started_s = time.perf_counter()
        for number in remove:
            await self._llm.remove_lora(number)
        await self._llm.add_lora(request)
        return time.perf_counter() - started_s

    def _call(self, what: str, call: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a call to vLLM about weights or memory. Return its answer. ``what`` describes the call for errors.

        Raises:
            WeightsError: the call failed or took too long.
        """
        try:
            return self._run(self._answer(call))
        except Exception as error:
            raise WeightsError(
                f"vLLM did not {what}: {type(error).__name__}: {error}; look for the cause in the generator's log"
            ) from error

    async def _answer(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Return the answer to a call to vLLM, which would wait on if the engine died meanwhile."""
        task = asyncio.ensure_future(call)
        try:
            async with asyncio.timeout(_UPDATE_LIMIT_S):
                while not (await asyncio.wait([task], timeout=_ALIVE_S))[0]:
                    if self._llm.errored:
                        raise self._llm.dead_error
            return task.result()
        finally:
            task.cancel()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """End the engine's processes."""
        if self._loop.is_closed():
            return
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._llm.shutdown(timeout=_CLOSE_S)
        # Let cancelled tasks end, including vLLM's.
        with contextlib.suppress(Exception):
            self._run(asyncio.wait_for(asyncio.sleep(0), 1.0))
        self._loop.close()
        self._llm = None  # otherwise it would shut down again, and fail, at the interpreter's end


def _cannot_run(model: str, error: BaseException) -> ModelError:
    return ModelError(
        f"vLLM can't run {model} here: {type(error).__name__}: {error}; the reason is in the lines above. Another "
        f"model, model.dtype, generator.memory_fraction, generator.engine, experimental.vllm.kv_cache_bytes or "
        f'generator.backend = "transformers" may help'
    )


def _stat_logger(load: Load) -> Any:
    """Return a vLLM logger that writes the engine's newest statistics into ``load``."""
    from vllm.v1.metrics.loggers import StatLoggerBase  # pyright: ignore[reportMissingImports]

    class LoadLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None: ...

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                load.num_running = scheduler_stats.num_running_reqs
                load.kv_usage = scheduler_stats.kv_cache_usage
            if iteration_stats is not None:
                load.num_tokens += iteration_stats.num_generation_tokens

        def log_engine_initialized(self) -> None: ...

    return LoadLogger()


class KvCacheCapacity:
    """Estimates how many sequences fit in the KV cache at once. The estimate is never above ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._need = 0.0

    @property
    def max_running(self) -> int:
        """How many sequences may run at once so that the KV cache should hold them all; at least 1."""
        if self._need * self._most <= _FILL:
            return self._most
        return max(1, int(_FILL / self._need))

    def observe(self, num_running: int, kv_usage: float) -> None:
        """Learn from one step how much of the KV cache a sequence needs.

        ``kv_usage`` is the share of the cache, 0 to 1, that the ``num_running`` sequences hold.
        """
        if num_running > 0:
            self._need = max(self._need * _FORGET, kv_usage / num_running)
