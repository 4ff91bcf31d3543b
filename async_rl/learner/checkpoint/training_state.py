"""Model, optimizer and random state to and from a directory, by torch.distributed.checkpoint.

Every rank writes its shards; any number of ranks reads them back. ``engine/fsdp_engine.py`` calls this on
all ranks; ``export.py`` reads the model alone, without a process group. torch's ``.metadata`` is a pickle: load only
checkpoints that you trust.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from async_rl.errors import RunError
from async_rl.learner.engine.ranks import Ranks

MODEL = "model."
OPTIMIZER = "optimizer."
"""What the names of stored tensors begin with; then the optimizer's have ``exp_avg.`` or ``exp_avg_sq.``."""
_STATE = "engine.json"


def save_training_state(
    directory: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], *, num_updates: int, ranks: Ranks
) -> None:
    """Write this rank's part into ``directory``; returns when every rank has. Names are the caller's."""
    _write_random_state(directory, ranks)
    with _quiet():
        dcp.save(
            _tensors(model, optimizer),
            storage_writer=dcp.FileSystemWriter(directory),
            process_group=ranks.host_group,
            no_dist=not ranks.has_group,
        )
    if ranks.is_leader:
        (directory / _STATE).write_text(json.dumps({"num_updates": num_updates, "world_size": ranks.world_size}))
    if ranks.has_group:
        ranks.barrier()


def load_training_state(
    directory: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], *, ranks: Ranks
) -> int:
    """Fill the tensors in place from ``directory``; the number of updates done.

    A rank that did not exist when it was written keeps its own random state.

    Raises:
        RunError: a file is missing, or the tensors are not those of this model.
    """
    state = _tensors(model, optimizer)
    try:
        found = json.loads((directory / _STATE).read_text())
        _check_fits(directory, state)
        with _quiet():
            dcp.load(
                state,
                storage_reader=dcp.FileSystemReader(directory),
                process_group=ranks.host_group,
                no_dist=not ranks.has_group,
            )
    except (OSError, ValueError) as error:
        raise RunError(f"can't read the checkpoint {directory}: {type(error).__name__}: {error}") from error
    _read_random_state(directory, ranks)
    return int(found["num_updates"])


def load_tensors(directory: Path, prefix: str = MODEL) -> dict[str, Tensor]:
    """Every tensor of the model (or, by ``prefix``, the optimizer), whole, on the host, without a process group.

    Raises:
        RunError: ``directory`` holds no such thing.
    """
    stored = {n: m for n, m in _stored(directory).items() if n.startswith(prefix)}
    state: dict[str, Any] = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in stored.items()}
    try:
        with _quiet():
            dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    except (OSError, ValueError) as error:
        raise RunError(f"can't read the checkpoint {directory}: {type(error).__name__}: {error}") from error
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def _tensors(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> dict[str, Any]:
    prefixed = {MODEL + name: tensor for name, tensor in model.items()}
    return prefixed | {OPTIMIZER + name: tensor for name, tensor in optimizer.items()}


def _stored(directory: Path) -> dict[str, TensorStorageMetadata]:
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    except OSError as error:
        raise RunError(f"expected a checkpoint in {directory}, but can't read it: {error}") from error
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _check_fits(directory: Path, state: Mapping[str, Tensor]) -> None:
    stored = {name: tuple(entry.size) for name, entry in _stored(directory).items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    differing = _first(name for name in sorted(stored | wanted) if stored.get(name) != wanted.get(name))
    if differing is not None:
        raise RunError(
            f"the checkpoint {directory} is another model's: {differing} has shape {stored.get(differing)} there and "
            f"{wanted.get(differing)} in model.path; resume with the model that the run began with"
        )


def _first(names: Iterable[str]) -> str | None:
    return next(iter(names), None)


def _random_state_path(directory: Path, ranks: Ranks, device_type: str) -> Path:
    return directory / f"random-state-{device_type}-{ranks.rank:05d}.bin"


def _write_random_state(directory: Path, ranks: Ranks) -> None:
    states = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(ranks.device)
    for device_type, state in states.items():
        _random_state_path(directory, ranks, device_type).write_bytes(state.numpy().tobytes())


def _read_random_state(directory: Path, ranks: Ranks) -> None:
    for device_type in ("cpu", ranks.device.type):
        path = _random_state_path(directory, ranks, device_type)
        if not path.is_file():
            continue
        state = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        if device_type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, ranks.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that a single process saves without a process group, which is what we mean."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(single process|torch.distributed is).*")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
