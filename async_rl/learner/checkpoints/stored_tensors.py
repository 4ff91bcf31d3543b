"""The engine's files of a checkpoint: model, optimizer and random state.

torch.distributed.checkpoint writes each rank's shards as safetensors files, and reads them on any number of ranks. The
files may come from anybody: no checkpoint can run code, read other files or take more memory than its size.

``FsdpEngine`` calls ``write_training_state``, in a thread or not, and ``load_training_state``, on all ranks.
``export/`` calls ``load_tensors`` in one process.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from async_rl.errors import RunError, TrainingError, WeightsError
from async_rl.learner.checkpoints.digests import is_inside, write_part
from async_rl.learner.checkpoints.files import CHECK_DISK, USE_ANOTHER
from async_rl.learner.ranks import Ranks
from async_rl.weights.manifest import ALIGNMENT
from async_rl.weights.memory import own_memory

MODEL = "model."
OPTIMIZER = "optimizer."
REFERENCE = "reference."
"""Prefixes of the names of stored tensors. In optimizer names, the kind of state follows, such as ``exp_avg.``."""
_STATE = "engine.json"
_FILE_BYTES = 128 << 20
"""Most bytes of tensors in a file, if it has more than one. While a file is written, the host's memory has it twice
more, and Python waits for a tenth of a second."""


@contextmanager
def _storage_errors(action: str, directory: Path, remedy: str) -> Iterator[None]:
    """Raise RunError for an error of torch's checkpoint reader or writer, or of the file system.

    torch's ``CheckpointException`` is a BaseException, which our handlers of errors would miss.
    """
    try:
        yield
    except (OSError, ValueError, SafetensorError, CheckpointException) as error:
        cause = error if not isinstance(error, CheckpointException) else next(iter(error.failures.values()))[0]
        if isinstance(cause, RunError):
            raise cause from error
        text = f"can't {action} the checkpoint {directory}: {type(cause).__name__}: {cause}; {remedy}"
        raise RunError(text) from error


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What one rank saves.

    Attributes:
        tensors: this rank's part of model and optimizer, by stored name.
        random: the state of the random generators, by device type.
        num_updates: number of optimizer steps done.
    """

    tensors: dict[str, Any]
    random: dict[str, Tensor]
    num_updates: int

    @classmethod
    def of(
        cls, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor],
        reference: Mapping[str, Tensor] | None = None, *, num_updates: int, ranks: Ranks,
    ) -> Self:  # fmt: skip
        """Return the state of now. ``reference`` is one that moves. The tensors are not copied."""
        random = {"cpu": torch.get_rng_state()}
        if ranks.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(ranks.device)
        return cls(_tensors(model, optimizer, reference), random, num_updates)


