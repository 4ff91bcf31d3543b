"""Translate between async-rl and vLLM: engine arguments, sampling parameters, log-probabilities. No torch.

Called by ``vllm.backend``. The names are those of vLLM 0.32.

Behavior log-probabilities and sampling masks are of the distribution that was sampled (``logprobs_mode =
"processed_logprobs"``): tokens that vLLM's top-k, top-p and min-p exclude have -inf there, so the finite ones are the
mask.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from async_rl.config.config import Config
from async_rl.config.generator import BACKENDS, missing_package
from async_rl.errors import ConfigError, EngineError, ModelError
from async_rl.generator.backend import rollout_keys
from async_rl.generator.vllm.plugin import DOUBLE_BUFFER, OWNED, TRANSFER_NAME
from async_rl.records import NO_VERSION, Lease, Sampling
from async_rl.sampling_mask import SamplingMask, pack_ids

_NEEDS = BACKENDS["vllm"]
CPU_KV_BYTES = 1 << 30
_MIN_TEMPERATURE = BACKENDS["vllm"].min_temperature
PROGRESS_TOKENS = 16
"""vLLM reports a running sequence after this many new tokens."""
_SPARE = 8
"""vLLM also keeps tokens that tie with the k-th logit. Request this many more log-probabilities to detect them."""
_MAX_LISTED = 4096
"""The most log-probabilities to request per token."""
_MOST_VERSIONS = 16
"""The most versions of adapters in flight. vLLM keeps memory for all of them on the device."""


def check_version(key: str) -> None:
    """Check that the supported version of vLLM is installed. ``key`` is the config key that chose vLLM.

    Raises:
        ModelError: it is not installed, or is another version; the message has the remedy.
    """
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ModelError(missing_package("vllm", str(error), key=key)) from error
    found: str = vllm.__version__  # pyright: ignore[reportAttributeAccessIssue]
    if not found.startswith(f"{_NEEDS.package_version}."):
        raise ModelError(f"expected vLLM {_NEEDS.package_version}.*, got {found}: {_NEEDS.install}")


def check_installed() -> None:
    """Check that the supported version of vLLM is installed and that vLLM finds our plugin.

    Raises:
        ModelError: it is not installed, is another version, or does not find the plugin; the message has the remedy.
    """
    check_version("generator.backend")
    if TRANSFER_NAME not in {entry.name for entry in entry_points(group="vllm.general_plugins")}:
        raise ModelError(
            f"vLLM finds no plugin {TRANSFER_NAME!r}: it looks for it in the metadata of installed packages; install "
            f"async-rl (pip install -e . in a checkout) instead of running it from its files"
        )


def known_arguments() -> list[str]:
    """Return the names of the arguments of the installed vLLM's engine, from its source: to import vLLM takes seconds.

    Empty if vLLM is not installed here.
    """
    spec = find_spec("vllm")
    places = [Path(one, "engine", "arg_utils.py") for one in (spec and spec.submodule_search_locations) or ()]
    classes = [
        node
        for path in places
        if path.is_file()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    ]
    fields = [line.target for one in classes for line in one.body if isinstance(line, ast.AnnAssign)]
    return [one.id for one in fields if isinstance(one, ast.Name) and not one.id.startswith("_")]


def check_names(arguments: Iterable[str]) -> None:
    """Check that the installed vLLM, if there is one, knows the ``arguments`` of ``generator.engine``.

    Raises:
        ConfigError: it does not know one.
    """
    known = known_arguments()
    for name in arguments if known else ():
        if name not in known:
            near = difflib.get_close_matches(name, known)
            raise ConfigError(
                f"generator.engine.{name}: expected an argument of the installed vLLM's engine, got another name; "
                + (f"did you mean {' or '.join(near)}?" if near else "correct it")
            )


def check_model_runner(model_runner: Literal["v1", "v2"] | None) -> None:
    """Check that vLLM can run ``model_runner`` on this machine, before it loads a model.

    Raises:
        ModelError: it is v2, and Triton, which compiles its kernels, does not work here.
    """
    from vllm.triton_utils import HAS_TRITON  # pyright: ignore[reportMissingImports]

    if model_runner == "v2" and not HAS_TRITON:
        raise ModelError(
            'experimental.vllm.model_runner: expected "v1" or no value on this machine, got "v2": its kernels need '
            "Triton, which needs a GPU and its driver; leave the key out"
        )


def prepare_environment(num_threads: int | None, model_runner: Literal["v1", "v2"] | None = None) -> None:
    """Set the environment variables for vLLM's processes, but keep most values that the user has set.

    Call it before vLLM is imported. ``model_runner`` is ``experimental.vllm.model_runner``.
    """
    os.environ[OWNED] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # the plugin's watch on the parent relies on it
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # vLLM would pin its threads to cores of its choice, which the learner and other generators use too.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    if model_runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(model_runner == "v2"))
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and TRANSFER_NAME not in chosen.split(","):
        os.environ["VLLM_PLUGINS"] = f"{chosen},{TRANSFER_NAME}" if chosen else TRANSFER_NAME


def workers_receive(config: Config, *, device: str) -> bool:
    """Return whether the engine's workers take part in broadcasts of weights. If not, the generator's process does.

    On a GPU they do so while the engine decodes, so they need memory for a second version there. With several workers
    the engine and the broadcast would both use NCCL on each device, in an order that may differ from worker to worker,
    and could wait for each other for ever. Versions of adapters alone are small, and vLLM loads them from files. The
    memory would be that of the quantised parameters, if they are quantised, and a version is larger.
    """
    if config.lora.publishes_adapters or "quantization" in config.generator.engine:
        return False
    if device == "cpu":
        return True
    has_broadcasts = config.weights.transport != "tcp" and config.weights.port is None
    return has_broadcasts and config.generator.double_buffer and config.generator.tensor_parallel_size == 1


def engine_arguments(
    directory: Path, config: Config, *, device: str, max_length: int, can_sleep: bool = False
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``AsyncEngineArgs`` for this run.

    ``can_sleep``: the engine gives up its memory when it sleeps, if vLLM can do that on ``device``.

    Raises:
        ConfigError: vLLM does not know an argument of ``generator.engine``.
        ModelError: vLLM has no kernels for the run's adapters.
    """
    engine, vllm = config.generator, config.experimental.vllm
    is_cpu = device == "cpu"
    dtype = config.model.dtype if config.model.dtype != "auto" else "float32" if is_cpu else "bfloat16"
    kv_bytes = vllm.kv_cache_bytes or (CPU_KV_BYTES if is_cpu else None)
    from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]

    check_names(engine.engine)
    transfer: dict[str, Any] = {"weight_transfer_config": WeightTransferConfig(backend=TRANSFER_NAME)}
    if config.lora.publishes_adapters:
        transfer = lora_arguments(config)
    return {
        "enable_prefix_caching": True,
        **engine.engine,
        "model": str(directory),
        "runner": "generate",  # a config without "architectures" would become a model for embeddings
        "tokenizer": str(tokenizer_directory(directory)),
        # Texts that end an answer are the run's or an agent's. Without a tokenizer vLLM ignores them silently.
        "skip_tokenizer_init": not (config.sampling.stop or config.has_agents),
        # Weights come from the learner, and from files only below adapters.
        "load_format": "auto" if config.lora.publishes_adapters else "dummy",
        "dtype": dtype,
        # Do not use the sampling parameters of the model's generation_config.json.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "max_model_len": max_length,
        "max_num_seqs": engine.batch_size,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "gpu_memory_utilization": engine.memory_fraction,
        **({} if kv_bytes is None else {"kv_cache_memory_bytes": kv_bytes}),
        "enforce_eager": is_cpu if vllm.enforce_eager is None else vllm.enforce_eager,
        # For a prompt that is read in parts, vLLM rewinds the random numbers. torch's CPU generators can't do that, and
        # the engine would fail.
        **({"enable_chunked_prefill": False} if is_cpu else {}),
        # vLLM's CPU build takes calls to sleep and to wake, but refuses this.
        **({"enable_sleep_mode": True} if can_sleep and not is_cpu else {}),
        **transfer,
        "additional_config": {DOUBLE_BUFFER: workers_receive(config, device=device)},
        "worker_extension_cls": "async_rl.generator.vllm.weights.WorkerCalls",
        "disable_log_stats": True,
        "seed": 0,
    }


