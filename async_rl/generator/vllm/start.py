"""How vLLM is started for a run: whether it is here, what its processes inherit, its engine's arguments. No torch.

Called by ``vllm.backend`` before there is an engine; the names are those of vLLM 0.32.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from async_rl.config.backends import BACKENDS, missing_package
from async_rl.config.config import Config
from async_rl.errors import ModelError
from async_rl.generator.vllm.plugin import OWNED, TRANSFER_NAME

_NEEDS = BACKENDS["vllm"]
_CPU_KV_BYTES = 1 << 30


def check_installed() -> None:
    """Whether a vLLM that we know is here, and finds our plugin.

    Raises:
        ModelError: it is not; the message says what to do.
    """
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ModelError(missing_package("vllm", str(error))) from error
    found: str = vllm.__version__  # pyright: ignore[reportAttributeAccessIssue]
    if not found.startswith(f"{_NEEDS.package_version}."):
        raise ModelError(f"expected vLLM {_NEEDS.package_version}.*, got {found}: {_NEEDS.install}")
    if TRANSFER_NAME not in {entry.name for entry in entry_points(group="vllm.general_plugins")}:
        raise ModelError(
            f"vLLM finds no plugin {TRANSFER_NAME!r}: it looks for it in the metadata of installed packages; install "
            f"async-rl (pip install -e . in a checkout) instead of running it from its files"
        )


def prepare_environment(num_threads: int | None) -> None:
    """What vLLM's processes inherit; to be called before vLLM is imported. What the user has set stays."""
    os.environ[OWNED] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # the plugin's watch on the parent relies on it
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # vLLM would pin its threads to cores of its choice, the learner's and other generators' among them.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and TRANSFER_NAME not in chosen.split(","):
        os.environ["VLLM_PLUGINS"] = f"{chosen},{TRANSFER_NAME}" if chosen else TRANSFER_NAME


def engine_arguments(directory: Path, config: Config, *, device: str, max_length: int) -> dict[str, Any]:
    """vLLM's ``AsyncEngineArgs`` for this run."""
    engine = config.generator
    is_cpu = device == "cpu"
    dtype = config.model.dtype if config.model.dtype != "auto" else "float32" if is_cpu else "bfloat16"
    kv_bytes = engine.vllm.kv_cache_bytes or (_CPU_KV_BYTES if is_cpu else None)
    from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]

    return {
        "model": str(directory),
        "tokenizer": str(tokenizer_directory(directory)),
        "skip_tokenizer_init": not config.sampling.stop,
        "load_format": "dummy",  # weights come from the learner, never from a file
        "dtype": dtype,
        # Sampling parameters that a model's author left in generation_config.json are none of ours.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "max_model_len": max_length,
        "max_num_seqs": engine.batch_size,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "gpu_memory_utilization": engine.memory_fraction,
        **({} if kv_bytes is None else {"kv_cache_memory_bytes": kv_bytes}),
        "enforce_eager": is_cpu if engine.vllm.enforce_eager is None else engine.vllm.enforce_eager,
        "enable_prefix_caching": True,
        # A prompt that is read in parts has its random numbers wound back, which torch's generators on a CPU can't do:
        # the engine would die of it.
        **({"enable_chunked_prefill": False} if is_cpu else {}),
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER_NAME),
        "worker_extension_cls": "async_rl.generator.vllm.weights.WorkerCalls",
        "disable_log_stats": True,
        "seed": 0,
    }


def tokenizer_directory(directory: Path) -> Path:
    """Where vLLM finds the tokenizer of ``directory`` as it is.

    Beside a ``config.json`` the loader goes by the model's type and would rebuild a generic tokenizer with that
    model's own splitting; so it gets a directory without one.
    """
    target = directory / "tokenizer"
    target.mkdir(exist_ok=True)
    for path in directory.iterdir():
        if path.is_file() and path.name not in ("config.json", "generation_config.json"):
            link = target / path.name
            if not link.exists():
                link.symlink_to(path.resolve())
    return target