class HostCopy:
    """Host memory for a copy of one rank's state, all in one piece.

    The memory is kept from save to save: a copy into new memory takes several times as long. On a GPU it is pinned.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, state: TrainingState) -> TrainingState:
        """Return a copy of ``state``, which the next optimizer step does not change. It is valid until the next call.

        Of a sharded tensor, this rank's part is copied.

        Raises:
            TrainingError: there is not so much memory.
        """
        copied: dict[str, Any] = {}
        here = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.tensors.items()}
        if not self._tensors:
            self._tensors = _host_memory_for(here)
        for name, tensor in state.tensors.items():
            copied[name] = self._tensors[name].copy_(here[name], non_blocking=True)
            if isinstance(tensor, DTensor):
                # from_local would move it to the device of the mesh. The writer asks the mesh only which part this is.
                copied[name] = cast(Any, DTensor)(copied[name], cast(Any, tensor)._spec, requires_grad=False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return replace(state, tensors=copied)


def _host_memory_for(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a tensor on the host for each of ``tensors``, of its shape and dtype."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    try:
        memory = own_memory(sum(sizes), pinned=any(tensor.is_cuda for tensor in tensors.values()))
    except WeightsError as error:
        raise TrainingError(f"the copy for a checkpoint: {error}, or set checkpoint.asynchronous = false") from error
    pieces = zip(tensors.items(), memory.split(sizes), strict=True)
    return {name: piece[: t.nbytes].view(t.dtype).view(t.shape) for (name, t), piece in pieces}


def write_training_state(directory: Path, state: TrainingState, ranks: Ranks) -> None:
    """Write this rank's part of model and optimizer into the checkpoint ``directory``. Return when every rank has
    written.

    A thread may call it: its collectives have a process group of their own.

    Raises:
        RunError: a rank can't write its files.
    """
    _silence_torch()
    tensors = {name: tensor.contiguous() for name, tensor in state.tensors.items()}
    with _storage_errors("write", directory, CHECK_DISK):
        directory.mkdir(exist_ok=True)
        writer = _Writer(str(directory), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, process_group=ranks.save_group, no_dist=not ranks.has_group)
    error = ""
    try:
        for device_type, random in state.random.items():
            _random_state_path(directory, ranks, device_type).write_bytes(random.numpy().tobytes())
        if ranks.is_leader:
            written = {"num_updates": state.num_updates, "world_size": ranks.world_size}
            (directory / _STATE).write_text(json.dumps(written))
        write_part(directory, ranks.rank, directory.glob(f"shard-{ranks.rank + 1:05d}-*"))
    except OSError as cause:
        error = f"can't write the checkpoint {directory}: {type(cause).__name__}: {cause}; {CHECK_DISK}"
    if error := next(filter(None, ranks.exchange_saved(error)), ""):
        raise RunError(error)


def load_training_state(
    directory: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor],
    reference: Mapping[str, Tensor] | None = None, *, ranks: Ranks,
) -> int:  # fmt: skip
    """Fill the tensors in place from the checkpoint ``directory``. Return the number of updates done.

    A rank for which no random state is stored keeps its current random state. A fork may have a reference that moves
    where its checkpoint has none, which keeps its values, or the reverse.

    Raises:
        RunError: a file is missing, or the stored tensors belong to another model.
    """
    with _storage_errors("read", directory, USE_ANOTHER):
        num_updates = _read_num_updates(directory / _STATE)
        reader = _Reader(directory)
        stored = reader.tensors
        if not any(name.startswith(REFERENCE) for name in stored):
            reference = None
        elif not reference:
            stored = {name: entry for name, entry in stored.items() if not name.startswith(REFERENCE)}
        state = _tensors(model, optimizer, reference)
        _check_fits(directory, stored, state, ranks)
        reader.load(state, process_group=ranks.host_group, no_dist=not ranks.has_group)
    _read_random_state(directory, ranks)
    return num_updates


def load_tensors(directory: Path, prefix: str = MODEL) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint whose names begin with ``prefix``, unsharded, on the host, in one process.

    Raises:
        RunError: ``directory`` is not a checkpoint, or is damaged.
    """
    batches = read_batches(directory, stored_names(directory, prefix), prefix=prefix, max_bytes=sys.maxsize)
    return next(batches, {})


