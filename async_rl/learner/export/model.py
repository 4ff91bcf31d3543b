"""Exports a checkpoint as a Hugging Face model directory: config, tokenizer, safetensors. One process is enough.

Called by ``async-rl export``, and at the end of a run and of ``async-rl sft``. It needs only the checkpoint. A
checkpoint of adapters (``lora.rank``) also needs the model that they were trained on, into which they are merged.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from async_rl.data.chat import quiet_progress_bars
from async_rl.data.model_config import read_model_config
from async_rl.data.turn_end import GENERATION_CONFIG, write_turn_ends
from async_rl.errors import ModelError, RunError
from async_rl.learner.checkpoints.digests import find_damage, is_inside
from async_rl.learner.checkpoints.files import MODEL_FILES, model_part, reading
from async_rl.learner.checkpoints.stored_tensors import load_tensors, read_batches, stored_names
from async_rl.learner.export.model_card import write_model_card
from async_rl.learner.export.shards import BATCH_BYTES, MAX_SHARD_BYTES, plan_export, write_shards
from async_rl.learner.model.heads import auto_class, is_value_config
from async_rl.learner.model.lora import ADAPTER_CONFIG, check_base, has_adapters, merge_into, peft_names
from async_rl.output import Report, ignore

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""peft's name for the file of an adapter's weights."""


def check_export_target(out_dir: Path) -> None:
    """Refuse an export to ``out_dir`` that would overwrite files.

    Raises:
        RunError: ``out_dir`` exists and is not an empty directory.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        got = "one with files" if out_dir.is_dir() else "a file"
        raise RunError(f"expected no directory, or an empty one, at {out_dir}, got {got}; choose another path")


def export_checkpoint(checkpoint_dir: Path, out_dir: Path, report: Report = ignore) -> None:
    """Write the checkpoint's model to ``out_dir``, completely or not at all, so that ``from_pretrained`` can load it.

    ``checkpoint_dir`` is a checkpoint, or a run directory that has one. The weights get the dtype in the model's
    config, or float32 if it has none. A critic is written to ``out_dir / "critic"``, a sequence classification model.
    ``report`` gets the progress.

    Raises:
        RunError: the checkpoint does not exist or is damaged, ``out_dir`` is not empty, or the adapters' frozen weights
            have changed.
        ModelError: the checkpoint's weights don't fit its config, or the model of its adapters is gone.
    """
    _export(checkpoint_dir, out_dir, _write_models, report)


def export_adapter(checkpoint_dir: Path, out_dir: Path, report: Report = ignore) -> None:
    """Write only the checkpoint's adapters to ``out_dir``, completely or not at all, in peft's format.

    Raises:
        RunError: the checkpoint does not exist, is damaged or has no adapters, or ``out_dir`` is not empty.
    """
    _export(checkpoint_dir, out_dir, _write_adapter, report)


def _export(path: Path, out_dir: Path, write: Callable[[Path, Path, Report], None], report: Report) -> None:
    with reading(Path(path)) as checkpoint_dir:
        _export_one(checkpoint_dir, out_dir, write, report)


def _export_one(
    checkpoint_dir: Path, out_dir: Path, write: Callable[[Path, Path, Report], None], report: Report
) -> None:
    report(f"checking the files of {checkpoint_dir}")
    if damage := find_damage(checkpoint_dir):
        raise RunError(f"the checkpoint {checkpoint_dir.name} is damaged: {damage}; export another checkpoint")
    out_dir = Path(out_dir)
    check_export_target(out_dir)
    partial = out_dir.with_name(f".{out_dir.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        write(checkpoint_dir, partial, report)
        write_model_card(checkpoint_dir, partial)
        # safetensors writes files that only the user may read: give all files the modes that the umask allows.
        mode = partial.stat().st_mode & 0o666
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(mode)
        if out_dir.exists():
            out_dir.rmdir()
        os.rename(partial, out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_adapter(checkpoint_dir: Path, target: Path, report: Report) -> None:
    if not has_adapters(checkpoint_dir):
        raise RunError(
            f"expected a checkpoint of adapters (lora.rank), got one of all weights: {checkpoint_dir}; export it "
            f"without --adapter"
        )
    report(f"writing {ADAPTER_WEIGHTS}")
    save_file(peft_names(load_tensors(checkpoint_dir)), target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    shutil.copy2(checkpoint_dir / ADAPTER_CONFIG, target / ADAPTER_CONFIG)


def _write_models(checkpoint_dir: Path, target: Path, report: Report) -> None:
    _write(checkpoint_dir, target, report)
    critic = model_part(checkpoint_dir, "critic")
    if critic.is_dir():
        (target / critic.name).mkdir()
        _write(critic, target / critic.name, report)


def _write(checkpoint_dir: Path, target: Path, report: Report) -> None:
    """Write the checkpoint's model, its config and its tokenizer, and the end tokens of its turns."""
    report("loading transformers")
    quiet_progress_bars()
    files = checkpoint_dir / MODEL_FILES
    try:
        config = read_model_config(files)
    except ModelError as error:
        raise RunError(f"{error}; or use another checkpoint") from error
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    report(f"reading the weights of {checkpoint_dir}")
    if has_adapters(checkpoint_dir):
        _save(_merged(checkpoint_dir, config, dtype), target, report)
    else:
        _write_all_weights(checkpoint_dir, config, dtype, target, report)
    for path in sorted(files.iterdir()):
        if not is_inside(checkpoint_dir, path) or not path.is_file():
            raise RunError(
                f"{path}: expected a file of the checkpoint, got one that leads to {path.resolve()}; remove it"
            )
        # transformers writes a generation config of its own, made from config.json: the model's own has more.
        if path.name == GENERATION_CONFIG or not (target / path.name).exists():
            shutil.copy2(path, target / path.name)
    write_turn_ends(target)


def _class_of(config: PretrainedConfig) -> Any:
    return auto_class("value" if is_value_config(config) else "tokens")


def _merged(checkpoint_dir: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model that the adapters were trained on, with the adapters merged into its weights."""
    model: Any = _class_of(config).from_pretrained(
        check_base(checkpoint_dir), config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    merge_into(model, checkpoint_dir, load_tensors(checkpoint_dir))
    return model


def _write_all_weights(
    checkpoint_dir: Path, config: PretrainedConfig, dtype: torch.dtype, target: Path, report: Report
) -> None:
    """Write the weights of a checkpoint that holds all weights: shard by shard, or, where files have tensors that are
    made from several of the model's, with ``save_pretrained``.

    Raises:
        ModelError: the checkpoint's weights don't fit its config.
    """
    with torch.device("meta"):
        model = _class_of(config).from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    names = stored_names(checkpoint_dir)
    plan = plan_export(model, names, dtype)
    if plan is not None:
        write_shards(plan, checkpoint_dir, target, report)
        return
    buffers = {name for name, _ in model.named_buffers()}
    state = {
        name: tensor if name in buffers else tensor.to(dtype)
        for batch in read_batches(checkpoint_dir, names, max_bytes=BATCH_BYTES)
        for name, tensor in batch.items()
    }
    wrong = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if absent or wrong.unexpected_keys:
        raise ModelError(
            f"the weights in {checkpoint_dir} don't fit its config: missing {absent[:3]}, unknown "
            f"{list(wrong.unexpected_keys)[:3]}; export with the versions of async-rl and transformers that wrote it"
        )
    _save(model, target, report)


def _save(model: PreTrainedModel, target: Path, report: Report) -> None:
    report("writing the model")
    model.save_pretrained(target, max_shard_size=MAX_SHARD_BYTES)