def max_versions(config: Config) -> int:
    """Return how many versions of adapters may be in flight: those within the staleness bound, and an older one of
    evaluations.
    """
    return min(config.queue.max_staleness + 2, _MOST_VERSIONS)


def lora_arguments(config: Config) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``AsyncEngineArgs`` for adapters.

    Raises:
        ModelError: vLLM has no kernels for adapters of this rank.
    """
    from vllm.config.lora import MaxLoRARanks  # pyright: ignore[reportMissingImports]

    rank, ranks = config.lora.rank or 0, sorted(get_args(MaxLoRARanks))
    if rank > ranks[-1]:
        raise ModelError(
            f'lora.rank: expected at most {ranks[-1]} with lora.publish = "adapters" and generator.backend = "vllm", '
            f'got {rank}; lower it, or set lora.publish = "merged"'
        )
    most = max_versions(config)
    return {
        "enable_lora": True,
        "max_lora_rank": next(one for one in ranks if one >= rank),
        "max_loras": most,
        "max_cpu_loras": most + 1,  # the newest one may have no request yet
        "lora_dtype": "auto",
    }


def tokenizer_directory(directory: Path) -> Path:
    """Create a subdirectory of ``directory`` from which vLLM loads the tokenizer unchanged. Return its path.

    Where a ``config.json`` is in the same directory, the tokenizer's loader goes by the model's type, and would build a
    generic tokenizer that splits text in that model's way. So the subdirectory has links to all files but
    ``config.json`` and ``generation_config.json``.
    """
    target = directory / "tokenizer"
    target.mkdir(exist_ok=True)
    for path in directory.iterdir():
        if path.is_file() and path.name not in ("config.json", "generation_config.json"):
            link = target / path.name
            if not link.exists():
                link.symlink_to(path.resolve())
    return target


def seeds(lease: Lease) -> list[int]:
    """Return one seed for each rollout of the lease. It depends only on the lease's seed and the rollout's index.

    Seeds have 63 bits, because those of vLLM are signed.
    """
    keys = rollout_keys(lease.seed, np.arange(lease.group_size))
    return [int(key >> np.uint64(1)) for key in keys]


def num_listed(sampling: Sampling, vocab_size: int) -> int:
    """Return how many log-probabilities vLLM must list for each sampled token to show its whole sampling mask.

    The result is 0 if the lease's sampling keeps all tokens.

    Raises:
        ModelError: there are too many, because top-p or min-p without top-k may keep most of a large vocabulary.
    """
    if sampling.keeps_all:
        return 0
    wanted = vocab_size if sampling.top_k == 0 else min(vocab_size, sampling.top_k + _SPARE)
    if wanted > _MAX_LISTED:
        raise ModelError(
            f"sampling.top_p = {sampling.top_p}, top_k = {sampling.top_k}, min_p = {sampling.min_p}: the "
            f"vllm backend can say which tokens they kept for at most {_MAX_LISTED} tokens, of a vocabulary of "
            f"{vocab_size}; set sampling.top_k to at most {_MAX_LISTED - _SPARE}, or generator.backend = "
            f'"transformers"'
        )
    return wanted


def sampling_parameters(sampling: Sampling, seed: int, *, listed: int, eos_ids: Iterable[int]) -> Any:
    """Return vLLM's ``SamplingParams`` for one rollout. Every field that matters is set, so no model file changes it.

    Raises:
        ModelError: the temperature is so low that vLLM would raise it.
    """
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    if 0 < sampling.temperature < _MIN_TEMPERATURE:
        raise ModelError(
            f"temperature {sampling.temperature}: vLLM can't sample at temperatures between 0 and {_MIN_TEMPERATURE}; "
            f"raise sampling.temperature, sampling.temperature_end or eval.temperature, whichever has this value; "
            f"evaluations may also use 0, greedy decoding"
        )
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        max_tokens=sampling.max_new_tokens,
        stop=list(sampling.stop) or None,
        stop_token_ids=sorted({*eos_ids, *sampling.stop_token_ids}),
        include_stop_str_in_output=True,
        # The engine needs text only for stop strings. The answer is decoded once, from all tokens.
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop string may be a special token, such as </answer>
        logprobs=listed,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=PROGRESS_TOKENS,
    )


def scoring_parameters(temperature: float, token_id: int) -> Any:
    """Return vLLM's ``SamplingParams`` to get the log-probability of ``token_id`` as the next token.

    vLLM samples one token, which is not used. Top-p and top-k are off.
    """
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    return SamplingParams(
        temperature=temperature,
        # No seed: the sample is not used, and vLLM's CPU build fails on a seeded prompt that it reads in parts.
        max_tokens=1,
        logprob_token_ids=[token_id],
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def logprob_of(token_id: int, logprobs: Any) -> float:
    """Return the log-probability of ``token_id`` from vLLM's ``FlatLogprobs`` of one sampled token.

    Raises:
        EngineError: vLLM did not return it.
    """
    for listed, value in zip(logprobs.token_ids, logprobs.logprobs, strict=True):
        if listed == token_id:
            return float(value)
    raise EngineError(
        f"expected the logprob of token {token_id} from vLLM, got only those of tokens {list(logprobs.token_ids)}; "
        f"this is a bug in async-rl or vLLM, please report it"
    )


class Gathered:
    """Collects the tokens, log-probabilities and sampling masks of one running sequence.

    ``vocab_size`` is the size of the vocabulary for its sampling masks. It is None if the lease wants no masks.
    """

    def __init__(self, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._counts: list[int] = []
        self._allowed_ids: list[np.ndarray] = []

    @property
    def lists(self) -> bool:
        """Whether vLLM lists log-probabilities of other tokens too, because the lease wants sampling masks."""
        return self._vocab_size is not None

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_ids: Sequence[int], logprobs: Any) -> None:
        """Append the next tokens, with vLLM's ``FlatLogprobs`` of them.

        Raises:
            EngineError: the numbers of tokens and logprobs differ, or a sampling mask is not listed completely.
        """
        starts, ends = logprobs.start_indices, logprobs.end_indices
        if len(starts) != len(token_ids):
            raise EngineError(
                f"vLLM: expected log-probabilities of {len(token_ids)} tokens, got {len(starts)}; "
                f"report it with the installed version of vLLM"
            )
        ids, values = logprobs.token_ids, logprobs.logprobs
        for token_id, start, end in zip(token_ids, starts, ends, strict=True):
            # The sampled token's own comes first.
            if ids[start] != token_id:
                raise EngineError(
                    f"vLLM: expected the log-probability of the sampled token {token_id}, got that of {ids[start]}; "
                    f"report it with the installed version of vLLM"
                )
            self.token_ids.append(token_id)
            self._logprobs.append(values[start])
            if self._vocab_size is not None:
                self._keep(np.array(ids[start:end]), np.array(values[start:end]), self._vocab_size)

    def _keep(self, ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> None:
        listed = len(np.unique(ids))
        kept = np.unique(ids[logprobs > -np.inf])
        if len(kept) == listed < vocab_size:
            raise EngineError(
                f"vLLM returned log-probabilities of the {listed} most likely tokens, and all are in the sampling "
                f"mask. More tokens may tie with the last one, so the mask may be incomplete; raise sampling.top_k"
            )
        self._counts.append(len(kept))
        self._allowed_ids.append(kept)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the collected token ids, int32 [N], and log-probabilities, float32 [N]."""
        return np.array(self.token_ids, np.int32), np.array(self._logprobs, np.float32)

    def sampling_mask(self) -> SamplingMask | None:
        if self._vocab_size is None or not self._counts:
            return None
        return pack_ids(np.array(self._counts), np.concatenate(self._allowed_ids), vocab_size=self._vocab_size)


def token_versions(spans: Iterable[Any] | None, num_tokens: int) -> np.ndarray:
    """Return the version that sampled each token, int32 [N].

    vLLM gives ``spans`` of tokens with the same version, each with ``version``, ``start`` and ``end``.

    Raises:
        EngineError: the spans do not cover every token once, in order, or a version is not a number.
    """
    versions = np.full(num_tokens, NO_VERSION, np.int32)
    end = 0
    for span in spans or ():
        if span.start != end or not span.version.isdecimal():
            break
        versions[span.start : span.end] = int(span.version)
        end = span.end
    if end != num_tokens:
        raise EngineError(
            f"vLLM: expected the weight version of each of {num_tokens} tokens, as spans, got {spans}; "
            f"report it with the installed version of vLLM"
        )
    return versions