def read_batches(
    directory: Path, names: Sequence[str], *, prefix: str = MODEL, max_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a checkpoint with these ``names``, in this order, unsharded, on the host, in one process.

    A batch has at most ``max_bytes``, or one tensor. The caller may change it. Only its tensors are read.

    Raises:
        RunError: ``directory`` is not a checkpoint, or is damaged.
    """
    reader = _Reader(directory)
    batch: dict[str, Tensor] = {}
    for name in names:
        entry = reader.tensors[prefix + name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        if batch and sum(t.nbytes for t in batch.values()) + tensor.nbytes > max_bytes:
            yield _filled(directory, reader, prefix, batch)
            batch = {}
        batch[name] = tensor
    if batch:
        yield _filled(directory, reader, prefix, batch)


def _filled(directory: Path, reader: _Reader, prefix: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    with _storage_errors("read", directory, USE_ANOTHER):
        reader.load({prefix + name: tensor for name, tensor in batch.items()}, no_dist=True)
    return batch


def stored_names(directory: Path, prefix: str = MODEL) -> list[str]:
    """Return the names of a checkpoint's tensors that begin with ``prefix``, without it, in order.

    Raises:
        RunError: ``directory`` is not a checkpoint, or is damaged.
    """
    return [name.removeprefix(prefix) for name in _Reader(directory).tensors if name.startswith(prefix)]


class _Writer(dcp.HuggingFaceStorageWriter):
    """Writes each rank's shards as ``shard-RANK-model-FILE-of-FILES.safetensors``, RANK from 1 on."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Say which rank writes which tensors into which of its files."""
        return [replace(p, storage_data=_files_of(p) | {"shard_index": i}) for i, p in enumerate(plans, start=1)]


def _files_of(plan: SavePlan) -> dict[str, Any]:
    """Return the number of the file of each tensor of a rank, from 1 on."""
    number, filled, files = 1, 0, dict[str, int]()
    for item in plan.items:
        stored = cast(Any, item.tensor_data)
        size = stored.chunk.sizes.numel() * stored.properties.dtype.itemsize
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        files[item.index.fqn] = number
        filled += size
    return {"fqn_to_index_mapping": files}


class _Reader(dcp.HuggingFaceStorageReader):
    """Reads the files of one checkpoint, once their headers have been checked.

    Attributes:
        tensors: the stored tensors by name, in order.
    """

    def __init__(self, directory: Path) -> None:
        """Read the headers. Those of a damaged file may say anything: the parts of a tensor must cover it exactly once,
        so that reading takes no more memory than the files have bytes.

        Raises:
            RunError: there are no files, they lead elsewhere, are damaged or don't agree with each other.
        """
        super().__init__(str(directory))
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise RunError(f"expected a checkpoint with *.safetensors in {directory}, got none; {USE_ANOTHER}")
        for path in paths:
            if not path.is_file() or not is_inside(directory, path):
                raise RunError(f"{path}: expected a file of the checkpoint, got {path.resolve()}; {USE_ANOTHER}")
        self.tensors: dict[str, TensorStorageMetadata] = {}
        try:
            self._metadata = super().read_metadata()
            metadata = cast(dict[str, TensorStorageMetadata], self._metadata.state_dict_metadata)
            self.tensors = dict(sorted(metadata.items()))
            problem = _why_not_covered(self.tensors)
        except Exception as error:  # a foreign header makes torch's reader fail in any way
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise RunError(f"{directory}/*.safetensors: expected what torch writes, got: {problem}; {USE_ANOTHER}")

    def read_metadata(self) -> Metadata:
        return self._metadata

    def load(self, state: dict[str, Any], *, process_group: Any = None, no_dist: bool) -> None:
        """Fill the tensors of ``state`` in place. The ranks of ``process_group`` call it together."""
        _silence_torch()
        dcp.load(state, storage_reader=self, process_group=process_group, no_dist=no_dist)


def _why_not_covered(tensors: Mapping[str, TensorStorageMetadata]) -> str:
    """Return what is wrong with parts of tensors that don't cover them exactly once; empty if nothing is."""
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if len(chunk.offsets) != len(tensor.size) or any(offset < 0 for offset in chunk.offsets):
                return f"a part of {name}, of shape {list(tensor.size)}, at {list(chunk.offsets)}"
        if not tensor.size and len(tensor.chunks) > 1:
            return f"{name}, a number, {len(tensor.chunks)} times"
    plans = [SavePlan([]), SavePlan([])]  # torch compares the volumes only for several ranks
    return next(iter(_validate_global_plan(plans, Metadata(dict(tensors)))), "")


def _tensors(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    parts = {MODEL: model, OPTIMIZER: optimizer, REFERENCE: reference or {}}
    return {prefix + name: tensor for prefix, tensors in parts.items() for name, tensor in tensors.items()}


def _check_fits(
    directory: Path, entries: Mapping[str, TensorStorageMetadata], state: Mapping[str, Tensor], ranks: Ranks
) -> None:
    stored = {name: tuple(entry.size) for name, entry in entries.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if ranks.layout.pipeline > 1:  # other stages have other tensors
        of_ranks: list[dict[str, tuple[int, ...]]] = [{}] * ranks.world_size
        dist.all_gather_object(of_ranks, shapes, group=ranks.host_group)
        shapes = {name: shape for of_rank in of_ranks for name, shape in of_rank.items()}
    differing = next((name for name in sorted(stored | shapes) if stored.get(name) != shapes.get(name)), None)
    if differing is not None:
        if differing.startswith(OPTIMIZER):
            raise RunError(
                f"the checkpoint {directory} is another optimizer's: {differing} has shape {stored.get(differing)} "
                f"there and {shapes.get(differing)} here (None: it is missing); resume with the optimizer.name that "
                f"the run began with"
            )
        raise RunError(
            f"the checkpoint {directory} is another model's: {differing} has shape {stored.get(differing)} there and "
            f"{shapes.get(differing)} in model.path (None: it is missing); resume with the model that the run "
            f"began with"
        )


def _read_num_updates(path: Path) -> int:
    state = json.loads(path.read_text(encoding="utf-8"))
    number = state.get("num_updates") if isinstance(state, dict) else None
    if type(number) is not int or number < 0:
        raise RunError(f"{path}: expected a JSON object with num_updates, a number from 0 on, got none; {USE_ANOTHER}")
    return number


def _random_state_path(directory: Path, ranks: Ranks, device_type: str) -> Path:
    return directory / f"random-state-{device_type}-{ranks.rank:05d}.bin"


def _read_random_state(directory: Path, ranks: Ranks) -> None:
    for device_type in ("cpu", ranks.device.type):
        path = _random_state_path(directory, ranks, device_type)
        if not path.is_file():
            continue
        try:
            state = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            if device_type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, ranks.device)
        except (OSError, ValueError, TypeError, RuntimeError) as error:  # torch has no error of its own for this
            raise RunError(
                f"{path}: expected a state of torch's random generator, got: {error}; {USE_ANOTHER}"
            ) from error


def _silence_torch() -> None:
    """Suppress FutureWarnings of torch, and its warning about saving without a process group, which is intended here.

    The filters stay, because restoring them, as ``catch_warnings`` does, is not safe in a thread.
    """
    warnings.filterwarnings("ignore", message=".*(single process|torch.distributed is).*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
